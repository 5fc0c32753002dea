"""Times of a finished step's operations, from its workers' marks, and of its transfers."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.dispatch.dispatch import StepRun
from roundpipe_cli.engine.live import ActionTime
from roundpipe_cli.engine.worker import Worker, WorkerStep
from roundpipe_cli.schedule.actions import Action
from roundpipe_cli.schedule.timeline import DOWN, UP, Interval

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


def measured_transfers(run: StepRun, started_s: float) -> tuple[Interval, ...]:
    """The transfers of a step that has ended, in the order in which they arrived, in seconds since it started.

    A transfer lasts from the issue of its first chunk until a lane's thread has seen that its last one is there: on a
    GPU up to a millisecond late.

    Args:
        started_s: when the step started, of `time.perf_counter`.
    """
    found = []
    for record in run.records:
        op = run.ledger.ops[record.op_id]
        if op.lane in (UP, DOWN):
            start_s, end_s = record.start_s - started_s, record.end_s - started_s
            found.append(Interval(op.worker, op.lane, op.kind, op.stage, op.microbatch, start_s, end_s))
    return tuple(found)


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
