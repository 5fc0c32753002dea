"""Stages of forwards alone, for evaluation and for what DPO compares with.

A step's own stages suit forward and backward together: the last blocks are with the head, and the first forward
stages are short. Forwards alone want stages of equal time, as many as deal out evenly, no larger than the slots that
the step has taken. Each is then uploaded once in a pass of all its microbatches:

    worker 0   0F0 0F1 0F2 0F3   2F0 2F1 2F2 2F3
    worker 1       1F0 1F1 1F2 1F3   3F0 3F1 3F2 3F3
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.costs.memory import largest_visit_bytes
from roundpipe_cli.planning.search.ranges import balanced_sizes, forward_ranges
from roundpipe_cli.schedule.builders import build_forward
from roundpipe_cli.schedule.program import lower
from roundpipe_cli.schedule.simulate import simulated_ends

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
