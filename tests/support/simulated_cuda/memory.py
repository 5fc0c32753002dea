"""Memory of simulated devices, and page-locked host memory: caching allocators that use freed blocks again at once.

As torch's allocators do, blocks lie in segments, each stream of a device has a pool, and a freed block goes back to its
pool although the device may still use it: `record_stream` is what holds it back. Freed bytes become 0xFF, which is NaN
in every floating type and -1 in the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.support.simulated_cuda.clocks import Clock, History, join
from tests.support.simulated_cuda.streams import Line, Marker, Streams

Pool = Line | None  # the stream whose memory it is; None: page-locked host memory
POISON = 0xFF
BLOCK_BYTES, SMALL_BYTES, SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 512, 2**20, 2 * 2**20, 20 * 2**20
"""As torch: rounding of a block, the largest small block, segments for small blocks and for those up to 10 MiB."""


class Segment:
    """A piece of memory that was asked of the driver, cut into blocks."""

    def __init__(self, name: str, num_bytes: int, pool: Pool) -> None:
        raw = np.empty(num_bytes + BLOCK_BYTES, dtype=np.uint8)
        start = -raw.ctypes.data % BLOCK_BYTES
        self.bytes = raw[start : start + num_bytes]
        self.pool = pool
        self.history = History(name)
        self.end = 0  # of the bytes that were ever given out
        self.num_used = 0  # blocks that are not free
        self.whole = torch.from_numpy(self.bytes)  # for copies that happen later, whoever has the bytes by then


@dataclass(eq=False)
class Block:
    """A piece of a segment, in use or free."""

    segment: Segment
    start: int
    num_bytes: int
    used_by: dict[int, Marker] = field(default_factory=dict)  # other streams: where they last used it
    recorded: set[int] = field(default_factory=set)  # streams that `record_stream` named
    known: Clock = field(default_factory=dict)  # what had happened when it became free
    done: dict[Line, int] = field(default_factory=dict)  # stream -> operations over before its reuse

    def poison(self) -> None:
        """Write over the block, behind the copies that its own stream has put off: those may still use it."""
        line = self.segment.pool
        if line is not None and line.deferred:
            line.deferred.append((line.count, self._fill))
        else:
            self._fill()

    def _fill(self) -> None:
        self.segment.bytes[self.start : self.start + self.num_bytes].fill(POISON)


class Lease(np.ndarray):  # type: ignore[type-arg]
    """A block as the buffer of one torch storage; with the storage's end the block is free."""

    block: Block | None = None
    end: Callable[[Block], None] | None = None

    def __del__(self) -> None:
        if self.block is not None and self.end is not None:
            if not (self.block.used_by or self.block.recorded):  # else nobody gets it before those are done
                self.block.poison()
            self.end(self.block)


def lease_of(block: Block, num_bytes: int, end: Callable[[Block], None]) -> torch.Tensor:
    """The block's first bytes as a tensor; `end` is called once its storage is freed, by whichever thread does that."""
    lease = block.segment.bytes[block.start : block.start + num_bytes].view(Lease)
    lease.block, lease.end = block, end
    return torch.frombuffer(lease, dtype=torch.uint8)


class CachingAllocator:
    """Blocks of one device, or of page-locked host memory."""

    def __init__(self, name: str, round_bytes: Callable[[int], int], streams: Streams) -> None:
        self.name, self._round_bytes, self._streams = name, round_bytes, streams
        self.limit_bytes: Callable[[], int] = lambda: 1 << 62  # that may be reserved, now
        self.refuses: Callable[[], bool] = lambda: False  # whether the driver cannot give memory that way
        self._segments: list[Segment] = []
        self._free: dict[tuple[Pool, int], list[Block]] = {}  # by pool and size
        self._returned: deque[Block] = deque()  # freed, perhaps amid something else, not seen to yet
        self._waiting: list[Block] = []  # freed, and held back for streams that use them
        self.on_return: Callable[[Block], None] = lambda block: None  # notes where streams are that it waits for
        self.allocated_bytes = self.peak_bytes = self.peak_reserved_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(len(segment.bytes) for segment in self._segments)

    def allocate(self, num_bytes: int, pool: Pool) -> tuple[torch.Tensor, Block]:
        """A block as a tensor of so many bytes, at least one."""
        self.tidy()
        size = self._round_bytes(max(1, num_bytes))
        blocks = self._free.setdefault((pool, size), [])
        block = blocks.pop() if blocks else self._cut(size, pool)
        block.segment.num_used += 1
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        block.segment.history.forget(block.start, block.start + size, block.known, block.done)
        block.used_by, block.recorded, block.known, block.done = {}, set(), {}, {}
        return lease_of(block, max(1, num_bytes), self._give_back), block

    def _give_back(self, block: Block) -> None:
        """Called by whichever thread frees a block, its last holder, perhaps in the middle of something else."""
        block.known = dict(self._streams.myself().clock)
        for line in self._streams.lines:
            join(block.known, dict(line.seen))  # a copy: this thread may hold no lock
        self._returned.append(block)

    def tidy(self) -> None:
        """See to blocks that were freed, and to those whose streams are done with them."""
        while self._returned:
            block = self._returned.popleft()
            self.allocated_bytes -= block.num_bytes
            self.on_return(block)
            self._waiting.append(block)
        held = []
        for block in self._waiting:
            if all(marker.poll(teaches=False) for marker in block.used_by.values()):
                for marker in block.used_by.values():
                    join(block.known, marker.clock)
                    block.done[marker.line] = max(marker.count, block.done.get(marker.line, 0))
                block.poison()
                block.segment.num_used -= 1
                self._free.setdefault((block.segment.pool, block.num_bytes), []).append(block)
            else:
                held.append(block)
        self._waiting = held

    def release_unused(self) -> None:
        """Give segments without a block in use back to the driver, once streams are done with what was freed."""
        self.tidy()
        for block in self._waiting:
            for marker in block.used_by.values():
                marker.complete()
        self.tidy()
        gone = {id(segment) for segment in self._segments if not segment.num_used}
        self._segments = [segment for segment in self._segments if id(segment) not in gone]
        for blocks in self._free.values():
            blocks[:] = [block for block in blocks if id(block.segment) not in gone]

    def _cut(self, size: int, pool: Pool) -> Block:
        """A block from bytes never given out."""
        for segment in self._segments:
            if segment.pool == pool and len(segment.bytes) - segment.end >= size:
                break
        else:
            segment = self._reserve(size, pool)
        block = Block(segment, segment.end, size)
        segment.bytes[segment.end : segment.end + size].fill(POISON)
        segment.end += size
        return block

    def _out_of_memory(self, num_bytes: int) -> RuntimeError:
        return torch.OutOfMemoryError(f"{self.name} out of memory. Tried to allocate {num_bytes} bytes")

    def _reserve(self, size: int, pool: Pool) -> Segment:
        wanted = SEGMENT_BYTES if size <= SMALL_BYTES else LARGE_SEGMENT_BYTES
        if size > LARGE_SEGMENT_BYTES // 2:
            wanted = -(-size // SEGMENT_BYTES) * SEGMENT_BYTES
        return self._segment(size, wanted, pool)

    def _segment(self, size: int, wanted: int, pool: Pool) -> Segment:
        """Ask the driver for `wanted` bytes, for a block of `size`."""
        if self.refuses():
            raise RuntimeError("CUDA driver error: operation not supported")
        if self.reserved_bytes + wanted > self.limit_bytes():
            self.release_unused()
            if self.reserved_bytes + wanted > self.limit_bytes():
                raise self._out_of_memory(size)
        segment = Segment(f"a segment of {self.name}", wanted, pool)
        self._segments.append(segment)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return segment


class PageLocked(CachingAllocator):
    """Page-locked host memory: every block is asked of the driver for itself, and refused in the driver's words."""

    def _out_of_memory(self, num_bytes: int) -> RuntimeError:
        return RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    def _reserve(self, size: int, pool: Pool) -> Segment:
        return self._segment(size, size, pool)
