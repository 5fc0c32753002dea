"""The planner's stages where sequences come in chunks: a backward stage starts with the last chunk, so nothing of a
sequence goes backward before all of it has gone forward.

    worker 0 | 0F | 3F |      . 2B | 5B |      with one sequence a step it is filled and drained twice; many short
    worker 1   | 1F | 4F |    . 3B | 6B |      stages make that short, uneven ones make workers wait
    worker 2     | 2F | 0B(head) 1B | 4B |

Few shapes are worth trying, so all are: stages of about equal time, as many of them as there are ways to put 1, 2, 3
... blocks into one. Seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.planning.stages import forward_ranges
from roundpipe_cli.schedule.actions import stage_times
from roundpipe_cli.schedule.builders import Dealer, Options

NUM_SIMULATED = 4
"""So many of the shapes that are fastest without transfers are simulated with transfers."""
MAX_ROUND_SIZES = 4
ROUND_PER_WORKER = 4
"""Most microbatches per worker in a round: the host keeps the round's boundaries, keys and values."""

Shape = tuple[tuple[StageRange, ...], tuple[StageRange, ...], int]
"""Forward stages, backward stages (the head alone first), microbatches per round."""


def chunk_shapes(
    costs: CostModel, num_workers: int, num_microbatches: int, sequence_chunks: int, options: Options
) -> list[Shape]:
    """Shapes of a step, the fastest first by the clocks of the dealing, which know no transfers."""
    head = len(costs.layers) - 1
    whole = [(index, index) for index in range(head + 1)]
    times = stage_times(costs, whole, whole, fused_head=False)
    backward_s = [sum(parts) for parts in zip(times.recompute_s, times.backward_s, strict=True)]
    counts = sorted({-(-head // size) for size in range(1, head + 1)})
    forward = {forward_ranges(balanced_sizes(times.forward_s[:head], count)) for count in counts}
    backward = {forward_ranges(balanced_sizes(list(reversed(backward_s[:head])), count)) for count in counts}
    num_sequences = num_microbatches // sequence_chunks
    rounds = sorted({-(-num_sequences // parts) * sequence_chunks for parts in range(1, num_sequences + 1)})
    timed = []
    most = max(sequence_chunks, ROUND_PER_WORKER * num_workers)
    rounds = [size for size in rounds if size <= most][-MAX_ROUND_SIZES:] or rounds[:1]
    for first, second, per_round in product(sorted(forward), sorted(backward), rounds):
        mirrored = tuple((head - 1 - last, head - 1 - start) for start, last in second)
        shape = (first, ((head, head), *mirrored), per_round)
        timed.append((_clock_s(costs, shape, num_workers, num_microbatches, sequence_chunks, options), shape))
    return [shape for _, shape in sorted(timed)]


def fastest_shape(
    shapes: Sequence[Shape], keeps: Callable[[Shape], bool], simulated_s: Callable[[Shape], float]
) -> Shape:
    """The fastest by simulation of the first few that keep their limits; if none does, the one of least memory."""
    kept = [shape for shape in shapes if keeps(shape)][:NUM_SIMULATED]
    if not kept:
        return max(shapes, key=lambda shape: (len(shape[1]), len(shape[0]), -shape[2]))
    return min(kept, key=simulated_s)


def _clock_s(
    costs: CostModel, shape: Shape, num_workers: int, num_microbatches: int, sequence_chunks: int, options: Options
) -> float:
    times = stage_times(costs, shape[0], shape[1], fused_head=True)
    if costs.boundaries_move:
        times = replace(times, head_forward_s=0.0)
    dealer = Dealer(num_workers, times, costs.hop_s, options, sequence_chunks)
    for start in range(0, num_microbatches, shape[2]):
        dealer.deal_round(range(start, min(start + shape[2], num_microbatches)))
    return max(dealer.free_s)


def balanced_sizes(layer_s: Sequence[float], num_stages: int) -> list[int]:
    """Layers of each of at most `num_stages` consecutive stages, so that the slowest is fastest; filled in order."""
    low, high = max(layer_s), sum(layer_s)
    for _ in range(60):
        middle = (low + high) / 2
        if len(_fill(layer_s, middle)) <= num_stages:
            high = middle
        else:
            low = middle
    return _fill(layer_s, high)


def _fill(layer_s: Sequence[float], limit_s: float) -> list[int]:
    """Sizes of stages filled one after the other up to `limit_s`."""
    sizes, filled = [0], 0.0
    for seconds in layer_s:
        if sizes[-1] and filled + seconds > limit_s * (1 + 1e-12):
            sizes.append(0)
            filled = 0.0
        sizes[-1] += 1
        filled += seconds
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
