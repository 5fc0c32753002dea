"""The trained layers of a model, and the activations that stay on a device: facts that hold for every step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_cli.engine.program import layer_range
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.program import Program

# Activations that stay on the device from a block's forward to its backward, in place of being recomputed.
#
# They stay where a microbatch's forward and backward of a block run on the same worker. Meanwhile the block's slot may
# hold other weights, so a graph that is kept does not keep the weights that it saved: it notes where in the layer's
# buffer they lie and finds them again, when backward asks, in the slot that the layer is bound to then.

KeptActivations = frozenset[tuple[int, int]]
"""(layer, microbatch) pairs whose activations stay."""


def kept_activations(program: Program, layers: Collection[int]) -> KeptActivations:
    """The activations of `layers` that can stay: forward and backward of the microbatch run on the same worker.

    What the stage with the head computes by itself is not recomputed anyway.
    """
    schedule = program.schedule
    forward: dict[tuple[int, int], int] = {}
    kept = set()
    for op in program.ops:
        if op.kind is Kind.FORWARD:
            forward |= {(layer, op.microbatch): op.worker for layer in layer_range(schedule.forward_stages[op.stage])}
    for op in program.ops:
        if op.kind is Kind.BACKWARD:
            for layer in layer_range(schedule.backward_stages[op.stage]):
                if layer in layers and forward.get((layer, op.microbatch)) == op.worker:
                    kept.add((layer, op.microbatch))
    return frozenset(kept)


@dataclass(frozen=True)
class _Place:
    """Place of a saved tensor in its layer's buffer."""

    offset_bytes: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def weights_found_again(
    needed: bool, weights_now: Callable[[], torch.Tensor], num_bytes: int
) -> AbstractContextManager[Any]:
    """Around a block's forward: weights that its graph saves are looked up again in the backward.

    Args:
        needed: False where weights do not move: then nothing is done.
        weights_now: the first weight of the layer's buffer, as it is bound at the time of the call.
        num_bytes: of the buffer.
    """
    if not needed:
        return nullcontext()
    first = weights_now().data_ptr()

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Place:
        offset = tensor.data_ptr() - first
        if 0 <= offset < num_bytes:
            return _Place(offset, tensor.shape, tensor.stride(), tensor.dtype)
        return tensor.detach()  # it would hold its own graph after a failed step

    def unpack(saved: torch.Tensor | _Place) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        weights = weights_now()
        start = weights.data_ptr() - weights.untyped_storage().data_ptr() + saved.offset_bytes
        found = torch.empty(0, dtype=saved.dtype, device=weights.device)
        return found.set_(weights.untyped_storage(), start // saved.dtype.itemsize, saved.size, saved.stride)  # type: ignore[call-overload]

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# The trained layers of a model, and the facts that follow for every step.


@dataclass(frozen=True)
class TrainedLayers:
    """Facts about the trained layers that the engine needs."""

    num_layers: int
    first: int
    """The lowest layer with a gradient; `num_layers` where nothing is trained."""
    late: frozenset[int]
    """Trained layers that get gradients from the embed layer, which are added when all workers are done: complete at
    the end of a step only."""


def trained_layers(store: WeightStore, split: ModelSplit) -> TrainedLayers:
    """The layers of a store that are trained."""
    num_layers = len(store.layouts)
    trained = [layer for layer, layout in enumerate(store.layouts) if layout.num_trainable_elements]
    if _trains_tied_table(store, split):
        head = num_layers - 1
        return TrainedLayers(num_layers, 0, frozenset({0, head} if 0 in trained else {head}))
    return TrainedLayers(num_layers, min(trained, default=num_layers), frozenset({0} & set(trained)))


def in_order_of_need(store: WeightStore, split: ModelSplit) -> list[int]:
    """The trained layers in the order in which a step first reads them: a tied table's, the embedding, the blocks, the
    head."""
    late = trained_layers(store, split).late
    return sorted(store.trained, key=lambda layer: (0, -layer) if layer in late else (1, layer))


def _trains_tied_table(store: WeightStore, split: ModelSplit) -> bool:
    """Whether the table, or rows of it, are kept with the head but trained through the embed layer too."""
    own = (name for name in store.trainable_names if name.startswith(f"{split.embedding_path}."))
    return any(store.layer_of(name) > 0 for name in own)
