"""Who did what before whom: vector clocks of host threads and streams, and the accesses to each range of bytes.

A thread or a stream is an actor, and so is each transfer of a step on its stream (`program.py`). Its clock says of
every actor up to which of its operations all has happened before. Two accesses to common bytes, one of them a write,
must be ordered by the clocks, whatever the timing of this one run was. A lock, an event or a started thread hands
clocks on; nothing else does.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

Clock = dict[int, int]  # actor -> number of its operations that have happened before

Frames = tuple[tuple[str, int, str], ...]  # (file, line, function), innermost first

STACK_DEPTH = 4
_OURS = ("roundpipe_cli", "tests/engine")
_OF_OURS: dict[str, bool] = {}  # by file


def join(clock: Clock, other: Clock) -> bool:
    """Add what `other` knows to `clock`; returns whether any of it was new."""
    is_new = False
    for actor, count in other.items():
        if clock.get(actor, 0) < count:
            clock[actor] = count
            is_new = True
    return is_new


def of_hosts(clock: Clock) -> Clock:
    """What a clock says of host threads."""
    return {actor: count for actor, count in clock.items() if actor < 0}


class Actor:
    """A host thread, a stream or a transfer."""

    def __init__(self, number: int, name: str) -> None:
        """`number`: negative for host threads."""
        self.number, self.name = number, name
        self.waited_for: Clock = {}  # of a host thread: what it has waited for itself, or what was over when it began
        self.count = 0  # of its operations so far
        self.clock: Clock = {}
        self.version = 0  # changes with the clock

    def learn(self, clock: Clock) -> None:
        """What the clock says has happened."""
        if join(self.clock, clock):
            self.version += 1

    def step(self) -> int:
        """Begin the actor's next operation; returns its number."""
        self.count += 1
        self.clock[self.number] = self.count
        self.version += 1
        return self.count


def short_stack() -> Frames:
    """The innermost frames of the product or of a test in this thread."""
    found: list[tuple[str, int, str]] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < STACK_DEPTH:
        name = frame.f_code.co_filename
        if name not in _OF_OURS:
            _OF_OURS[name] = any(part in name for part in _OURS)
        if _OF_OURS[name]:
            found.append((name, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Access:
    """One operation's use of memory."""

    actor: Actor
    count: int  # the operation's number in its actor
    operation: str
    thread: str  # host thread that issued it
    frames: Frames
    line: Any = None  # stream that it was on; None: the host
    place: int = 0  # its number among the stream's operations

    def __str__(self) -> str:
        stack = " < ".join(f"{PurePath(file).name}:{line} {name}" for file, line, name in self.frames)
        return f"{self.operation} on {self.actor.name}, issued by thread {self.thread} ({stack})"


@dataclass(slots=True)
class _Range:
    start: int
    end: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)  # by actor, since the last write
    earlier: list[tuple[Access, bool]] = field(default_factory=list)
    """(access, whether it writes) from before the bytes were given out again: on one stream they come first."""

    def part(self, start: int, end: int) -> _Range:
        return _Range(start, end, self.write, dict(self.reads), list(self.earlier))

    def accesses(self) -> list[tuple[Access, bool]]:
        """Since the bytes were given out: the last write, and the reads after it."""
        written = [] if self.write is None else [(self.write, True)]
        return [*written, *((read, False) for read in self.reads.values())]


@dataclass(frozen=True)
class Unordered:
    """Two accesses to common bytes that nothing orders, one of them a write."""

    memory: str
    start: int
    end: int
    first: Access
    first_writes: bool
    second: Access
    second_writes: bool

    def __str__(self) -> str:
        words = {True: "written by", False: "read by"}
        return (
            f"bytes {self.start} to {self.end} of {self.memory}:\n"
            f"    {words[self.first_writes]} {self.first}\n"
            f"    {words[self.second_writes]} {self.second}\n"
            "    and nothing says which comes first"
        )


class History:
    """The last accesses to each range of bytes of one piece of memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ranges: list[_Range] = []
        self._starts: list[int] = []

    def add(self, start: int, end: int, access: Access, *, writes: bool) -> list[Unordered]:
        """Note an access by an actor whose clock is up to date; returns what it is not ordered with."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._ranges[first].end <= start:
            first += 1
        last = first
        while last < len(self._ranges) and self._ranges[last].start < end:
            last += 1
        overlapped = self._ranges[first:last]
        wrong = self._conflicts(overlapped, access, writes)
        if len(overlapped) == 1 and overlapped[0].start == start and overlapped[0].end == end:
            self._note(overlapped[0], access, writes)
            return wrong
        self._replace(first, last, self._cut(overlapped, start, end, access, writes))
        return wrong

    def forget(self, start: int, end: int, known: Clock, done: dict[Any, int]) -> None:
        """The bytes are given out again: accesses are over that happened before, as the clock says, or the number of
        operations that each stream has done; those of host threads too, as storage ends with its last user there."""

        def is_over(access: Access) -> bool:
            if access.line is None or access.count <= known.get(access.actor.number, 0):
                return True
            return access.place <= done.get(access.line, -1)

        for one in self._ranges:
            if one.start < end and start < one.end:
                one.earlier = [item for item in (*one.earlier, *one.accesses()) if not is_over(item[0])]
                one.write, one.reads = None, {}

    def _conflicts(self, overlapped: list[_Range], access: Access, writes: bool) -> list[Unordered]:
        clock, wrong = access.actor.clock, []
        for one in overlapped:
            before = [*one.accesses(), *(item for item in one.earlier if item[0].line is not access.line)]
            for other, other_writes in before:
                if (writes or other_writes) and clock.get(other.actor.number, 0) < other.count:
                    wrong.append(Unordered(self.name, one.start, one.end, other, other_writes, access, writes))
        return wrong

    @staticmethod
    def _note(one: _Range, access: Access, writes: bool) -> None:
        if writes:
            one.write, one.reads, one.earlier = access, {}, []
        else:
            one.reads[access.actor.number] = access

    def _cut(self, overlapped: list[_Range], start: int, end: int, access: Access, writes: bool) -> list[_Range]:
        """The overlapped ranges with what the access changes of them."""
        made: list[_Range] = []
        if overlapped and overlapped[0].start < start:
            made.append(overlapped[0].part(overlapped[0].start, start))
        if writes:
            made.append(_Range(start, end, access))
        else:
            place = start
            for one in overlapped:
                if one.start > place:
                    made.append(_Range(place, one.start))
                made.append(one.part(max(one.start, start), min(one.end, end)))
                place = min(one.end, end)
            if place < end:
                made.append(_Range(place, end))
            for one in made:
                if one.start >= start:
                    self._note(one, access, False)
        if overlapped and overlapped[-1].end > end:
            made.append(overlapped[-1].part(end, overlapped[-1].end))
        return made

    def _replace(self, first: int, last: int, ranges: list[_Range]) -> None:
        self._ranges[first:last] = ranges
        self._starts[first:last] = [one.start for one in ranges]
