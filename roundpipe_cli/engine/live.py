"""Times of a step's operations on the workers, while it runs and when it is done; to look slows no worker down."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.schedule.program import Op
from roundpipe_cli.schedule.timeline import Interval


def op_interval(op: Op, start_s: float, end_s: float) -> Interval:
    """The interval in which an operation was carried out."""
    return Interval(op.worker, op.lane, op.kind, op.stage, op.microbatch, start_s, end_s)


@dataclass
class ComputeInterval:
    """One operation; marks are the backend's."""

    op: Op
    start: Any = None
    """When it had its input: time before it is waiting, not work. None until then."""
    end: Any = None
    """None while it is carried out."""
    issued_s: float = 0.0
    """Time of its last launch, by `time.perf_counter`."""


@dataclass
class WorkerStep:
    """Record of a worker's operations in one step; grows while the step is carried out. Keeps none of its tensors."""

    backend: Backend
    intervals: list[ComputeInterval] = field(default_factory=list)
    start: Any = None
    """The backend's mark of when the worker took the step up; None until then."""
    started_s: float = 0.0
    """The time of that mark, by `time.perf_counter`."""
    peak_bytes: int = 0
    """Peak of the device's memory in use."""
    reserved_bytes: int = 0
    """Peak of the memory taken from the driver."""

    def seconds(self, mark: Any, since_s: float) -> float:
        """Time of a mark, in seconds since `since_s` (of `time.perf_counter`)."""
        return self.started_s - since_s + self.backend.seconds_between(self.start, mark)

    def timed(self, one: ComputeInterval, since_s: float, end_s: float | None = None) -> Interval:
        """An operation in seconds since `since_s`; `end_s`: its end so far, where it is not done."""
        start_s = self.seconds(one.start, since_s)
        return op_interval(one.op, start_s, self.seconds(one.end, since_s) if end_s is None else max(start_s, end_s))


@dataclass
class StepInWork:
    """A step that has begun, with its workers' records."""

    step: int
    """From 0."""
    started_s: float
    """Start by `time.perf_counter`."""
    records: Sequence[WorkerStep]
    fused_head: bool
    """`fused_head` of its schedule."""
    lanes: tuple[int, ...]
    """See `StepResult`."""
    _num_seen: Counter[int] = field(default_factory=Counter)

    def look(self) -> tuple[float, list[Interval], list[Interval]]:
        """Seconds from the step's start until now, the operations that ended since the last look, and those that run
        now, which end now."""
        now_s = time.perf_counter() - self.started_s
        done: list[Interval] = []
        running: list[Interval] = []
        for worker, record in enumerate(self.records):
            has_passed = record.backend.has_passed
            for one in record.intervals[self._num_seen[worker] :]:
                if one.start is None or not has_passed(one.start):
                    break
                if one.end is None or not has_passed(one.end):
                    running.append(record.timed(one, self.started_s, now_s))
                    break
                done.append(record.timed(one, self.started_s))
                self._num_seen[worker] += 1
        return now_s, done, running
