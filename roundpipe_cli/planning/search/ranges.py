"""Stages as ranges of layers: of given sizes, of equal numbers of blocks, of equal time.

The planner counts in sizes: how many layers each stage holds, in execution order. Forward stages start at layer 0,
backward stages at the last layer; the first backward stage holds the head and is not part of any forward stage:

      layer      0   1   2   3   4   5  head
      forward   |  0  |    1    |             sizes (2, 3)
      backward  |  2  |  1  |       0    |    sizes (3, 2, 2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.schedule.actions import stage_times


def forward_ranges(sizes: Sequence[int]) -> tuple[StageRange, ...]:
    """Layer ranges of stages of these sizes, in execution order, from layer 0 up."""
    return tuple((stop - size, stop - 1) for size, stop in zip(sizes, accumulate(sizes), strict=True))


def backward_ranges(sizes: Sequence[int], num_layers: int) -> tuple[StageRange, ...]:
    """Layer ranges of stages of these sizes, in execution order, from the last layer down."""
    return tuple((num_layers - 1 - last, num_layers - 1 - first) for first, last in forward_ranges(sizes))


def even_sizes(total: int, parts: int, *, larger_first: bool) -> tuple[int, ...]:
    """`total` divided into `parts` numbers that differ by at most one."""
    size, larger = divmod(total, parts)
    small, large = [size] * (parts - larger), [size + 1] * larger
    return tuple(large + small if larger_first else small + large)


def even_cut(
    num_layers: int, forward_blocks: int, backward_blocks: int, *, beside_head: int = 0, num_free: int = 1
) -> tuple[tuple[StageRange, ...], tuple[StageRange, ...]]:
    """Forward and backward stages of at most so many blocks each, as equal as can be.

    Args:
        num_layers: all layers; the last one is the head.
        beside_head: blocks in the head's stage.
        num_free: layers at the start, such as an embedding, that take no time: they join the first block.
    """
    blocks = num_layers - 1 - num_free - beside_head
    if blocks <= 0:
        return (), ((0, num_layers - 1),)
    forward = list(even_sizes(blocks, -(-blocks // forward_blocks), larger_first=False))
    backward = [1 + beside_head, *even_sizes(blocks, -(-blocks // backward_blocks), larger_first=True)]
    forward[0] += num_free
    backward[-1] += num_free
    return forward_ranges(forward), backward_ranges(backward, num_layers)


def even_stages(num_layers: int, num_stages: int) -> tuple[StageRange, ...]:
    """Equal numbers of blocks, larger stages last; the head, layer `num_layers - 1`, joins the last stage."""
    size, larger = divmod(num_layers - 1, num_stages)
    sizes = [size + (index >= num_stages - larger) for index in range(num_stages)]
    sizes[-1] += 1
    return forward_ranges(sizes)


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
    layer_s = [sum(passes) for passes in zip(times.forward_s, times.recompute_s, times.backward_s, strict=True)]
    sizes = balanced_sizes(layer_s, num_stages)
    return forward_ranges(sizes + [0] * (num_stages - len(sizes)))
