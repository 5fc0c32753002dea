"""Stages for one worker, without a search: nobody waits for anybody, so evenness does not matter.

    F 0..15 | F 16..30 | B 31..head | B 24..30 | B 17..23 ...

What matters is the head's stage, which recomputes nothing and so takes all that its limit allows, and whether uploads
hide behind arithmetic: a few sizes of stages and rounds are simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.planning.compare import SimulationCase, StageCut, costs_per_microbatch, run_step_s
from roundpipe_cli.planning.quick_cut import enough_per_round
from roundpipe_cli.planning.stages import StageLimits, backward_ranges, even_sizes, forward_ranges
from roundpipe_cli.schedule.actions import Kind, stage_times

MAX_SIMULATED_MICROBATCHES = 8
MAX_SHORT_ROUND = 4
"""Rounds of these numbers of microbatches are tried, and longer ones where links would limit."""
ROUNDING = 1e-9
"""A bound may exceed a time by this relative difference, because sums are rounded."""


def single_cut(case: SimulationCase, keeps: Callable[[StageCut], bool]) -> StageCut | None:
    """The fastest of a few cuts that keep the limits of `keeps`; None if none does."""
    assert case.limits is not None
    cuts = list(filter(keeps, _candidates(case.costs, case.limits, case.num_microbatches)))
    if len(cuts) < 2:
        return cuts[0] if cuts else None
    longest = max(cut.microbatches_per_round or 1 for cut in cuts)
    simulated = min(case.num_microbatches, max(MAX_SIMULATED_MICROBATCHES, longest))
    short = replace(case, num_microbatches=simulated)
    # most promising first; of equal bounds the one with long rounds, which waits less for its link
    order = sorted(
        (single_worker_bound_s(cut, short), -(cut.microbatches_per_round or 1), place) for place, cut in enumerate(cuts)
    )
    found: list[tuple[float, int]] = []
    for bound_s, _, place in order:
        if found and bound_s > min(found)[0] * (1 + ROUNDING):
            break
        found.append((run_step_s("roundpipe", cuts[place], short), place))
    return cuts[min(found)[1]]


def single_worker_bound_s(cut: StageCut, case: SimulationCase) -> float:
    """Lower bound on a step of one worker: its link carries nothing but weights, and gradients stay.

    A visit waits for the visit before and for its weights, which wait for the weights before and for a slot. It is much
    quicker than a simulation and hardly less than its time.
    """
    costs, per_round = (
        costs_per_microbatch("roundpipe", case, cut.microbatches_per_round),
        cut.microbatches_per_round or 1,
    )
    times = stage_times(costs, cut.forward_stages, cut.backward_stages, fused_head=True)
    forward = [(layers, times.action_s(Kind.FORWARD, k, 0)) for k, layers in enumerate(cut.forward_stages)]
    backward = [
        (layers, times.action_s(Kind.RECOMPUTE, k, 0) + times.action_s(Kind.BACKWARD, k, 0))
        for k, layers in enumerate(cut.backward_stages)
    ]
    upload_s = {
        (first, last): sum(layer.param_bytes for layer in costs.layers[first : last + 1]) / costs.link_bytes_per_s
        for (first, last), _ in forward + backward
    }
    now_s = link_s = 0.0
    held: dict[StageRange, float] = {}
    """Stages in slots, least recently used first, and the time at which each was left."""
    for begin in range(0, case.num_microbatches, per_round):
        size = min(per_round, case.num_microbatches - begin)
        for layers, seconds in forward + backward:
            if held.pop(layers, None) is None:
                free_s = held.pop(next(iter(held))) if len(held) == costs.slots else 0.0
                link_s = max(link_s, free_s) + upload_s[layers]
                now_s = max(now_s, link_s)
            now_s += size * seconds
            held[layers] = now_s
    return now_s


def _candidates(costs: CostModel, limits: StageLimits, num_microbatches: int) -> list[StageCut]:
    """Cuts with large and medium stages, with short rounds and with rounds long enough for the links."""
    num_blocks = len(costs.layers) - 2
    blocks = costs.layers[1:-1]
    weights = max(layer.param_bytes + layer.whole_bytes for layer in blocks)
    whole = max(layer.param_bytes + layer.grad_bytes + layer.visit_bytes for layer in blocks)
    head = costs.layers[-1]
    head_bytes = head.param_bytes + head.grad_bytes + head.activation_bytes
    most_head = limits.backward_bytes if limits.head_bytes is None else limits.head_bytes
    beside = num_blocks if most_head is None else int((most_head - head_bytes) // max(1, whole))
    beside = max(0, min(num_blocks, beside))
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
        first = even_sizes(left, -(-left // forward), larger_first=False) if left else ()
        later = even_sizes(left, -(-left // backward), larger_first=True) if left else ()
        sizes = [beside + 1, *later]
        sizes[-1] += 1  # the embedding
        ranges = forward_ranges([1 + first[0], *first[1:]]) if first else ()
        found.append(StageCut(ranges, backward_ranges(sizes, num_blocks + 2), per_round, explanation=(why,)))
    return found


def _sizes(limit_bytes: float | None, block_bytes: float, num_blocks: int) -> list[int]:
    """Blocks of a stage: as many as the limit allows, and about a third of them."""
    most = num_blocks if limit_bytes is None else int(limit_bytes // max(1, block_bytes))
    most = max(1, min(most, num_blocks))
    return sorted({most, max(1, most // 3)})
