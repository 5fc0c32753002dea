"""The host's store of weights: one flat page-aligned buffer per layer, exact size.

Trainable parameters also have float32 masters and float32 gradient sums, one flat tensor per layer each. All of it is
allocated once. Version v of a layer is its weights after v updates: step v reads it, and its update writes the next one
over it. In 16 bit the masters are apart, and copied for parameters that are used in float32 nevertheless. In float32
the weights are the masters.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from roundpipe_cli.engine.dispatch.dispatch import StepRun
from roundpipe_cli.engine.host_memory import mapped_buffers, page_aligned
from roundpipe_cli.model.layout import LayerLayout, ParameterPlace
from roundpipe_cli.model.stored.packed_weights import PackedWeight, dequantize

NO_VERSION = -1
"""Version of a buffer that is empty or being written."""
REFERENCE = -2
"""Version of the weights that `keep_reference` put aside."""


@dataclass(frozen=True)
class LayerUpdate:
    """Tensors that one update of a layer reads and writes; flat tensors [num_trainable_elements]."""

    masters: torch.Tensor
    """float32; changed in place."""
    weights: torch.Tensor | None
    """Destination of the rounded masters; None in float32."""
    whole: torch.Tensor
    """All of the layer's new trainable bytes, uint8; written in part when the update is over."""


class WeightStore:
    """Weights, masters and gradients of all layers, in host memory."""

    def __init__(
        self, layouts: Sequence[LayerLayout], folder: Path | None = None, elsewhere: Collection[int] = ()
    ) -> None:
        """
        Args:
            layouts: one per layer.
            folder: map the weights from a file there; None: ordinary memory.
            elsewhere: layers that another process keeps the masters of: here they are on the meta device, unless they
                are the weights themselves.

        Raises:
            OSError: no such file can be made in `folder`.
        """
        self.layouts = tuple(layouts)
        sizes = [layout.num_bytes for layout in layouts]
        self.is_mapped = folder is not None
        self.buffers = [page_aligned(size) for size in sizes] if folder is None else mapped_buffers(folder, sizes)
        """Per layer, uint8: frozen weights, then the trainable ones."""
        self.masters: list[torch.Tensor] = []
        """Per layer, float32 [num_trainable_elements]."""
        for layer, (layout, buffer) in enumerate(zip(layouts, self.buffers, strict=True)):
            if layout.trainable_dtype == torch.float32:
                self.masters.append(layout.trainable_flat(layout.trainable_bytes(buffer)))
            elif layer in elsewhere:
                self.masters.append(torch.empty(layout.num_trainable_elements, device="meta"))
            else:
                self.masters.append(page_aligned(4 * layout.num_trainable_elements).view(torch.float32))
        self.gradients = [page_aligned(4 * layout.num_trainable_elements).view(torch.float32) for layout in layouts]
        """Per layer, float32 [num_trainable_elements]: the sum over the microbatches of the newest step."""
        self._places: dict[str, tuple[int, ParameterPlace]] = {
            place.name: (index, place) for index, layout in enumerate(layouts) for place in layout.places
        }
        self._reference: list[torch.Tensor] = []
        """Per layer, uint8: the trainable weights that were put aside; empty: none were."""
        self.views: Mapping[str, torch.Tensor] = self.views_at(NO_VERSION)
        """Parameter name -> its weights, a view."""
        self.trained = [layer for layer, layout in enumerate(layouts) if layout.num_trainable_elements]
        """Layers with trained weights, in order."""
        self._held: list[int] = []
        """Per layer, the version that it has; while an update writes it, `NO_VERSION`."""
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._readers: list[tuple[StepRun, int]] = []
        """Steps under way, each with the version that it reads."""
        self.set_version(0)

    def views_at(self, version: int) -> dict[str, torch.Tensor]:
        """Parameter name -> its weights of `version`, a view."""
        homes = {name: self._home(layer, place, version) for name, (layer, place) in self._places.items()}
        return {name: place.view(buffer) for name, (place, buffer) in homes.items()}

    def _home(self, layer: int, place: ParameterPlace, version: int) -> tuple[ParameterPlace, torch.Tensor]:
        """The buffer that has a parameter at a version, and the parameter's place there."""
        if version != REFERENCE or not place.trainable:
            return place, self.buffers[layer]
        offset_bytes = place.offset_bytes - self.layouts[layer].trainable_offset_bytes
        return replace(place, offset_bytes=offset_bytes), self._reference[layer]

    # -- versions ------------------------------------------------------------------------------------------------

    def keep_reference(self) -> None:
        """Put the trainable weights aside as they are now: every pass can read them as version `REFERENCE`."""
        self._reference = [page_aligned(layout.trainable_num_bytes) for layout in self.layouts]
        for layer, kept in enumerate(self._reference):
            kept.copy_(self.trained_bytes(layer, self.newest))

    @property
    def has_reference(self) -> bool:
        """Whether weights were put aside."""
        return bool(self._reference)

    @property
    def newest(self) -> int:
        """The newest version that every layer has."""
        return min((self._held[layer] for layer in self.trained), default=0)

    def version_of(self, layer: int) -> int:
        """The version that `layer` has, whole; `NO_VERSION` while an update writes it."""
        return self._held[layer]

    def wait_for(self, layer: int, version: int) -> None:
        """Block until `layer` has `version`, or a later one. Not for threads behind which others wait: see `tell`.

        Raises:
            the error given to `fail`: it never will.
        """
        with self._changed:
            while self.version_of(layer) < version:
                self.check_updates()
                self._changed.wait()

    def check_updates(self) -> None:
        """Raise the error given to `fail`, if there was one."""
        if self._error is not None:
            raise self._error

    def tell(self, reader: StepRun, version: int) -> None:
        """Report to `reader` each trained layer that has `version`, or a later one: now or as soon as it has, from the
        thread that wrote it, until `forget`."""
        with self._changed:
            self._readers = [*self._readers, (reader, version)]
            there, error = [layer for layer in self.trained if self.version_of(layer) >= version], self._error
        for layer in there:
            reader.ready(layer)
        if error is not None:
            reader.give_up(error, "the host's updates")

    def forget(self, reader: StepRun) -> None:
        """Report nothing more to `reader`."""
        with self._changed:
            self._readers = [item for item in self._readers if item[0] is not reader]

    def fail(self, error: BaseException) -> None:
        """No layer will get another version: all who wait for one get `error`."""
        with self._changed:
            self._error, readers = error, self._readers
            self._changed.notify_all()
        for reader, _ in readers:
            reader.give_up(error, "the host's updates")

    def check_version(self, layer: int, version: int) -> None:
        """Assert that `layer` has its weights of `version`, whole; called wherever a step starts to read them."""
        if self.layouts[layer].num_trainable_elements and version != REFERENCE:
            held = self._held[layer]
            assert held == version, f"layer {layer} has weights of version {held}, not {version}"

    def set_version(self, version: int) -> None:
        """Declare what lies in the buffers now to be version `version`."""
        self._held = [version for _ in self.layouts]

    def trained_bytes(self, layer: int, version: int) -> torch.Tensor:
        """The bytes of a layer's trainable weights of one version, uint8."""
        if version == REFERENCE:
            return self._reference[layer]
        return self.layouts[layer].trainable_bytes(self.buffers[layer])

    @contextmanager
    def next_version(self, layer: int) -> Iterator[LayerUpdate]:
        """Buffers for the update of one layer. On leaving without an error the layer has its next version."""
        version = self._held[layer] + 1
        self._held[layer] = NO_VERSION
        layout, masters, whole = self.layouts[layer], self.masters[layer], self.trained_bytes(layer, version)
        if layout.trainable_dtype == torch.float32:
            yield LayerUpdate(masters, None, whole)
        else:
            yield LayerUpdate(masters, layout.trainable_flat(whole), whole)
            for place in layout.wide if not masters.is_meta else ():
                self.views[place.name].copy_(place.trainable_view(masters))
        with self._changed:
            self._held[layer], readers = version, self._readers
            self._changed.notify_all()
        for reader, wanted in readers:
            if version >= wanted:
                reader.ready(layer)

    # -- reading -------------------------------------------------------------------------------------------------

    def pieces(self, layer: int, version: int) -> tuple[tuple[int, torch.Tensor], tuple[int, torch.Tensor]]:
        """The bytes of a layer at `version` as (offset in the layer's layout, uint8 tensor): the frozen ones, and those
        that are trained."""
        self.check_version(layer, version)
        begin = self.layouts[layer].trainable_offset_bytes
        return (0, self.buffers[layer][:begin]), (begin, self.trained_bytes(layer, version))

    def parameters(self, layer: int, version: int) -> dict[str, torch.nn.Parameter]:
        """Parameters on the host's own bytes of a layer at `version`, for devices that read host memory."""
        homes = [self._home(layer, place, version) for place in self.layouts[layer].places]
        return {place.name: place.parameter(buffer) for place, buffer in homes}

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
        place.write(self.views[name], values)

    def set_packed(self, name: str, weight: PackedWeight) -> None:
        """Write a weight that is packed already, as this parameter is."""
        assert weight.kind == self._places[name][1].packed_as, name
        weight.write(self.views[name])

    def master(self, name: str) -> torch.Tensor:
        """The float32 values of a trainable parameter (a view), else its weights."""
        index, place = self._places[name]
        return place.trainable_view(self.masters[index]) if place.trainable else self.views[name]

    def base_weight(self, name: str) -> torch.Tensor:
        """The whole weight of a parameter; a new tensor where it lies packed."""
        _, place = self._places[name]
        view = self.views[name]
        return dequantize(view, place.shape, place.dtype, place.packed_as) if place.packed_as else view

    # -- gradients -----------------------------------------------------------------------------------------------

    def gradient(self, name: str) -> torch.Tensor:
        """The float32 gradient sum of a trainable parameter, a view."""
        index, place = self._places[name]
        return place.trainable_view(self.gradients[index])

    # -- memory --------------------------------------------------------------------------------------------------

    def renew_gradients(self) -> None:
        """Other memory for the gradient sums, between steps: somebody may still write into theirs."""
        self.gradients = [page_aligned(gradient.nbytes).view(torch.float32) for gradient in self.gradients]

    @property
    def transferred(self) -> list[torch.Tensor]:
        """Every buffer that is copied to or from devices and stays in memory."""
        return [*([] if self.is_mapped else self.buffers), *self._reference, *self.gradients]

    def num_bytes(self) -> dict[str, int]:
        """Host bytes by part: weights (with those put aside), masters (0 in float32), gradients."""
        masters = sum(
            master.nbytes
            for master, layout in zip(self.masters, self.layouts, strict=True)
            if layout.trainable_dtype != torch.float32 and not master.is_meta
        )
        return {
            "weights": sum(buffer.nbytes for buffer in (*self.buffers, *self._reference)),
            "masters": masters,
            "gradients": sum(gradient.nbytes for gradient in self.gradients),
        }
