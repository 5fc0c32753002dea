"""Stages of forwards alone, for evaluation and for what DPO compares with.

A step's own stages suit forward and backward together: the last blocks are with the head, and the first forward stages
are short. Forwards alone want stages of equal time, as many as deal out evenly, no larger than the slots that the step
has taken. Each is then uploaded once in a pass of all its microbatches:

    worker 0   0F0 0F1 0F2 0F3   2F0 2F1 2F2 2F3
    worker 1       1F0 1F1 1F2 1F3   3F0 3F1 3F2 3F3
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.costs.memory import largest_visit_bytes
from roundpipe_cli.schedule.builders import build_forward
from roundpipe_cli.schedule.program import lower
from roundpipe_cli.schedule.simulate import simulate_program
from roundpipe_cli.schedule.timeline import makespan_s

SEARCH_STEPS = 40
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
    if _keeps(layers, most):
        return ((0, len(layers) - 1),)
    even = (_even(layers, count, most) for count in range(num_workers, len(layers), num_workers))
    tried = [tuple(own), *islice(filter(None, even), COUNTS_TRIED)]

    def taken_s(stages: tuple[StageRange, ...]) -> float:
        schedule = build_forward(stages, num_workers=num_workers, num_microbatches=num_microbatches)
        return makespan_s(simulate_program(lower(schedule, costs), costs))

    return min(tried, key=taken_s)


def _keeps(layers: Sequence[LayerCost], most_bytes: tuple[int, int]) -> bool:
    """Whether a stage of these layers keeps both limits: bytes of weights, and of unpacked weights."""
    weights, whole = sum(layer.param_bytes for layer in layers), sum(layer.whole_bytes for layer in layers)
    return weights <= most_bytes[0] and whole <= most_bytes[1]


def _even(layers: Sequence[LayerCost], count: int, most_bytes: tuple[int, int]) -> tuple[StageRange, ...] | None:
    """`count` stages of at most so many bytes, the longest as short as can be; None where they are too few."""
    # A head's time may be known for its backward alone, which begins with its forward.
    seconds = [layer.forward_s or layer.backward_s / 2 for layer in layers]
    low, high, best = 0.0, sum(seconds) or 1.0, None
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        found = _filled(layers, seconds, middle, most_bytes)
        if found is not None and len(found) <= count:
            best, high = found, middle
        else:
            low = middle
    while best is not None and len(best) < count:
        widest = max(best, key=lambda stage: stage[1] - max(1, stage[0]))
        if widest[1] == max(1, widest[0]):
            return None
        half = (max(1, widest[0]) + widest[1]) // 2
        best = sorted([*(stage for stage in best if stage != widest), (widest[0], half), (half + 1, widest[1])])
    return None if best is None else tuple(best)


def _filled(
    layers: Sequence[LayerCost], seconds: Sequence[float], most_s: float, most_bytes: tuple[int, int]
) -> list[StageRange] | None:
    """Stages filled up one after the other; None where a layer alone takes longer. The first block is always with the
    embedding, which takes no time and no weights."""
    stages: list[StageRange] = []
    first, taken_s = 0, 0.0
    for index in range(len(layers)):
        if index > 1 and (taken_s + seconds[index] > most_s or not _keeps(layers[first : index + 1], most_bytes)):
            stages.append((first, index - 1))
            first, taken_s = index, 0.0
        taken_s += seconds[index]
        if taken_s > most_s or not _keeps(layers[first : index + 1], most_bytes):
            return None
    return [*stages, (first, len(layers) - 1)]
