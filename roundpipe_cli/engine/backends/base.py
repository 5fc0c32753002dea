"""The one seam to a device: a small vocabulary of memory, copies, events and time.

A backend serves one worker. Its worker thread computes; its prefetch thread uploads. Events order work on a device
without blocking the host where the device can; on the CPU everything is done when the call returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

CHUNK_BYTES = 32 * 1024**2
"""Copies are cut into chunks of this size, so that a more urgent one can overtake."""

Event = Any
"""A point in a device's work; opaque to everybody but the backend that made it."""


class Backend(ABC):
    """One worker's device."""

    device: torch.device
    aliases_host: bool
    """True: the device reads host weights where they lie, so nothing is uploaded."""

    @abstractmethod
    def worker_thread(self) -> AbstractContextManager[None]:
        """Set the current thread up to compute on this device."""

    @abstractmethod
    def copy_thread(self) -> AbstractContextManager[None]:
        """Set the current thread up to issue uploads to this device."""

    @abstractmethod
    def compute(self) -> AbstractContextManager[None]:
        """Encloses every computation of the worker thread."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A device buffer, uint8 [num_bytes], that lives until the backend is closed."""

    @abstractmethod
    def upload(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event]) -> Event:
        """Copy (device tensor, host tensor) pairs once all of `after` have happened; the event says when it is done."""

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """A host copy of what the worker thread just computed, and when it is complete."""

    @abstractmethod
    def download(self, host: torch.Tensor, tensor: torch.Tensor) -> Event:
        """Copy what the worker thread just computed into `host`."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, ready: Event) -> torch.Tensor:
        """A device copy of a host tensor for the worker thread's next computation."""

    @abstractmethod
    def record(self) -> Event:
        """An event after everything that the worker thread has computed so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make the worker thread's next computation wait for `event`."""

    @abstractmethod
    def finish(self, event: Event) -> None:
        """Block the host until `event` has happened."""

    @abstractmethod
    def mark(self) -> Any:
        """A time stamp in the worker thread's work."""

    @abstractmethod
    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another; both must have passed."""

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has come to a mark; without waiting, from any thread."""
        return True

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all issued work is done."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Most device bytes in use at once since `reset_peak`; 0 where they are not counted."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak measurement."""
