"""Weights that stay on a device: what is frozen is uploaded once in a run, what is trained once in a step.

Without a cache every visit uploads the weights of its stage into a slot. A layer in the cache has a buffer of its own
beside the slots, which need no room for it, and of a step's visits on this worker only the first one uploads anything
to it:

    step 0, first visit of the layer   frozen and trained weights
    later steps, first visit           trained weights (LoRA: the adapters)
    any other visit                    nothing

That is safe without further events: a worker's visits compute in their order, so whatever reads the buffer in a step
runs behind the first visit, which waited for the upload; and no step begins before the one before has ended, so nobody
reads while the next step's first visit writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from roundpipe_cli.costs.memory import DEVICE_ALIGNMENT_BYTES
from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.program import layer_range
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.layout import LayerLayout, round_up
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.program import Program


def layers_to_keep(program: Program, worker: int, layouts: Sequence[LayerLayout], budget_bytes: int) -> tuple[int, ...]:
    """Layers whose weights `worker` should keep: those that save most bytes of uploads per byte of device memory."""
    visits: Counter[int] = Counter()
    for visit in program.visits:
        if visit.worker == worker and visit.ops:
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


class WeightCache:
    """The weight cache of one worker."""

    def __init__(self, worker: int, backend: Backend, store: WeightStore, budget_bytes: int) -> None:
        """
        Args:
            budget_bytes: device memory that may be taken; nothing is kept on devices that read host memory as it is.
        """
        self._worker, self._backend, self._store = worker, backend, store
        self._budget_bytes = 0 if backend.aliases_host else budget_bytes
        self._whole_bytes = sum(round_up(layout.num_bytes, DEVICE_ALIGNMENT_BYTES) for layout in store.layouts[1:])
        self._arena: torch.Tensor | None = None
        self._chosen_for: Schedule | None = None
        self._buffers: dict[int, torch.Tensor] = {}
        self._starts: dict[int, int] = {}
        self._filled: set[int] = set()
        """Layers whose frozen weights are in their buffers."""
        self._dropped = False
        """Whether buffers were freed to which modules may still be bound."""
        self._first_visits: dict[int, int] = {}
        """In the current step: layer -> the visit that uploads missing weights."""

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory in use."""
        return 0 if self._arena is None else self._arena.nbytes

    @property
    def is_on(self) -> bool:
        """Whether weights stay on the device, now or from the next step on."""
        return self._budget_bytes > 0

    @property
    def holds_all(self) -> bool:
        """Whether there is room for all weights, so that they are kept whatever a program visits."""
        return self._budget_bytes >= self._whole_bytes

    def grant(self, budget_bytes: int) -> None:
        """Change the budget between steps; kept weights are dropped and uploaded again."""
        self._budget_bytes = 0 if self._backend.aliases_host else budget_bytes
        self._dropped = self._dropped or bool(self._buffers)
        self._arena, self._chosen_for = None, None
        self._buffers, self._starts, self._filled = {}, {}, set()

    def choose(self, program: Program) -> bool:
        """Settle what is kept for a training program (for any, where all is); between steps. Returns whether any
        layer's buffer is another."""
        dropped, self._dropped = self._dropped, False
        if not self._budget_bytes or program.schedule is self._chosen_for:
            return dropped
        layouts = self._store.layouts
        if self._arena is None:
            self._arena = self._backend.allocate(min(self._budget_bytes, self._whole_bytes))
        self._chosen_for = program.schedule
        starts, end = {}, 0
        chosen: Iterable[int] = (layer for layer in range(1, len(layouts)) if layouts[layer].num_bytes)
        if not self.holds_all:  # otherwise all layers: a later step, or an evaluation, has other visits
            chosen = layers_to_keep(program, self._worker, layouts, self._arena.nbytes)
        for layer in chosen:
            starts[layer] = end
            end += round_up(layouts[layer].num_bytes, DEVICE_ALIGNMENT_BYTES)
        same = {layer for layer, start in starts.items() if self._starts.get(layer) == start}
        if len(same) == len(starts) == len(self._starts):
            return dropped
        self._filled &= same
        self._starts = starts
        self._buffers = {
            layer: self._arena[start : start + layouts[layer].num_bytes] for layer, start in starts.items()
        }
        return True

    def begin_step(self, program: Program) -> None:
        """Find out which visits of a program upload."""
        self._first_visits = {}
        for index, visit in enumerate(program.visits):
            if visit.worker == self._worker and visit.ops:
                for layer in layer_range(visit.layers):
                    self._first_visits.setdefault(layer, index)

    def step_done(self) -> None:
        """All that the step uploaded has arrived. Not called for a step that failed: its uploads are done again."""
        self._filled.update(layer for layer in self._buffers if layer in self._first_visits)

    def buffer(self, layer: int) -> torch.Tensor | None:
        """Device buffer, uint8, in which the weights of `layer` stay; None if they do not."""
        return self._buffers.get(layer)

    def missing(self, layer: int, visit: int, version: int) -> list[tuple[int, torch.Tensor]]:
        """Pieces that `visit` has to upload to the layer's buffer, as (offset, uint8 tensor on the host)."""
        if self._first_visits[layer] != visit:
            return []
        pieces = self._store.pieces(layer, version)
        return pieces if layer not in self._filled else trained_part(pieces, self._store.layouts[layer])


def trained_part(pieces: Sequence[tuple[int, torch.Tensor]], layout: LayerLayout) -> list[tuple[int, torch.Tensor]]:
    """The bytes of a layer from where its trainable parameters begin."""
    if not layout.num_trainable_elements:
        return []
    begin = layout.trainable_offset_bytes
    return [
        (max(start, begin), piece[max(0, begin - start) :]) for start, piece in pieces if start + piece.nbytes > begin
    ]
