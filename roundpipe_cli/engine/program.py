"""Facts that the engine reads out of a lowered schedule and a model: stages, kept activations, trained layers.

The same program drives the simulator. The engine takes from it each worker's compute operations in order, and its
visits: which layers a worker holds in which slot, from which operation to which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.program import Op, Program, lower
from roundpipe_cli.units import shown_step

if TYPE_CHECKING:
    from roundpipe_cli.model.layout import LayerLayout


def lower_for_engine(
    schedule: Schedule, layouts: Sequence[LayerLayout], num_slots: int, *, copies: bool = True
) -> Program:
    """Lower `schedule` for a model of these layers. Times do not matter here: the engine measures them.

    Args:
        copies: whether tensors have to be moved to the devices; without, the program has compute operations only.
    """
    last = len(layouts) - 1
    layers = tuple(
        LayerCost(
            layout.name,
            forward_s=0.0,
            backward_s=0.0,
            recompute=index < last,
            param_bytes=layout.num_bytes if copies and index else 0,  # the embedding stays on the host
            boundary_bytes=1 if copies and index < last else 0,  # their number depends on the microbatch
            grad_bytes=4 * layout.num_trainable_elements if copies and index else 0,
        )
        for index, layout in enumerate(layouts)
    )
    return lower(schedule, CostModel("engine", layers, slots=num_slots))


def stage_layers(schedule: Schedule, op: Op) -> StageRange:
    """The layers of a compute operation."""
    stages = schedule.forward_stages if op.kind is Kind.FORWARD else schedule.backward_stages
    return stages[op.stage]


def layer_range(layers: StageRange) -> range:
    """The layers of a stage as a range."""
    return range(layers[0], layers[1] + 1)


def hidden_readers(schedule: Schedule, read_layers: Collection[int], lowest: int = 0) -> Counter[int]:
    """How many stages read the hidden states at the input of each layer, for one microbatch.

    Backward stages read their first layer's, and those of `read_layers`, but for the stage with the head: it goes
    through its layers in one go. Backward stages below layer `lowest` read nothing.
    """
    readers: Counter[int] = Counter()
    for first, last in schedule.forward_stages:
        if first <= last:
            readers[first] += 1
    for index, (first, last) in enumerate(schedule.backward_stages):
        if first > last or last < lowest:
            continue
        readers[first] += 1
        if index > 0:
            readers.update(layer for layer in range(first + 1, last + 1) if layer in read_layers)
    return readers


def backward_ops(program: Program, visit: int) -> list[Op]:
    """The backward operations of a visit, in order."""
    return [program.ops[op] for op in program.visits[visit].ops if program.ops[op].kind is Kind.BACKWARD]


def device_folds(program: Program) -> frozenset[int]:
    """Layers whose gradient sum travels with their stage; the others are added up on the host."""
    schedule = program.schedule
    on_host = {layer for stage in program.host_folded for layer in layer_range(stage)}
    return frozenset(layer for stage in schedule.backward_stages for layer in layer_range(stage)) - on_host


def describe_op(op: Op, schedule: Schedule, step: int) -> str:
    """Name of an operation, for error messages.

    Args:
        step: its index, from 0.
    """
    kind = {Kind.FORWARD: "forward", Kind.RECOMPUTE: "recompute", Kind.BACKWARD: "backward"}[op.kind]
    first, last = stage_layers(schedule, op)
    return f"{kind} of stage {op.stage} (layers {first}-{last}), microbatch {op.microbatch}, step {shown_step(step)}"


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


class FoundAgain:
    """Around a block's forward: weights that its graph saves are looked up again in the backward."""

    def __init__(self, weights_now: Callable[[], torch.Tensor], num_bytes: int) -> None:
        """
        Args:
            weights_now: the first weight of the layer's buffer, as it is bound at the time of the call.
            num_bytes: of the buffer.
        """
        self._weights_now = weights_now
        self._num_bytes = num_bytes
        self._start = weights_now().data_ptr()

    def hooks(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Place:
        offset = tensor.data_ptr() - self._start
        if 0 <= offset < self._num_bytes:
            return _Place(offset, tensor.shape, tensor.stride(), tensor.dtype)
        return tensor.detach()  # it would hold its own graph after a failed step

    def _unpack(self, saved: torch.Tensor | _Place) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        weights = self._weights_now()
        start = weights.data_ptr() - weights.untyped_storage().data_ptr() + saved.offset_bytes
        found = torch.empty(0, dtype=saved.dtype, device=weights.device)
        return found.set_(weights.untyped_storage(), start // saved.dtype.itemsize, saved.size, saved.stride)  # type: ignore[call-overload]


def weights_found_again(
    needed: bool, weights_now: Callable[[], torch.Tensor], num_bytes: int
) -> AbstractContextManager[Any]:
    """The hooks of `FoundAgain`; none where weights do not move."""
    return FoundAgain(weights_now, num_bytes).hooks() if needed else nullcontext()


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


def _trains_tied_table(store: WeightStore, split: ModelSplit) -> bool:
    """Whether the table is kept with the head but trained through the embed layer too."""
    embedding = f"{split.embedding_path}.weight"
    tied = embedding in store.views and store.layer_of(embedding) > 0
    return tied and embedding in store.trainable_names
