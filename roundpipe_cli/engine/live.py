"""A view of the workers while a step runs; it does not slow them down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe_cli.engine.worker import Worker, WorkerStep
from roundpipe_cli.schedule.actions import Action


@dataclass(frozen=True)
class ActionTime:
    """Time of an action on a worker, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepInWork:
    """A step that has begun, with its workers' records. Keeps none of the step's tensors."""

    step: int
    """From 0."""
    started_s: float
    """Start by `time.perf_counter`."""
    workers: Sequence[Worker]
    results: Sequence[WorkerStep]
    """The workers' records, which grow."""
    fused_head: bool
    """`fused_head` of its schedule."""
    lanes: tuple[int, ...]
    """See `StepResult`."""


@dataclass(frozen=True)
class LiveNews:
    """News of a running step; seconds from its start."""

    now_s: float
    done: tuple[ActionTime, ...]
    """Actions that finished since the previous look."""
    running: tuple[ActionTime, ...]
    """Operations that run now; they end at `now_s`."""


class Watcher:
    """Looks at an engine's running step repeatedly; reports each finished action once."""

    def __init__(self) -> None:
        self._step: StepInWork | None = None
        self._num_seen: list[int] = []

    def look(self, step: StepInWork) -> LiveNews:
        """News of the engine's running step."""
        if step is not self._step:
            self._step, self._num_seen = step, [0] * len(step.workers)
        done: list[ActionTime] = []
        running: list[ActionTime] = []
        now_s = time.perf_counter() - step.started_s
        for worker in range(len(step.workers)):
            now = self._look_at(step, worker, done)
            if now is not None:
                running.append(ActionTime(now.action, now.start_s, max(now_s, now.start_s)))
        return LiveNews(now_s, tuple(done), tuple(running))

    def _look_at(self, step: StepInWork, worker: int, done: list[ActionTime]) -> ActionTime | None:
        """Add the finished actions of one worker to `done`; returns the running one, without an end."""
        backend, result = step.workers[worker].backend, step.results[worker]
        if result.start is None:  # it still computes the previous step
            return None

        def since_start_s(mark: Any) -> float:
            return result.started_s - step.started_s + backend.seconds_between(result.start, mark)

        num_intervals = len(result.intervals)
        while self._num_seen[worker] < num_intervals:
            interval = result.intervals[self._num_seen[worker]]
            if not backend.has_passed(interval.start):
                return None
            begin_s = since_start_s(interval.start)
            if not backend.has_passed(interval.end):
                return ActionTime(interval.action, begin_s, begin_s)
            done.append(ActionTime(interval.action, begin_s, since_start_s(interval.end)))
            self._num_seen[worker] += 1
        current = step.workers[worker].running(result)
        if current is None or not backend.has_passed(current.start):
            return None
        begin_s = since_start_s(current.start)
        return ActionTime(current.action, begin_s, begin_s)
