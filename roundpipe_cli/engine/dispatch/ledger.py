"""Which operations of a program may be issued: pure decisions, no thread, no clock. PROTOCOL.md explains it.

An operation may be issued to its device once all that it waits for has been issued (and so has an event); whether
those events have happened is the device's business (compute) or the lane's (transfers).
"""

from __future__ import annotations

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
