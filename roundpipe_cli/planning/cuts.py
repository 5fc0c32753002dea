"""Cuts that need no search, for one worker and for very many layers: a few even ones are simulated.

    F 0..15 | F 16..30 | B 31..head | B 24..30 | B 17..23 ...

What matters is the head's stage, which recomputes nothing and so takes all that its limit allows, and whether uploads
hide behind arithmetic. With very many stages unevenness hardly matters; the ratio of forward to backward stages and the
microbatches per round do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.planning.compare import SimulationCase, StageCut, run_step_s
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.planning.search.stages import StageLimits
from roundpipe_cli.schedule.builders import Options

MAX_LINK_SHARE = 0.7
MAX_QUICK_MICROBATCHES = 32


def quick_cut(case: SimulationCase) -> StageCut:
    """The fastest of a few even cuts, the head alone in its stage."""
    costs, limits, why = case.costs, case.limits, "the best of a few even cuts"
    assert limits is not None
    per_round = enough_per_round(costs, case.num_workers, case.num_microbatches, limits)
    sizes = _quick_sizes(costs, limits, case.num_workers)
    cuts = [StageCut(*even_cut(len(costs.layers), *each), per_round, explanation=(why,)) for each in sizes]
    if len(cuts) == 1:
        return cuts[0]
    simulated = min(case.num_microbatches, MAX_QUICK_MICROBATCHES)
    short = replace(case, num_microbatches=simulated, num_steps=1, options=Options(), accounting="default")
    return min(cuts, key=lambda cut: run_step_s("roundpipe", cut, short))


def _quick_sizes(costs: CostModel, limits: StageLimits, num_workers: int) -> list[tuple[int, int]]:
    """Blocks per (forward, backward) stage that keep the limits; backward does three times the work."""
    blocks, (weights, whole) = costs.layers[1:-1], _block_bytes(costs)
    most_forward = _most(limits.forward_bytes, weights, len(blocks))
    most_backward = _most(limits.backward_bytes, whole, len(blocks))
    enough_stages = max(1, len(blocks) // (2 * num_workers))
    backward = min(most_backward, enough_stages, 2)
    sizes = {(min(most_forward, times * each), each) for each in {1, backward} for times in (2, 3)}
    return sorted(sizes)


def _block_bytes(costs: CostModel) -> tuple[int, int]:
    """Bytes of a device that the largest block takes in a forward and in a backward stage."""
    blocks = costs.layers[1:-1]
    weights = max(layer.param_bytes + layer.whole_bytes for layer in blocks)
    return weights, max(layer.param_bytes + layer.grad_bytes + layer.visit_bytes for layer in blocks)


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
    return -(-num_microbatches // -(-num_microbatches // per_round))


def links_bind(costs: CostModel, num_microbatches: int, per_round: int) -> bool:
    """Whether weights take the links for more than `MAX_LINK_SHARE` of the workers' time."""
    link_s = 2 * sum(layer.param_bytes for layer in costs.layers) / costs.link_bytes_per_s
    compute_s = sum((2 if layer.recompute else 1) * layer.forward_s + layer.backward_s for layer in costs.layers)
    return math.ceil(num_microbatches / per_round) * link_s > MAX_LINK_SHARE * num_microbatches * compute_s


MAX_SIMULATED_MICROBATCHES = 8
MAX_SHORT_ROUND = 4
"""Rounds of these numbers of microbatches are tried, and longer ones where links would limit."""


def single_cut(case: SimulationCase, keeps: Callable[[StageCut], bool]) -> StageCut | None:
    """The fastest of a few cuts that keep the limits of `keeps`; None if none does."""
    assert case.limits is not None
    cuts = list(filter(keeps, _candidates(case.costs, case.limits, case.num_microbatches)))
    if len(cuts) < 2:
        return cuts[0] if cuts else None
    longest = max(cut.microbatches_per_round or 1 for cut in cuts)
    simulated = min(case.num_microbatches, max(MAX_SIMULATED_MICROBATCHES, longest))
    short = replace(case, num_microbatches=simulated)
    return min(cuts, key=lambda cut: run_step_s("roundpipe", cut, short))


def _candidates(costs: CostModel, limits: StageLimits, num_microbatches: int) -> list[StageCut]:
    """Cuts with large and medium stages, with short rounds and with rounds long enough for the links."""
    num_blocks, (weights, whole) = len(costs.layers) - 2, _block_bytes(costs)
    beside = most_beside_head(costs, limits)
    left = num_blocks - beside
    why = "one worker: the head's stage takes all it can, the others are as large as uploads can hide"
    enough = enough_per_round(costs, 1, num_microbatches, limits)
    rounds = sorted({1, min(MAX_SHORT_ROUND, num_microbatches), enough})
    found = []
    for forward, backward, per_round in product(
        _sizes(limits.forward_bytes, weights, left), _sizes(limits.backward_bytes, whole, left), rounds
    ):
        if not limits.keeps_round(per_round):
            continue
        stages = even_cut(num_blocks + 2, forward, backward, beside_head=beside)
        found.append(StageCut(*stages, per_round, explanation=(why,)))
    return found


def most_beside_head(costs: CostModel, limits: StageLimits) -> int:
    """Blocks for which the head's stage has room."""
    num_blocks, head = len(costs.layers) - 2, costs.layers[-1]
    head_bytes = head.param_bytes + head.grad_bytes + head.activation_bytes
    most_bytes = limits.backward_bytes if limits.head_bytes is None else limits.head_bytes
    beside = num_blocks if most_bytes is None else int((most_bytes - head_bytes) // max(1, _block_bytes(costs)[1]))
    return max(0, min(num_blocks, beside))


def stage_sizes(costs: CostModel, limits: StageLimits) -> tuple[int, int]:
    """The most blocks of a forward and of a backward stage."""
    num_blocks, (weights, whole) = len(costs.layers) - 2, _block_bytes(costs)
    return _most(limits.forward_bytes, weights, num_blocks), _most(limits.backward_bytes, whole, num_blocks)


def _sizes(limit_bytes: int | None, block_bytes: int, num_blocks: int) -> list[int]:
    """Blocks of a stage: as many as the limit allows, and about a third of them."""
    most = max(1, min(_most(limit_bytes, block_bytes, num_blocks), num_blocks))
    return sorted({most, max(1, most // 3)})
