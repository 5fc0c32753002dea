"""Streams and events. Work is carried out when it is issued; what is random is when the host sees that it is done.

A lazy simulation puts asynchronous copies off: they are carried out when an event behind them is waited for, and not
before. Whoever reads too early then reads other bytes.
"""

from __future__ import annotations

import _thread
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.support.simulated_cuda.clocks import Actor, Clock, join, of_hosts

MAX_POLLS = (1, 2, 4, 12)
"""Times that the host may ask for an event before it is told that it has happened; each stream has a limit of its own,
so that one is late and another is not."""


class Line:
    """One stream's work, in order."""

    def __init__(self, device: int, actor: Actor, max_polls: int) -> None:
        self.device, self.actor, self.max_polls = device, actor, max_polls
        self.count = 0  # operations so far
        self.completed = 0  # operations that the host knows to be done
        self.seen: Clock = {}  # of its transfers, those that the host knows to be done
        self.by_program = False  # a worker's: its order with other streams comes from the program (`program.py`)
        self.carries = False  # it carries transfers
        self.issuer = (0, 0, 0)  # thread that issued the last operation, and what it knew then
        self.transfers: list[Actor] = []  # those on it that its own actor does not know of yet
        self.deferred: deque[tuple[int, Callable[[], None]]] = deque()  # (operation, what it does): put off
        self.ends_at: float = math.inf  # the device hangs: operations from here on never end

    def join_transfers(self) -> None:
        """What follows on the stream, and belongs to no transfer, comes after all of them."""
        for transfer in self.transfers:
            self.actor.learn(transfer.clock)
        self.transfers.clear()

    def run_until(self, count: int) -> None:
        """Carry out what was put off, up to operation `count`."""
        while self.deferred and self.deferred[0][0] <= count:
            self.deferred.popleft()[1]()


class Marker:
    """A point in a stream's work."""

    def __init__(self, line: Line, actor: Actor, myself: Callable[[], Actor], polls: int) -> None:
        """`actor`: whose work is done with it, the stream's or a transfer's."""
        self.line, self._actor, self._myself, self._polls_left = line, actor, myself, polls
        self.count, self.clock = line.count, dict(actor.clock)
        self.time_s = time.perf_counter()
        self.seen_by: set[int] = set()  # host threads that know that the stream has come here

    @property
    def is_done(self) -> bool:
        """Whether the host knows that the stream has come here."""
        return self.count <= self.line.completed

    def poll(self, *, teaches: bool = True) -> bool:
        """Ask whether the stream has come here; after a few times it has. `teaches`: the calling thread acts on it."""
        if self.count > self.line.ends_at:
            return False
        if not self.is_done and self._polls_left > 0:
            self._polls_left -= 1
            return False
        self._reached()
        if teaches:
            self._myself().learn(self.clock)
        return True

    def _reached(self) -> None:
        self.line.run_until(self.count)
        self.line.completed = max(self.line.completed, self.count)
        if self._actor is not self.line.actor:
            join(self.line.seen, {self._actor.number: self.clock.get(self._actor.number, 0)})
        self.seen_by.add(self._myself().number)

    def complete(self) -> None:
        """The host waits for this point."""
        self._reached()
        thread = self._myself()
        thread.learn(self.clock)
        join(thread.waited_for, self.clock)


class Streams:
    """All streams of a simulation, and which of them each host thread uses."""

    def __init__(self, seed: int, new_actor: Callable[[str], Actor], myself: Callable[[], Actor]) -> None:
        self.random = random.Random(seed)
        self._new_actor, self.myself = new_actor, myself
        self._of_thread = threading.local()
        self._defaults: dict[int, SimulatedStream] = {}
        self.lines: list[Line] = []
        self.floor: Clock = {}  # what was over when the step under way began
        self.lock: Any = None  # the simulation's
        self.failed: set[int] = set()  # devices for which the driver has an error, from now on for every call
        self.num_freed_on_failed = 0
        """Blocks that were freed on those while another stream might use them: torch would ask the driver, and end."""
        self._left: dict[int, tuple[int, Callable[[int], None]]] = {}  # device -> operations until it fails or hangs

    def break_after(self, device: int, num_operations: int, how: Callable[[int], None]) -> None:
        """`fail`, `fail_all` or `hang`, with the last of so many operations of a device."""
        self._left[device] = num_operations, how

    def fail(self, device: int) -> None:
        self.failed.add(device)

    def fail_all(self, device: int) -> None:
        self.failed |= {line.device for line in self.lines}

    def hang(self, device: int) -> None:
        for line in self.lines:
            if line.device == device:
                line.ends_at = line.count

    def launch(self, device: int) -> None:
        """An operation is given to a device, which may fail with it."""
        if device in self._left:
            left, how = self._left.pop(device)
            if left:
                self._left[device] = left - 1, how
            else:
                how(device)
        self.check(device)

    def check(self, device: int) -> None:
        """The driver is asked for something of a device; raises as `launch`."""
        if device in self.failed:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    def wait_for_ever_if_hung(self, line: Line) -> None:
        """The host waits for a stream; called without the lock."""
        self.check(line.device)
        if line.count > line.ends_at:
            lock = _thread.allocate_lock()
            lock.acquire()
            lock.acquire()

    def line(self, device: int) -> Line:
        name = f"stream {sum(line.device == device for line in self.lines)} of cuda:{device}"
        self.lines.append(Line(device, self._new_actor(name), self.random.choice(MAX_POLLS)))
        return self.lines[-1]

    # -- who issues ----------------------------------------------------------------------------------------------
    def transfer_on(self, line: Line) -> Actor | None:
        """The transfer of a step that the calling thread works at, if that is on this stream."""
        return getattr(self._of_thread, "transfer", None) if line.carries else None

    @property
    def looks(self) -> bool:
        """Whether the calling thread asks for events on behalf of transfers, which `program.py` then tells."""
        return getattr(self._of_thread, "looks", False)

    @looks.setter
    def looks(self, value: bool) -> None:
        self._of_thread.looks = value

    @contextmanager
    def working_at(self, transfer: Actor) -> Iterator[None]:
        self._of_thread.transfer = transfer
        try:
            yield
        finally:
            self._of_thread.transfer = None

    def issuer(self, line: Line) -> Actor:
        """Whose next operation on the stream it is, with all in its clock that certainly happens before.

        A worker's streams learn of the host what it did to its memory, and what it waited for. That some thread once
        saw an event there, and that another took a lock after it, may be otherwise in the next run.
        """
        thread, transfer = self.myself(), self.transfer_on(line)
        if transfer is not None:  # a chunk follows the one before
            transfer.learn(thread.waited_for)
            transfer.learn({thread.number: thread.count})
            if transfer not in line.transfers:
                line.transfers.append(transfer)
            return transfer
        line.join_transfers()
        known = thread.number, thread.version, id(self.floor)
        if line.issuer == known:
            return line.actor
        line.issuer = known
        if line.by_program:
            for clock in (of_hosts(thread.clock), thread.waited_for, self.floor):
                line.actor.learn(clock)
        else:
            line.actor.learn(thread.clock)
        return line.actor

    @property
    def device(self) -> int:
        """The calling thread's current device."""
        return int(getattr(self._of_thread, "device", 0))

    @device.setter
    def device(self, index: int) -> None:
        self._of_thread.device = index

    def current(self, device: int) -> SimulatedStream:
        """The calling thread's current stream of a device."""
        chosen: dict[int, SimulatedStream] = self._of_thread.__dict__.setdefault("streams", {})
        return chosen.get(device) or self.default(device)

    def choose(self, stream: SimulatedStream) -> None:
        self._of_thread.__dict__.setdefault("streams", {})[stream.device.index] = stream

    def default(self, device: int) -> SimulatedStream:
        with self.lock:
            if device not in self._defaults:
                self._defaults[device] = SimulatedStream(device, owner=self)
            return self._defaults[device]

    def marker(self, line: Line) -> Marker:
        actor = self.transfer_on(line)
        if actor is None:
            line.join_transfers()
        return Marker(line, actor or line.actor, self.myself, self.random.randrange(line.max_polls))

    def synchronize(self, line: Line) -> None:
        self.marker(line).complete()


class SimulatedStream:
    """In place of `torch.cuda.Stream`."""

    owner: Streams  # of the simulation that is on

    def __init__(self, device: Any = None, priority: int = 0, *, owner: Streams | None = None) -> None:
        self._streams = owner or type(self).owner
        self.device = torch.device("cuda", index_of(device, self._streams))
        self.priority = priority
        with self._streams.lock:
            self.line = self._streams.line(self.device.index)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = SimulatedEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        self._streams.check(self.device.index)
        if event.marker is not None:
            with self._streams.lock:
                event.marker.line.run_until(event.marker.count)
                (self._streams.transfer_on(self.line) or self.line.actor).learn(event.marker.clock)

    def synchronize(self) -> None:
        self._streams.wait_for_ever_if_hung(self.line)
        with self._streams.lock:
            self._streams.synchronize(self.line)


class SimulatedEvent:
    """In place of `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.marker: Marker | None = None
        self._is_timed = enable_timing
        self._streams = SimulatedStream.owner

    def record(self, stream: SimulatedStream | None = None) -> None:
        stream = self._streams.current(self._streams.device) if stream is None else stream
        self._streams.check(stream.line.device)
        with self._streams.lock:
            self.marker = self._streams.marker(stream.line)

    def query(self) -> bool:
        if self.marker is not None:
            self._streams.check(self.marker.line.device)
        with self._streams.lock:
            return self.marker is None or self.marker.poll(teaches=not self._streams.looks)

    def synchronize(self) -> None:
        if self.marker is not None:
            self._streams.wait_for_ever_if_hung(self.marker.line)
        with self._streams.lock:
            if self.marker is not None:
                self.marker.complete()

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Milliseconds; raises as the driver, for events that are not timed or have not happened."""
        if not (self._is_timed and end._is_timed) or self.marker is None or end.marker is None:
            raise ValueError("Both events must be recorded with enable_timing before calculating elapsed time")
        if not (self.marker.is_done and end.marker.is_done):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (end.marker.time_s - self.marker.time_s)


@contextmanager
def chosen_device(device: Any) -> Iterator[None]:
    """In place of `torch.cuda.device`."""
    streams = SimulatedStream.owner
    before, streams.device = streams.device, index_of(device, streams)
    try:
        yield
    finally:
        SimulatedStream.owner.device = before


@contextmanager
def chosen_stream(stream: SimulatedStream | None) -> Iterator[None]:
    """In place of `torch.cuda.stream`: the stream's device is the current one meanwhile."""
    if stream is None:
        yield
        return
    streams = SimulatedStream.owner
    before = streams.device, streams.current(stream.device.index)
    streams.device = stream.device.index
    streams.choose(stream)
    try:
        yield
    finally:
        SimulatedStream.owner.choose(before[1])
        SimulatedStream.owner.device = before[0]


def index_of(device: Any, streams: Streams) -> int:
    """Index of a device as torch lets callers name it."""
    if device is None:
        return streams.device
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return streams.device if index is None else int(index)
