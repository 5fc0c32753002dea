"""NVIDIA (and ROCm) GPUs. The only file that names `torch.cuda`.

Three streams per worker: one computes, one copies up, one copies down. The host threads only issue; order between
streams is kept by events on the device. Host memory must be page-locked, or copies would turn synchronous in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from roundpipe_cli.engine.backends.base import CHUNK_BYTES, Backend, Event


def num_devices() -> int:
    """How many GPUs torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def memory_bytes(index: int) -> int:
    """Free memory of GPU `index` now; a display or another program may hold the rest."""
    return int(torch.cuda.mem_get_info(index)[0])


def memory_use(index: int) -> tuple[int, int]:
    """Bytes in use on GPU `index`, by whomever, and what it has."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return int(total_bytes - free_bytes), int(total_bytes)


def uuid(index: int) -> str:
    """How the driver names GPU `index`, whatever `CUDA_VISIBLE_DEVICES` says."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def describe_device(index: int) -> str:
    """Name and memory of GPU `index`."""
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {properties.total_memory / 1024**3:.0f} GiB"


def register_host_buffer(buffer: torch.Tensor) -> bool:
    """Page-lock an existing host buffer, exact size. False if the system refuses (limit of locked memory)."""
    if buffer.nbytes == 0:
        return True
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 1)  # type: ignore[union-attr]  # portable
    return int(code) == 0


def unregister_host_buffer(buffer: torch.Tensor) -> None:
    """Undo `register_host_buffer`."""
    if buffer.nbytes:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[union-attr]


class CudaBackend(Backend):
    """One worker on one GPU. The same GPU may serve several workers."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.aliases_host = False
        with torch.cuda.device(self.device):
            self._compute = torch.cuda.Stream(self.device, priority=-1)
            self._up = torch.cuda.Stream(self.device)
            self._down = torch.cuda.Stream(self.device)

    @contextmanager
    def worker_thread(self) -> Iterator[None]:
        torch.set_num_threads(1)
        with torch.cuda.device(self.device), torch.cuda.stream(self._compute):
            yield

    @contextmanager
    def copy_thread(self) -> Iterator[None]:
        torch.set_num_threads(1)
        with torch.cuda.device(self.device), torch.cuda.stream(self._up):
            yield

    def compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def upload(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event]) -> Event:
        for event in after:
            if event is not None:
                self._up.wait_event(event)
        for target, source in copies:
            size = max(1, CHUNK_BYTES // source.element_size())
            for start in range(0, source.numel(), size):
                target[start : start + size].copy_(source[start : start + size], non_blocking=True)
        return self._up.record_event()

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host, self.download(host, tensor)

    def download(self, host: torch.Tensor, tensor: torch.Tensor) -> Event:
        self._down.wait_event(self._compute.record_event())
        with torch.cuda.stream(self._down):
            host.copy_(tensor, non_blocking=True)
            event = self._down.record_event()
        tensor.record_stream(self._down)  # its memory is not reused before the copy is done
        return event

    def receive(self, tensor: torch.Tensor, ready: Event) -> torch.Tensor:
        with torch.cuda.stream(self._up):
            if ready is not None:
                self._up.wait_event(ready)
            source = tensor if tensor.is_pinned() else tensor.pin_memory()
            copied = source.to(self.device, non_blocking=True)
            arrived = self._up.record_event()
        self._compute.wait_event(arrived)
        copied.record_stream(self._compute)
        return copied

    def record(self) -> Event:
        return self._compute.record_event()

    def wait(self, event: Event) -> None:
        if event is not None:
            self._compute.wait_event(event)

    def finish(self, event: Event) -> None:
        if event is not None:
            event.synchronize()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._compute)
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def has_passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def synchronize(self) -> None:
        self._compute.synchronize()
        self._down.synchronize()
        self._up.synchronize()

    @property
    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
