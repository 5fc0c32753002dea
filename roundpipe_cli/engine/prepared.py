"""A schedule prepared for the engine, once for all steps: trained layers, activations that stay; a step's own state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.engine.carrier import BoundaryKey, BoundaryStore, MicrobatchState, downloads_of
from roundpipe_cli.engine.dispatch.decisions import Dependencies, Progress, links_of
from roundpipe_cli.engine.gradients import StepGradients
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
    own = (name for name in store.trainable_names if name.startswith(f"{split.embedding_path}."))
    if any(store.layer_of(name) > 0 for name in own):  # a tied table, or rows of it, which are kept with the head
        head = num_layers - 1
        return TrainedLayers(num_layers, 0, frozenset({0, head} if 0 in trained else {head}))
    return TrainedLayers(num_layers, min(trained, default=num_layers), frozenset({0} & set(trained)))


def in_order_of_need(store: WeightStore, split: ModelSplit) -> list[int]:
    """The trained layers in the order in which a step first reads them: a tied table's, the embedding, the blocks, the
    head."""
    late = trained_layers(store, split).late
    return sorted(store.trained, key=lambda layer: (0, -layer) if layer in late else (1, layer))


# A schedule with the facts that steps need.


@dataclass(frozen=True)
class Recomputation:
    """Which layers backward stages compute again, and from which inputs."""

    each_layer: bool
    """One layer at a time, right before its backward; False: a whole stage."""
    read_layers: frozenset[int]
    """Layers within a backward stage whose input is read again instead of recomputed: all with `recompute: layer`."""
    keep_layers: frozenset[int]
    """Layers that are not computed again where their activations can stay."""


def recomputation_of(options: EngineOptions, store: WeightStore) -> Recomputation:
    """The recomputation that the options ask for."""
    num_layers, each_layer = len(store.layouts), options.recompute == "layer"
    read_layers = frozenset(range(1, num_layers)) if each_layer else frozenset()
    if options.keep_inputs and options.unread:
        read_layers |= {index + 2 for index, names in options.unread.items() if names}
    last_blocks = range(max(1, num_layers - 1 - options.keep_blocks), num_layers - 1)
    packed = {layer for layer in last_blocks if any(place.packed_as for place in store.layouts[layer].places)}
    return Recomputation(each_layer, read_layers, frozenset(last_blocks) - packed)


@dataclass(frozen=True)
class PreparedProgram:
    """A program, and the facts about it that steps need."""

    program: Program
    links: Dependencies
    downloads: dict[BoundaryKey, int]
    """Boundary -> the program's download of it."""
    num_layers: int
    recomputation: Recomputation
    readers: Counter[int]
    """Layer -> stages that read the hidden states at its input, for one microbatch."""
    kept: KeptActivations
    """Activations that stay on their worker from the forward to the backward."""
    attended_layers: frozenset[int]
    """Blocks whose keys and values later chunks of a sequence ask for in the backward; none without chunks."""
    weight_readers: dict[int, tuple[int, ...]]
    """Trained layer -> operations before which the host must have its weights."""
    device_folds: frozenset[int]
    """Layers whose gradient sums travel with the stage instead of being folded on the host."""

    @property
    def schedule(self) -> Schedule:
        return self.program.schedule

    @property
    def head(self) -> int:
        """The last layer."""
        return self.num_layers - 1

    def has_head(self, layers: StageRange) -> bool:
        """Whether a stage ends with the head."""
        return layers[1] == self.head

    def fold_place(self, layer: int, microbatch: int) -> int:
        """Place of a microbatch in the order in which a layer's gradients are added up."""
        return self.schedule.backward_place(0 if layer == self.head else 1, microbatch)


class ProgramStore:
    """The prepared programs of an engine: a run has few schedules and uses each for many steps."""

    def __init__(self, store: WeightStore, trained: TrainedLayers, options: EngineOptions, *, copies: bool) -> None:
        """
        Args:
            copies: whether tensors have to be moved to the devices.
        """
        self._store, self._trained, self._num_slots, self._copies = store, trained, options.num_slots, copies
        self._recomputation = recomputation_of(options, store)
        self._known: dict[int, PreparedProgram] = {}
        """Identity of a schedule -> its program."""

    def use_less_memory(self) -> None:
        """Prepare programs that recompute one layer at a time from now on."""
        num_layers = self._trained.num_layers
        self._recomputation = Recomputation(True, frozenset(range(1, num_layers)), frozenset())
        self._known.clear()

    def prepared(self, schedule: Schedule) -> PreparedProgram:
        """The program of `schedule`."""
        known = self._known.get(id(schedule))
        if known is None or known.schedule is not schedule:
            known = self._known[id(schedule)] = self._prepare(schedule)
        return known

    def _prepare(self, schedule: Schedule) -> PreparedProgram:
        recomputation, num_layers = self._recomputation, self._trained.num_layers
        program = lower_for_engine(schedule, self._store.layouts, self._num_slots, copies=self._copies)
        # Backward stages below this layer compute nothing, not even a recompute.
        lowest_read = self._trained.first if recomputation.each_layer else 0
        return PreparedProgram(
            program=program,
            links=links_of(program),
            downloads=downloads_of(program),
            num_layers=num_layers,
            recomputation=recomputation,
            readers=hidden_readers(schedule, recomputation.read_layers, lowest_read),
            kept=self._kept(program),
            attended_layers=_attended(schedule, num_layers, lowest_read),
            weight_readers=weight_readers(program, self._store.trained, self._trained.late),
            device_folds=device_folds(program) if self._copies else frozenset(),
        )

    def _kept(self, program: Program) -> KeptActivations:
        if program.schedule.sequence_chunks > 1:  # a graph would hold earlier chunks' keys and values too
            return frozenset()
        trained = {layer for layer in self._recomputation.keep_layers if layer >= self._trained.first}
        return kept_activations(program, trained)


def _attended(schedule: Schedule, num_layers: int, lowest_read: int) -> frozenset[int]:
    """Blocks whose keys and values go from the forward to the backward."""
    if schedule.sequence_chunks == 1:
        return frozenset()
    stages = [stage for stage in schedule.backward_stages if stage[1] >= lowest_read]
    layers = {layer for stage in stages for layer in layer_range(stage)}
    return frozenset(layers - {0, num_layers - 1})


# State that the threads of one step share.


@dataclass(frozen=True)
class Scoring:
    """A pass without backward, dropout or gradients."""

    adapters: bool = True
    """False: only the base model computes, without adapters."""
    greedy: bool = False
    """Also return the most probable token at each target's place."""


@dataclass(frozen=True)
class StepContext:
    """One step: its program, its microbatches and where its results go."""

    step: int
    version: int
    """Version of the weights that the whole step reads, the embedding's rows included."""
    prepared: PreparedProgram
    microbatches: list[MicrobatchState]
    num_units: int
    """Number of the step's target tokens, or pairs: the loss is their mean."""
    loss: HeadLoss
    """How the loss is computed; its gradient scale is the step's loss scale / `num_units`."""
    dropout_seed: int
    """The run's seed."""
    seeds_blocks: bool
    """Watch blocks for calls of random functions; False: they are known to call none."""
    progress: Progress
    boundaries: BoundaryStore
    gradients: StepGradients
    scoring: Scoring | None = None
    """None in a training step."""

    @property
    def program(self) -> Program:
        return self.prepared.program
