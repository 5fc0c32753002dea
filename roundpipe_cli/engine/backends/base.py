"""The one seam to a device: a small vocabulary of memory, copies, events and time.

A backend serves one worker. Its worker thread computes, its lane threads copy. Events order work on a device without
blocking the host where the device can; on the CPU everything is done when the call returns.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from roundpipe_cli.errors import is_out_of_host_memory
from roundpipe_cli.faults import DeviceFault, fault

# The number of intra-op threads of one thread, independent of other threads' settings.


def set_own_threads(count: int) -> None:
    """Let the calling thread compute with `count` threads from now on.

    The first parallel operation of a thread takes the number that any thread has set last, over its own: asking for the
    number gets that over with (torch 2.13, aten/src/ATen/ParallelOpenMP.cpp, `lazy_init_num_threads`).
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


DeviceEvent = Any
"""A point in a device's work, which only the backend that made it can read. None: it has already happened."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source) of a copy, of one shape and type."""

_REFUSALS = ("out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
"""Texts in errors of the driver (which also loads kernels and page-locks memory), cuBLAS and cuDNN."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device had no more memory, whichever library asked for it."""
    if isinstance(error, torch.OutOfMemoryError) or is_out_of_host_memory(error):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _REFUSALS)


_FAILURES = (
    "CUDA error",
    "CUDA driver error",
    "HIP error",
    "CUBLAS_STATUS",
    "HIPBLAS_STATUS",
    "CUDNN_STATUS",
    "cuDNN error",
)
"""Texts in errors of a device, of the driver or of its libraries; those for lack of memory have others too."""


def is_device_error(error: BaseException) -> bool:
    """Whether a device failed, for another reason than memory: it is lost, or computes no more for this process."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, (torch.AcceleratorError, DeviceFault)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FAILURES)


class Backend(ABC):
    """One worker's device; where it has no say, one that is done when a call returns."""

    device: torch.device
    aliases_host: bool
    """True: the device reads host memory where it lies, so nothing is moved."""
    capability: tuple[int, int] | None = None
    """Compute capability of an NVIDIA GPU, e.g. (8, 6); None: another device."""

    def take_notice(self) -> str | None:
        """A note on this device for the user; each note is returned once."""
        return None

    @abstractmethod
    def worker_thread(self) -> AbstractContextManager[None]:
        """Set the current thread up to compute on this device."""

    @abstractmethod
    def copy_thread(self) -> AbstractContextManager[None]:
        """Set the current thread up to issue copies to and from this device."""

    @abstractmethod
    def compute(self) -> AbstractContextManager[None]:
        """Encloses every computation of the worker thread."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A device buffer, uint8 [num_bytes], that lives until the backend is closed."""

    def release_unused(self) -> None:  # noqa: B027 - most devices hold no unused memory
        """Give memory that nothing uses any more back to the device."""

    @abstractmethod
    def device_like(self, host: torch.Tensor) -> torch.Tensor:
        """Device memory for `host`, to be filled by `copy_up` and then read by the worker thread's computations."""

    @abstractmethod
    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for a device tensor, to be filled by `copy_down`."""

    @abstractmethod
    def copy_up(self, pairs: Sequence[Pair], after: DeviceEvent = None) -> DeviceEvent:
        """Copy host tensors to the device behind `after`; the event says when they are there."""

    @abstractmethod
    def copy_down(self, pairs: Sequence[Pair]) -> DeviceEvent:
        """Copy device tensors to the host; the event says when they are there."""

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent]:
        """A host copy of what the worker thread just computed, and when it is complete. Past the lanes, for rare
        tensors."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device copy of a host tensor for the worker thread's next computation. Past the lanes, for small ones."""

    def record(self) -> DeviceEvent:
        """An event after everything that the worker thread has computed so far."""
        return None

    def wait(self, event: DeviceEvent) -> None:  # noqa: B027 - it has happened
        """Make the worker thread's next computation wait for `event`."""

    def happens_in_s(self, event: DeviceEvent) -> float:
        """0 if `event` has happened, else the seconds after which to ask again."""
        return 0.0

    def mark(self) -> Any:
        """A time stamp in the worker thread's work."""
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another; both must have passed."""
        return float(end - start)

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has passed a mark; does not wait, may be called by any thread."""
        return True

    def synchronize(self) -> None:  # noqa: B027 - it is done
        """Block until all issued work is done."""

    def answers(self, worker: int) -> bool:
        """Whether the device still computes: a small result, up, down and through its streams. Blocks while it hangs.

        Args:
            worker: for the fault point.
        """
        try:
            fault("answer", worker=worker)
            with self.worker_thread():
                result, _ = self.send(self.receive(torch.ones(8)) + 1)
                self.synchronize()
                return bool((result == 2).all())
        except Exception:  # whatever the driver makes of it
            return False

    def give_up(self) -> None:  # noqa: B027 - most devices share nothing
        """Take back what threads of this device, which hang, may hold of what devices share."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Most device bytes in use at once since `reset_peak`; 0 where they are not counted."""

    @property
    def peak_reserved_bytes(self) -> int:
        """Most device bytes taken from the driver at once since `reset_peak`, with those that an allocator holds
        between blocks in use or for later ones."""
        return self.peak_bytes

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak measurement."""
