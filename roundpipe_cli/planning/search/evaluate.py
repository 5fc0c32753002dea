"""How long a roundpipe partition takes, exactly, one candidate at a time and without building a schedule. Seconds.

The stages of a round are walked in execution order, which is also the order of every worker's list, so one pass settles
all times. A stage is a lead (what may run before the previous stage has delivered: the recompute, or the fused head's
forward) and a rest:

      end[m] = max(end[m - 1] + lead, arrival[m]) + rest

Stage k of a round runs on worker (start + k) mod workers; the next round starts on the worker that is free first.
`search_batch` does the same for many partitions at once; the search uses that, this one is what it is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.planning.stages import StageSums


@dataclass(frozen=True, slots=True)
class RoundChain:
    """What is run: how many microbatches each round has, and between which rounds the time per step is measured."""

    round_sizes: tuple[int, ...]
    rounds_per_step: int
    from_round: int
    """Rounds before the measured ones; 0 for a single step."""
    measured_steps: int
    waits: bool = False
    """Whether a step begins no sooner than the one two before it has ended, whose update makes the weights it reads."""

    def step_s(self, from_s: float, to_s: float) -> float:
        """Time per step, given the times before and after the measured rounds."""
        return (to_s - from_s) / self.measured_steps

    def since_first_s(self, first_s: float, to_s: float) -> float:
        """Time per step of all steps but the first, given the times after the first and after all."""
        return (to_s - first_s) / (len(self.round_sizes) // self.rounds_per_step - 1)


def chain_of(
    num_microbatches: int, per_round: int, *, staleness: int, num_steps: int, waits: bool = False
) -> RoundChain:
    """The rounds that decide a run's time per step. With staleness 0 a barrier separates steps: one step tells all."""
    step = _round_sizes(num_microbatches, per_round)
    if staleness == 0 or num_steps == 1:
        return RoundChain(step, len(step), 0, 1)
    half = num_steps // 2
    return RoundChain(step * num_steps, len(step), len(step) * half, num_steps - half, waits)


def steady_chain(num_microbatches: int, per_round: int, min_rounds: int, *, waits: bool = False) -> RoundChain:
    """Enough chained steps to see how fast they follow each other."""
    rounds = -(-num_microbatches // per_round)
    num_steps = 2 * -(-min_rounds // (2 * rounds))
    return chain_of(num_microbatches, per_round, staleness=1, num_steps=num_steps, waits=waits)


def _round_sizes(num_microbatches: int, per_round: int) -> tuple[int, ...]:
    return tuple(min(per_round, num_microbatches - first) for first in range(0, num_microbatches, per_round))


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What the default accounting adds to the published one."""

    bytes_per_s: float
    """Of each worker's link, each direction."""
    slots: int


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage as the walk sees it, on a worker of speed 1."""

    lead_s: float
    rest_s: float
    fused_s: float = 0.0
    """For the stage with the head: lead and rest together, of which the rest is what the lead leaves."""

    def on(self, speed: float) -> tuple[float, float]:
        """Lead and rest on a worker of this speed, rounded as the schedule's cost function rounds."""
        lead = self.lead_s / speed
        return lead, self.fused_s / speed - lead if self.fused_s else self.rest_s / speed


def stage_works(
    sums: StageSums, forward_stages: Sequence[StageRange], backward_stages: Sequence[StageRange]
) -> list[StageWork]:
    """The stages of one round in execution order."""
    works = [StageWork(0.0, sums.forward_s[first][last + 1]) for first, last in forward_stages]
    first, last = backward_stages[0]
    head = sums.forward_s[first][last + 1]
    works.append(StageWork(head, 0.0, sums.backward_s[first][last + 1] + head))
    for first, last in backward_stages[1:]:
        works.append(StageWork(sums.recompute_s[first][last + 1], sums.backward_s[first][last + 1]))
    return works


def walk_rounds(
    works: Sequence[StageWork],
    round_sizes: Sequence[int],
    speeds: Sequence[float],
    hop_s: float,
    wait_rounds: int = 0,
) -> list[float]:
    """The makespan after each round, no barrier between them.

    Args:
        wait_rounds: of a step, where a step waits for the one two before it; 0: it does not.
    """
    num_workers = len(speeds)
    table = [[work.on(speed) for speed in speeds] for work in works]
    hop = hop_s if num_workers > 1 else 0.0
    free = [0.0] * num_workers
    makespan = 0.0
    makespans = []
    step_ends = [0.0, 0.0]
    for index, size in enumerate(round_sizes):
        if wait_rounds and index % wait_rounds == 0:
            step_ends.append(0.0)
        worker = free.index(min(free))
        ends = [step_ends[-3] if wait_rounds else 0.0] * size
        for position, row in enumerate(table):
            lead, rest = row[worker]
            latency = hop if position else 0.0
            clock = free[worker]
            for microbatch in range(size):
                ready = clock + lead
                arrival = ends[microbatch] + latency
                clock = (ready if ready > arrival else arrival) + rest
                ends[microbatch] = clock
            free[worker] = clock
            if lead + rest > 0 and clock > makespan:
                makespan = clock
            worker = worker + 1 if worker + 1 < num_workers else 0
        step_ends[-1] = max(step_ends[-1], *ends)
        makespans.append(makespan)
    return makespans


def evaluate_partition(
    costs: CostModel,
    forward_stages: Sequence[StageRange],
    backward_stages: Sequence[StageRange],
    *,
    num_workers: int,
    chain: RoundChain,
) -> tuple[float, float]:
    """Makespan of the first step and time per step, by the published rules."""
    works = stage_works(StageSums(costs), forward_stages, backward_stages)
    wait_rounds = chain.rounds_per_step if chain.waits else 0
    ends = walk_rounds(works, chain.round_sizes, worker_speeds(costs, num_workers), costs.hop_s, wait_rounds)
    return ends[chain.rounds_per_step - 1], chain.step_s(
        ends[chain.from_round - 1] if chain.from_round else 0.0, ends[-1]
    )


def worker_speeds(costs: CostModel, num_workers: int) -> tuple[float, ...]:
    """Relative speed of each worker; those beyond the list run at speed 1."""
    speeds = tuple(costs.worker_speed or ())[:num_workers]
    return speeds + (1.0,) * (num_workers - len(speeds))
