"""The host's store of weights: one flat page-aligned buffer per layer, exact size.

Trainable parameters also have float32 masters and float32 gradient sums, one flat tensor per layer each. All of it is
allocated once. Version v of a layer is its weights after v updates: step v reads it, and its update writes the next one
over it. In 16 bit the masters are apart, and copied for parameters that are used in float32 nevertheless. In float32
the weights are the masters.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from roundpipe_cli.costs.machine import HostLayout, host_layout
from roundpipe_cli.engine.dispatch.dispatch import StepRun
from roundpipe_cli.model.layout import LayerLayout, ParameterPlace, round_up
from roundpipe_cli.model.stored.nf4 import PackedWeight
from roundpipe_cli.model.stored.packed_weights import dequantize

# The host's memory: large buffers over all NUMA nodes, on pages of 2 MiB where the system gives them; one heap.
#
# Buffers are private to this process. A forked child does not get them: its parent, which writes them on, would be
# given copies of their pages, and lose those that are page-locked.
#
# A buffer on one node would be read over the link between two processors by half of the GPUs and of the updates. Large
# pages make updates faster, which go through all weights, masters and moments (measured: scripts/MEASUREMENTS.md).

LEAST_BYTES = 2 * 1024**2
"""Smaller buffers are not placed."""
MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call by machine."""
INTERLEAVE = 3
"""MPOL_INTERLEAVE: pages on all nodes in turn."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Settings in glibc's malloc.h."""
OUTSIDE_HEAP_BYTES = 4 * 1024**2
"""Tensors from here on, such as logits, have pages of their own."""
KEPT_HEAP_BYTES = 64 * 1024**2
"""The heap's unused end is kept up to this size during a step. By default glibc gives back 128 KiB, and a temporary
that lies there gets pages that the system must clear, each time."""
TIME_SHARE = 0.01
"""Largest share of a run's time for giving memory back."""


@functools.cache
def layout() -> HostLayout:
    """NUMA nodes and pages of this machine."""
    return host_layout()


def page_aligned(num_bytes: int) -> torch.Tensor:
    """A zeroed buffer at a page border, exact size, as a uint8 tensor [num_bytes]; forked children do not have it."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_DONTFORK)
    if num_bytes >= LEAST_BYTES:
        _place(buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _place(buffer: mmap.mmap) -> None:
    """Ask for pages of 2 MiB on all nodes, before the buffer is first written. A refusal changes no bit."""
    if layout().gives_huge_pages:
        with suppress(OSError):
            buffer.madvise(mmap.MADV_HUGEPAGE)
    if len(layout().nodes) > 1:
        interleave(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer), layout().nodes)


_OWN = threading.local()
"""Memory that each thread keeps, by its dtype's name."""


def own_scratch(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the calling thread, [num_elements], which the thread's next call with this dtype gives away again.

    Memory that is asked for anew each time has pages that the system must clear first, which takes longer than most
    arithmetic on them (scripts/MEASUREMENTS.md has figures).
    """
    held: dict[str, torch.Tensor] = vars(_OWN)
    name = str(dtype)
    if name not in held or held[name].numel() < num_elements:
        held.pop(name, None)
        held[name] = page_aligned(num_elements * dtype.itemsize).view(dtype)
    return held[name][:num_elements]


def interleave(address: int, num_bytes: int, nodes: tuple[int, ...]) -> bool:
    """Spread the pages of a buffer over `nodes`; False if the system refuses, as containers may."""
    number = MBIND.get(platform.machine())
    if number is None:
        return False
    words = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), ctypes.c_int(INTERLEAVE), words)
    most = ctypes.c_ulong(64 * len(words) + 1)
    return bool(call(ctypes.c_long(number), *arguments, most, ctypes.c_uint(0)) == 0)


def settle_heap() -> None:
    """Let all threads that start from here on allocate from one heap, and large tensors outside it, unless the user
    set how.

    By default glibc gives each new thread a heap of its own and keeps there what the thread frees, so a run on the
    processor grew to a seventh more than `plan` counts, and went on growing. Tensors of up to 32 MB come to lie between
    small ones, where they leave holes (scripts/MEASUREMENTS.md).
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    for setting, value, variable, name in (
        (M_ARENA_MAX, 1, "MALLOC_ARENA_MAX", "arena_max"),
        (M_MMAP_THRESHOLD, OUTSIDE_HEAP_BYTES, "MALLOC_MMAP_THRESHOLD_", "mmap_threshold"),
        (M_TRIM_THRESHOLD, KEPT_HEAP_BYTES, "MALLOC_TRIM_THRESHOLD_", "trim_threshold"),
    ):
        if variable not in os.environ and name not in tunables:
            with suppress(AttributeError, OSError):  # another C library
                ctypes.CDLL(None).mallopt(ctypes.c_int(setting), ctypes.c_int(value))


class UnusedHeap:
    """Memory of the heap that nothing uses, between steps.

    glibc keeps what a step freed wherever something else lies above it. Where workers compute on the processor this
    grew from step to step; given back after each, it is as large as one step needs (scripts/MEASUREMENTS.md).
    """

    def __init__(self) -> None:
        self._next_s = 0.0
        self._trim: Callable[[ctypes.c_size_t], int] | None = None
        with suppress(AttributeError, OSError):  # another C library
            self._trim = ctypes.CDLL(None).malloc_trim

    def give_back(self) -> None:
        """Return whole unused pages to the system, unless that was done a moment ago."""
        started_s = time.monotonic()
        if self._trim is None or started_s < self._next_s:
            return
        self._trim(ctypes.c_size_t(0))
        now_s = time.monotonic()
        self._next_s = now_s + (now_s - started_s) / TIME_SHARE


NO_VERSION = -1
"""Version of a buffer that is empty or being written."""
REFERENCE = -2
"""Version of the weights that `keep_reference` put aside."""


def mapped_buffers(folder: Path, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Buffers at page borders, uint8, on a file in `folder` that is gone when the process ends.

    The system keeps of them in memory what fits and fetches the rest when it is read.

    Raises:
        OSError: the file cannot be made.
    """
    starts = [0]
    for size in sizes:
        starts.append(round_up(starts[-1] + size, mmap.ALLOCATIONGRANULARITY))
    descriptor, name = tempfile.mkstemp(prefix=".tmp-weights-", dir=folder)
    try:
        Path(name).unlink()
        os.posix_fallocate(descriptor, 0, max(starts[-1], 1))  # a full disk is reported now, and not by SIGBUS later
        return [
            torch.frombuffer(mmap.mmap(descriptor, size, offset=start), dtype=torch.uint8)
            if size
            else torch.empty(0, dtype=torch.uint8)
            for start, size in zip(starts, sizes, strict=False)
        ]
    finally:
        os.close(descriptor)


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
        """Write a weight that is packed already; unpacked where this parameter lies whole."""
        place, view = self._places[name][1], self.views[name]
        if place.packed_as == "4bit":
            weight.write(view)
        else:
            self.set_parameter(name, weight.dequantized())

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
