"""Sums of layer costs over stages, and the limits that stages keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange


@dataclass(frozen=True)
class StageLimits:
    """The most bytes that one stage may hold on a device, and the longest round. None: no limit.

    A forward stage holds its weights. A backward stage holds its weights, its gradient accumulators and the activations
    of one microbatch. Both hold what they unpack for a visit.
    """

    forward_bytes: int | None = None
    backward_bytes: int | None = None
    head_bytes: int | None = None
    """Limit of the first backward stage, without its logits; None: as `backward_bytes`."""
    microbatches_per_round: int | None = None
    """Longest round: the host keeps the boundaries of all its microbatches."""
    waiting_bytes: int | None = None
    """Host memory for gradients of a trained head that wait for their turn to be added."""

    def keeps_round(self, microbatches: int) -> bool:
        """Whether a round may have this many microbatches."""
        return self.microbatches_per_round is None or microbatches <= self.microbatches_per_round


class StageSums:
    """Sums of layer costs over every run of layers `first:stop`.

    Each is summed from left to right, as the schedule's own cost function does, so that times agree to the last bit.
    """

    def __init__(self, costs: CostModel) -> None:
        layers = costs.layers
        self.num_layers = len(layers)
        self.forward_s = _sums(layers, lambda layer: layer.forward_s)
        self.recompute_s = _sums(layers, lambda layer: layer.recomputed_s)
        self.backward_s = _sums(layers, lambda layer: layer.backward_s)
        self.param_bytes = _sums(layers, lambda layer: layer.param_bytes)
        self.grad_bytes = _sums(layers, lambda layer: layer.grad_bytes)
        self.forward_bytes = _sums(layers, lambda layer: layer.param_bytes + layer.whole_bytes)
        """On the device while a forward stage runs."""
        self.visit_bytes = _sums(layers, lambda layer: layer.visit_bytes)
        self.boundary_bytes = [float(layer.boundary_bytes) for layer in layers]
        self.updated_s = _updated_s(costs)
        """When the updates of `layers[first:stop]` are done, from the end of the step before."""

    def backward_bytes(self, first: int, stop: int) -> float:
        """Bytes on the device while the backward stage `first:stop` runs one microbatch."""
        return self.param_bytes[first][stop] + self.grad_bytes[first][stop] + self.visit_bytes[first][stop]


def within_limits(
    sums: StageSums,
    limits: StageLimits | None,
    forward_stages: Sequence[StageRange],
    backward_stages: Sequence[StageRange],
    microbatches_per_round: int,
) -> bool:
    """Whether every stage keeps its limit, and the rounds theirs."""
    if limits is None:
        return True
    if not limits.keeps_round(microbatches_per_round):
        return False
    head_bytes = limits.backward_bytes if limits.head_bytes is None else limits.head_bytes
    held = [(sums.forward_bytes[first][last + 1], limits.forward_bytes) for first, last in forward_stages]
    for index, (first, last) in enumerate(backward_stages):
        held.append((sums.backward_bytes(first, last + 1), limits.backward_bytes if index else head_bytes))
    return all(most is None or num_bytes <= most for num_bytes, most in held)


def limits_for(
    costs: CostModel, free_bytes: int, microbatches_per_round: int | None = None, *, head_gradient_bytes: int = 0
) -> StageLimits:
    """Limits under which every cut fits a device; the smallest stages may all the same be too large for it.

    Stages of b blocks backward and f forward need slots x max(f weights, b (weights + gradients), head's) + max(b
    (activations + unpacked weights), f unpacked weights) <= `free_bytes`. The planner wants forward stages about three
    times as large, since backward does three times the work, so b is the largest for which f = 3 b fits as well.

    Args:
        costs: of embedding, blocks and head.
        free_bytes: of a device, without what all stages share: the head's activations, boundaries, workspace.
        microbatches_per_round: at most.
        head_gradient_bytes: of a trained head, beside its sum in the slot.
    """
    blocks, head = costs.layers[1:-1], costs.layers[-1]
    weights = max(layer.param_bytes for layer in blocks)
    trained = weights + max(layer.grad_bytes for layer in blocks)
    kept, whole = max(layer.visit_bytes for layer in blocks), max(layer.whole_bytes for layer in blocks)
    head_bytes = head.param_bytes + head.grad_bytes
    count = 1
    while count < len(blocks):
        larger = count + 1
        wide = min(3 * larger, len(blocks))
        widest = max(wide * weights, larger * trained, head_bytes)
        if costs.slots * widest + max(larger * kept, wide * whole) > free_bytes:
            break
        count = larger
    room = max(count * kept, head_gradient_bytes)
    slot_bytes = max((free_bytes - room) // costs.slots, weights, trained, head_bytes)
    beside_head = min(count, max(0, slot_bytes - head_bytes) // max(1, trained))
    beside_head = min(beside_head, (room - head_gradient_bytes) // max(1, kept))
    forward_bytes = slot_bytes
    if whole:
        beside_slots = (free_bytes - costs.slots * max(count * trained, head_bytes)) // whole
        most = min(beside_slots, free_bytes // (costs.slots * weights + whole), slot_bytes // max(1, weights))
        forward_bytes = max(1, most) * (weights + whole)
    return StageLimits(
        forward_bytes=forward_bytes,
        backward_bytes=count * (trained + kept),
        head_bytes=head_bytes + head.activation_bytes + beside_head * (trained + kept),
        microbatches_per_round=microbatches_per_round,
    )


def _sums(layers: Sequence[LayerCost], value: Callable[[LayerCost], float]) -> list[list[float]]:
    """`sums[first][stop]` over `layers[first:stop]`; 0 where the run is empty."""
    values = list(map(value, layers))
    return [[0.0] * first + list(accumulate(values[first:], initial=0.0)) for first in range(len(values) + 1)]


def _updated_s(costs: CostModel) -> list[list[float]]:
    """`updated[first][stop]`: the end of the last update of `layers[first:stop]`; 0 where none is updated."""
    ends_s, now_s = [0.0] * len(costs.layers), 0.0
    for layer in costs.update_order:
        if costs.layers[layer].optimizer_s:
            now_s += costs.layers[layer].optimizer_s
            ends_s[layer] = now_s
    if costs.tied:  # the rows that come in are new with the head
        ends_s[0] = max(ends_s[0], ends_s[-1])
    count = len(ends_s)
    return [[max(ends_s[first:stop], default=0.0) for stop in range(count + 1)] for first in range(count + 1)]
