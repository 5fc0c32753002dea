"""Screens of recorded runs, by a clock that stands still.

`python -m tests.dashboard.test_dashboard_screens` writes them anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from roundpipe_cli.dashboard.chart import chart
from roundpipe_cli.dashboard.lane import lane, slices, window_s
from roundpipe_cli.dashboard.live import ansi
from roundpipe_cli.dashboard.state import MAX_POINTS, Curve, DashboardState, fold, fold_all
from roundpipe_cli.dashboard.theme import ASCII, Theme, theme_for
from roundpipe_cli.dashboard.views import screen
from roundpipe_cli.events import (
    Event,
    Notice,
    Paused,
    Phase,
    RunFinished,
    RunStarted,
    RunStopped,
    Span,
    StepTimeline,
)
from tests.support.recorded import START_S, recorded_run, recorded_step

GOLDEN = Path(__file__).parents[1] / "golden"
KEYS = (("p", "pause"), ("s", "save"), ("q", "quit"))
COLOUR, LETTERS = Theme(), Theme(has_colour=False)
SCREENS = {
    "80x24_2gpu": (80, 24, 2, True, COLOUR),
    "80x24_2cpu_letters": (80, 24, 2, False, LETTERS),
    "80x24_8gpu": (80, 24, 8, True, COLOUR),
    "120x40_4gpu": (120, 40, 4, True, COLOUR),
    "200x60_8gpu": (200, 60, 8, True, COLOUR),
    "80x24_4gpu_ascii": (80, 24, 4, True, Theme(has_colour=False, glyphs=ASCII)),
}


def lines_of(name: str) -> list[str]:
    width, height, num_workers, gpu, theme = SCREENS[name]
    events = recorded_run(num_workers, gpu=gpu)
    lines = screen(fold_all(events), events[-1][0] + 0.1, width, height, theme, KEYS)
    return [line.plain for line in lines]


@pytest.mark.parametrize("name", SCREENS)
def test_golden(name: str) -> None:
    found = "\n".join(line.rstrip() for line in lines_of(name)) + "\n"
    assert found == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8"), f"\n{found}"


@pytest.mark.parametrize("width", [1, 39, 40, 66, 79, 116, 200])
def test_every_size_is_filled_exactly(width: int) -> None:
    events = recorded_run(8, num_done=3)
    for height in (1, 5, 10, 16, 24, 31, 80):
        for state in (DashboardState(), fold_all(events[:2]), fold_all(events)):
            lines = screen(state, events[-1][0], width, height, COLOUR, KEYS)
            assert [line.cell_len for line in lines] == [width] * height


def test_ascii_is_ascii() -> None:
    assert all(line.isascii() for line in lines_of("80x24_4gpu_ascii"))
    assert theme_for("ISO-8859-1", True).glyphs is ASCII and theme_for("utf-8", True).glyphs.braille


def test_many_workers_on_a_small_screen_are_counted() -> None:
    events: list[tuple[float, Event]] = [
        (START_S, RunStarted(START_S, "m", "lora", ("cpu",) * 40, 10, 0)),
    ]
    text = "\n".join(line.plain for line in screen(fold_all(events), START_S, 80, 24, COLOUR))
    assert "more workers" in text and "worker" in text


def test_words_say_how_it_goes() -> None:
    state = fold_all(recorded_run(2, num_done=3))

    def first_line(*events: Event) -> str:
        after = state
        for event in events:
            after = fold(after, event, START_S + 100)
        return screen(after, START_S + 100, 80, 24, COLOUR)[0].plain

    assert "● training" in first_line()
    assert "● paused" in first_line(Paused(3, True)) and "● training" in first_line(Paused(3, True), Paused(3, False))
    assert "● writing the result" in first_line(Phase("writing the result"))
    assert "● finished" in first_line(RunFinished("out", 3, 5.0))
    assert "● stopped" in first_line(RunStopped("by SIGINT"))


def test_a_name_or_message_cannot_steer_the_terminal() -> None:
    state = fold_all(recorded_run(2, num_done=1))
    assert state.run is not None
    state = replace(state, run=replace(state.run, title="m\x1b[2J", devices=("cuda:\x07", "b")))
    state = fold(state, Notice("rows\n\x1b]0;title\x07 of 汉字"), START_S + 99)
    console = Console(force_terminal=True, color_system="truecolor")
    shown = "".join(ansi(line, console) for line in screen(state, START_S + 99, 80, 24, COLOUR))
    assert "\x1b[2J" not in shown and "\x07" not in shown and "\n" not in shown and "\\x1b[2J" in shown


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "xterm-256color"}])
def test_no_colour_means_no_colour(environment: dict[str, str]) -> None:
    console = Console(force_terminal=True, _environ=environment)
    events = recorded_run(2)
    theme = theme_for("utf-8", console.color_system is not None and not console.no_color)
    text = "".join(ansi(line, console) for line in screen(fold_all(events), events[-1][0], 80, 24, theme))
    assert ("\x1b[38" in text or "\x1b[3" in text.replace("\x1b[39", "")) == ("NO_COLOR" not in environment)
    assert "\x1b[" in text  # bold and dim stay


# --- lanes and curves -------------------------------------------------------------------------------------------------


def work(kind: str, start_s: float, end_s: float, lane: str = "compute") -> Span:
    return Span(0, lane, kind, 0, 0, start_s, end_s)


def test_a_slice_shows_what_took_the_most_of_it() -> None:
    spans = [work("F", 0, 1.9), work("R", 1.9, 2.5), work("B", 2.5, 3), work("U", 4, 5.5, "up"), work("B", 6.6, 7)]
    assert slices(spans, 8, 1.0, 8) == "FFR.~..."
    assert slices(spans, 4, 2.0, 4) == "F.~."
    assert slices([], 3, 1.0, 3) == "..."


def test_a_moving_lane_does_not_flicker() -> None:
    """Whatever the moment, a piece of work has the same characters; it only moves left."""
    spans = [work("FRB"[n % 3], 0.37 * n, 0.37 * n + 0.3) for n in range(100)]
    before = ""
    for moment in range(200):
        now = lane(spans, 20 + moment * 0.01, 10.0, 50, LETTERS)[0].plain
        assert now in (before, before[1:] + now[-1]) or not before
        before = now


def test_a_lane_shows_about_one_and_a_half_steps() -> None:
    assert [window_s(seconds) for seconds in (None, 0.01, 3.0, 10.0, 25.0, 1000.0)] == [
        10.0,
        5.0,
        5.0,
        20.0,
        60.0,
        120.0,
    ]


def test_a_chart_goes_through_its_points() -> None:
    lines = [line.plain for line in chart([(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)], [(4, 1.0)], 20, 5, COLOUR)]
    assert lines == [
        " 4.000 ┤⠑⠢⢄         ",
        "       │   ⠉⠢⢄      ",
        "       │      ⠑⠢⣀   ",
        " 1.000 ┤         ⠉⠢◆",
        "       └1          4",
    ]


def test_a_long_curve_is_thinned_evenly() -> None:
    curve = Curve()
    for step in range(1, 50_001):
        curve = curve.with_value(step, float(step))
    points = curve.all_points
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS + 1 and points[-1][0] > 49_900
    assert all(step == pytest.approx(value) for step, value in points)
    assert Curve().with_value(1, float("nan")).points == ()


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_measured_step_takes_the_place_of_what_was_seen_of_it() -> None:
    events = recorded_run(2, num_done=2)
    live = fold_all(events)
    assert live.workers[0].running is not None or live.workers[1].running is not None
    timeline = recorded_step(2)
    spans = tuple(
        Span(i.worker, i.lane, i.kind.value, i.stage, i.microbatch, i.start_s, i.end_s) for i in timeline.intervals
    )
    assert live.timeline is not None
    start_s = live.seen_s - 0.6 * max(span.end_s for span in spans)
    after = fold(live, StepTimeline(3, start_s, spans), live.seen_s + 3)
    for index, worker in enumerate(after.workers):
        mine = [span for span in worker.spans if span.start_s >= start_s - 1e-6]
        assert len(mine) == sum(span.worker == index for span in spans)
        assert worker.running is None


def test_means_are_weighted_by_the_length_of_the_step() -> None:
    state = fold_all(recorded_run(2, num_done=1))
    assert state.step is not None
    step = replace(state.step, step=2, bubble_ratio=0.9, utilization=(0.1, 0.1), step_s=1e9)
    state = fold(state, step, 0.0)
    assert state.mean_bubble.value == pytest.approx(0.9, abs=1e-3)
    assert state.workers[0].mean_utilization.value == pytest.approx(0.1, abs=1e-3)


if __name__ == "__main__":
    for each in SCREENS:
        (GOLDEN / f"{each}.txt").write_text(
            "\n".join(line.rstrip() for line in lines_of(each)) + "\n", encoding="utf-8"
        )
