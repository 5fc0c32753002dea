"""Decides what is issued and carried next: pure (events in, instructions out; no thread, no clock).

One queue per worker and direction. A transfer enters it when everything that it waits for has happened, so nothing on
the device's stream ever waits for anything but the link. It goes in chunks, the most urgent transfer first; one that
turns up later but is more urgent overtakes at the next chunk border. Few chunks are in flight, or overtaking would
come too late:

    queue   weights 3 4 5 6 ...     boundary enters       boundary goes next     weights go on
    stream  [weights 1][weights 2]                        [boundary]             [weights 3]
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from roundpipe_cli.schedule.program import Op, Program

# State that all threads of a step share: a lock, an abort, and the time of the last progress.


class AbortedError(Exception):
    """Another thread failed and its error will be shown: leave without a message."""


class Progress:
    """Wakes waiting threads, spreads an abort and reports progress to the watchdog, all under one lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.condition = threading.Condition(self.lock)
        self._conditions = [self.condition]
        self.aborted = False
        self.last_s = time.monotonic()

    def new_condition(self) -> threading.Condition:
        """A condition for one thread on the common lock, so that its events wake no other thread."""
        condition = threading.Condition(self.lock)
        with self.lock:
            self._conditions.append(condition)
        return condition

    def abort(self) -> None:
        with self.lock:
            self.aborted = True
            for condition in self._conditions:
                condition.notify_all()

    def moved(self) -> None:
        """Say that something has happened."""
        with self.lock:
            self.last_s = time.monotonic()
            self.condition.notify_all()

    def wait_for(self, ready: Callable[[], bool], condition: threading.Condition | None = None) -> None:
        """Block until `ready()` is true, which is called with the lock held.

        Args:
            condition: one of `new_condition`'s; None: the one that `moved` notifies.

        Raises:
            AbortedError: another thread of the step failed.
        """
        condition = condition or self.condition
        with condition:
            condition.wait_for(lambda: self.aborted or ready())
            if self.aborted:
                raise AbortedError


# The interface between the dispatcher and the code that carries operations out.

DispatchEvent = Any
"""A point in a device's work; None: it has already happened."""
NOBODY = -1
"""In place of a worker, for the host's updates."""


class TransferChunk(NamedTuple):
    """A piece of a transfer."""

    num_bytes: int
    content: Any
    """Data that the `Work` that made the chunk needs to copy it."""


class Work(Protocol):
    """Carries out the operations of one worker."""

    lanes: tuple[str, ...]
    """Lanes that have a thread."""

    def compute_thread(self) -> AbstractContextManager[None]:
        """Prepare the current thread for issuing compute operations."""

    def lane_thread(self) -> AbstractContextManager[None]:
        """Prepare the current thread for issuing transfers."""

    def begin_part(self, part: Any) -> None:
        """Begin a step; the compute thread calls this before any other thread of the worker touches the step.

        Args:
            part: what `StepRun.parts` has for this worker.
        """

    def run(self, op: Op, ready: Sequence[DispatchEvent], late: Sequence[DispatchEvent]) -> DispatchEvent:
        """Issue a compute operation behind its events (`late`: of `late_deps`); returns the event of its end."""

    def prepare(self, op: Op, after: Sequence[DispatchEvent]) -> Sequence[TransferChunk]:
        """The chunks of a transfer whose inputs have happened; none where nothing is to be moved."""

    def copy(self, op: Op, chunk: TransferChunk) -> DispatchEvent:
        """Issue one chunk; returns the event of its arrival."""

    def issued(self, op: Op, event: DispatchEvent) -> None:
        """Note that all chunks of a transfer have been issued; it has arrived once `event` has happened."""

    def ended(self, op: Op) -> None:
        """Note that a transfer has arrived."""

    def happens_in_s(self, event: DispatchEvent) -> float:
        """0 if `event` has happened, else the seconds after which to ask again."""

    def where(self, op: Op, *, weights: bool) -> str:
        """The place of an error, for its message; `weights`: while waiting for the weights of `op`."""

    def drain(self) -> None:
        """Block until all issued work is done."""

    def reset(self) -> None:
        """Drop what a step left, which may have ended early."""


# Which operations of a program may be issued: pure decisions, no thread, no clock. PROTOCOL.md explains it.
#
# An operation may be issued to its device once all that it waits for has been issued (and so has an event); whether
# those events have happened is the device's business (compute) or the lane's (transfers).


@dataclass(frozen=True)
class Dependencies:
    """The dependencies between a program's operations; made once and used for every step."""

    num_missing: tuple[int, ...]
    """Per operation: the number of operations that it waits for."""
    followers: tuple[tuple[int, ...], ...]


def links_of(program: Program) -> Dependencies:
    """The dependencies of a program, turned around."""
    followers: list[list[int]] = [[] for _ in program.ops]
    for op in program.ops:
        for dep in (*op.deps, *op.late_deps):
            followers[dep].append(op.id)
    counts = tuple(len(op.deps) + len(op.late_deps) for op in program.ops)
    return Dependencies(counts, tuple(tuple(row) for row in followers))


class Ledger:
    """Record of what has been issued in one step. Operations beyond the program's own may be added on the way."""

    def __init__(self, program: Program, links: Dependencies) -> None:
        self.ops: list[Op] = list(program.ops)
        self.num_missing = list(links.num_missing)
        self.events: list[Any] = [None] * len(self.ops)
        self.is_issued = bytearray(len(self.ops))
        self._followers = links.followers
        self._released: dict[int, Any] = {}

    def issuable(self) -> list[int]:
        """Operations that wait for no other."""
        return [op_id for op_id, count in enumerate(self.num_missing) if not count]

    def issue(self, op_id: int, event: Any) -> list[int]:
        """`op_id` is on its stream, `event` comes after it. Returns what waits for nothing else any more."""
        assert not self.is_issued[op_id] and not self.num_missing[op_id], f"operation {op_id} issued out of turn"
        self.is_issued[op_id] = 1
        self.events[op_id] = event
        found = []
        for follower in self.followers(op_id):
            if follower in self._released:
                continue
            self.num_missing[follower] -= 1
            if not self.num_missing[follower]:
                found.append(follower)
        return found

    def release(self, op_id: int, event: Any) -> None:
        """Let the transfer `op_id` start once `event` has happened, before the operation that feeds it has ended."""
        assert not self.is_issued[op_id] and op_id not in self._released
        self._released[op_id] = event
        self.num_missing[op_id] = 0

    def hold(self, op_id: int) -> None:
        """Let `op_id` wait for something outside the program too, until as many calls of `let_go`."""
        self.num_missing[op_id] += 1

    def let_go(self, op_id: int) -> bool:
        """Undo one `hold`. Returns whether `op_id` waits for nothing else any more."""
        self.num_missing[op_id] -= 1
        return not self.num_missing[op_id]

    def add(self, op: Op, event: Any) -> None:
        """One more transfer, which waits for `event` only; its id is the next one."""
        assert op.id == len(self.ops)
        self.ops.append(op)
        self.num_missing.append(0)
        self.events.append(None)
        self.is_issued.append(0)
        self._released[op.id] = event

    def followers(self, op_id: int) -> tuple[int, ...]:
        """Operations that wait for `op_id`."""
        return self._followers[op_id] if op_id < len(self._followers) else ()

    def inputs(self, op_id: int) -> Sequence[tuple[int, Any]]:
        """(operation waited for, its event) of everything that `op_id` waits for; -1 for an event of no operation."""
        if op_id in self._released:
            return [(-1, self._released[op_id])]
        op = self.ops[op_id]
        return [(dep, self.events[dep]) for dep in (*op.deps, *op.late_deps)]


MAX_IN_FLIGHT = 2
"""Chunks on a stream at a time: one moves, one follows without a gap."""


class TransferQueue:
    """The transfers of one direction of one worker's link."""

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self._max_in_flight = max_in_flight
        self._ready: list[tuple[tuple[int, int], int, int]] = []
        """Heap of (priority, order of arrival, id)."""
        self._chunks_left: dict[int, int] = {}
        self._num_arrived = 0
        self.num_in_flight = 0

    def enter(self, transfer: int, priority: tuple[int, int], num_chunks: int) -> None:
        """Put a transfer, whose inputs have all happened, into the queue."""
        assert num_chunks > 0 and transfer not in self._chunks_left
        self._num_arrived += 1
        self._chunks_left[transfer] = num_chunks
        heapq.heappush(self._ready, (priority, self._num_arrived, transfer))

    def next(self) -> tuple[int, bool] | None:
        """Put the next chunk in flight: (transfer, whether it is its last chunk); None: nothing may go now."""
        if not self._ready or self.num_in_flight >= self._max_in_flight:
            return None
        transfer = self._ready[0][2]
        self.num_in_flight += 1
        self._chunks_left[transfer] -= 1
        last = not self._chunks_left[transfer]
        if last:
            heapq.heappop(self._ready)
            del self._chunks_left[transfer]
        return transfer, last

    def ended(self) -> None:
        """The oldest chunk in flight has arrived."""
        assert self.num_in_flight > 0
        self.num_in_flight -= 1


@dataclass(slots=True)
class TransferRecord:
    """Times at which a transfer began to move and was seen to have arrived, by `time.perf_counter`."""

    op: Op
    num_bytes: int
    start_s: float = 0.0
    end_s: float = 0.0
