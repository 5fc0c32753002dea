"""Timelines of what happened, or would happen: intervals per worker and link, and pure functions over them.

The simulator fills a Timeline from virtual time, the engine from measured time; every figure and picture is made from
it alone, so predicted and measured figures have one definition. Seconds and bytes throughout.

    worker r  |....FFFFFFFF..FFFF...RRBBRRBB..RRBB.....|
               fill ^        ^   switch         steady  drain
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roundpipe_cli.schedule.actions import Kind

COMPUTE, UP, DOWN, HOST = "compute", "up", "down", "host"
"""Lanes of a worker: its compute stream, its link from and to the host; and the host's optimizer (worker -1)."""


class Interval(NamedTuple):
    """One action, or one uninterrupted piece of a transfer."""

    worker: int
    """-1 for the host."""
    lane: str
    kind: Kind
    stage: int
    """Forward stage for F, backward stage for R and B; for U and D that of the compute action that they serve; the
    layer for O."""
    microbatch: int
    """-1 where there is none: weights, weight gradients, updates."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """All intervals of one step or several chained steps."""

    num_workers: int
    intervals: tuple[Interval, ...]
    fused_head: bool = True
    """`fused_head` of the schedule; decides what counts as warm-up (`bubble`)."""
    updates_overlap: bool = False
    """Staleness 1: the host's updates run beside the next step and do not lengthen the makespan."""
    host_memory_s: float = 0.0
    """Time that the host's memory needs for all traffic of a simulation, which no interval shows."""


@dataclass(frozen=True, slots=True)
class Bubble:
    """Shares of workers x makespan; the four parts sum to `ratio`."""

    ratio: float
    fill: float
    """Idle from 0 to a worker's first action."""
    switch: float
    """Idle between the end of the warm-up forwards and the worker's first backward."""
    drain: float
    """Idle from a worker's last backward to the makespan."""
    steady: float
    """All other idle time."""


def makespan_s(timeline: Timeline) -> float:
    """End of the last action, or of the host memory's traffic. An action that takes no time does not count."""
    ends_s = (
        interval.end_s
        for interval in timeline.intervals
        if interval.end_s > interval.start_s and not (interval.lane == HOST and timeline.updates_overlap)
    )
    return max(timeline.host_memory_s, *ends_s, 0.0)


def busy_s(timeline: Timeline) -> list[float]:
    """Seconds in F, R and B of each worker."""
    busy = [0.0] * timeline.num_workers
    for interval in timeline.intervals:
        if interval.lane == COMPUTE:
            busy[interval.worker] += interval.end_s - interval.start_s
    return busy


def chained_step_s(
    first_busy_s: Sequence[float], ends_s: tuple[float, float], num_steps: int, speeds: Sequence[float]
) -> float:
    """Time per step of `num_steps` steps that follow each other without a barrier.

    Never less than all work at the speed of all workers: where few steps are compared, their last actions may end
    early or late by chance.

    Args:
        first_busy_s: of the first step alone, as `busy_s`.
        ends_s: makespans before and after those steps.
        speeds: relative speed of each worker.
    """
    work_s = sum(seconds * speed for seconds, speed in zip(first_busy_s, speeds, strict=True))
    return max((ends_s[1] - ends_s[0]) / num_steps, work_s / sum(speeds))


def utilization(timeline: Timeline) -> list[float]:
    """Busy share of the makespan of each worker, 0 to 1."""
    makespan = makespan_s(timeline)
    return [busy / makespan if makespan else 0.0 for busy in busy_s(timeline)]


def bubble_ratio(timeline: Timeline) -> float:
    """1 - sum(busy) / (workers x makespan)."""
    area = timeline.num_workers * makespan_s(timeline)
    return 1.0 - sum(busy_s(timeline)) / area if area else 0.0


def bubble(timeline: Timeline) -> Bubble:
    """The bubble and its four parts, as the published accounting defines them.

    A worker r of a bound schedule has warmed up after its (workers - r)-th forward; one of roundpipe after the last
    forward before its first backward. A recompute belongs to its backward.
    """
    makespan = makespan_s(timeline)
    area = timeline.num_workers * makespan
    if not area:
        return Bubble(0.0, 0.0, 0.0, 0.0, 0.0)
    fill = switch = drain = 0.0
    for worker, row in enumerate(compute_rows(timeline)):
        fill += row[0].start_s if row else makespan
        switch += _switch_s(row, None if timeline.fused_head else timeline.num_workers - worker)
        drain += _drain_s(row, makespan)
    ratio = bubble_ratio(timeline)
    fill, switch, drain = fill / area, switch / area, drain / area
    steady = ratio - fill - switch - drain
    return Bubble(ratio, fill, switch, drain, steady if abs(steady) > 1e-12 else 0.0)


def _switch_s(row: Sequence[Interval], num_warmup: int | None) -> float:
    first = next((index for index, interval in enumerate(row) if interval.kind is not Kind.FORWARD), None)
    if first is None:
        return 0.0
    if num_warmup is None:
        return row[first].start_s - row[first - 1].end_s if first else 0.0
    if first == 0:
        return 0.0
    last_warmup = min(num_warmup, first) - 1  # the forwards before the first backward come first in the row
    return sum(row[index + 1].start_s - row[index].end_s for index in range(last_warmup, first))


def _drain_s(row: Sequence[Interval], makespan: float) -> float:
    if not row:
        return 0.0
    last = max((index for index, interval in enumerate(row) if interval.kind is Kind.BACKWARD), default=len(row) - 1)
    later_busy = sum(interval.end_s - interval.start_s for interval in row[last + 1 :])
    return makespan - row[last].end_s - later_busy


def merged(pieces: Iterable[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """The (start, end) that pieces of some length cover, in order, as one where at most `gap` is between them."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(piece for piece in pieces if piece[1] > piece[0]):
        if found and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def compute_rows(timeline: Timeline) -> list[list[Interval]]:
    """Per worker: the compute intervals in order of time, without those that take no time."""
    rows: list[list[Interval]] = [[] for _ in range(timeline.num_workers)]
    for interval in timeline.intervals:
        if interval.lane == COMPUTE and interval.end_s > interval.start_s:
            rows[interval.worker].append(interval)
    for row in rows:
        row.sort(key=lambda interval: (interval.start_s, interval.end_s))
    return rows
