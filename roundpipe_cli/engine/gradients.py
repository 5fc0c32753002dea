"""Gradient sums: a strict left fold over the step's microbatches in ascending order, in float32.

g = 0; for m in 0..M-1: g = g + float32(g_m). Rounds, workers, partitions and schedules do not regroup it, so they do
not change its bits. Two ways, chosen once per step for each layer:

- on the host: gradients of one microbatch at a time; one that comes before its turn waits in line;
- on the device: each visit of a stage continues the sum of the visit before, which it uploads with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from roundpipe_cli.engine.backends.base import set_own_threads
from roundpipe_cli.engine.dispatch.progress import Progress
from roundpipe_cli.engine.host_memory import own_scratch
from roundpipe_cli.engine.options import GradientOptions
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import as_ours
from roundpipe_cli.model.block_calls import EmbedGradient, Prologue
from roundpipe_cli.model.layout import LayerLayout

SQUARED_ELEMENTS = 1 << 10
"""Elements whose squares are summed in float32; these sums are added in float64. 1e-9 off, and six times as fast as
float64 alone. Decides bits."""
ADDED_ELEMENTS = 1 << 18
"""Elements that are added at a time where a gradient and its sum differ in type: they stay in the caches."""

GradientParts = list[tuple[int, torch.Tensor]]
"""(index of the parameter, its gradient), in the order of addition."""


class GradientFold:
    """The gradient sum of one layer during one step."""

    def __init__(
        self, layer: int, layout: LayerLayout, flat: torch.Tensor, num_microbatches: int, *, progress: Progress
    ) -> None:
        """`flat`: float32 [num_trainable_elements], the host's sum; set to zero by whoever adds to it first."""
        self.layer = layer
        self.flat = flat
        self.num_microbatches = num_microbatches
        self._views = [place.trainable_view(flat) for place in layout.trainable]
        self._begun = False
        """Whether `flat` holds this step's sum, not an earlier step's."""
        self._progress = progress
        self._next = 0
        self._folding = False
        self._waiting: dict[int, GradientParts] = {}

    def begin(self) -> list[torch.Tensor]:
        """The sum of each parameter, zero at first; for the microbatch whose turn it is."""
        if not self._begun:
            self.flat.zero_()
            self._begun = True
        return self._views

    def is_turn(self, microbatch: int) -> bool:
        """Whether `microbatch` comes next. Only the caller who holds that microbatch's gradients may rely on it."""
        with self._progress.condition:
            return self._next == microbatch

    def fold(self, microbatch: int, parts: GradientParts) -> bool:
        """Add one microbatch's gradients (none left if it was its turn), or keep them until it is their turn.

        Returns:
            whether this call added the step's last microbatch.
        """
        with self._progress.condition:
            self._waiting[microbatch] = parts
            if self._folding:
                return False
            self._folding = True
        while True:
            with self._progress.condition:
                if self._next not in self._waiting:
                    self._folding = False
                    complete = self._next == self.num_microbatches
                    break
                turn = self._waiting.pop(self._next)
            views = self.begin()
            for index, gradient in turn:
                add_to(views[index], gradient)
            with self._progress.condition:
                self._next += 1
        self._progress.moved()
        return complete

    def finish_visit(self, next_microbatch: int) -> None:
        """`flat` holds the sum of all microbatches before `next_microbatch`, or soon will: its download is issued."""
        assert next_microbatch > self._next, "a stage was visited out of order"
        self._next = next_microbatch
        self._begun = True


class StepGradients:
    """The gradient sums of one step on the host; reports each that is complete."""

    def __init__(
        self, folds: Mapping[int, GradientFold], late_layers: Collection[int], options: GradientOptions
    ) -> None:
        """
        Args:
            folds: by layer, in ascending order.
            late_layers: layers whose gradient is complete only at the end of the step.
        """
        self.folds, self.options, self._late_layers = folds, options, late_layers
        self._square_sums: dict[int, torch.Tensor] = {}
        """Layer -> sum of squares of its complete gradient."""
        self._of_embed: dict[int, Future[list[EmbedGradient]]] = {}
        """Microbatch -> gradients of the embed layer's parameters."""
        self._embed_thread = ThreadPoolExecutor(1, "embed", partial(set_own_threads, 1))

    def begin_embed(self, microbatch: int, prologue: Prologue, gradient: torch.Tensor) -> None:
        """Compute the gradients of the embed layer's parameters, in a thread beside those that issue work."""
        self._of_embed[microbatch] = self._embed_thread.submit(prologue.backward, gradient)

    def complete(self, layer: int, squares: torch.Tensor) -> None:
        """Note the sum of squares of a complete gradient, which is on the host."""
        self._square_sums[layer] = squares
        if layer not in self._late_layers:
            self._tell(layer)

    def finish(self, store: WeightStore) -> list[float]:
        """Complete the late layers, when all workers are done.

        Returns:
            the sums of squares of all trained layers, in their order.
        """
        self._add_embed(store)
        for layer in sorted(self._late_layers, reverse=True):  # as the next step needs them
            self._tell(layer)
        return [float(self._square_sums[layer]) for layer in self.folds]

    def _tell(self, layer: int) -> None:
        if self.options.on_complete is not None:
            self.options.on_complete(layer, partial(float, self._square_sums[layer]))

    def _embed_gradients(self, microbatch: int) -> list[EmbedGradient]:
        try:
            return self._of_embed[microbatch].result()
        except Exception as error:
            raise as_ours(error, "the embedding's backward", f"microbatch {microbatch}, layer embed") from error

    def _add_embed(self, store: WeightStore) -> None:
        """Add the embed layer's gradients in microbatch order: after the head's, where the table is tied to it."""
        touched = {0}.intersection(self.folds)
        num_threads = torch.get_num_threads()
        with self._embed_thread, ThreadPoolExecutor(num_threads, "rows", partial(set_own_threads, 1)) as pool:
            for index in sorted(self._of_embed):
                for item in self._embed_gradients(index):
                    layer = store.layer_of(item.name)
                    touched.add(layer)
                    target = store.gradient(item.name)
                    if item.token_ids is None:
                        add_to(target, item.gradient)
                        continue
                    pieces = item.token_ids.chunk(num_threads), item.gradient.chunk(num_threads)
                    list(pool.map(partial(add_rows, target), *pieces))
        for layer in touched:
            self._square_sums[layer] = square_sum(self.folds[layer].flat)


@dataclass(frozen=True)
class Leaving:
    """Gradients of one microbatch and layer on their way from a device to the host's sum."""

    shapes: tuple[tuple[int, torch.Size], ...]
    """(index of the parameter, shape), in the order in which they lie in `flat`."""
    flat: torch.Tensor

    def parts_in(self, host: torch.Tensor) -> GradientParts:
        """The gradients as they lie in `host`, a copy of `flat`."""
        pieces = host.split([shape.numel() for _, shape in self.shapes])
        return [(index, piece.view(shape)) for (index, shape), piece in zip(self.shapes, pieces, strict=True)]


OWN_COPY_BYTES = 1 << 22
"""Gradients from here on leave by themselves, as the one of a head's matrix does: to join them would copy them."""


def leaving_parts(parts: GradientParts) -> list[Leaving]:
    """The gradients of one microbatch and layer: small ones as one tensor, which is one copy."""
    large = [[part] for part in parts if part[1].nbytes >= OWN_COPY_BYTES]
    small = [part for part in parts if part[1].nbytes < OWN_COPY_BYTES]
    return [
        Leaving(
            tuple((index, gradient.shape) for index, gradient in group),
            group[0][1].reshape(-1) if len(group) == 1 else torch.cat([gradient.reshape(-1) for _, gradient in group]),
        )
        for group in (*large, small)
        if group
    ]


def add_to(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add `gradient` to the float32 `total` of the same shape.

    On the host torch would first make a float32 copy of the whole gradient, on pages that the system has to clear.
    """
    if gradient.dtype == total.dtype or total.device.type != "cpu":
        total.add_(gradient)
        return
    if total.is_contiguous() and gradient.is_contiguous():
        total, gradient = total.view(-1), gradient.view(-1)
    if total.numel() <= ADDED_ELEMENTS:
        total.add_(own_scratch(total.numel(), total.dtype).view(total.shape).copy_(gradient))
        return
    num_rows = max(1, ADDED_ELEMENTS * len(total) // total.numel())
    for part, added in zip(total.split(num_rows), gradient.split(num_rows), strict=True):
        if num_rows == 1:
            part, added = part[0], added[0]
        add_to(part, added)


def add_rows(total: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add `gradient` [U, H] to those rows of the float32 `total`; they are distinct, so no order decides bits."""
    size = max(1, ADDED_ELEMENTS * len(gradient) // max(1, gradient.numel()))
    for some, part in zip(rows.split(size), gradient.split(size), strict=True):
        if part.dtype != total.dtype:
            part = own_scratch(part.numel(), total.dtype).view(part.shape).copy_(part)
        total.index_add_(0, some, part)


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a float32 tensor, a 0-dim float64 tensor on its device. The number of threads does not change
    its bits: of results in a row, each is one thread's."""
    norms = _of_rows(flat, partial(torch.linalg.vector_norm, ord=2, dim=1))
    return _of_rows(norms.double().square_(), partial(torch.sum, dim=1)).sum()


def _of_rows(flat: torch.Tensor, reduced: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Results of `reduced` for rows of `SQUARED_ELEMENTS` elements and for what is left of them."""
    num_whole = flat.numel() // SQUARED_ELEMENTS * SQUARED_ELEMENTS
    return torch.cat([reduced(flat[:num_whole].view(-1, SQUARED_ELEMENTS)), reduced(flat[num_whole:][None])])
