"""Screens of recorded runs, by a clock that stands still.

`python -m tests.dashboard.test_dashboard_screens` writes them anew.
"""

from __future__ import annotations

import io
import math
import os
import re
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from roundpipe_cli.dashboard.demo import demo_events
from roundpipe_cli.dashboard.live import ansi
from roundpipe_cli.dashboard.state import (
    MAX_MESSAGES,
    MAX_POINTS,
    MAX_SPANS,
    Curve,
    DashboardState,
    Median,
    fold,
    fold_all,
    window_s,
)
from roundpipe_cli.dashboard.theme import ASCII, Theme, framed, theme_for
from roundpipe_cli.dashboard.views import details, lane, screen, slices
from roundpipe_cli.events import (
    EvaluationFinished,
    Event,
    Notice,
    Paused,
    Phase,
    RunFinished,
    RunStarted,
    RunStopped,
    Span,
    StepTimeline,
    WorkSeen,
)
from roundpipe_cli.schedule.pictures import span_of
from roundpipe_cli.schedule.timeline import makespan_s
from roundpipe_cli.units import format_seconds
from tests.support.recorded import START_S, recorded_run, recorded_step, simulated_run

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
    "60x15_2gpu_paused": (60, 15, 2, True, COLOUR),
    "100x30_2cpu_loading": (100, 30, 2, False, COLOUR),
    "60x15_8gpu_simulated": (60, 15, 8, True, LETTERS),
    "120x40_8gpu_simulated": (120, 40, 8, True, COLOUR),
}
SIZES = ((60, 15), (80, 24), (100, 30), (120, 40), (200, 60))
ENDS: dict[str, Event] = {
    "paused": Paused(40, True),
    "failed": RunStopped("a worker failed: out of GPU memory"),
    "finished": RunFinished("outputs/qwen3-8b", 100, 437.0),
}
SCREENS |= {
    name: (width, height, num_workers, True, LETTERS)
    for width, height in SIZES
    for num_workers in (1, 2, 8, 16)
    for state in ("", *(f"_{state}" for state in (*ENDS, "loading")))
    if (name := f"{width}x{height}_{num_workers}gpu{state}") not in SCREENS
}
LOADING = "loading weights: 3.1 GiB of 15.3 GiB, 420 MiB/s, 30 s left"


@cache
def run_in(state: str, num_workers: int, *, gpu: bool = True) -> tuple[tuple[float, Event], ...]:
    """A recorded run that is training, `loading`, or at one of ENDS."""
    if state == "loading":
        return (START_S, Notice("data: 233 rows")), (START_S + 0.5, Phase(LOADING))
    if state == "simulated":
        events = tuple(demo_events(simulated_run(num_workers), 3, START_S))
        return events[: 2 * len(events) // 3]
    events = tuple(recorded_run(num_workers, gpu=gpu))
    return (*events, (events[-1][0], ENDS[state])) if state in ENDS else events


@cache
def state_in(state: str, num_workers: int, *, gpu: bool = True) -> DashboardState:
    """The dashboard's state after `run_in`; nothing that draws it changes it."""
    return fold_all(run_in(state, num_workers, gpu=gpu))


def training(num_workers: int) -> tuple[tuple[tuple[float, Event], ...], DashboardState]:
    return run_in("training", num_workers), state_in("training", num_workers)


def lines_of(name: str) -> list[str]:
    width, height, num_workers, gpu, theme = SCREENS[name]
    state = name.split("_")[-1]
    events = run_in(state, num_workers, gpu=gpu)
    keys = () if state in ("finished", "failed") else KEYS  # the frame that stays has none
    lines = screen(state_in(state, num_workers, gpu=gpu), events[-1][0] + 0.1, width, height, theme, keys)
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


def test_the_newest_messages_are_kept_and_a_resumed_run_is_not_over() -> None:
    stopped = (START_S, RunStopped("stopped")), *((START_S, Notice(f"message {n}")) for n in range(MAX_MESSAGES))
    events, before = training(2)
    state = fold_all(stopped, before)
    said = [message.text for message in state.messages]
    assert said == [f"message {n}" for n in range(MAX_MESSAGES)] and state.is_over
    assert not fold_all(events, state).is_over


def test_news_is_seen_on_the_smallest_screen() -> None:
    """Where no message has room, `s` seemed to do nothing."""
    events, before = training(2)
    said_s = events[-1][0] + 60
    state = fold(before, Notice("saving now"), said_s)
    for later_s, is_seen in ((1.0, True), (6.0, False)):
        text = "\n".join(line.plain for line in screen(state, said_s + later_s, 60, 15, COLOUR, KEYS))
        assert ("saving now" in text, "bubble" in text, "loss" in text) == (is_seen, not is_seen, True), text


def test_a_long_message_is_read_to_its_end() -> None:
    """`stopping after this step, with a checkpoint; Ctrl-C stops at once, wi…`: how to read on was said nowhere."""
    said = "stopping after this step, with a checkpoint; Ctrl-C stops at once, without a checkpoint"
    events, before = training(2)
    now_s = events[-1][0] + 1
    state = fold(before, Notice(said), now_s)
    for width, height in SIZES[1:]:
        lines = [line.plain.strip() for line in screen(state, now_s, width, height, COLOUR, KEYS)]
        assert said in " ".join(lines), lines


@pytest.mark.parametrize("loss, shown", [(1e-8, "1.00e-08"), (1e8, "1.00e+08"), (-3.25, "-3.2500"), (0.0, "0.0000")])
def test_a_loss_of_any_size_is_shown(loss: float, shown: str) -> None:
    """1e-8 was `0.0000`, and 1e8 pushed other figures off the line."""
    events, state = training(2)
    assert state.step is not None
    state = replace(state, step=replace(state.step, loss=loss), losses=Curve().with_value(1, loss))
    for width, height in SIZES:
        lines = screen(state, events[-1][0], width, height, COLOUR, KEYS)
        assert [line.cell_len for line in lines] == [width] * height
        assert shown in "\n".join(line.plain for line in lines)


def test_preference_pairs_show_their_rewards() -> None:
    """The dashboard showed none of them, and plain lines the margin alone."""
    events, state = training(2)
    assert state.step is not None
    rewards = {"reward_margin": 0.731, "reward_accuracy": 0.875, "kl": 0.25}
    state = replace(state, step=replace(state.step, preference=rewards))
    found = EvaluationFinished(40, 100, 0.5, 1.6, 156, 0.1, True, preference=rewards)
    state = fold(state, found, events[-1][0])
    for width, height in SIZES[1:]:
        text = "\n".join(line.plain for line in screen(state, events[-1][0], width, height, COLOUR, KEYS))
        assert re.search(r"reward margin +0\.731", text) and re.search(r"reward accuracy +88 %", text), text
        assert "loss 0.5000, reward margin 0.731, reward accuracy 88 %, kl 0.25" in re.sub(r"\s+", " ", text), text
    assert "reward margin 0.731, reward accuracy 88 %, kl 0.25" in details(state)[0]


def test_the_time_left_counts_down_between_steps() -> None:
    _, state = training(2)
    seen_s = state.step_seen_s
    assert state.step is not None
    for later_s in (0.0, 3.0, 60.0):
        line = screen(state, seen_s + later_s, 80, 24, COLOUR)[1].plain
        assert f" epoch 0.80  eta {format_seconds(round(state.step.eta_s - later_s))} at 08:11 " in line
        narrow = screen(state, seen_s + later_s, 40, 12, COLOUR)[1].plain
        assert " eta " in narrow and " at " not in narrow and "epoch" not in narrow, narrow


def test_terminals_without_unicode_get_ascii() -> None:
    for encoding, glyphs in (("ISO-8859-1", ASCII), ("utf-8", COLOUR.glyphs)):
        assert theme_for(Console(file=io.TextIOWrapper(io.BytesIO(), encoding))).glyphs == glyphs


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
    events, state = training(2)
    lines = screen(state, events[-1][0], 80, 24, theme_for(console))
    text = "".join(ansi(line, console) for line in lines)
    assert ("\x1b[38" in text or "\x1b[3" in text.replace("\x1b[39", "")) == ("NO_COLOR" not in environment)
    assert "\x1b[" in text  # bold and dim stay
    assert ("F forward" in "".join(line.plain for line in lines)) == ("NO_COLOR" in environment), "letters instead"


def test_a_step_tells_of_devices_that_have_no_figures_of_their_own() -> None:
    state = fold_all(recorded_run(2, num_done=1))
    assert state.step is not None
    step = replace(state.step, upload_bytes=50 * 10**9, step_s=2.0, device_peak_bytes=3 << 30, tokens=12_345)
    shown = " ".join(details(replace(state, step=step)))
    for figure in ("upload 25.0 GB/s", "device peak 3.00 GiB", "tokens 12,345 this step"):
        assert figure in shown, shown


# --- lanes and curves -------------------------------------------------------------------------------------------------
def work(kind: str, start_s: float, end_s: float, lane: str = "compute") -> Span:
    return Span(0, lane, kind, 0, 0, start_s, end_s)


@pytest.mark.parametrize("num_spans", [9_000, 30_000])
def test_very_many_pieces_of_work_keep_their_shares(num_spans: int) -> None:
    """Of a step with 95 stages and 64 microbatches most of a worker's lane showed it idle."""
    spans, at_s, step_s, width = [], START_S, 10.0, 196
    for index in range(num_spans):
        seconds = step_s / num_spans * (0.5 + index % 7 / 8)
        kind = "FRBRBB"[index % 6 if index > num_spans // 3 else 0]
        spans.append(Span(0, "compute", kind, 0, 0, at_s, at_s + seconds))
        at_s += step_s / num_spans * (1.4 if index % 1000 > 900 else 0.5 + index % 7 / 8)
    shown_s = at_s - START_S
    moved = tuple(span.moved(-START_S) for span in spans)
    started = fold_all([(START_S, RunStarted(START_S, "m", "lora", ("cpu",), 10, 0))])
    kept = fold(started, StepTimeline(1, START_S, moved), at_s).workers[0].spans
    assert len(kept) <= MAX_SPANS
    slice_s = window_s(shown_s) / width / 2
    found, truth = (slices(of, 2 * width, slice_s, math.floor(at_s / slice_s)) for of in (kept, spans))
    for kind in "FRB.":
        assert abs(found.count(kind) - truth.count(kind)) / 2 <= 1, (kind, found, truth)


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("width", [38, 76, 150])
def test_kinds_of_work_have_their_share_of_a_lane(num_workers: int, width: int) -> None:
    timeline = recorded_step(num_workers)
    seconds = makespan_s(timeline)
    for worker in range(num_workers):
        spans = [span_of(item, fused_head=False) for item in timeline.intervals if item.worker == worker]
        letters = slices(spans, 2 * width, seconds / width / 2, 2 * width)
        for kind in "FRB":
            time_s = sum(span.end_s - span.start_s for span in spans if span.kind == kind and span.lane == "compute")
            assert time_s > 0
            assert abs(letters.count(kind) / 2 - width * time_s / seconds) <= 1, (worker, kind, letters)


def test_a_moving_lane_does_not_flicker() -> None:
    spans = [work("FRB"[n % 3], 0.37 * n, 0.37 * n + 0.3) for n in range(100)]
    before = ""
    for moment in range(200):
        now = lane(spans, 20 + moment * 0.01, 10.0, 50, theme=LETTERS)[0].plain
        assert now in (before, before[1:] + now[-1]) or not before
        before = now


def test_a_long_curve_is_thinned_evenly() -> None:
    curve = Curve()
    for step in range(1, 50_001):
        curve = curve.with_value(step, float(step))
        assert curve.all_points[-1][0] >= step - (curve.stride - 1) / 2, "the newest values are there"
    points = curve.all_points
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS + 1 and points[-1][0] > 49_900
    assert all(step == pytest.approx(value) for step, value in points)
    assert Curve().with_value(1, float("nan")).points == ()


# --- state ------------------------------------------------------------------------------------------------------------
def test_a_measured_step_takes_the_place_of_what_was_seen_of_it() -> None:
    events = recorded_run(2, num_done=2)
    live = fold_all(events)
    assert live.workers[0].running is not None or live.workers[1].running is not None
    spans = tuple(span_of(item, fused_head=False) for item in recorded_step(2).intervals)
    assert live.timeline is not None and live.step is not None
    start_s = live.seen_s - 0.6 * max(span.end_s for span in spans)
    after = fold(live, StepTimeline(3, start_s, spans), live.seen_s + 3)
    for index, worker in enumerate(after.workers):
        mine = [span for span in worker.spans if span.start_s >= start_s - 1e-6]
        assert len(mine) == sum(span.worker == index for span in spans)
        assert worker.running is None
    begin_s = live.seen_s + 1000  # of the step after an evaluation or a pause: what was before it is moved up to it
    for event in (StepTimeline(3, begin_s, spans), WorkSeen(begin_s, 3, (), ())):
        workers = fold(live, event, begin_s).workers
        before_s = [span.end_s for worker in workers for span in worker.spans if span.start_s < begin_s - 1e-6]
        assert max(before_s, default=0.0) == pytest.approx(begin_s - window_s(live.step.step_s) / 4, abs=0.02)


@pytest.mark.parametrize("width", range(12, 40))
def test_a_frame_is_as_wide_as_its_place(width: int) -> None:
    lines = framed(Text("a title"), "and its note", [Text("x" * 80), Text("y")], width, theme=COLOUR)
    assert {line.cell_len for line in lines} == {width}
    assert ("note" in lines[0].plain) is (width >= 27)


def test_means_are_weighted_by_the_length_of_the_step() -> None:
    state = fold_all(recorded_run(2, num_done=1))
    assert state.step is not None
    step = replace(state.step, step=2, bubble_ratio=0.9, utilization=(0.1, 0.1), step_s=1e9)
    state = fold(state, step, 0.0)
    assert Median().with_value(0.031).with_value(0.019).with_value(0.019).value == 0.019
    assert state.workers[0].mean_utilization.value == pytest.approx(0.1, abs=1e-3)


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    for one in SCREENS:
        (GOLDEN / f"{one}.txt").write_text("\n".join(line.rstrip() for line in lines_of(one)) + "\n", encoding="utf-8")
