"""Logical workers on the processor: the same threads, queues and copies as on a GPU, with host memory as the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundpipe_cli.engine.backends.base import Backend, DeviceEvent, Pair, set_own_threads


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages that computations under this mode have made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lock = threading.Lock()
        self.permanent_bytes = 0
        self.peak_bytes = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Count `tensor`'s storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        with self._lock:
            known = self._storages.get(storage._cdata)
            if known is None or known[0].expired():
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def update_peak(self) -> None:
        """Drop freed storages and note the total."""
        with self._lock:
            self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
            total = self.permanent_bytes + sum(size for _, size in self._storages.values())
            self.peak_bytes = max(self.peak_bytes, total)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)] for tree in (args, outputs))
        inputs = {tensor.untyped_storage()._cdata for tensor in given}
        for output in made:
            if output.untyped_storage()._cdata not in inputs:
                self.add(output)
        self.update_peak()
        return outputs


class CpuBackend(Backend):
    """One logical worker. Host weights are used in place by default; `copy=True` moves every byte as a GPU would."""

    def __init__(self, num_threads: int, *, copy: bool = False, count_bytes: bool = False) -> None:
        """
        Args:
            num_threads: intra-op threads of this worker.
            copy: copy weights and boundaries in and out instead of sharing memory.
            count_bytes: count live bytes (slow; for tests and for checking the memory model).
        """
        self.device = torch.device("cpu")
        self.aliases_host = not copy
        self._num_threads = num_threads
        self._live = LiveBytes() if count_bytes else None

    @contextmanager
    def worker_thread(self) -> Iterator[None]:
        set_own_threads(self._num_threads)
        yield

    def copy_thread(self) -> AbstractContextManager[None]:
        return self.worker_thread()

    def compute(self) -> AbstractContextManager[None]:
        return self._live if self._live is not None else nullcontext()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        if self._live is not None:
            self._live.permanent_bytes += num_bytes
        padded = torch.empty(num_bytes + 64, dtype=torch.uint8)
        start = -padded.data_ptr() % 64
        return padded[start : start + num_bytes]

    def device_like(self, host: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_like(host)
        if self._live is not None:
            self._live.add(tensor)
            self._live.update_peak()
        return tensor

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor)

    def copy_up(self, pairs: Sequence[Pair], after: DeviceEvent = None) -> DeviceEvent:
        for target, source in pairs:
            target.copy_(source)

    def copy_down(self, pairs: Sequence[Pair]) -> DeviceEvent:
        self.copy_up(pairs)

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent]:
        return tensor if self.aliases_host else tensor.clone(), None

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.aliases_host:
            return tensor
        copied = self.device_like(tensor)
        copied.copy_(tensor)
        return copied

    @property
    def peak_bytes(self) -> int:
        return self._live.peak_bytes if self._live is not None else 0

    def reset_peak(self) -> None:
        if self._live is not None:
            self._live.peak_bytes = 0
