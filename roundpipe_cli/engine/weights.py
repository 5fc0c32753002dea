"""The host's store of weights: one flat page-aligned buffer per layer, exact size.

Trainable parameters also have float32 masters and float32 gradient accumulators, one flat tensor per layer each.
In float32 the weights themselves are the masters. All of it is allocated once.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

import torch

from roundpipe_cli.model.layout import LayerLayout, ParameterPlace


def page_aligned(num_bytes: int) -> torch.Tensor:
    """An anonymous zeroed buffer at a page border, exact size, as a uint8 tensor [num_bytes]."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


class WeightStore:
    """Weights, masters and gradients of all layers, in host memory."""

    def __init__(self, layouts: Sequence[LayerLayout]) -> None:
        self.layouts = tuple(layouts)
        self.buffers = [page_aligned(layout.num_bytes) for layout in layouts]
        self.masters: list[torch.Tensor] = []
        """Per layer, float32 [num_trainable_elements]."""
        self.gradients: list[torch.Tensor] = []
        """Per layer, float32 [num_trainable_elements]: the sum over the step's microbatches."""
        for layout, buffer in zip(layouts, self.buffers, strict=True):
            count = layout.num_trainable_elements
            if layout.trainable_dtype == torch.float32 and count:
                self.masters.append(layout.trainable_bytes(buffer))
            else:
                self.masters.append(page_aligned(4 * count).view(torch.float32))
            self.gradients.append(page_aligned(4 * count).view(torch.float32))
        self._places: dict[str, tuple[int, ParameterPlace]] = {
            place.name: (index, place) for index, layout in enumerate(layouts) for place in layout.places
        }
        self._views = {name: place.view(self.buffers[index]) for name, (index, place) in self._places.items()}

    @property
    def views(self) -> Mapping[str, torch.Tensor]:
        """Parameter name -> its weights, a view of the layer's buffer."""
        return self._views

    @property
    def trainable_names(self) -> frozenset[str]:
        return frozenset(name for name, (_, place) in self._places.items() if place.trainable)

    def layer_of(self, name: str) -> int:
        """Index of the layer that holds parameter `name`."""
        return self._places[name][0]

    def set_parameter(self, name: str, values: torch.Tensor) -> None:
        """Write `values` as weights and, if the parameter is trainable, as float32 masters."""
        index, place = self._places[name]
        if place.trainable:
            place.trainable_view(self.masters[index]).copy_(values)
        self._views[name].copy_(values)

    def master(self, name: str) -> torch.Tensor:
        """The float32 values of a trainable parameter (a view), else its weights."""
        index, place = self._places[name]
        return place.trainable_view(self.masters[index]) if place.trainable else self._views[name]

    def gradient(self, name: str) -> torch.Tensor:
        """The float32 gradient sum of a trainable parameter, a view."""
        index, place = self._places[name]
        return place.trainable_view(self.gradients[index])

    def publish(self, layer: int) -> None:
        """Round the masters of `layer` to its weights (nothing to do in float32, where they are the same bytes)."""
        layout = self.layouts[layer]
        if layout.num_trainable_elements and layout.trainable_dtype != torch.float32:
            layout.trainable_bytes(self.buffers[layer]).copy_(self.masters[layer])

    def num_bytes(self) -> dict[str, int]:
        """Host bytes by part: weights, masters (0 in float32), gradients."""
        masters = sum(
            master.nbytes
            for master, layout in zip(self.masters, self.layouts, strict=True)
            if layout.trainable_dtype != torch.float32
        )
        return {
            "weights": sum(buffer.nbytes for buffer in self.buffers),
            "masters": masters,
            "gradients": sum(gradient.nbytes for gradient in self.gradients),
        }
