"""`roundpipe watch`: follow a run from its files, in another terminal or after its end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe_cli.cli.output import say, say_data
from roundpipe_cli.files import named_path

if TYPE_CHECKING:
    from roundpipe_cli.dashboard.replay import RunFiles, TimedEvent
    from roundpipe_cli.dashboard.state import DashboardState

POLL_S = 0.25
GRACE_S = 2.0
"""Seconds to wait for the last lines of a run, which it writes just after it has released its lock."""


def watch(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OUTPUT_DIR", help="Output directory of a run; with --demo a recipe and KEY=VALUE, or nothing."
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One line of JSON per step.")] = False,
    follow: Annotated[bool, typer.Option(help="Wait for more until the run is over.")] = True,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="Plain lines instead of a dashboard.")] = False,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write the run so far as a page and leave.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Write the newest step as a picture and leave.")
    ] = None,
    demo: Annotated[
        str | None,
        typer.Option("--demo", metavar="HARDWARE", help="Play the simulated step of a recipe on 8x4090, say."),
    ] = None,
) -> None:
    """Follow a running or finished run from its files, or see a simulated one.

    Example: roundpipe watch outputs/first; roundpipe watch --demo 8x4090 qwen3-8b
    """
    from roundpipe_cli.cli.display import is_terminal
    from roundpipe_cli.cli.watch_demo import watch_demo, write_picture
    from roundpipe_cli.dashboard.replay import RunFiles

    if demo is not None:
        _refuse_beside_demo(json_output=json_output, html=html)
        watch_demo(demo, words or (), svg)
        return
    folder = _folder_of(words or ())
    files = RunFiles(folder)
    if svg is not None or html is not None:
        _refuse_json_beside_files(json_output)
    if svg is not None:
        from roundpipe_cli.dashboard.state import fold_all

        write_picture(fold_all(files.poll()[1]), svg, where=str(folder))
    if html is not None:
        from roundpipe_cli.dashboard.html import write_page

        write_page(folder, named_path(html))
        say(f"wrote {html}")
    if svg is not None or html is not None:
        return
    if json_output:
        _as_json(files, follow)
    elif is_terminal() and not no_dashboard:
        _on_screen(files, follow)
    else:
        _as_lines(files, follow)


def _refuse_json_beside_files(json_output: bool) -> None:
    from roundpipe_cli.errors import RefusedError

    if json_output:
        raise RefusedError(
            "--json prints a run, --svg and --html write it",
            found="--json with --svg or --html",
            expected="one of them at a time",
            hint="leave --json out, and run the command again with --json alone",
        )


def _refuse_beside_demo(*, json_output: bool, html: str | None) -> None:
    from roundpipe_cli.errors import RefusedError

    if json_output or html is not None:
        other = "--json" if json_output else "--html"
        raise RefusedError(
            f"{other} is of a run, and --demo simulates one",
            where="--demo",
            found=f"--demo with {other}",
            expected="--demo alone or with --svg",
            hint="`roundpipe plan RECIPE --hardware 8x4090 --json` prints the simulated figures",
        )


def _folder_of(words: Sequence[str]) -> Path:
    from roundpipe_cli.dashboard.replay import run_hint
    from roundpipe_cli.errors import RefusedError

    if len(words) == 1:
        return named_path(words[0])
    raise RefusedError(
        "watch follows one run",
        where="roundpipe watch",
        found=" ".join(words) or "no output directory",
        expected="the output_dir of a run",
        hint=f"{run_hint(Path.cwd())}; `roundpipe watch --demo 8x4090` simulates one",
    )


def _polls(files: RunFiles, follow: bool) -> Iterator[tuple[bool, list[TimedEvent]]]:
    """Polls until the run is over and its files no longer grow."""
    from roundpipe_cli.dashboard.replay import Life

    over_s: float | None = None
    while True:
        is_over = files.life() is not Life.RUNNING
        anew, events = files.poll()
        yield anew, events
        if not follow:
            return
        if not is_over:
            over_s = None
        elif over_s is None:
            over_s = time.monotonic()
        elif time.monotonic() - over_s > GRACE_S or files.life() is Life.FINISHED:
            yield files.poll()
            return
        time.sleep(POLL_S)


_NO_STEP = "no step of this run is finished"


def _as_json(files: RunFiles, follow: bool) -> None:
    from roundpipe_cli.cli.lines import step_json
    from roundpipe_cli.events import StepFinished

    last = 0
    for anew, events in _polls(files, follow):
        if anew:
            last = 0
        for _, event in events:
            if isinstance(event, StepFinished) and event.step > last:
                last = event.step
                say_data(step_json(event))
    if not last:
        say(f"{files.folder}: {_NO_STEP}")


def _as_lines(files: RunFiles, follow: bool) -> None:
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.events import RunStopped, StepFinished

    time_s, has_step = 0.0, False
    show = LinePrinter(1, clock=lambda: time_s)  # of the run, which may be over
    for _, events in _polls(files, follow):
        for time_s, event in events:  # noqa: B007 (the clock reads it)
            show(event)
            has_step = has_step or isinstance(event, StepFinished)
            if isinstance(event, RunStopped):
                say(event.text)
    if not has_step:
        say(f"{files.folder}: {_NO_STEP}")


def _on_screen(files: RunFiles, follow: bool) -> None:
    """A dashboard while the run lasts; its last screen stays."""
    from roundpipe_cli.dashboard.replay import Life
    from roundpipe_cli.dashboard.state import DashboardState, fold_all

    _, events = files.poll()
    state = fold_all(events, DashboardState())
    if follow and files.life() is Life.RUNNING:
        state = _live(files, state)
    _print_last(files, state)


def _live(files: RunFiles, state: DashboardState) -> DashboardState:
    import sys

    from rich.console import Console

    from roundpipe_cli.dashboard.live import KeyBinding, LiveDashboard, Terminal
    from roundpipe_cli.dashboard.state import fold_all
    from roundpipe_cli.events import run_clock

    left = threading.Event()

    def leave(_: DashboardState) -> str:
        left.set()
        return ""

    keys = {"q": KeyBinding("leave; the run continues", leave)}
    live = LiveDashboard(Terminal(), Console(file=sys.stdout), run_clock(), keys, state)
    live.start()
    try:
        for anew, events in _polls(files, follow=True):
            if anew:
                live.begin_anew(fold_all(events))
            else:
                for _, event in events:
                    live.tell(event)
            if left.is_set():
                break
    except KeyboardInterrupt:  # as q
        pass
    finally:
        live.stop()
    return live.state


def _print_last(files: RunFiles, state: DashboardState) -> None:
    import shutil
    import sys

    from rich.console import Console

    from roundpipe_cli.dashboard.html import comparison, comparison_table, range_note, read_report
    from roundpipe_cli.dashboard.live import last_frame
    from roundpipe_cli.dashboard.replay import Life

    console = Console(file=sys.stdout)
    for line in last_frame(state, console, shutil.get_terminal_size()):
        console.print(line, end="\n", crop=True, no_wrap=True)
    report = read_report(files.folder)
    with contextlib.suppress(OSError):
        if comparison(report):
            console.print(comparison_table(report))
            console.print(range_note(report), markup=False, highlight=False, end="\n" if range_note(report) else "")
    if files.life() is Life.STOPPED:
        say(f"the run in {files.folder} is not finished and not running")
