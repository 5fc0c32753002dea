"""A good cut in under a second for models with very many layers, where the planner's search takes seconds.

A few even cuts, each simulated; with so many stages unevenness hardly matters, the ratio of forward to backward stages
and the microbatches per round do.
"""

from __future__ import annotations

import math
from typing import Literal

from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.planning.stages import StageLimits
from roundpipe_cli.planning.verdict import stages_of_blocks
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from roundpipe_cli.schedule.simulate import simulated_makespan_s

MAX_LINK_SHARE = 0.7
MAX_SIMULATED_MICROBATCHES = 32

QuickCut = tuple[tuple[StageRange, ...], tuple[StageRange, ...], int]
"""Forward stages, backward stages, microbatches per round."""


def quick_cut(
    costs: CostModel, *, num_workers: int, num_microbatches: int, staleness: Literal[0, 1], limits: StageLimits
) -> QuickCut:
    """The fastest of a few even cuts, the head alone in its stage."""
    per_round = enough_per_round(costs, num_workers, num_microbatches, limits)
    simulated = min(num_microbatches, MAX_SIMULATED_MICROBATCHES)

    def step_s(cut: QuickCut) -> float:
        """Seconds of a simulated step with these stages."""
        schedule = build_schedule(
            "roundpipe",
            forward_stages=cut[0],
            backward_stages=cut[1],
            num_workers=num_workers,
            rounds=Rounds(simulated, per_round=cut[2], staleness=staleness),
            costs=costs,
        )
        return simulated_makespan_s(schedule, costs, staleness=staleness)

    cuts = [
        (
            tuple(stages_of_blocks(len(costs.layers), forward)[0]),
            tuple(stages_of_blocks(len(costs.layers), backward)[1]),
            per_round,
        )
        for forward, backward in _sizes(costs, limits, num_workers)
    ]
    return cuts[0] if len(cuts) == 1 else min(cuts, key=step_s)


def _sizes(costs: CostModel, limits: StageLimits, num_workers: int) -> list[tuple[int, int]]:
    """Blocks per (forward, backward) stage that keep the limits; backward does three times the work."""
    blocks = costs.layers[1:-1]
    weights = max(layer.param_bytes + layer.whole_bytes for layer in blocks)
    whole = max(layer.param_bytes + layer.grad_bytes + layer.visit_bytes for layer in blocks)
    most_forward = _most(limits.forward_bytes, weights, len(blocks))
    most_backward = _most(limits.backward_bytes, whole, len(blocks))
    enough_stages = max(1, len(blocks) // (2 * num_workers))
    backward = min(most_backward, enough_stages, 2)
    sizes = {(min(most_forward, times * each), each) for each in {1, backward} for times in (2, 3)}
    return sorted(sizes)


def _most(limit_bytes: int | None, block_bytes: int, num_blocks: int) -> int:
    """Blocks of a stage that keep the limit, at least 1."""
    return num_blocks if limit_bytes is None else max(1, limit_bytes // max(1, block_bytes))


def enough_per_round(costs: CostModel, num_workers: int, num_microbatches: int, limits: StageLimits) -> int:
    """More microbatches a round where the links would bind: every layer is sent twice a round, however many it serves.

    Doubled from the number of workers until the links take at most `MAX_LINK_SHARE` of the workers' time.
    """
    per_round = num_workers
    while (
        per_round < num_microbatches
        and limits.keeps_round(min(2 * per_round, num_microbatches))
        and links_bind(costs, num_microbatches, per_round)
    ):
        per_round = min(2 * per_round, num_microbatches)
    return per_round


def links_bind(costs: CostModel, num_microbatches: int, per_round: int) -> bool:
    """Whether weights take the links for more than `MAX_LINK_SHARE` of the workers' time."""
    link_s = 2 * sum(layer.param_bytes for layer in costs.layers) / costs.link_bytes_per_s
    compute_s = sum((2 if layer.recompute else 1) * layer.forward_s + layer.backward_s for layer in costs.layers)
    return math.ceil(num_microbatches / per_round) * link_s > MAX_LINK_SHARE * num_microbatches * compute_s
