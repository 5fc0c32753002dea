"""When the operations of a finished step ran, by the marks that its workers took."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_cli.engine.live import ActionTime
from roundpipe_cli.engine.worker import Worker, WorkerStep
from roundpipe_cli.schedule.actions import Action


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
