"""A simulated step as the events of a run, for `watch --demo`: every screen and picture of them says `simulated`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from roundpipe_cli.dashboard.state import SIMULATED
from roundpipe_cli.events import Event, Notice, RunStarted, Span, StepFinished, StepTimeline, WorkSeen
from roundpipe_cli.schedule.pictures import span_of
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, UP, Timeline, bubble_ratio, makespan_s, utilization

SAME_SHARE = 1 / 1000
"""Pauses of a link shorter than this share of a step cannot be seen."""
FRAMES = 60
"""Looks at the workers in one step."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A prediction, ready to be played."""

    title: str
    settings: str
    devices: tuple[str, ...]
    timeline: Timeline
    """The timeline of one step."""
    step_s: float
    """Predicted seconds; more than the timeline's where the timeline leaves something out."""
    tokens: int
    notes: tuple[str, ...]
    """Notes for the reader."""


def demo_events(run: SimulatedRun, num_steps: int, start_s: float) -> Iterator[tuple[float, Event]]:
    """(time, event) in order, on the simulator's clock; steps follow each other without a pause."""
    shown_s = makespan_s(run.timeline)
    spans = _spans(run.timeline)
    yield start_s, RunStarted(start_s, run.title, run.settings, run.devices, num_steps, 0, SIMULATED)
    for note in run.notes:
        yield start_s, Notice(note)
    for step in range(1, num_steps + 1):
        begin_s = start_s + (step - 1) * shown_s
        yield from _looks(spans, step, begin_s, shown_s / FRAMES)
        end_s = begin_s + shown_s
        yield end_s, StepTimeline(step, begin_s, spans)
        yield end_s, _finished(run, step, num_steps, shown_s)


def _spans(timeline: Timeline) -> tuple[Span, ...]:
    """The intervals in order of time; of links only uploads, of which those for one stage without a pause between them
    are one."""
    same_s = SAME_SHARE * makespan_s(timeline)
    spans: list[Span] = []
    newest: dict[tuple[int, str, int, bool], int] = {}
    for item in sorted(timeline.intervals, key=lambda one: one.start_s):
        span = span_of(item, fused_head=timeline.fused_head)
        row = item.worker, item.lane, item.stage, item.microbatch < 0
        before = newest.get(row)
        if item.lane == DOWN:
            continue
        if item.lane == UP and before is not None and span.start_s - spans[before].end_s < same_s:
            spans[before] = replace(spans[before], end_s=max(span.end_s, spans[before].end_s))
            continue
        newest[row] = len(spans)
        spans.append(span)
    return tuple(spans)


def _looks(spans: tuple[Span, ...], step: int, begin_s: float, every_s: float) -> Iterator[tuple[float, Event]]:
    work = [span for span in spans if span.lane == COMPUTE and span.end_s > span.start_s]
    for frame in range(1, FRAMES):
        from_s, to_s = (frame - 1) * every_s, frame * every_s
        done = tuple(_moved(span, begin_s) for span in work if from_s < span.end_s <= to_s)
        running = tuple(_moved(replace(span, end_s=to_s), begin_s) for span in work if span.start_s < to_s < span.end_s)
        yield begin_s + to_s, WorkSeen(begin_s + to_s, step, done, running)


def _moved(span: Span, offset_s: float) -> Span:
    return replace(span, start_s=span.start_s + offset_s, end_s=span.end_s + offset_s)


def _finished(run: SimulatedRun, step: int, num_steps: int, shown_s: float) -> StepFinished:
    """A step without a loss; no screen shows one of a simulated run."""
    return StepFinished(
        step=step,
        num_steps=num_steps,
        loss=0.0,
        learning_rate=0.0,
        grad_norm=0.0,
        tokens=run.tokens,
        tokens_per_s=run.tokens / run.step_s,
        step_s=run.step_s,
        bubble_ratio=bubble_ratio(run.timeline),
        utilization=tuple(utilization(run.timeline)),
        upload_bytes=0,
        device_peak_bytes=0,
        eta_s=shown_s * (num_steps - step),
    )
