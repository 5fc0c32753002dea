"""Brings the gradients of one worker's backward passes to their sums.

On the processor they are added to the host's sum where it is their turn. From a device they are added to the sum that
travels with the stage, or leave, one microbatch at a time, for the host's sum.
"""

from __future__ import annotations

import torch

from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.context import StepContext
from roundpipe_cli.engine.gradients import GradientParts, Leaving, square_sum
from roundpipe_cli.model.head import Take


class GradientCollector:
    """Adds up, lists or sends away the gradients of a worker's backward passes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.accumulators: dict[int, list[torch.Tensor]] = {}
        """Per layer of the current visit, the device's gradient sums (empty if folded on the host)."""
        self.leaving: list[Leaving] = []
        """Gradients of the current operation, which its download takes to the host's sum."""

    def taker(self, context: StepContext, layer: int, microbatch: int) -> tuple[Take, GradientParts]:
        """Adds gradients to the layer's sum as backward makes them; lists them if an earlier microbatch is missing."""
        fold, prepared = context.gradients.folds[layer], context.prepared
        parts: GradientParts = []
        on_host, leaves = layer not in prepared.device_folds, self._leaves(context, layer)
        sums = [] if on_host else self.accumulators.get(layer, [])
        if fold is not None and on_host and not leaves and fold.is_turn(prepared.fold_place(layer, microbatch)):
            sums = fold.begin()

        def take(index: int, gradient: torch.Tensor) -> None:
            if on_host and not leaves and self._backend.device.type != "cpu":
                gradient = gradient.cpu()
            if sums:
                sums[index].add_(gradient)
            else:
                parts.append((index, gradient))

        return take, parts

    def fold(self, context: StepContext, layer: int, microbatch: int, parts: GradientParts) -> None:
        """After a layer's backward: add listed gradients on the host, or let them wait for their turn or download."""
        if context.gradients.folds[layer] is None or layer in context.prepared.device_folds:
            return
        place = context.prepared.fold_place(layer, microbatch)
        if parts and self._leaves(context, layer):
            with self._backend.compute():
                self.leaving.append(Leaving.of(layer, place, parts))
        else:
            self.fold_on_host(context, layer, place, parts)

    def fold_on_host(self, context: StepContext, layer: int, place: int, parts: GradientParts) -> None:
        """Add a microbatch to the layer's sum on the host; it waits until all earlier ones are added."""
        fold = context.gradients.folds[layer]
        assert fold is not None
        if fold.fold(place, parts):
            context.gradients.complete(layer, square_sum(fold.flat))

    def take_leaving(self) -> list[Leaving]:
        """The gradients that leave; they are no longer kept here."""
        leaving, self.leaving = self.leaving, []
        return leaving

    def _leaves(self, context: StepContext, layer: int) -> bool:
        """Whether a lane takes the layer's gradients to the host's fold. Not a trained head's, which are added up
        chunk by chunk of its tokens and as large as its weights."""
        prepared = context.prepared
        return not (self._backend.aliases_host or layer == prepared.head or layer in prepared.device_folds)
