"""The host's memory: large buffers over all NUMA nodes, on pages of 2 MiB where the system gives them.

Buffers are private to this process. A forked child does not get them: its parent, which writes them on, would be
given copies of their pages, and lose those that are page-locked.

A buffer on one node would be read over the link between two processors by half of the GPUs and of the updates. Large
pages make updates faster, which go through all weights, masters and moments (measured: scripts/MEASUREMENTS.md).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from roundpipe_cli.costs.machine import HostLayout, host_layout
from roundpipe_cli.model.layout import round_up

LEAST_BYTES = 2 * 1024**2
"""Smaller buffers are not placed."""
MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call by machine."""
INTERLEAVE = 3
"""MPOL_INTERLEAVE: pages on all nodes in turn."""


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
