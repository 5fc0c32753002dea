"""The work of `roundpipe watch`: a run followed from its files, on a screen or in lines; a simulated one played."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.cli.display import is_terminal
from roundpipe_cli.cli.lines import LinePrinter
from roundpipe_cli.cli.output import say, say_data, terminal_width, wrapped
from roundpipe_cli.cli.parameter_counts import build_counts
from roundpipe_cli.dashboard.demo import SimulatedRun, demo_events, shared_picture
from roundpipe_cli.dashboard.html import comparison_lines, read_report
from roundpipe_cli.dashboard.live import LiveDashboard, Terminal, last_frame
from roundpipe_cli.dashboard.replay import Life, RunFiles, TimedEvent
from roundpipe_cli.dashboard.state import DashboardState, fold, fold_all
from roundpipe_cli.events import RunStopped, StepFinished, run_clock
from roundpipe_cli.files import write_named
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.schedule.timeline import makespan_s
from roundpipe_cli.units import format_seconds

if TYPE_CHECKING:
    from roundpipe_cli.planning.predict import Plan

# `roundpipe watch --demo`: the planner's step of a recipe, played in the dashboard of a run. Nothing is trained.

DEMO_RECIPE = "qwen3-32b"
DEMO_S = 120.0
"""Seconds that a demo lasts, where nobody leaves it before."""
LEAST_SHOWN_S, MOST_SHOWN_S = 1.0, 10.0
"""Seconds in which a step is played; one between them takes its own time."""


def watch_demo(hardware: str, words: Sequence[str], svg: Path | None) -> None:
    """Plan a recipe on `hardware`, such as 8x4090, and play the simulated step, or write it as a picture."""
    from roundpipe_cli.planning.predict import make_plan
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.train.run_length import with_estimated_length

    recipe, overrides = recipe_and_overrides(words)
    loaded = load_recipe(recipe, overrides)
    for notice in loaded.notices:
        say(f"notice: {notice}")
    say(f"planning {recipe} on {hardware} ...")
    answer = make_plan(with_estimated_length(loaded), hardware, build_counts)
    if svg is not None:
        write_plan_picture(answer, svg)
        return
    run = simulated_run(answer)
    if is_terminal():
        _leave_last(_play(run, time.time()))
        return
    last = _after_one_step(run)
    say_data(_one_line(last))
    for message in last.messages:
        say_data(f"  {message.text}")


def write_plan_picture(answer: Plan, path: Path) -> None:
    """Write the simulated step of a plan as a picture; errors as of `write_picture`."""
    write_picture(_after_one_step(simulated_run(answer)), path, where=str(answer.question.loaded.path))


def _after_one_step(run: SimulatedRun) -> DashboardState:
    return fold_all(demo_events(run, 1, 0.0))


def recipe_and_overrides(words: Sequence[str]) -> tuple[str, list[str]]:
    """(recipe, overrides) of the words that follow `--demo`; without a recipe a well-known one."""
    if words and "=" not in words[0]:
        return words[0], list(words[1:])
    return DEMO_RECIPE, list(words)


def simulated_run(answer: Plan) -> SimulatedRun:
    """A plan as a run that can be played; its notes say what a lane leaves out."""
    from roundpipe_cli.planning.predict import MAX_SIMULATED_MICROBATCHES

    question, settings = answer.question, answer.question.settings
    names = [device.name.removeprefix("rtx-") for device in question.hardware.devices]
    notes = ["simulated by roundpipe, not measured"]
    if not answer.verdict.fits:
        notes.append(f"it DOES NOT FIT: {answer.verdict.reasons[0]}")
    shown_s = makespan_s(answer.timeline)
    if settings.num_microbatches > MAX_SIMULATED_MICROBATCHES:
        notes.append(f"lanes show {format_seconds(shown_s)}, a part of the {settings.num_microbatches} microbatches")
    elif answer.binds == "launches":
        notes.append(f"of a step: {answer.parts}")
    if question.hardware.machines > 1:
        notes.append(f"lanes show one of {question.hardware.machines} machines, without their exchange of gradients")
    packed = f" {PACKED_FORMATS[settings.packed_as].label}" if settings.packed_as else ""
    return SimulatedRun(
        title=question.architecture.name.rpartition("/")[2],
        settings=f"{settings.method}{packed}",
        devices=tuple(f"{name}:{index}" for index, name in enumerate(names)),
        timeline=answer.timeline,
        step_s=answer.step_s,
        tokens=question.tokens_per_step,
        notes=tuple(notes),
    )


def write_picture(state: DashboardState, path: Path, *, where: str) -> None:
    """Write a run's newest step as a picture.

    Raises:
        RefusedError: no step to draw, or no such folder.
        ResourceError: the disk is full or failing.
    """
    path = named_path(path)
    write_named(path, shared_picture(state, where=where))
    say(f"wrote {path}")


def _one_line(state: DashboardState) -> str:
    assert state.run is not None and state.step is not None
    busy = f"{state.worker_word} {100 * (1 - state.step.bubble_ratio):.0f} % busy"
    return (
        f"{state.run.title} {state.run.settings} on {state.pool.replace(' ', '')}: "
        f"{format_seconds(state.step.step_s)} a step, {state.step.tokens_per_s:,.0f} tokens/s, {busy}"
    )


def _play(run: SimulatedRun, start_s: float) -> DashboardState:
    """Tell the events at their time, on a clock that makes a step last 1 to 10 seconds; q and Ctrl-C leave."""
    step_s = makespan_s(run.timeline)
    speed = step_s / min(MOST_SHOWN_S, max(LEAST_SHOWN_S, step_s))
    num_steps = 1 + max(1, round(DEMO_S * speed / step_s))
    began_s = time.monotonic() - step_s / speed
    events, state = demo_events(run, num_steps, start_s), DashboardState()
    for time_s, event in events:  # the first step is over: its lanes and figures are seen at once
        state = fold(state, event, time_s)
        if isinstance(event, StepFinished):
            break

    def clock() -> float:
        return start_s + speed * (time.monotonic() - began_s)

    def play(live: LiveDashboard, left: threading.Event) -> None:
        for time_s, event in events:
            if left.wait(max(0.0, (time_s - clock()) / speed)):
                break
            live.tell(event)

    return _show(state, clock, "leave", play)


def _show(
    state: DashboardState,
    clock: Callable[[], float],
    meaning: str,
    play: Callable[[LiveDashboard, threading.Event], None],
) -> DashboardState:
    """A dashboard while `play` reports events to it; q, whose meaning is shown, and Ctrl-C leave."""
    left = threading.Event()

    def leave(_: DashboardState) -> str:
        left.set()
        return ""

    live = LiveDashboard(Terminal(), Console(file=sys.stdout), clock, {"q": (meaning, leave)}, state=state)
    live.start()
    try:
        play(live, left)
    except KeyboardInterrupt:  # as q
        pass
    finally:
        live.stop()
    return live.state


def _leave_last(state: DashboardState) -> None:
    console = Console(file=sys.stdout)
    for line in last_frame(state, console, shutil.get_terminal_size()):
        console.print(line, crop=True, no_wrap=True)


# A run that goes on, or is over.

POLL_S = 0.25
GRACE_S = 2.0
"""Seconds to wait for the last lines of a run, which it writes just after it has released its lock."""


def _polls(files: RunFiles, follow: bool) -> Iterator[tuple[bool, list[TimedEvent]]]:
    """Polls until the run is over and its files no longer grow."""
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


def print_lines(files: RunFiles, follow: bool, *, is_verbose: bool, as_json: bool) -> None:
    """Lines as of the run itself."""
    time_s, has_step = 0.0, False
    how = {"as_json": as_json, "is_verbose": is_verbose, "is_kept": False}
    show = LinePrinter(1, lambda: time_s, **how)  # the clock of the run, which may be over
    for _, events in _polls(files, follow):
        for time_s, event in events:  # noqa: B007 (the clock reads it)
            show(event)
            has_step = has_step or isinstance(event, StepFinished)
            if isinstance(event, RunStopped):
                say(event.text)
    if not has_step:
        say(f"{files.folder}: no step of this run is finished")


def show_on_screen(files: RunFiles, follow: bool) -> None:
    """A dashboard while the run lasts; its last screen stays."""

    def play(live: LiveDashboard, left: threading.Event) -> None:
        for anew, events in _polls(files, follow=True):
            if anew:
                live.begin_anew(fold_all(events))
            else:
                for _, event in events:
                    live.tell(event)
            if left.is_set():
                break

    state = fold_all(files.poll()[1])
    if follow and files.life() is Life.RUNNING:
        state = _show(state, run_clock(), "leave; the run continues", play)
    _leave_last(state)
    for line in wrapped(comparison_lines(read_report(files.folder)), terminal_width()):
        say_data(line, is_kept=True)
    if files.life() is Life.STOPPED:
        say(f"the run in {files.folder} is not finished and not running")
