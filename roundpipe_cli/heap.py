"""The C library's heap: how a run and a plan use it, and what is given back to the system between steps."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress

SETTINGS = {"TRIM_THRESHOLD_": -1, "MMAP_THRESHOLD_": -3, "ARENA_MAX": -8}
"""Numbers in glibc's malloc.h, by the end of the environment variable."""
OUTSIDE_HEAP_BYTES = 4 * 1024**2
"""Tensors from here on, such as logits, have pages of their own."""
KEPT_HEAP_BYTES = 64 * 1024**2
"""The heap's unused end is kept up to this size during a step. By default glibc gives back 128 KiB, and a temporary
that lies there gets pages that the system must clear, each time."""
TIME_SHARE = 0.01
"""Largest share of a run's time for giving memory back."""


def settle_heap() -> None:
    """Let all threads that start from here on allocate from one heap, and large tensors outside it, unless the user
    set how.

    By default glibc gives each new thread a heap of its own and keeps there what the thread frees, so a run on the
    processor grew to a seventh more than `plan` counts, and went on growing. Tensors of up to 32 MB come to lie between
    small ones, where they leave holes (scripts/MEASUREMENTS.md).
    """
    _set({"ARENA_MAX": 1, "MMAP_THRESHOLD_": OUTSIDE_HEAP_BYTES, "TRIM_THRESHOLD_": KEPT_HEAP_BYTES})


def keep_heap() -> None:
    """Keep all that this process frees, which only plans: new pages for numpy's temporaries, which the system clears,
    took a tenth to a third of a cold plan's time (scripts/MEASUREMENTS.md). 32 MiB is the most that glibc documents."""
    _set({"MMAP_THRESHOLD_": 32 * 1024**2, "TRIM_THRESHOLD_": 1024**3})


def _set(values: dict[str, int]) -> None:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    for name, value in values.items():
        if f"MALLOC_{name}" not in os.environ and name.lower().rstrip("_") not in tunables:
            with suppress(AttributeError, OSError):  # another C library
                ctypes.CDLL(None).mallopt(ctypes.c_int(SETTINGS[name]), ctypes.c_int(value))


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
