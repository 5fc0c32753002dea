"""When the operations of a finished step ran, by the marks that its workers took."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.live import ActionTime
from roundpipe_cli.engine.worker import Worker, WorkerStep
from roundpipe_cli.schedule.actions import Action

LAUNCH_BOUND_SHARE = 0.1
"""An operation waited for its launches if its device was done within this share of its time after the last of them."""


def measured_actions(
    workers: Sequence[Worker], steps: Sequence[WorkerStep], started_s: float
) -> tuple[list[ActionTime], dict[int, tuple[float, float]]]:
    """The actions of a step with their times.

    Args:
        started_s: when the step started, of `time.perf_counter`.

    Returns:
        the actions, in seconds since the step started, and operation -> start and end of `time.perf_counter`.
    """
    actions = []
    compute_s = {}
    for step in steps:
        backend, offset_s = workers[step.worker].backend, step.started_s - started_s
        for interval in step.intervals:
            begin_s = offset_s + backend.seconds_between(step.start, interval.start)
            end_s = offset_s + backend.seconds_between(step.start, interval.end)
            op = interval.op
            compute_s[op.id] = (started_s + begin_s, started_s + end_s)
            actions.append(ActionTime(Action(op.kind, op.stage, op.microbatch, op.worker), begin_s, end_s))
    return actions, compute_s


def launch_bound_s(backend: Backend, step: WorkerStep) -> float:
    """Seconds of a GPU's operations in which it kept up with the host, so that it may have waited for launches.

    What of them was arithmetic cannot be told. 0 for processors, which compute where they launch.
    """
    if backend.capability is None:
        return 0.0
    total_s = 0.0
    for interval in step.intervals:
        begin_s, end_s = (backend.seconds_between(step.start, mark) for mark in (interval.start, interval.end))
        left_s = end_s - (interval.issued_s - step.started_s)
        if left_s <= LAUNCH_BOUND_SHARE * (end_s - begin_s):
            total_s += end_s - begin_s
    return total_s
