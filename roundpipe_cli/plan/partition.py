"""The planner's choice: how to cut the layers into forward and backward stages so that a step takes least time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.plan.cost import CostModel
from roundpipe_cli.plan.evaluate import Chain, chain_of, evaluate_partition, worker_speeds
from roundpipe_cli.plan.search_batch import INFEASIBLE, Array, Batch, BatchScorer
from roundpipe_cli.plan.search_bound import lower_bounds
from roundpipe_cli.plan.search_local import descend
from roundpipe_cli.plan.search_seeds import PATTERNS, head_units, seeds, stage_counts, unit_bounds
from roundpipe_cli.plan.stages import StageLimits, StageRange, StageSums, backward_ranges, check_costs, forward_ranges

Accounting = Literal["default", "published"]

NUM_STARTS = 12
"""Partitions that the local search starts from."""


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
) -> Partition:
    """The partition with the least time per step.

    Raises:
        RefusedError: costs or counts that mean nothing.
        ResourceError: no partition keeps the limits.
    """
    check_costs(costs)
    for name, value in (
        ("workers", num_workers),
        ("microbatches", num_microbatches),
        ("steps", num_steps),
    ):
        if value < 1:
            raise RefusedError(f"the number of {name} must be 1 or more", found=str(value))
    sums = StageSums(costs)
    speeds = worker_speeds(costs, num_workers)
    scorer = BatchScorer(sums, speeds=speeds, hop_s=costs.hop_s, limits=limits)
    chain = chain_of(num_microbatches, num_workers, staleness=staleness, num_steps=num_steps)
    value, sizes, num_forward = _search(scorer, sums, chain)
    if value == INFEASIBLE:
        raise ResourceError("no partition keeps every stage within its limit", expected=str(limits))
    layout = [int(size) for size in sizes]
    forward = forward_ranges(layout[:num_forward])
    backward = backward_ranges(layout[num_forward:], len(costs.layers))
    makespan_s, step_s = evaluate_partition(costs, forward, backward, num_workers=num_workers, chain=chain)
    return Partition(forward, backward, num_workers, makespan_s, step_s, ())


def _search(scorer: BatchScorer, sums: StageSums, chain: Chain) -> tuple[float, Array, int]:
    numpy = scorer.numpy
    found: list[tuple[float, int, tuple[int, ...]]] = []
    best = INFEASIBLE
    bounds = unit_bounds(sums)
    for patterns in [(forward, backward) for backward in PATTERNS[1::-1] for forward in PATTERNS]:
        for count in stage_counts(sums, bounds):
            batch = seeds(scorer, bounds, count, patterns, head_units(sums, bounds))
            if batch is None:
                continue
            promising = lower_bounds(scorer, batch, chain) < best * 1.01
            batch = Batch(batch.sizes[promising], batch.num_forward[promising])
            if not len(batch.sizes):
                continue
            scores = scorer.score(batch, chain)
            best = min(best, float(scores.min()))
            for index in numpy.argsort(scores, kind="stable")[:4]:
                found.append((float(scores[index]), int(batch.num_forward[index]), tuple(batch.sizes[index])))
    found.sort(key=lambda entry: entry[0])
    if not found:
        return INFEASIBLE, numpy.zeros(1, dtype=int), 0
    results = []
    for value, num_forward, sizes in dict.fromkeys(found[: 4 * NUM_STARTS]):
        if len(results) == NUM_STARTS or value == INFEASIBLE:
            break
        end, better = descend(scorer, numpy.array(sizes), num_forward, value, chain, 40)
        results.append((end, num_forward, tuple(int(size) for size in better)))
    if not results:
        return INFEASIBLE, numpy.zeros(1, dtype=int), 0
    value, num_forward, sizes = min(results)
    return value, numpy.array(sizes), num_forward
