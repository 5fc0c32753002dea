"""A schedule prepared for the engine, once for all steps: trained layers, activations that stay; a step's own state."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.engine.carrier import BoundaryStore, downloads_of
from roundpipe_cli.engine.dispatch.decisions import links_of
from roundpipe_cli.engine.dispatch.progress import Progress
from roundpipe_cli.engine.gradients import StepGradients
from roundpipe_cli.engine.microbatch import MicrobatchState
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.program import device_folds, hidden_readers, layer_range, lower_for_engine, weight_readers
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.head import HeadLoss
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.schedule.actions import Kind, Schedule
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

    first: int
    """The lowest layer with a gradient; the number of layers where nothing is trained."""
    late: frozenset[int]
    """Trained layers that get gradients from the embed layer, which are added when all workers are done: complete at
    the end of a step only."""


def trained_layers(store: WeightStore, split: ModelSplit) -> TrainedLayers:
    """The layers of a store that are trained."""
    num_layers = len(store.layouts)
    start, matrix = f"{split.embedding_path}.", split.embedding_weight
    own = (name for name in store.trainable_names if name.startswith(start) or name == matrix)
    if any(store.layer_of(name) > 0 for name in own):  # a tied table, or rows of it, which are kept with the head
        head = num_layers - 1
        return TrainedLayers(0, frozenset({0, head}.intersection(store.trained)))
    return TrainedLayers(min(store.trained, default=num_layers), frozenset({0}.intersection(store.trained)))


def in_order_of_need(store: WeightStore, split: ModelSplit) -> list[int]:
    """The trained layers in the order in which a step first reads them: a tied table's, the embedding, the blocks, the
    head."""
    late = trained_layers(store, split).late
    return sorted(store.trained, key=lambda layer: (0, -layer) if layer in late else (1, layer))


class PreparedProgram:
    """A schedule's program, and the facts about it that steps need."""

    def __init__(
        self, schedule: Schedule, store: WeightStore, trained: TrainedLayers, options: EngineOptions, *, copies: bool
    ) -> None:
        """`copies`: whether tensors have to be moved to the devices."""
        num_layers = len(store.layouts)
        self.schedule = schedule
        self.head = num_layers - 1
        """The last layer."""
        self.program = program = lower_for_engine(schedule, store.layouts, options.num_slots, copies=copies)
        self.links = links_of(program)
        self.downloads = downloads_of(program)
        self.each_layer = options.recompute == "layer"
        """Backward stages compute one layer at a time again, right before its backward; False: a whole stage."""
        self.read_layers = frozenset(range(1, num_layers)) if self.each_layer else frozenset()
        """Layers within a backward stage whose input is read again instead of recomputed."""
        if options.keep_inputs and options.unread:
            self.read_layers |= {index + 2 for index, names in options.unread.items() if names}
        # Backward stages below this layer compute nothing, not even a recompute.
        lowest_read = trained.first if self.each_layer else 0
        self.readers = hidden_readers(schedule, self.read_layers, lowest_read)
        """Layer -> stages that read the hidden states at its input, for one microbatch."""
        self.kept: KeptActivations = frozenset()
        """Activations that stay on their worker from the forward to the backward."""
        self.attended_layers: frozenset[int] = frozenset()
        """Blocks whose keys and values later chunks of a sequence ask for in the backward; none without chunks."""
        if schedule.sequence_chunks > 1:  # kept graphs would hold earlier chunks' keys and values too
            stages = [stage for stage in schedule.backward_stages if stage[1] >= lowest_read]
            self.attended_layers = frozenset(layer for stage in stages for layer in layer_range(stage)) - {0, self.head}
        else:
            last = range(max(1, trained.first, self.head - options.keep_blocks), self.head)
            packed = {layer for layer in last if any(place.packed_as for place in store.layouts[layer].places)}
            self.kept = kept_activations(program, set(last) - packed)
        self.weight_readers = weight_readers(program, store.trained, trained.late)
        self.device_folds = device_folds(program) if copies else frozenset()

    def has_head(self, layers: StageRange) -> bool:
        """Whether a stage ends with the head."""
        return layers[1] == self.head

    def fold_place(self, layer: int, microbatch: int) -> int:
        """Place of a microbatch in the order in which a layer's gradients are added up."""
        return self.schedule.backward_place(0 if layer == self.head else 1, microbatch)


# State that the threads of one step share.


@dataclass(frozen=True)
class StepContext:
    """One step: its program, its microbatches and where its results go."""

    step: int
    version: int
    """Version of the weights that the whole step reads, the embedding's rows included."""
    prepared: PreparedProgram
    microbatches: list[MicrobatchState]
    num_units: float
    """Number of the step's target tokens, or rows: the loss is their mean."""
    loss: HeadLoss
    """How the loss is computed; its gradient scale is the step's loss scale / `num_units`."""
    dropout_seed: int
    """The run's seed."""
    seeds_blocks: bool
    """Watch blocks for calls of random functions; False: they are known to call none."""
    progress: Progress
    boundaries: BoundaryStore
    gradients: StepGradients
    scoring: bool = False
    """A pass without backward, dropout or gradients."""
    adapters: bool = True
    """False: only the base model computes, without adapters."""
    top_k: int = 0
    """In such a pass: how many of the most probable tokens at each target's place are returned."""

    @property
    def program(self) -> Program:
        return self.prepared.program
