"""A simulated step as the events of a run, and as one picture to share; both say `simulated`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from roundpipe_cli.dashboard.state import SIMULATED, DashboardState
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Event, Notice, RunStarted, Span, StepFinished, StepTimeline, WorkSeen
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.pictures import BOTH, span_of, svg_picture
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, UP, Interval, Timeline, bubble_ratio, makespan_s, utilization
from roundpipe_cli.units import format_loss, format_seconds

# One picture of a run to share: model, machine, busy share, and the work of each worker in one step.


def shared_picture(state: DashboardState, *, where: str) -> str:
    """An SVG document of the newest step of which it is known what the workers did.

    Raises:
        RefusedError: there is no such step yet in the run `where`.
    """
    run, step, timeline = state.run, state.step, state.timeline
    if run is None or step is None or timeline is None:
        raise RefusedError(
            "there is no step to draw yet",
            where=where,
            found="a run whose workers have not finished a step",
            expected="a run with at least one finished step in events.jsonl",
            hint="wait for the first step, or draw a simulated one: roundpipe watch --demo 8x4090 --svg run.svg",
        )
    source = "; ".join(message.text for message in state.messages)
    if not state.is_simulated:
        day = time.strftime("%Y-%m-%d", time.gmtime(run.time_s))
        source = f"measured by roundpipe on {day}, step {timeline.step} of {step.num_steps}"
    heading = f"{run.title} {run.settings} on {state.pool.replace(' ', '')}, {step.tokens_per_s:,.0f} tokens/s"
    facts = [f"one step: {format_seconds(step.step_s)}"]
    if run.goal == "loss":
        facts.append(f"loss {format_loss(step.loss)}")
    facts.append(f"bubble {100 * step.bubble_ratio:.1f} %")
    return svg_picture(
        [(", ".join(facts), timeline_of(timeline, len(run.devices)))],
        heading=heading,
        note=source,
        pool=state.worker_word,
    )


def timeline_of(step: StepTimeline, num_workers: int) -> Timeline:
    """The events of a step as a timeline, from which every figure has its one definition."""
    kinds = {**{kind.value: kind for kind in Kind}, BOTH: Kind.BACKWARD}
    intervals = tuple(
        Interval(one.worker, one.lane, kinds[one.kind], one.stage, one.microbatch, one.start_s, one.end_s)
        for one in step.spans
        if one.kind in kinds and -1 <= one.worker < num_workers
    )
    return Timeline(num_workers, intervals, fused_head=any(span.kind == BOTH for span in step.spans))


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
        done = tuple(span.moved(begin_s) for span in work if from_s < span.end_s <= to_s)
        running = tuple(replace(span, end_s=to_s).moved(begin_s) for span in work if span.start_s < to_s < span.end_s)
        yield begin_s + to_s, WorkSeen(begin_s + to_s, step, done, running)


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
