"""`roundpipe watch`: follow a run from its files, in another terminal or after its end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundpipe_cli.cli.output import say
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import write_named
from roundpipe_cli.regular_files import named_path


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
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="In plain lines, what each worker did and waited for.")
    ] = False,
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
    from roundpipe_cli.cli.follow import print_lines, show_on_screen, watch_demo, write_picture
    from roundpipe_cli.dashboard.html import report_page
    from roundpipe_cli.dashboard.replay import RunFiles, run_hint
    from roundpipe_cli.dashboard.state import fold_all

    if demo is not None:
        if json_output or html is not None:
            other = "--json" if json_output else "--html"
            raise RefusedError(
                f"{other} is of a run, and --demo simulates one",
                where="--demo",
                found=f"--demo with {other}",
                expected="--demo alone or with --svg",
                hint="`roundpipe plan RECIPE --hardware 8x4090 --json` prints the simulated figures",
            )
        watch_demo(demo, words or (), svg)
        return
    if words is None or len(words) != 1:
        raise RefusedError(
            "watch follows one run",
            where="roundpipe watch",
            found=" ".join(words or ()) or "no output directory",
            expected="the output_dir of a run",
            hint=f"{run_hint(Path.cwd())}; `roundpipe watch --demo 8x4090` simulates one",
        )
    files = RunFiles(named_path(words[0]))
    if json_output and (svg is not None or html is not None):
        raise RefusedError(
            "--json prints a run, --svg and --html write it",
            found="--json with --svg or --html",
            expected="one of them at a time",
            hint="leave --json out, and run the command again with --json alone",
        )
    if svg is not None:
        write_picture(fold_all(files.poll()[1]), svg, where=words[0])
    if html is not None:
        write_named(named_path(html), report_page(files.folder))
        say(f"wrote {html}")
    if svg is not None or html is not None:
        return
    if is_terminal() and not (no_dashboard or json_output):
        show_on_screen(files, follow)
    else:
        print_lines(files, follow, is_verbose=verbose, as_json=json_output)
