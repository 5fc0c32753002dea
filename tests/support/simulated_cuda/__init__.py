"""A simulation of `torch.cuda`: the real CUDA backend runs on it, while all tensors lie on the processor.

    with Simulation([Card(), Card()], seed=3) as machine:
        with Engine(..., [CudaBackend(0), CudaBackend(1)]) as engine: ...

Every operation of torch that any thread carries out meanwhile is noted with its stream, or with its host thread. At the
end the block fails if two accesses to common bytes were not ordered by streams, events, locks or waits. When the host
sees that an event has happened is drawn by the seed. With `lazy`, copies are put off until an event forces them, so
that whoever does not wait computes with other bytes.
"""

from __future__ import annotations

import _thread
import threading
import types
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any

import torch
from torch.utils._device import _device_constructors

from tests.support.simulated_cuda.clocks import Actor, Unordered
from tests.support.simulated_cuda.memory import BLOCK_BYTES, CachingAllocator, PageLocked
from tests.support.simulated_cuda.mode import CardMode, Machine
from tests.support.simulated_cuda.patches import Patch, Runtime, cuda_patches, tensor_patches
from tests.support.simulated_cuda.program import Transfers
from tests.support.simulated_cuda.streams import SimulatedStream, Streams
from tests.support.simulated_cuda.threads import BackwardThreads, ThreadHooks

GIB = 1024**3


@dataclass(frozen=True)
class Card:
    """A kind of GPU."""

    name: str = "Simulated 90"
    total_bytes: int = 8 * GIB
    multi_processors: int = 132
    capability: tuple[int, int] = (9, 0)
    maps_memory: bool = True  # whether segments of memory can grow; those of virtual GPUs cannot
    uuid: str = ""  # as torch has it, without `GPU-`; empty: one by the number of processors

    def properties(self) -> Any:
        return types.SimpleNamespace(
            name=self.name,
            total_memory=self.total_bytes,
            multi_processor_count=self.multi_processors,
            major=self.capability[0],
            minor=self.capability[1],
            uuid=self.uuid or f"0000-{self.multi_processors}",
        )


SMALL_CARD = Card("Simulated 75", 4 * GIB, 24, (7, 5))
GAMING_CARD = Card("Simulated 86", 8 * GIB, 82, (8, 6))


class _Actors:
    """The host threads that have been seen, and all streams."""

    def __init__(self) -> None:
        self._numbers, self._threads = count(1), count(-1, -1)
        self._of_thread = threading.local()

    def new(self, name: str) -> Actor:
        return Actor(next(self._numbers), name)

    def myself(self) -> Actor:
        """The calling thread's."""
        found: Actor | None = getattr(self._of_thread, "actor", None)
        if found is None:  # not `current_thread`, which takes locks that ask for this
            found = self._of_thread.actor = Actor(next(self._threads), f"host thread {_thread.get_ident()}")
        return found


class Simulation:
    """GPUs that are not there, for the length of a `with` block."""

    def __init__(
        self,
        cards: Sequence[Card] = (Card(),),
        seed: int = 0,  # of how late the host learns of events
        *,
        lazy: bool = False,  # put asynchronous copies off
        tolerant: bool = False,  # keep accesses without an order in `unordered` instead of failing the block
        max_locked_bytes: int | None = None,  # of host memory that may be page-locked; None: any
    ) -> None:
        actors = _Actors()
        streams = Streams(seed, actors.new, actors.myself)
        streams.lock = _thread.RLock()
        self.machine = machine = Machine(streams, lazy=lazy)
        machine.devices = [CachingAllocator(f"cuda:{index}", _whole_blocks, streams) for index in range(len(cards))]
        machine.capabilities = [card.capability for card in cards]
        machine.pinned = PageLocked("page-locked memory", _power_of_two, streams)
        for allocator in (*machine.devices, machine.pinned):
            allocator.on_return = machine.on_return
        if max_locked_bytes is not None:
            machine.pinned.limit_bytes = lambda: (
                max_locked_bytes - sum(end - first for first, end in machine.registered)
            )
        for allocator, card in zip(machine.devices, cards, strict=True):
            allocator.refuses = lambda card=card: machine.grows_segments and not card.maps_memory
        self._tolerant = tolerant
        self._actors = actors
        self._hooks = ThreadHooks(actors.myself, lambda: CardMode(machine))
        self._runtime, self._cards = Runtime(machine, max_locked_bytes), cards
        self._stack = ExitStack()

    @property
    def unordered(self) -> list[Unordered]:
        """Pairs of accesses that nothing orders, the first ones."""
        return self.machine.unordered

    def __enter__(self) -> Simulation:
        assert not hasattr(SimulatedStream, "owner"), "one simulation at a time"
        _device_constructors()  # which torch keeps from here on: functions that a device context changes, unpatched
        SimulatedStream.owner = self.machine.streams
        self._stack.callback(lambda: delattr(SimulatedStream, "owner"))
        patches = cuda_patches(self.machine, self._cards, self._runtime)
        transfers = Transfers(self.machine, self._actors.new)
        for patch in (*patches, *self._hooks.patches(), *transfers.patches()):
            self._put(patch)
        backward_threads = BackwardThreads(len(self._cards))  # whose locks hand clocks on
        self._stack.callback(backward_threads.end)
        for patch in tensor_patches(self.machine, backward_threads):
            self._put(patch)
        self._stack.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        self._stack.enter_context(CardMode(self.machine))
        return self

    def _put(self, patch: Patch) -> None:
        owner, name, value = patch
        if name in vars(owner):
            self._stack.callback(setattr, owner, name, vars(owner)[name])
        else:
            self._stack.callback(delattr, owner, name)
        setattr(owner, name, value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self.unordered and not self._tolerant:
            text = "\n\n".join(map(str, self.unordered[:4]))
            raise AssertionError(f"{len(self.unordered)} pairs of accesses that nothing orders\n{text}") from error


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _power_of_two(num_bytes: int) -> int:
    return max(BLOCK_BYTES, 1 << (num_bytes - 1).bit_length())
