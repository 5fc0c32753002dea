"""The planner's choice: how to cut the layers into forward and backward stages so that a step takes least time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.plan.cost import CostModel
from roundpipe_cli.plan.evaluate import chain_of, evaluate_partition, steady_chain, worker_speeds
from roundpipe_cli.plan.search_batch import BatchScorer
from roundpipe_cli.plan.search_run import Effort, Search
from roundpipe_cli.plan.search_seeds import unit_bounds
from roundpipe_cli.plan.stages import StageLimits, StageRange, StageSums, backward_ranges, check_costs, forward_ranges

Accounting = Literal["default", "published"]

MIN_ROUNDS = 24
"""Chained rounds by which a plan for staleness 1 is judged at least."""


@dataclass(frozen=True)
class Partition:
    """Which layers form a stage, and what the planner expects of it."""

    forward_stages: tuple[StageRange, ...]
    """Inclusive layer ranges in execution order; leaves out what the first backward stage computes itself."""
    backward_stages: tuple[StageRange, ...]
    """Inclusive layer ranges in execution order: the one with the head first."""
    microbatches_per_round: int
    makespan_s: float
    """Of the first step alone."""
    step_s: float
    """Time per step over the chained steps."""
    explanation: tuple[str, ...]


def plan_partition(
    costs: CostModel,
    *,
    num_workers: int,
    num_microbatches: int,
    accounting: Accounting = "default",
    staleness: Literal[0, 1] = 0,
    num_steps: int = 1,
    limits: StageLimits | None = None,
    effort: Effort | None = None,
) -> Partition:
    """The partition with the least time per step.

    Raises:
        RefusedError: costs or counts that mean nothing.
        ResourceError: no partition keeps the limits.
    """
    check_costs(costs)
    for name, value in (("workers", num_workers), ("microbatches", num_microbatches), ("steps", num_steps)):
        if value < 1:
            raise RefusedError(f"the number of {name} must be 1 or more", found=str(value))
    sums = StageSums(costs)
    speeds = worker_speeds(costs, num_workers)
    scorer = BatchScorer(sums, speeds=speeds, hop_s=costs.hop_s, limits=limits)
    chain = chain_of(num_microbatches, num_workers, staleness=staleness, num_steps=num_steps)
    judged = chain
    if chain.from_round and len(chain.round_sizes) < MIN_ROUNDS:
        judged = steady_chain(num_microbatches, num_workers, MIN_ROUNDS * 2 // 3)
    search = Search(scorer, unit_bounds(sums), judged, effort or Effort())
    found = search.run()
    if not found:
        raise ResourceError("no partition keeps every stage within its limit", expected=str(limits))
    best = found[0]
    forward = forward_ranges(best.sizes[: best.num_forward])
    backward = backward_ranges(best.sizes[best.num_forward :], len(costs.layers))
    makespan_s, step_s = evaluate_partition(costs, forward, backward, num_workers=num_workers, chain=chain)
    return Partition(forward, backward, num_workers, makespan_s, step_s, ())
