"""Why a worker waited: its idle time by cause, the help that `?` shows, and lines that say what a screen shows."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from roundpipe_cli.cli.lines import LinePrinter
from roundpipe_cli.dashboard.html import page
from roundpipe_cli.dashboard.live import help_screen
from roundpipe_cli.dashboard.state import DashboardState, fold_all
from roundpipe_cli.dashboard.theme import Theme
from roundpipe_cli.dashboard.views import figure_lines, screen, slices
from roundpipe_cli.dashboard.waiting import CAUSES, REMEDIES, longest_waiting, waiting
from roundpipe_cli.events import RunStarted, RunStopped, Span, StepFinished, StepTimeline
from roundpipe_cli.recipe.check import hints_of
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.schedule.timeline import makespan_s, utilization
from tests.support.recorded import recorded_run, recorded_step

KEYS = (("p", "pause"), ("q", "quit"), ("?", "help"))


def span(lane: str, start_s: float, end_s: float, *, worker: int = 0, microbatch: int = 0) -> Span:
    return Span(worker, lane, "F", 0, microbatch, start_s, end_s)


STEP = StepTimeline(
    7,
    1000.0,
    (
        span("up", 0, 1, microbatch=-1),  # its weights: 1 s before it can begin
        span("compute", 1, 2),
        span("up", 2, 2.5),  # a boundary tensor: half of what it waits for
        span("compute", 3, 4),
        span("compute", 0, 6, worker=1),
        span("host", 6, 8, worker=-1),
        span("down", 6, 7),  # nobody waits for it
    ),
)


STARTED = RunStarted(0.0, "model", "lora", ("cpu", "cpu"), 10, 0)


def _row(step_s: float) -> StepFinished:
    return StepFinished(7, 10, 1.0, 1e-4, 1.0, 100, 10.0, step_s, 0.5, (0.5, 0.5), 0, 0, 1.0)


def test_idle_time_has_a_cause() -> None:
    """Nothing said why a lane was empty: an upload, another worker, the host, or no work left."""
    found = waiting(STEP, 0, launches=False)
    assert found is not None and found.by_cause_s == {"upload": 1.0, "boundary": 1.0, "update": 2.0, "tail": 2.0}
    assert found.text().startswith("worker 0 waited 6 s of step 7 (75 %): update 2 s, tail 2 s, ")
    other = waiting(STEP, 1)
    assert other is not None and other.by_cause_s == {"update": 2.0}
    simulated = replace(STARTED, goal="simulated")
    assert longest_waiting(fold_all([(0.0, simulated), (8.0, STEP)])) == found
    assert longest_waiting(fold_all([(0.0, simulated), (8.0, StepTimeline(1, 0.0, ()))])) is None
    busy = waiting(StepTimeline(3, 0.0, (span("compute", 0, 1),)), 0)
    assert busy is not None and busy.text() == "worker 0 did not wait in step 3"


def work(kind: str, stage: int, start_s: float, end_s: float, *, worker: int = 0, lane: str = "compute") -> Span:
    return Span(worker, lane, kind, stage, -1 if kind == "U" else 0, start_s, end_s)


FIRST = work("F", 0, 0, 1, worker=1)
UPDATES = tuple(Span(0, "host", "O", n, -1, n, 4 - n) for n in (0, 1))
NEEDED = {
    "an upload for a later stage is no cause, and the input came 1 s before the work began": (
        (replace(FIRST, end_s=4), work("U", 5, 0, 4, lane="up"), work("F", 1, 5, 6)), {"boundary": 4, "launch": 1}),
    "the upload began only when its memory was free; the time before is no wait for another worker": (
        (FIRST, work("B", 0, 0, 2), work("U", 1, 3, 4, lane="up"), work("B", 1, 4, 5)), {"upload": 2}),
    "a tensor on its way up is a boundary": (
        (FIRST, Span(0, "up", "F", 1, 0, 1.0, 2.5), work("F", 1, 3, 4)), {"boundary": 2.5, "launch": 0.5}),
    "an update that ended within another one takes nothing from that": (
        (FIRST, *UPDATES, work("F", 1, 4.5, 6)), {"boundary": 1, "update": 3, "launch": 0.5}),
    "a single worker waits for nobody else": (
        (work("F", 0, 0, 1), work("F", 1, 1.5, 3), work("R", 0, 3, 4), work("B", 0, 4, 6)), {"launch": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("case", NEEDED)
def test_only_what_the_next_work_needs_is_a_cause(case: str) -> None:
    """Any upload on the link counted, so a wait for another worker looked like one for weights of a later stage."""
    spans, expected = NEEDED[case]
    found = waiting(StepTimeline(1, 0.0, spans), 0)
    assert found is not None and found.by_cause_s == expected


@pytest.mark.parametrize(("lane", "letter"), [("host", "u"), ("up", "~")])
@pytest.mark.parametrize(("waited_s", "expected"), [(0.3, "F{0}"), (0.15, "F.")])
def test_what_is_left_of_a_slice_is_what_most_of_it_waited_for(
    lane: str, letter: str, waited_s: float, expected: str
) -> None:
    spans = [work("F", 0, n, n + 0.6) for n in range(10)]
    spans += [work("O" if lane == "host" else "U", 1, n + 0.6, n + 0.6 + waited_s, lane=lane) for n in range(10)]
    shown = slices(spans, 10, 1.0, 10)
    assert set(shown) == set(expected.format(letter)) and shown.count("F") == 6


def test_a_wait_for_an_update_has_a_cause_and_a_mark() -> None:
    spans = (
        work("F", 0, 0, 1, worker=1),
        Span(1, "host", "O", 0, -1, 0, 4),
        Span(0, "host", "O", 1, -1, 0, 3),
        work("U", 1, 3, 4, lane="up"),
        work("F", 1, 4.5, 6),
    )
    step = StepTimeline(1, 0.0, spans)
    found = waiting(step, 0)
    assert found is not None and found.by_cause_s == {"boundary": 1.0, "update": 2.0, "upload": 1.0, "launch": 0.5}
    own = [span for span in spans if span.worker == 0]
    assert slices(own, 12, 0.5, 12) == "uuuuuu~~.FFF"
    state = fold_all([(0.0, STARTED), (6.0, step)])
    for theme, mark in ((Theme(has_colour=False), "u update"), (Theme(), "update")):
        assert mark in str(screen(state, 6.0, 120, 30, theme, KEYS)[-1])
        plain = fold_all([(0.0, STARTED), (6.0, replace(step, spans=spans[-1:]))])
        assert mark not in str(screen(plain, 6.0, 120, 30, theme, KEYS)[-1])
    assert "waits for the update, 3 s" in page([(0.0, STARTED), (6.0, step)], {}, "")


def test_what_the_host_does_beside_the_pipeline_is_said() -> None:
    row = _row(step_s=10.0)
    found = longest_waiting(fold_all([(0.0, STARTED), (8.0, STEP), (10.0, row)]))
    assert found is not None and found.host_part_s == 2.0
    besides = "; besides, all workers waited 2 s while the host prepared microbatches or ended an update"
    assert found.text().endswith(besides)
    pairs = longest_waiting(fold_all([(0.0, STARTED), (8.0, STEP), (10.0, replace(row, preference={"rewards": 0.0}))]))
    assert pairs is not None and pairs.host_part_s == 0.0, "workers may have computed the base model's part"


@pytest.mark.parametrize("num_workers", [1, 4, 8])
def test_causes_sum_to_the_idle_time(num_workers: int) -> None:
    state, timeline = fold_all(recorded_run(num_workers)), recorded_step(num_workers)
    assert state.timeline is not None
    for worker, share in enumerate(utilization(timeline)):
        found = waiting(state.timeline, worker)
        assert found is not None and found.step_s == pytest.approx(makespan_s(timeline), rel=1e-3)
        assert found.total_s == pytest.approx((1 - share) * found.step_s, abs=0.005 * found.step_s)


def test_help_says_why_the_worker_that_waited_most_waited() -> None:
    state = fold_all(recorded_run(8))
    whole = [line.plain for line in help_screen(state, 0.0, 60, 99, Theme(), KEYS)[:-1]]
    assert "…" not in "".join(whole[2:]), "below its head every sentence goes on in the next line"
    num_cut = len("\n".join(line.strip() for line in whole).rstrip().splitlines()) - 14
    for width, height in ((60, 15), (80, 24), (200, 60)):
        lines = help_screen(state, 0.0, width, height, Theme(), KEYS)
        assert [line.cell_len for line in lines] == [width] * height
        text = " ".join(" ".join(line.plain for line in lines).split())
        assert "worker 2 waited" in text and "of step 40 (26 %): " in text and "? back" in text
        told = f"{num_cut} lines more on a higher terminal" in text
        assert told == (height == 15), "what was cut is missed by nobody otherwise"
    assert "no step is finished yet" in help_screen(DashboardState(), 0.0, 80, 24, Theme(), KEYS)[3].plain
    assert "worker 2 waited" in page(recorded_run(8), {}, ""), "the page says it too"


# --- plain lines ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_workers, is_worth_it", [(2, False), (8, True)])
def test_a_wait_that_is_worth_it_is_one_line_with_a_remedy(
    num_workers: int, is_worth_it: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight lines about host, workers and causes after the first and the last step, and none said what to do."""
    now_s = [0.0]
    printer = LinePrinter(1, lambda: now_s[0])
    for _, event in recorded_run(num_workers, num_steps=40):  # its first step measures the layers
        now_s[0] += 2.5 if isinstance(event, StepFinished) else 0.0
        printer(event)
    said = [line for line in capsys.readouterr().err.splitlines() if "waited" in line or line.startswith("  ")]
    said = [line for line in said if not line.startswith("checkpoint ")]
    assert len(said) == is_worth_it, said
    remedy = r"note: worker 2 waited \d\d % of step \d+, most of it because .*: .*\(.+\) help$"
    assert not is_worth_it or re.match(remedy, said[0]), said


def test_every_cause_of_a_wait_has_a_remedy() -> None:
    assert REMEDIES.keys() == CAUSES.keys()
    keys = {key for text in REMEDIES.values() for key in re.findall(r"[a-z]+_[a-z_0-9]+", text)}
    assert keys <= set(hints_of(Recipe)), "each names keys of a recipe"


@pytest.mark.parametrize("gpu", [True, False])
def test_plain_lines_say_every_figure_that_a_screen_shows(gpu: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """They had no busy share, memory, temperature or power of a worker, and no reason why one waited."""
    events = recorded_run(4, gpu=gpu)[:-1]  # without the step in work
    state, printer = fold_all(events), LinePrinter(1, lambda: 0.0, is_verbose=True)
    for _, event in events:
        printer(event)
    assert state.step is not None
    for _ in range(2):
        printer(RunStopped("stopped by SIGINT"))
    printer(replace(state.step, step=state.step.num_steps))  # the last step
    said = capsys.readouterr()
    text = said.out + said.err
    shown = [line.plain for line in screen(state, events[-1][0], 200, 80, Theme(has_colour=False))]
    boxes = [line for line in shown if " busy " in line]
    boxes += [line.plain for line in figure_lines(state, 40, 60, Theme())]
    assert len(boxes) >= 4 + 8
    for line in boxes:
        figures = re.findall(r"\d[\d.]*(?:e-\d+)?", line.replace(",", ""))
        assert all(figure in text.replace(",", "") for figure in figures), line
    waited = longest_waiting(state)
    assert waited is not None and replace(waited, host_part_s=0.0).text() in said.err  # the row is not the timeline's
    assert all(cause in said.err for cause in waited.by_cause_s)
    stopped_at = re.findall(rf"^ *step {state.step.step}: ", said.err, re.MULTILINE)
    assert len(stopped_at) == 1, "a stopped run says the figures of its last step, once"
    assert said.out.count("step ") == 41 and "worker 0" not in said.out, "stdout has one line a step"
