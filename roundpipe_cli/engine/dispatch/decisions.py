"""Decides what is issued and carried next: pure (events in, instructions out; no thread, no clock).

An operation may be issued to its device once all that it waits for has been issued (and so has an event); whether
those events have happened is the device's business (compute) or the lane's (transfers). PROTOCOL.md explains it.

One queue per worker and direction. A transfer enters it when everything that it waits for has happened, so nothing on
the device's stream ever waits for anything but the link. It goes in chunks, the most urgent transfer first; one that
turns up later but is more urgent overtakes at the next chunk border. Few chunks are in flight, or overtaking would
come too late:

    queue   weights 3 4 5 6 ...     boundary enters       boundary goes next     weights go on
    stream  [weights 1][weights 2]                        [boundary]             [weights 3]
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe_cli.schedule.program import Op, Program


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
