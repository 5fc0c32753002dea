"""NVIDIA (and ROCm) GPUs. The only file that names `torch.cuda`.

Three streams per worker: one computes, one copies up, one copies down. The host threads only issue; order between
streams is kept by events on the device. Host memory must be page-locked, or copies would turn synchronous in silence.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from roundpipe_cli.costs.machine import describe_locking
from roundpipe_cli.costs.memory import PINNED_RING_BYTES
from roundpipe_cli.engine.backends.base import Backend, DeviceEvent, Pair, is_out_of_memory, set_own_threads
from roundpipe_cli.engine.backends.turns import IssueTurns
from roundpipe_cli.library_settings import count_by_bus

POLL_S, MAX_POLL_S = 100e-6, 1e-3
"""Seconds between a lane's looks at the events that it waits for: at first, and after a while."""
POLL_SHARE = 1 / 8
"""Length of a pause, as a share of the time waited so far: short pauses would keep the interpreter busy."""

LOCK_REFUSED = (
    "the system does not let this process page-lock more host memory for its transfers: ordinary memory is used, and "
    "GPUs wait for those copies"
)


def num_devices() -> int:
    """How many GPUs torch can use. CUDA starts here at the latest, so here it learns how to number them."""
    count_by_bus()
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def memory_bytes(index: int) -> int:
    """Free memory of GPU `index` now; a display or another program may hold the rest."""
    return int(torch.cuda.mem_get_info(index)[0])


def memory_use(index: int) -> tuple[int, int]:
    """Bytes in use on GPU `index`, by all programs, and its total memory."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return int(total_bytes - free_bytes), int(total_bytes)


def total_bytes() -> list[int]:
    """Memory of each GPU that torch can use."""
    return [torch.cuda.get_device_properties(index).total_memory for index in range(num_devices())]


def uuid(index: int) -> str:
    """The driver's name of GPU `index`, or of the instance of one (MIG), independent of `CUDA_VISIBLE_DEVICES`."""
    properties = torch.cuda.get_device_properties(index)
    return f"{'MIG' if ' MIG ' in properties.name else 'GPU'}-{properties.uuid}"


def device_name(index: int) -> str:
    """The driver's name of the kind of GPU `index`."""
    return str(torch.cuda.get_device_properties(index).name)


def describe_device(index: int) -> str:
    """Name and memory of GPU `index`."""
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {properties.total_memory / 1024**3:.0f} GiB"


def has_bfloat16(index: int) -> bool:
    """Whether GPU `index` computes in bfloat16 itself; torch would emulate it, many times slower."""
    with torch.cuda.device(index):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


XID_S = 1200.0
"""Older messages of the kernel are of something else."""


def last_xid(index: int) -> str | None:
    """The driver's newest message on GPU `index`, such as `Xid 79: GPU has fallen off the bus`; None where there is
    none, or where this user may not read the kernel's."""
    properties = torch.cuda.get_device_properties(index)
    parts = [getattr(properties, f"pci_{name}_id", -1) for name in ("domain", "bus", "device")]
    if -1 in parts:
        return None
    place = f"{parts[0]:04x}:{parts[1]:02x}:{parts[2]:02x}"
    with suppress(OSError):
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        lines = []
        try:
            while True:
                lines.append(os.read(log, 8192).decode(errors="replace"))
        except BlockingIOError:
            return xid_in(lines, place, time.clock_gettime(time.CLOCK_MONOTONIC))
        finally:
            os.close(log)
    return None


def xid_in(lines: Sequence[str], place: str, now_s: float) -> str | None:
    """The newest message of the driver among the kernel's, on the card at this place of the PCI bus."""
    for line in reversed(lines):
        head, _, text = line.partition(";")
        found = re.search(rf"Xid \(PCI:{re.escape(place)}[^)]*\): (\d+)(?:, (.*))?", text, re.IGNORECASE)
        if found and now_s - int(head.split(",")[2]) / 1e6 < XID_S:
            what = (found[2] or "").strip().rpartition(", ")[2]
            return f"Xid {found[1]}: {what}" if what else f"Xid {found[1]}"
    return None


def nvidia_capability(device: torch.device | str) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU, e.g. (8, 6); None: another maker's."""
    return None if torch.version.hip else torch.cuda.get_device_capability(device)


def release_workspaces() -> None:
    """Free what cuBLAS keeps for each stream that ever computed, tens of MB each; for measurements of memory."""
    if num_devices():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()


def register_host_buffer(buffer: torch.Tensor, index: int) -> bool:
    """Page-lock an existing host buffer for all GPUs, exact size, by the driver's context of GPU `index`.

    False if the system refuses, see `describe_locking`.
    """
    if buffer.nbytes == 0:
        return True
    with torch.cuda.device(index):
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 1)  # type: ignore[union-attr]  # portable
        if int(code) == 0:
            return True
        with suppress(RuntimeError):  # clear the error, or the next kernel that starts would raise it
            torch.ones(1, device="cuda").add_(1)
    return False


def unregister_host_buffer(buffer: torch.Tensor) -> None:
    """Undo `register_host_buffer`."""
    if buffer.nbytes:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[union-attr]


NUM_RING_PIECES = 4
RING_PIECE_BYTES = PINNED_RING_BYTES // NUM_RING_PIECES
"""Sizes of a ring: one piece moves while the host copies to or from another. Small, since boundaries need the rest."""


class Ring:
    """Page-locked pieces by which one direction of a link copies from or to ordinary memory, for one thread.

    Memory is ordinary where the system refuses to page-lock it. The driver copies it too, but the host copies nothing
    while a piece of it moves, and on the way down waits for all that the stream was given before.
    """

    def __init__(self, stream: torch.cuda.Stream, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`make`: host memory for a tensor, page-locked unless the system refuses."""
        self._stream, self._make = stream, make
        self._pieces: deque[tuple[torch.Tensor, torch.cuda.Event]] | None = None
        """Each with the event after which it is free, oldest first; None: not asked for yet."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Copy on the stream, which is the current one; False: nothing was copied, since there are no pieces."""
        if self._pieces is None:
            size = NUM_RING_PIECES * RING_PIECE_BYTES
            whole = self._make(torch.empty(size, dtype=torch.uint8))
            parts = whole.split(RING_PIECE_BYTES) if whole.is_pinned() else ()
            self._pieces = deque((piece, torch.cuda.Event()) for piece in parts)
        if not (self._pieces and target.is_contiguous() and source.is_contiguous()):
            return False
        down: deque[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]] = deque()
        pairs = zip(
            *(tensor.view(-1).view(torch.uint8).split(RING_PIECE_BYTES) for tensor in (target, source)), strict=True
        )
        for to, part in pairs:
            if len(down) == NUM_RING_PIECES:
                self._arrive(*down.popleft())
            piece, event = self._pieces.popleft()
            event.synchronize()
            staged = piece[: len(part)]
            staged.copy_(part, non_blocking=True)
            if source.is_cuda:
                down.append((to, staged, self._stream.record_event(event)))
            else:
                to.copy_(staged, non_blocking=True)
                self._stream.record_event(event)
            self._pieces.append((piece, event))
        while down:
            self._arrive(*down.popleft())
        return True

    @staticmethod
    def _arrive(target: torch.Tensor, staged: torch.Tensor, event: torch.cuda.Event) -> None:
        event.synchronize()
        target.copy_(staged)


class CudaBackend(Backend):
    """One worker on one GPU. The same GPU may serve several workers."""

    def __init__(self, index: int, turns: IssueTurns | None = None) -> None:
        """`turns`: taken with the other GPUs of this process; None: there are none."""
        self.device = torch.device("cuda", index)
        self._turns = turns
        self.aliases_host = False
        self.capability = nvidia_capability(self.device)
        with torch.cuda.device(self.device):
            self._compute = torch.cuda.Stream(self.device, priority=-1)
            self._up = torch.cuda.Stream(self.device)
            self._down = torch.cuda.Stream(self.device)
        self._rings = Ring(self._up, self.host_like), Ring(self._down, self.host_like)
        self._refused_bytes = sys.maxsize
        """Page-locked memory is not asked for in pieces of this size: the system refused one."""
        self._notice: str | None = None

    def take_notice(self) -> str | None:
        notice, self._notice = self._notice, None
        if notice is None and self._turns is not None:
            notice, self._turns.notice = self._turns.notice, None
        return notice

    @contextmanager
    def worker_thread(self) -> Iterator[None]:
        set_own_threads(1)
        with torch.cuda.device(self.device), torch.cuda.stream(self._compute):
            yield

    @contextmanager
    def copy_thread(self) -> Iterator[None]:
        set_own_threads(1)
        with torch.cuda.device(self.device), torch.cuda.stream(self._up):
            yield

    def compute(self) -> AbstractContextManager[None]:
        return nullcontext() if self._turns is None else self._turns.turn()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def release_unused(self) -> None:
        with torch.cuda.device(self.device), suppress(torch.AcceleratorError):  # of another device, which is lost
            torch.cuda.empty_cache()

    def give_up(self) -> None:
        if self._turns is not None:
            self._turns.begin_anew()

    def device_like(self, host: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._up):
            tensor = torch.empty_like(host, device=self.device, pin_memory=False)
        tensor.record_stream(self._compute)  # freed by the host while the compute stream may still read it
        return tensor

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes < self._refused_bytes:
            try:
                # torch keeps page-locked memory, in powers of two, for use again when all copies of it have ended
                return torch.empty_like(tensor, device="cpu", pin_memory=True)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._refused_bytes = max(1, tensor.nbytes)
                self._notice = f"{LOCK_REFUSED}; {describe_locking()}"
        return torch.empty_like(tensor, device="cpu")

    def copy_up(self, pairs: Sequence[Pair], after: DeviceEvent = None) -> DeviceEvent:
        with torch.cuda.stream(self._up):
            if after is not None:
                self._up.wait_event(after)
            for target, source in pairs:
                if source.is_pinned() or not self._rings[0].copy(target, source):
                    target.copy_(source, non_blocking=True)
            return self._up.record_event()

    def copy_down(self, pairs: Sequence[Pair]) -> DeviceEvent:
        with torch.cuda.stream(self._down):
            for target, source in pairs:
                if target.is_pinned() or not self._rings[1].copy(target, source):
                    target.copy_(source, non_blocking=True)
            return self._down.record_event()

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent]:
        # On the compute stream, in order; `cpu()` would make the host wait for the whole stream.
        return self.host_like(tensor).copy_(tensor, non_blocking=True), self.record()

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        # On the compute stream itself, in order; torch keeps the page-locked copy until it has been read.
        # An expanded tensor (a mask of several rows, say) cannot be page-locked as it is.
        tensor = tensor.contiguous()
        staged = tensor if tensor.is_pinned() else self.host_like(tensor).copy_(tensor)
        return staged.to(self.device, non_blocking=True)

    def record(self) -> DeviceEvent:
        return self._compute.record_event()

    def wait(self, event: DeviceEvent) -> None:
        if event is not None:
            self._compute.wait_event(event)

    def happens_in_s(self, event: DeviceEvent) -> float:
        if event is None or event.query():
            return 0.0
        now_s = time.perf_counter()
        asked_s: float = event.__dict__.setdefault("asked_s", now_s)
        return min(MAX_POLL_S, max(POLL_S, POLL_SHARE * (now_s - asked_s)))

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

    @property
    def peak_reserved_bytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self.device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
