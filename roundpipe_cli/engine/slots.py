"""One worker's weights and gradient sums on its device: slots, uploads, the cache of what stays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.costs.memory import DEVICE_ALIGNMENT_BYTES
from roundpipe_cli.engine.backends.base import Backend, Pair
from roundpipe_cli.engine.gradients import GradientFold, GradientParts, Leaving, square_sum
from roundpipe_cli.engine.layer import GradientCollector, LayerRunner
from roundpipe_cli.engine.prepared import StepContext
from roundpipe_cli.engine.program import backward_ops, layer_range
from roundpipe_cli.engine.weights import REFERENCE, WeightStore
from roundpipe_cli.model.layout import LayerLayout, round_up
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.program import Op, Program, Visit
from roundpipe_cli.schedule.timeline import UP

# Weights that stay on a device: what is frozen is uploaded once in a run, what is trained once in a step.
#
# Without a cache every visit uploads the weights of its stage into a slot. A layer in the cache has a buffer of its own
# beside the slots, which need no room for it, and of a step's visits on this worker only the first one uploads anything
# to it:
#
#     step 0, first visit of the layer   frozen and trained weights
#     later steps, first visit           trained weights (LoRA: the adapters)
#     any other visit                    nothing
#
# That is safe without further events: a worker's visits compute in their order, so whatever reads the buffer in a step
# runs behind the first visit, which waited for the upload; and no step begins before the one before has ended, so
# nobody reads while the next step's first visit writes.


def layers_to_keep(program: Program, worker: int, layouts: Sequence[LayerLayout], budget_bytes: int) -> tuple[int, ...]:
    """Layers whose weights `worker` should keep: those that save most bytes of uploads per byte of device memory."""
    visits: Counter[int] = Counter()
    for visit in program.visits:
        if visit.worker == worker:
            visits.update(layer for layer in layer_range(visit.layers) if layer > 0)

    def saved_share(layer: int) -> float:
        layout = layouts[layer]
        return visits[layer] - layout.trainable_num_bytes / layout.num_bytes

    chosen, left_bytes = [], budget_bytes
    for layer in sorted(visits, key=lambda layer: (-saved_share(layer) if layouts[layer].num_bytes else 0.0, layer)):
        size = round_up(layouts[layer].num_bytes, DEVICE_ALIGNMENT_BYTES)
        if 0 < size <= left_bytes and saved_share(layer) > 0:
            chosen.append(layer)
            left_bytes -= size
    return tuple(sorted(chosen))


KEPT = -1
"""Stands for the weight cache where a slot's index is expected."""


@dataclass
class Slot:
    """Device memory for one stage: its weights and, for a backward stage, its gradient sums."""

    weights: torch.Tensor
    gradients: torch.Tensor


def stage_bytes(layouts: Sequence[LayerLayout], layers: Iterable[int]) -> int:
    """Device bytes of these layers' weights in a slot. The embed layer stays on the host."""
    return sum(round_up(layouts[layer].num_bytes, DEVICE_ALIGNMENT_BYTES) for layer in layers if layer > 0)


class StageSlots:
    """One worker's slots and weight cache, and the weights to which its modules are bound."""

    def __init__(self, layers: LayerRunner, store: WeightStore, cache_bytes: int) -> None:
        """`cache_bytes`: device memory for weights that stay; none do on devices that read host memory as it is."""
        self._layers, self._store, self._backend = layers, store, layers.backend
        self._cache_bytes = 0 if self._backend.aliases_host else cache_bytes
        self._whole_bytes = stage_bytes(store.layouts, range(1, len(store.layouts)))
        self.arena: torch.Tensor | None = None
        """The cache's memory, from the first step with one on."""
        self._chosen_for: Schedule | None = None
        self._starts: dict[int, int] = {}
        """Layers whose weights stay -> where in the arena."""
        self._filled: set[int] = set()
        """Layers whose frozen weights are in the arena already."""
        self._first_visits: dict[int, int] = {}
        """In the current step: layer -> the visit that uploads what the cache lacks."""
        self.slots: list[Slot] = []
        self._bound: dict[tuple[int, int, int], dict[str, nn.Parameter]] = {}
        """By (slot or `KEPT`, offset, layer)."""
        self._on_host: dict[bool, list[dict[str, nn.Parameter]]] = {}
        """By whether they were put aside: the embed layer's parameters, then those of aliased layers."""
        self._bound_aside: bool | None = None
        self.bound_visit = -1
        """The visit of the step at work whose layers the modules have."""

    def begin_step(self, program: Program, version: int) -> None:
        """Begin a step: find out which visits upload, and bind what is read from host memory."""
        self._first_visits = {}
        for index, visit in enumerate(program.visits):
            if visit.worker == self._layers.worker:
                for layer in layer_range(visit.layers):
                    self._first_visits.setdefault(layer, index)
        self.bound_visit = -1
        self._bind_host(version)

    def step_done(self) -> None:
        """All that the step uploaded has arrived. Not called for a step that failed: its uploads are done again."""
        self._filled.update(self._starts.keys() & self._first_visits.keys())

    # -- memory, between steps -----------------------------------------------------------------------------------

    def reserve(self, num_slots: int, program: Program, *, trains: bool) -> None:
        """Take the memory for a program: the weight cache, whose content programs that train decide, then slots for the
        layers outside it, as large as the largest stage."""
        if self._backend.aliases_host:
            return
        if trains or self._cache_bytes >= self._whole_bytes:
            self._choose(program)
        layouts = self._store.layouts
        # Without a cache as large as any worker's, so that no later step with other dealing makes them larger.
        worker = self._layers.worker
        held = (visit.layers for visit in program.visits if visit.worker == worker or not self._cache_bytes)
        left = ([layer for layer in layer_range(layers) if layer not in self._starts] for layers in held)
        weight_bytes = max((stage_bytes(layouts, layers) for layers in left), default=0)
        summed = (stage for stage in program.schedule.backward_stages if stage not in program.host_folded)
        counts = ([layouts[layer].num_trainable_elements for layer in layer_range(stage) if layer] for stage in summed)
        gradient_elements = max((sum(round_up(count, 64) for count in stage) for stage in counts), default=0)
        fits = self.slots and self.slots[0].weights.nbytes >= weight_bytes
        if fits and self.slots[0].gradients.nbytes >= 4 * gradient_elements and len(self.slots) >= num_slots:
            return
        self._let_go()
        for _ in range(num_slots):
            weights, gradients = map(self._backend.allocate, (weight_bytes, 4 * gradient_elements))
            self.slots.append(Slot(weights, gradients.view(torch.float32)))

    def _choose(self, program: Program) -> None:
        """Settle which layers' weights stay: all, where there is room, for a later step has other visits."""
        if not self._cache_bytes or program.schedule is self._chosen_for:
            return
        layouts = self._store.layouts
        if self.arena is None:
            self.arena = self._backend.allocate(min(self._cache_bytes, self._whole_bytes))
        self._chosen_for = program.schedule
        chosen: Iterable[int] = (layer for layer in range(1, len(layouts)) if layouts[layer].num_bytes)
        if self._cache_bytes < self._whole_bytes:
            chosen = layers_to_keep(program, self._layers.worker, layouts, self.arena.nbytes)
        starts, end = {}, 0
        for layer in chosen:
            starts[layer] = end
            end += round_up(layouts[layer].num_bytes, DEVICE_ALIGNMENT_BYTES)
        self._filled = {layer for layer in self._filled if starts.get(layer) == self._starts[layer]}
        self._starts = starts

    def grant_cache(self, num_bytes: int) -> None:
        """Another budget for weights that stay; what was kept is let go at once, and the slots, which are as large as
        what is not kept makes them."""
        if self._backend.aliases_host:
            return
        self._let_go()
        self._cache_bytes, self.arena, self._chosen_for = num_bytes, None, None
        self._starts, self._filled = {}, set()
        self._backend.release_unused()

    def _let_go(self) -> None:
        """Let go of the slots' and the cache's memory, which modules and gradient sums know: visits bind anew."""
        self.slots, self._bound, self.bound_visit = [], {}, -1
        self._layers.unbind()

    # -- uploads -------------------------------------------------------------------------------------------------

    def weight_copies(self, program: Program, visit_id: int, version: int) -> list[Pair]:
        """The copies of a visit's upload: weights into its slot, and those that the cache lacks into the cache."""
        pairs: list[Pair] = []
        for (slot, _, layer), target in self._memory(program.visits[visit_id]):
            if slot == KEPT and self._first_visits[layer] != visit_id:
                continue
            frozen, trained = self._store.pieces(layer, version)
            for start, piece in (trained,) if slot == KEPT and layer in self._filled else (frozen, trained):
                pairs.append((target[start : start + piece.nbytes], piece))
        return pairs

    def _memory(self, visit: Visit) -> Iterator[tuple[tuple[int, int, int], torch.Tensor]]:
        """For each layer of a visit the key of its weights in `_bound`, and their memory: in the slot or the cache."""
        offset = 0
        for layer in layer_range(visit.layers):
            size = self._store.layouts[layer].num_bytes
            if layer in self._starts and self.arena is not None:
                start = self._starts[layer]
                yield (KEPT, start, layer), self.arena[start : start + size]
            elif layer > 0:
                yield (visit.slot, offset, layer), self.slots[visit.slot].weights[offset : offset + size]
                offset += round_up(size, DEVICE_ALIGNMENT_BYTES)

    def check_versions(self, layers: StageRange, version: int) -> None:
        """Assert that the host has a visit's layers at the version that the step reads."""
        for layer in layer_range(layers):
            self._store.check_version(layer, version)
        if layers[0] == 0:  # its table may lie in the head's buffer
            for name in self._store.trainable_names.intersection(self._layers.model.names_of(0)):
                self._store.check_version(self._store.layer_of(name), version)

    # -- modules -------------------------------------------------------------------------------------------------

    def bind(self, program: Program, visit_id: int) -> None:
        """Point the modules of a visit's layers at the weights in its slot, or in the cache."""
        for key, buffer in self._memory(program.visits[visit_id]):
            if key not in self._bound:
                places = self._store.layouts[key[2]].places
                self._bound[key] = {place.name: place.parameter(buffer) for place in places}
            self._use(key[2], self._bound[key])
        self.bound_visit = visit_id

    def _bind_host(self, version: int) -> None:
        """Point what is read from host memory at the weights of `version`: the embed layer, aliased layers."""
        store, model = self._store, self._layers.model
        last = len(store.layouts) if self._backend.aliases_host else 1
        aside = version == REFERENCE
        if aside == self._bound_aside:
            return
        self._bound_aside = aside
        if aside not in self._on_host:
            embed = model.embed_parameters(store.views_at(version))
            self._on_host[aside] = [embed, *(store.parameters(layer, version) for layer in range(1, last))]
        model.bind_embed(self._on_host[aside][0])
        for layer in range(1, last):
            self._use(layer, self._on_host[aside][layer])

    def _use(self, layer: int, parameters: dict[str, nn.Parameter]) -> None:
        self._layers.model.bind(layer, parameters)
        layout = self._store.layouts[layer]
        self._layers.parameters[layer] = [parameters[place.name] for place in layout.trainable]


# One worker's gradient sums in device memory, and their way to the host's and back.
#
# A visit of a backward stage continues the sums of the visit before: they come up with its weights, and go down once
# its last backward is done. Gradients that are added up on the host go down one backward at a time.


def _fold_place(program: Program, op: Op) -> int:
    """Place of a backward operation's microbatch in the order in which its stage's gradients are added up."""
    return program.schedule.backward_place(op.stage, op.microbatch)


class DeviceSums:
    """The gradient sums in one worker's slots."""

    def __init__(self, backend: Backend, store: WeightStore, slots: StageSlots, collector: GradientCollector) -> None:
        self._backend, self._store, self._slots, self._collector = backend, store, slots, collector
        self._landing: dict[int, list[tuple[int, Leaving, torch.Tensor]]] = {}
        """By download: gradients on their way to the host's fold, with their layer and the host memory they go to."""
        self._squares: dict[int, torch.Tensor] = {}
        """Layer -> sum of squares of its complete gradient, which is on its way to the host."""

    def reset(self) -> None:
        """Drop what a failed step left."""
        self._landing.clear()
        self._squares.clear()

    # -- compute thread ------------------------------------------------------------------------------------------

    def bind(self, context: StepContext, visit_id: int) -> None:
        """Let backward passes add to the sums of a visit."""
        self._collector.accumulators = {}
        if backward_ops(context.program, visit_id):
            for fold, flat in self._sums(context, context.program.visits[visit_id]):
                places = self._store.layouts[fold.layer].trainable
                self._collector.accumulators[fold.layer] = [place.trainable_view(flat) for place in places]

    def start(self, context: StepContext, op: Op) -> None:
        """Before a visit's first backward: its sums begin at zero, or are there already from the visit before."""
        if op.kind is not Kind.BACKWARD or _fold_place(context.program, op):
            return
        if backward_ops(context.program, op.visit)[0].id == op.id:
            for _, flat in self._sums(context, context.program.visits[op.visit]):
                flat.zero_()

    def finish(self, context: StepContext, visit_id: int) -> None:
        """After a visit's last operation: take the squares of sums that are complete."""
        backwards = backward_ops(context.program, visit_id)
        if backwards and _fold_place(context.program, backwards[-1]) + 1 == len(context.microbatches):
            for fold, flat in self._sums(context, context.program.visits[visit_id]):
                self._squares[fold.layer] = square_sum(flat)

    # -- lane threads --------------------------------------------------------------------------------------------

    def copies(self, context: StepContext, op: Op) -> list[Pair]:
        """Between a visit's sums on the device and the host's; of gradients that are added up on the host, those of
        one backward."""
        visit = context.program.visits[op.visit]
        if visit.layers in context.program.host_folded:
            microbatch = context.program.ops[op.deps[0]].microbatch
            self._landing[op.id] = [
                (layer, one, self._backend.host_like(one.flat))
                for layer in layer_range(visit.layers)
                for one in self._collector.leaving.pop((layer, microbatch), ())
            ]
            return [(host, one.flat) for _, one, host in self._landing[op.id]]
        sums = self._sums(context, visit)
        return [(flat, fold.flat) if op.lane == UP else (fold.flat, flat) for fold, flat in sums]

    def downloaded(self, context: StepContext, op: Op) -> None:
        """A download of gradients has arrived."""
        landed: dict[int, GradientParts] = defaultdict(list)
        for layer, leaving, host in self._landing.pop(op.id, ()):
            landed[layer] += leaving.parts_in(host)
        for layer, parts in landed.items():
            self._collector.fold_on_host(context, layer, context.program.ops[op.deps[0]].microbatch, parts)
        end = _fold_place(context.program, backward_ops(context.program, op.visit)[-1]) + 1
        for fold, _ in self._sums(context, context.program.visits[op.visit]):
            fold.finish_visit(end)
            if fold.layer in self._squares:
                context.gradients.complete(fold.layer, self._squares.pop(fold.layer))

    def _sums(self, context: StepContext, visit: Visit) -> Iterator[tuple[GradientFold, torch.Tensor]]:
        """Each trained layer's fold and its sum in the visit's slot."""
        offset = 0
        for layer in layer_range(visit.layers):
            fold = context.gradients.folds.get(layer)
            if layer == 0 or fold is None or layer not in context.prepared.device_folds:
                continue
            count = self._store.layouts[layer].num_trainable_elements
            yield fold, self._slots.slots[visit.slot].gradients[offset : offset + count]
            offset += round_up(count, 64)
