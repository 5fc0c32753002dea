"""One worker's weights: device memory for stages, uploads into it, and modules that point at it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.costs.memory import DEVICE_ALIGNMENT_BYTES
from roundpipe_cli.engine.backends.base import Pair
from roundpipe_cli.engine.layer import LayerRunner
from roundpipe_cli.engine.program import layer_range
from roundpipe_cli.engine.weight_cache import WeightCache
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.layout import LayerLayout, round_up
from roundpipe_cli.schedule.program import Program

KEPT = -1
"""Stands for the weight cache where a slot's index is expected."""


@dataclass
class Slot:
    """Device memory for one stage: its weights and, for a backward stage, its gradient sums."""

    index: int
    weights: torch.Tensor
    gradients: torch.Tensor


def stage_bytes(layouts: Sequence[LayerLayout], layers: Iterable[int]) -> int:
    """Device bytes of these layers' weights in a slot. The embed layer stays on the host."""
    return sum(round_up(layouts[layer].num_bytes, DEVICE_ALIGNMENT_BYTES) for layer in layers if layer > 0)


def stage_gradient_elements(layouts: Sequence[LayerLayout], layers: range) -> int:
    """float32 elements of a stage's gradient sums in a slot."""
    return sum(round_up(layouts[layer].num_trainable_elements, 64) for layer in layers if layer > 0)


class StageSlots:
    """One worker's slots and weight cache, and the weights to which its modules are bound."""

    def __init__(self, layers: LayerRunner, store: WeightStore, cache: WeightCache) -> None:
        self.cache = cache
        self._layers, self._store, self._backend = layers, store, layers.backend
        self.slots: list[Slot] = []
        self._bound: dict[tuple[int, int, int], dict[str, nn.Parameter]] = {}
        """By (slot or `KEPT`, offset, layer)."""
        self._on_host: dict[int, list[dict[str, nn.Parameter]]] = {}
        """By the version's slot in the store: the embed layer's parameters, then those of aliased layers."""
        self._host_version = -1
        self.bound_visit = -1
        """The visit of the step at work whose layers the modules have."""

    def begin_step(self, program: Program, version: int) -> None:
        """Begin a step: find out which visits upload, and bind what is read from host memory."""
        self.cache.begin_step(program)
        self.bound_visit = -1
        self._bind_host(version)

    # -- memory, between steps -----------------------------------------------------------------------------------

    def reserve(self, num_slots: int, program: Program) -> None:
        """Make every slot large enough for the largest stage without the layers that the cache keeps."""
        if self._backend.aliases_host:
            return
        layouts = self._store.layouts
        # Without a cache as large as any worker's, so that no later step with other dealing makes them larger.
        worker = self._layers.worker
        held = (visit.layers for visit in program.visits if visit.worker == worker or not self.cache.is_on)
        left = ([layer for layer in layer_range(layers) if self.cache.buffer(layer) is None] for layers in held)
        weight_bytes = max((stage_bytes(layouts, layers) for layers in left), default=0)
        summed = (stage for stage in program.schedule.backward_stages if stage not in program.host_folded)
        gradient_elements = max((stage_gradient_elements(layouts, layer_range(stage)) for stage in summed), default=0)
        fits = self.slots and self.slots[0].weights.nbytes >= weight_bytes
        if fits and self.slots[0].gradients.nbytes >= 4 * gradient_elements and len(self.slots) >= num_slots:
            return
        self._let_go()
        for index in range(num_slots):
            weights = self._backend.allocate(weight_bytes)
            gradients = self._backend.allocate(4 * gradient_elements).view(torch.float32)
            self.slots.append(Slot(index, weights, gradients))

    def grant_cache(self, num_bytes: int) -> None:
        """Another budget for weights that stay; what was kept is let go at once, and the slots, which are as large as
        what is not kept makes them."""
        if not self._backend.aliases_host:
            self._let_go()
        self.cache.grant(num_bytes)
        self._backend.release_unused()

    def _let_go(self) -> None:
        """Let go of the slots' and the cache's memory, which modules and gradient sums know: visits bind anew."""
        self.slots, self._bound, self.bound_visit = [], {}, -1
        self._layers.unbind()

    def keep_weights(self, program: Program) -> None:
        """Settle which layers' weights stay on the device, for a training program."""
        if self.cache.choose(program):
            self._bound = {key: bound for key, bound in self._bound.items() if key[0] != KEPT}

    # -- uploads -------------------------------------------------------------------------------------------------

    def weight_copies(self, program: Program, visit_id: int, version: int) -> list[Pair]:
        """The copies of a visit's upload: weights into its slot, and those that the cache lacks into the cache."""
        visit = program.visits[visit_id]
        weights, pairs, offset = self.slots[visit.slot].weights, [], 0
        for layer in layer_range(visit.layers):
            if layer == 0:
                continue
            size, kept = self._store.layouts[layer].num_bytes, self.cache.buffer(layer)
            if kept is None:
                target, pieces = weights[offset : offset + size], self._store.pieces(layer, version)
                offset += round_up(size, DEVICE_ALIGNMENT_BYTES)
            else:
                target, pieces = kept, self.cache.missing(layer, visit_id, version)
            pairs += [(target[start : start + piece.nbytes], piece) for start, piece in pieces]
        return pairs

    def check_versions(self, layers: StageRange, version: int) -> None:
        """Assert that the host has a visit's layers at the version that the step reads."""
        for layer in layer_range(layers):
            self._store.check_version(layer, version)
        if layers[0] == 0:  # its table may lie in the head's buffer
            for name in self._layers.model.embed_names:
                self._store.check_version(self._store.layer_of(name), version)

    # -- modules -------------------------------------------------------------------------------------------------

    def bind(self, program: Program, visit_id: int) -> None:
        """Point the modules of a visit's layers at the weights in its slot, or in the cache."""
        visit = program.visits[visit_id]
        slot = self.slots[visit.slot]
        offset = 0
        for layer in layer_range(visit.layers):
            if layer > 0:
                kept = self.cache.buffer(layer)
                if kept is None:
                    size = self._store.layouts[layer].num_bytes
                    self._bind((slot.index, offset, layer), slot.weights[offset : offset + size])
                    offset += round_up(size, DEVICE_ALIGNMENT_BYTES)
                else:
                    self._bind((KEPT, 0, layer), kept)
        self.bound_visit = visit_id

    def _bind(self, key: tuple[int, int, int], buffer: torch.Tensor) -> None:
        """Point a layer's modules at its weights in `buffer`. `key`: (slot or `KEPT`, offset, layer)."""
        if key not in self._bound:
            places = self._store.layouts[key[2]].places
            self._bound[key] = {place.name: place.parameter(buffer) for place in places}
        self._use(key[2], self._bound[key])

    def _bind_host(self, version: int) -> None:
        """Point what is read from host memory at the weights of `version`: the embed layer, aliased layers."""
        store, model = self._store, self._layers.model
        last = len(store.layouts) if self._backend.aliases_host else 1
        slot = store.slot_of(version)
        if slot == self._host_version:
            return
        if slot not in self._on_host:
            embed = model.embed_parameters(store.views_at(version))
            self._on_host[slot] = [embed, *(store.parameters(layer, version) for layer in range(1, last))]
        self._host_version = slot
        model.bind_embed(self._on_host[slot][0])
        for layer in range(1, last):
            self._use(layer, self._on_host[slot][layer])

    def _use(self, layer: int, parameters: dict[str, nn.Parameter]) -> None:
        self._layers.model.bind(layer, parameters)
        layout = self._store.layouts[layer]
        self._layers.parameters[layer] = [parameters[place.name] for place in layout.trainable]
