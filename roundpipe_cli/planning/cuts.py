"""Cuts that need no search: one worker, resident weights, sequences in chunks, very many layers, forwards alone.

    F 0..15 | F 16..30 | B 31..head | B 24..30 | B 17..23 ...

What matters is the head's stage, which recomputes nothing and so takes all that its limit allows, and whether uploads
hide behind arithmetic: a few sizes of stages and rounds are simulated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, product

from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.costs.memory import largest_visit_bytes
from roundpipe_cli.planning.compare import SimulationCase, StageCut, run_step_s
from roundpipe_cli.planning.search.stages import StageLimits, even_cut, forward_ranges
from roundpipe_cli.schedule.actions import stage_times
from roundpipe_cli.schedule.builders import Dealer, Options, build_forward
from roundpipe_cli.schedule.program import lower
from roundpipe_cli.schedule.simulate import simulated_ends

# Stages for workers that hold all frozen weights.
#
# Where every worker has the weights, nothing is gained by passing a microbatch on: each stays on one worker from its
# forward to its backward, and stages are cut for memory alone. As many blocks as its activations allow go into the
# stage with the head, whose activations need no recompute:
#
#     all fit       worker 0   0B 2B ...        some do     worker 0   0F 0B 0R 0B   2F 2B 2R 2B ...
#                   worker 1   1B 3B ...                    worker 1   1F 1B 1R 1B   3F 3B 3R 3B ...
#
# Only what is trained is uploaded, once a step, and each microbatch's gradients of it go to the host, which adds them
# up.

DEALING = Options(earliest_free=True)


def resident_cut(costs: CostModel, num_workers: int, keeps: Callable[[StageCut], bool]) -> StageCut | None:
    """The stages with the fewest recomputes among those that keep the limits of `keeps`; None if none does.

    Args:
        costs: their first layer is an embedding, which is gathered on the host.
    """
    num_blocks = len(costs.layers) - 2
    numbers = range(1, num_blocks + 1)  # what a stage takes grows with its blocks
    fitting = bisect_left(numbers, True, key=lambda count: not keeps(_with_head(num_blocks, count, num_workers)))
    return _with_head(num_blocks, fitting, num_workers) if fitting else None


def _with_head(num_blocks: int, count: int, num_workers: int) -> StageCut:
    """The last `count` blocks with the head; the others in one forward stage and backward stages of as many at most."""
    stages = even_cut(num_blocks + 2, num_blocks, count, beside_head=count)
    return StageCut(*stages, num_workers, dealing=DEALING)


# The planner's stages where sequences come in chunks: a backward stage starts with the last chunk, so nothing of a
# sequence goes backward before all of it has gone forward.
#
#     worker 0 | 0F | 3F |      . 2B | 5B |      with one sequence a step it is filled and drained twice; many short
#     worker 1   | 1F | 4F |    . 3B | 6B |      stages make that short, uneven ones make workers wait
#     worker 2     | 2F | 0B(head) 1B | 4B |
#
# Few shapes are worth trying, so all are: stages of about equal time, as many of them as there are ways to put 1, 2, 3
# ... blocks into one. Seconds.

MAX_ROUND_SIZES = 4
ROUND_PER_WORKER = 4
"""Most microbatches per worker in a round: the host keeps the round's boundaries, keys and values."""

Shape = tuple[tuple[StageRange, ...], tuple[StageRange, ...], int]
"""Forward stages, backward stages (the head alone first), microbatches per round."""


def chunk_shapes(case: SimulationCase) -> list[StageCut]:
    """Shapes of a step, the fastest first by the clocks of the dealing, which know no transfers."""
    costs, chunks, head = case.costs, case.sequence_chunks, len(case.costs.layers) - 1
    whole = [(index, index) for index in range(head + 1)]
    times = stage_times(costs, whole, whole, fused_head=False)
    backward_s = [sum(parts) for parts in zip(times.recompute_s, times.backward_s, strict=True)]
    counts = sorted({-(-head // size) for size in range(1, head + 1)})
    forward = {forward_ranges(balanced_sizes(times.forward_s[:head], count)) for count in counts}
    backward = {forward_ranges(balanced_sizes(list(reversed(backward_s[:head])), count)) for count in counts}
    num_sequences = case.num_microbatches // chunks
    rounds = sorted({-(-num_sequences // parts) * chunks for parts in range(1, num_sequences + 1)})
    timed = []
    most = max(chunks, ROUND_PER_WORKER * case.num_workers)
    rounds = [size for size in rounds if size <= most][-MAX_ROUND_SIZES:] or rounds[:1]
    for first, second, per_round in product(sorted(forward), sorted(backward), rounds):
        mirrored = tuple((head - 1 - last, head - 1 - start) for start, last in second)
        shape = (first, ((head, head), *mirrored), per_round)
        timed.append((_clock_s(case, shape), shape))
    return [StageCut(*shape) for _, shape in sorted(timed)]


def _clock_s(case: SimulationCase, shape: Shape) -> float:
    forward, backward, per_round = shape
    stages, chunks = (forward, backward), case.sequence_chunks
    dealer = Dealer(case.num_workers, case.costs, stages, case.options, sequence_chunks=chunks)
    for start in range(0, case.num_microbatches, per_round):
        dealer.deal_round(range(start, min(start + per_round, case.num_microbatches)))
    return max(dealer.free_s)


def balanced_sizes(
    layer_s: Sequence[float], num_stages: int, fits: Callable[[int, int], bool] = lambda first, stop: True
) -> list[int]:
    """Layers of each of at most `num_stages` consecutive stages, so that the slowest is fastest; filled in order. There
    are more stages where the layers `first:stop` do not fit into as few."""
    low, high = max(layer_s), sum(layer_s)
    for _ in range(60):
        middle = (low + high) / 2
        if len(_filled(layer_s, middle, fits)) <= num_stages:
            high = middle
        else:
            low = middle
    return _filled(layer_s, high, fits)


def _filled(layer_s: Sequence[float], limit_s: float, fits: Callable[[int, int], bool]) -> list[int]:
    """Sizes of stages filled one after the other up to `limit_s`."""
    sizes, first, filled_s = [0], 0, 0.0
    for index, seconds in enumerate(layer_s):
        if sizes[-1] and (filled_s + seconds > limit_s * (1 + 1e-12) or not fits(first, index + 1)):
            sizes.append(0)
            first, filled_s = index, 0.0
        sizes[-1] += 1
        filled_s += seconds
    return sizes


def balanced_stages(costs: CostModel, num_stages: int) -> tuple[StageRange, ...]:
    """The cut whose slowest stage (forward, recompute and backward) is fastest; early stages are filled first.

    A bisection over the time of the slowest stage: a greedy fill tells whether so many stages suffice.
    """
    whole = [(index, index) for index in range(len(costs.layers))]
    times = stage_times(costs, whole, whole, fused_head=False)
    layer_s = [sum(parts) for parts in zip(times.forward_s, times.recompute_s, times.backward_s, strict=True)]
    sizes = balanced_sizes(layer_s, num_stages)
    return forward_ranges(sizes + [0] * (num_stages - len(sizes)))


# A good cut in under a second for models with very many layers, where the planner's search takes seconds.
#
# A few even cuts, each simulated; with so many stages unevenness hardly matters, the ratio of forward to backward
# stages and the microbatches per round do.

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
        stages = even_cut(num_blocks + 2, forward, backward, beside_head=beside)
        found.append(StageCut(*stages, per_round, explanation=(why,)))
    return found


def _sizes(limit_bytes: int | None, block_bytes: int, num_blocks: int) -> list[int]:
    """Blocks of a stage: as many as the limit allows, and about a third of them."""
    most = max(1, min(_most(limit_bytes, block_bytes, num_blocks), num_blocks))
    return sorted({most, max(1, most // 3)})


# Stages of forwards alone, for evaluation and for what DPO compares with.
#
# A step's own stages suit forward and backward together: the last blocks are with the head, and the first forward
# stages are short. Forwards alone want stages of equal time, as many as deal out evenly, no larger than the slots that
# the step has taken. Each is then uploaded once in a pass of all its microbatches:
#
#     worker 0   0F0 0F1 0F2 0F3   2F0 2F1 2F2 2F3
#     worker 1       1F0 1F1 1F2 1F3   3F0 3F1 3F2 3F3

COUNTS_TRIED = 3
"""So many numbers of stages are tried, from the fewest that slots allow."""


def forward_stages(
    costs: CostModel,
    own: Sequence[StageRange],
    others: Sequence[StageRange],
    *,
    num_workers: int,
    num_microbatches: int,
) -> tuple[StageRange, ...]:
    """Stages for a pass of forwards: the fastest of a few even cuts and of the step's own stages.

    Args:
        own: a step's stages that cover every layer once, in order. One or two stay as they are: each microbatch then
            stays on a worker.
        others: the step's other stages, whose size a slot has too, and what they unpack.
    """
    layers = costs.layers
    weights = [sum(layer.param_bytes for layer in layers[first : last + 1]) for first, last in (*own, *others)]
    if len(own) <= 2:
        return tuple(own)
    most = max(weights), largest_visit_bytes(layers, (*own, *others), ())

    def fits(first: int, stop: int) -> bool:
        # the embedding, which takes no time, is with the first one
        stage = layers[first + 1 if first else 0 : stop + 1]
        whole_bytes = sum(layer.whole_bytes for layer in stage)
        return sum(layer.param_bytes for layer in stage) <= most[0] and whole_bytes <= most[1]

    if fits(0, len(layers)):
        return ((0, len(layers) - 1),)
    # A head's time may be known for its backward alone, which begins with its forward.
    seconds = [layer.forward_s or layer.backward_s / 2 for layer in layers[1:]]
    counts = range(num_workers, len(layers), num_workers)
    even = (_of_count(balanced_sizes(seconds, count, fits), count) for count in counts)
    tried = [tuple(own), *islice(filter(None, even), COUNTS_TRIED)]

    def taken_s(stages: tuple[StageRange, ...]) -> float:
        schedule = build_forward(stages, num_workers=num_workers, num_microbatches=num_microbatches)
        return simulated_ends(lower(schedule, costs), costs).makespan_s

    return min(tried, key=taken_s)


def _of_count(sizes: list[int], count: int) -> tuple[StageRange, ...]:
    """Stages of these sizes behind the embedding, the largest cut in halves until they are `count`; none where there
    are more, or too few layers."""
    while len(sizes) < count and max(sizes) > 1:
        index = sizes.index(max(sizes))
        half = sizes[index] // 2
        sizes[index : index + 1] = [sizes[index] - half, half]
    return forward_ranges([sizes[0] + 1, *sizes[1:]]) if len(sizes) == count else ()
