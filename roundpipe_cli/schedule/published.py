"""The published accounting: the rules under which arXiv 2604.27085 reports its schedules. Seconds.

No transfer, no optimizer, no memory limit. A dependency between two workers arrives `hop_s` later, on one worker it is
free. A worker carries out its list in order.

- Bound schedules: recompute and backward start when the worker is free and the next stage's backward has arrived.
- roundpipe: what a backward stage does before it needs its gradient may run before that has arrived and is placed right
  before the backward. That is the recompute, and, as the published figures show (Qwen3-32B: 23978.8 ms; 24042.8 ms
  otherwise), also the fused head's forward before the last forward stage has delivered:

      gradient of microbatch m              |->
      worker        BBBBBB.......RRRRRRRRRRRBBBBBBBBBBB
"""

from __future__ import annotations

from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.schedule.actions import Action, Kind, Schedule, StageTimes, stage_times
from roundpipe_cli.schedule.timeline import COMPUTE, Interval, Timeline


def simulate_published(schedule: Schedule, costs: CostModel, *, staleness: int = 0) -> Timeline:
    """Time every action by the published rules; `staleness` 0 chains steps with a barrier, 1 without.

    Raises:
        ValueError: the schedule deadlocks.
    """
    times = stage_times(costs, schedule.forward_stages, schedule.backward_stages, fused_head=schedule.fused_head)
    walk = _Walk(schedule, times, costs.hop_s)
    for rows in _rows_by_step(schedule) if staleness == 0 else [schedule.actions]:
        walk.run(rows)
        if staleness == 0:
            walk.free_s = [max(walk.free_s)] * schedule.num_workers
    return Timeline(
        num_workers=schedule.num_workers,
        intervals=tuple(walk.intervals),
        fused_head=schedule.fused_head,
        updates_overlap=staleness == 1,
    )


def _rows_by_step(schedule: Schedule) -> list[list[list[Action]]]:
    steps: list[list[list[Action]]] = [[[] for _ in schedule.actions] for _ in range(schedule.num_steps)]
    for worker, row in enumerate(schedule.actions):
        for action in row:
            steps[action.microbatch // schedule.num_microbatches][worker].append(action)
    return steps


class _Walk:
    """Walks all workers' lists, each as far as the actions that it waits for are done.

    `forward_end` and `backward_end` hold (end, worker) per stage and microbatch, None before it is known.
    """

    def __init__(self, schedule: Schedule, times: StageTimes, hop_s: float) -> None:
        total = schedule.num_microbatches * schedule.num_steps
        self.times = times
        self.hop_s = hop_s
        self.early_lead = schedule.fused_head
        self.free_s = [0.0] * schedule.num_workers
        self.intervals: list[Interval] = []
        self.forward_end: list[list[tuple[float, int] | None]] = [[None] * total for _ in schedule.forward_stages]
        self.backward_end: list[list[tuple[float, int] | None]] = [[None] * total for _ in schedule.backward_stages]

    def run(self, rows: list[list[Action]] | tuple[tuple[Action, ...], ...]) -> None:
        """Time all workers' actions, each row in its order, each action once its inputs have ended.

        Raises:
            ValueError: the schedule deadlocks.
        """
        position = [0] * len(rows)
        progress = True
        while progress:
            progress = False
            for worker, row in enumerate(rows):
                before = position[worker]
                while position[worker] < len(row) and self._try(row[position[worker]]):
                    position[worker] += 1
                progress = progress or position[worker] > before
        if any(position[worker] < len(row) for worker, row in enumerate(rows)):
            raise ValueError("the schedule deadlocks")

    def _try(self, action: Action) -> bool:
        """Time one action if the ends of its inputs are known. A recompute is timed together with its backward."""
        if action.kind is Kind.RECOMPUTE:
            return True
        worker, stage, microbatch = action.worker, action.stage, action.microbatch
        forward = action.kind is Kind.FORWARD
        arrival_s = 0.0
        if stage or (not forward and self.early_lead and self.forward_end):
            if stage:
                done = (self.forward_end if forward else self.backward_end)[stage - 1][microbatch]
            else:
                done = self.forward_end[-1][microbatch]
            if done is None:
                return False
            arrival_s = done[0] if done[1] == worker else done[0] + self.hop_s
        elif not forward and self.forward_end and self.forward_end[-1][microbatch] is None:
            return False
        if forward:
            start_s = max(self.free_s[worker], arrival_s)
            end_s = start_s + self.times.action_s(Kind.FORWARD, stage, worker)
            self.forward_end[stage][microbatch] = (end_s, worker)
            self.intervals.append(Interval(worker, COMPUTE, Kind.FORWARD, stage, microbatch, start_s, end_s))
        else:
            end_s = self._backward(worker, stage, microbatch, arrival_s)
        self.free_s[worker] = end_s
        return True

    def _backward(self, worker: int, stage: int, microbatch: int, arrival_s: float) -> float:
        lead_s = self.times.lead_s(stage, worker)
        start_s = max(self.free_s[worker], arrival_s - lead_s if self.early_lead else arrival_s)
        middle_s = start_s + self.times.action_s(Kind.RECOMPUTE, stage, worker)
        end_s = middle_s + self.times.action_s(Kind.BACKWARD, stage, worker)
        self.backward_end[stage][microbatch] = (end_s, worker)
        if stage or not self.early_lead:
            self.intervals.append(Interval(worker, COMPUTE, Kind.RECOMPUTE, stage, microbatch, start_s, middle_s))
        self.intervals.append(Interval(worker, COMPUTE, Kind.BACKWARD, stage, microbatch, middle_s, end_s))
        return end_s
