"""Page-locked weights and gradients of a run, so that copies to GPUs run beside the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from roundpipe_cli.costs.machine import describe_locking
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import ResourceError
from roundpipe_cli.events import Notice, Tell
from roundpipe_cli.train.prepare.devices import gpu_index

LOCKED_FOR_BOUNDARIES_BYTES = 2 * 1024**3
"""Page-locked memory that boundaries may take where not all weights get some; all of it on WSL2."""


class PageLocks:
    """Page-locks a store's weights and gradients inside `with`, so that copies to GPUs run beside the host.

    `weights: auto` continues with ordinary memory where the system refuses, and says so. Some of what was locked is
    given back then: without any for the boundaries GPUs would wait for each of them.

    Raises (on entry):
        ResourceError: `weights: pinned` and the system refuses.
    """

    def __init__(self, store: WeightStore, devices: Sequence[str], weights: str, tell: Tell) -> None:
        """`weights`: as in the recipe."""
        self._store, self._devices, self._weights, self._tell = store, devices, weights, tell
        self._locked: list[torch.Tensor] = []
        self.stays = False
        """Nothing is unlocked any more: the driver would wait for a device that hangs."""

    def __enter__(self) -> PageLocks:
        try:
            self.lock(self._store.transferred, self._devices[0])
        except BaseException:
            self.unlock()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.unlock()

    def lock(self, buffers: Sequence[torch.Tensor], device: str) -> None:
        """Page-lock more buffers, by the driver's context of a device that works."""
        for buffer in buffers if device != "cpu" and self._weights != "pageable" else ():
            if not cuda.register_host_buffer(buffer, gpu_index(device)):
                text = "the system does not let this process page-lock its weights"
                if self._weights == "pinned":
                    raise ResourceError(text, where="weights: pinned", found=describe_locking(), hint="weights: auto")
                self._tell(Notice(f"{text}: uploads will be slower; {describe_locking()}"))
                self.unlock(LOCKED_FOR_BOUNDARIES_BYTES)
                break
            self._locked.append(buffer)

    def unlock(self, num_bytes: float = math.inf) -> None:
        """Undo about so much of it, or all, unless that would wait for ever."""
        freed = 0
        while self._locked and freed < num_bytes and not self.stays:
            freed += self._locked[-1].nbytes
            cuda.unregister_host_buffer(self._locked.pop())
