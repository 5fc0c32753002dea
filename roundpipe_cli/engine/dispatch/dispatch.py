"""The dispatcher: threads that issue a program's operations to devices, in order, by priority, behind their events.

    worker r   compute thread   issues compute[r] in order: each once all that it waits for has been issued, then lets
                                the device wait for their events
    up r       lane thread      issues what goes up to worker r: weights, gradient sums, boundaries
    down r     lane thread      issues what comes down: boundaries, weight gradients
    host       lane thread      the host's updates, where a program has them

It knows no tensors and no device: what an operation does is a `Work`'s business, which the engine supplies with
mathematics and the emulation with costs. `pool.py` has the compute threads. PROTOCOL.md says why the order that this
gives is safe. An exception in any thread is put into the results as a value; the caller raises it, once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from roundpipe_cli.engine.dispatch.ledger import Dependencies, Ledger
from roundpipe_cli.engine.dispatch.progress import AbortedError, Progress
from roundpipe_cli.engine.dispatch.transfer import TransferOptions, TransferQueue, TransferRecord
from roundpipe_cli.faults import fault
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.operations import WEIGHTS, Op, Program
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP

DispatchEvent = Any
"""A point in a device's work; None has happened."""

MEMORY_HINT = "lower micro_batch_size or max_seq_length, set pipeline.recompute=layer, or on_oom=adapt"
NOBODY = -1
"""The worker of host updates."""


class TransferChunk(NamedTuple):
    """A piece of a transfer."""

    num_bytes: int
    content: Any
    """What the `Work` that made it needs to copy it."""


class Work(Protocol):
    """What the operations of one worker (or of the host) do."""

    lanes: tuple[str, ...]
    """Lanes that have a thread."""

    def compute_thread(self) -> AbstractContextManager[None]:
        """Set the current thread up to issue compute."""

    def lane_thread(self) -> AbstractContextManager[None]:
        """Set the current thread up to issue transfers."""

    def take_up(self, part: Any) -> None:
        """A step comes next: its compute thread calls this before any other of its threads touches the step.

        Args:
            part: what `StepRun.parts` has for this worker.
        """

    def begin(self, op: Op) -> None:
        """`op` comes next in the compute thread."""

    def run(self, op: Op, ready: Sequence[DispatchEvent], late: Sequence[DispatchEvent]) -> DispatchEvent:
        """Issue a compute operation behind its events (`late`: of `late_deps`); returns when it is done."""

    def prepare(self, op: Op, after: Sequence[DispatchEvent]) -> Sequence[TransferChunk]:
        """The chunks of a transfer whose inputs have happened; none where nothing is to be moved."""

    def copy(self, op: Op, chunk: TransferChunk) -> DispatchEvent:
        """Issue one chunk; returns when it is there."""

    def issued(self, op: Op, event: DispatchEvent) -> None:
        """All chunks of a transfer have been issued; it is there once `event` has happened."""

    def ended(self, op: Op) -> None:
        """A transfer has arrived."""

    def arrival(self, dep: Op, op: Op, event: DispatchEvent) -> DispatchEvent:
        """When what `dep` made, once `event` has happened, is there for `op`."""

    def happens_in_s(self, event: DispatchEvent) -> float:
        """0 if `event` has happened, else seconds after which to look again."""

    def happened_at_s(self, event: DispatchEvent, now_s: float) -> float:
        """When an event that has happened did so (`time.perf_counter`); `now_s` where nobody knows."""

    def where(self, op: Op, *, weights: bool) -> str:
        """Where an error happened, for its message; `weights`: while waiting for the weights of `op`."""

    def drain(self) -> None:
        """Block until all issued work is done."""

    def busy_s(self) -> float:
        """Seconds for which the device is known to be busy; 0 where nobody knows."""

    def reset(self) -> None:
        """A step is over, perhaps before its end: drop what it left."""


@dataclass
class WorkResult:
    """What came of one worker's part of a step."""

    worker: int
    error: BaseException | None = None
    where: str = ""


@dataclass
class _LaneState:
    """What a lane's thread shares with the others during a step, under the step's lock."""

    condition: threading.Condition
    inbox: list[int] = field(default_factory=list)
    """Transfers all of whose inputs have been issued."""
    num_left: int = 0
    """Transfers not issued yet."""
    closed: bool = False
    """Nothing will be added any more."""
    has_left: bool = False


@dataclass
class _WorkerState:
    condition: threading.Condition
    waiting_for: int = -1
    """Operation that the compute thread waits for, to be issuable or, if it is a transfer, issued."""
    failed: dict[int, tuple[BaseException, bool]] = field(default_factory=dict)
    """Compute operation -> error of a transfer that it needs, and whether that carries its weights."""


class StepRun:
    """One program on its way: what its threads share."""

    def __init__(
        self, program: Program, links: Dependencies, step: int, progress: Progress, works: dict[int, Work]
    ) -> None:
        self.program, self.step, self.progress = program, step, progress
        self.ledger = Ledger(program, links)
        self.records: list[TransferRecord] = []
        self.errors: list[WorkResult] = []
        self.parts: dict[int, Any] = {}
        """Worker -> what its `Work` is to take up."""
        self.results: queue.Queue[WorkResult] = queue.Queue()
        """One of each worker, and one of the host where it has work."""
        self.is_abandoned = False
        """Nobody waits for the step any more: a thread of it may never return."""
        self._works = works
        self._lanes = {
            (lane, worker): _LaneState(progress.new_condition(), closed=lane == HOST)
            for worker, work in works.items()
            for lane in work.lanes
        }
        self._workers = [_WorkerState(progress.new_condition()) for _ in program.compute]
        for op in program.ops:
            if (op.lane, op.worker) in self._lanes:
                self._lanes[op.lane, op.worker].num_left += 1
        with progress.lock:
            for op_id in self.ledger.issuable():
                self._announce(op_id)

    def lane(self, lane: str, worker: int) -> _LaneState:
        """The shared state of one lane."""
        return self._lanes[lane, worker]

    def _announce(self, op_id: int) -> None:
        """All that `op_id` waits for has been issued. With the lock held, or before the threads start."""
        op = self.ledger.ops[op_id]
        if op.lane == COMPUTE:
            state = self._workers[op.worker]
            if state.waiting_for == op_id:
                state.condition.notify()
            return
        lane = self._lanes.get((op.lane, op.worker))
        if lane is not None:  # the engine's steps end before the host's updates, which are not its business
            lane.inbox.append(op_id)
            lane.condition.notify()

    def issue(self, op_id: int, event: DispatchEvent) -> None:
        """`op_id` has been issued; whoever waits for it may go on."""
        op = self.ledger.ops[op_id]
        with self.progress.lock:
            for follower in self.ledger.issue(op_id, event):
                self._announce(follower)
            if op.lane != COMPUTE:
                self._lanes[op.lane, op.worker].num_left -= 1
                if op.worker >= 0 and self._workers[op.worker].waiting_for == op_id:
                    self._workers[op.worker].condition.notify()
            self.progress.last_s = time.monotonic()

    def release(self, op_id: int, event: DispatchEvent) -> None:
        """What the transfer `op_id` moves is there once `event` has happened, before its producer has ended."""
        with self.progress.lock:
            self.ledger.release(op_id, event)
            self._announce(op_id)

    def add(
        self,
        kind: Kind,
        lane: str,
        like: Op,
        payload: str,
        boundary: int,
        priority: tuple[int, int],
        event: DispatchEvent,
    ) -> Op:
        """A transfer that the program does not have, for the worker and microbatch of `like`, behind `event`."""
        with self.progress.lock:
            op = like._replace(
                id=len(self.ledger.ops), kind=kind, lane=lane, payload=payload, num_bytes=0, visit=-1,
                priority=priority, deps=[], late_deps=[], boundary=boundary,
            )  # fmt: skip
            self.ledger.add(op, event)
            self._lanes[lane, op.worker].num_left += 1
        return op

    def start(self, op_id: int) -> None:
        """Hand an added transfer to its lane."""
        with self.progress.lock:
            self._announce(op_id)

    def wait_issued(self, op: Op) -> DispatchEvent:
        """Block the compute thread until a transfer of its own worker has been issued; returns its event."""
        state = self._workers[op.worker]
        with self.progress.lock:
            state.waiting_for = op.id
            while not self.ledger.is_issued[op.id]:
                self._check(state, op.id)
                state.condition.wait()
            state.waiting_for = -1
            return self.ledger.events[op.id]

    def wait_issuable(self, op: Op) -> tuple[list[DispatchEvent], list[DispatchEvent]]:
        """Block the compute thread until all that `op` waits for has been issued; returns the events and late ones."""
        state, ledger = self._workers[op.worker], self.ledger
        with self.progress.lock:
            state.waiting_for = op.id
            while ledger.num_missing[op.id]:
                self._check(state, op.id)
                state.condition.wait()
            self._check(state, op.id)
            state.waiting_for = -1
        return self._arrivals(op, op.deps), self._arrivals(op, op.late_deps)

    def _check(self, state: _WorkerState, op_id: int) -> None:
        if op_id in state.failed:
            raise TransferFailedError(*state.failed[op_id])
        if self.progress.aborted:
            raise AbortedError

    def _arrivals(self, op: Op, deps: Sequence[int]) -> list[DispatchEvent]:
        work, ledger = self._works[op.worker], self.ledger
        found = [work.arrival(ledger.ops[dep], op, ledger.events[dep]) for dep in deps]
        return [event for event in found if event is not None]

    def inputs(self, op: Op) -> list[DispatchEvent]:
        """The events that a transfer waits for; all have been issued."""
        work, ledger = self._works[op.worker], self.ledger
        found = [event if dep < 0 else work.arrival(ledger.ops[dep], op, event) for dep, event in ledger.inputs(op.id)]
        return [event for event in found if event is not None]

    def fail(self, op: Op, error: BaseException) -> None:
        """A transfer failed. Whoever needs it raises the error; the visits before go on, so that the place is right."""
        consumer = next((other for other in self._consumers(op) if other.worker == op.worker), None)
        if op.lane == UP and consumer is not None:
            with self.progress.lock:
                state = self._workers[op.worker]
                state.failed[consumer.id] = (error, op.payload == WEIGHTS)
                state.failed[op.id] = (error, False)
                state.condition.notify()
            return
        with self.progress.lock:
            producer = self.ledger.ops[op.deps[0]] if op.deps else op
            where = self._works[op.worker].where(producer if op.lane == DOWN else op, weights=False)
            self.errors.append(WorkResult(op.worker, error, where))
        self.progress.abort()

    def _consumers(self, op: Op) -> list[Op]:
        if op.id >= len(self.program.ops):  # added by the compute operation that the thread is at
            return [op]
        ops = (self.ledger.ops[follower] for follower in self.ledger.followers(op.id))
        return [other for other in ops if other.lane == COMPUTE]

    def leave(self, worker: int) -> None:
        """The compute thread of `worker` has ended its part: wait until its lanes have ended theirs."""
        state = self._workers[worker]
        lanes = [self._lanes[lane, worker] for lane in self._works[worker].lanes]
        with self.progress.lock:
            for lane in lanes:
                lane.closed = True
                lane.condition.notify()
            while not (self.is_abandoned or all(lane.has_left for lane in lanes)):
                state.condition.wait()

    def lane_failed(self, lane: str, worker: int, error: BaseException) -> None:
        """The lane's thread cannot go on with this step: where a device broke, whatever it is asked next fails."""
        what = "host updates" if worker == NOBODY else f"worker {worker}, its {lane} lane"
        with self.progress.lock:
            self.errors.append(WorkResult(worker, error, f"{what}, step {self.step}"))
        self.progress.abort()

    def lane_left(self, lane: str, worker: int) -> None:
        """The lane's thread is through with this step."""
        with self.progress.lock:
            self._lanes[lane, worker].has_left = True
            if worker >= 0:
                self._workers[worker].condition.notify()


class TransferFailedError(Exception):
    """A transfer that a compute operation needs has failed."""

    def __init__(self, error: BaseException, weights: bool) -> None:
        super().__init__(str(error))
        self.error, self.weights = error, weights


_FAULT_POINTS = {UP: "upload", DOWN: "download", HOST: "optimizer"}


class Lane:
    """The thread of one direction of one worker's link, or of the host's updates."""

    def __init__(self, lane: str, worker: int, work: Work, options: TransferOptions) -> None:
        self.name, self.worker, self.work = lane, worker, work
        self._options = options
        self.orders: queue.Queue[StepRun | None] = queue.Queue()
        name = lane if worker < 0 else f"{lane}-{worker}"
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def _main(self) -> None:
        with self.work.lane_thread():
            while True:
                run = self.orders.get()
                if run is None:
                    return
                try:
                    _LaneStep(self, run, self._options).serve()
                except BaseException as error:  # travels as a value, as an error of a compute thread does
                    run.lane_failed(self.name, self.worker, error)
                run.lane_left(self.name, self.worker)
                if self.worker < 0:
                    run.results.put(WorkResult(NOBODY))
                run = None


class _LaneStep:
    """One step of a lane."""

    def __init__(self, lane: Lane, run: StepRun, options: TransferOptions) -> None:
        self.run, self.work, self.lane = run, lane.work, lane
        self.state = run.lane(lane.name, lane.worker)
        self.queue = TransferQueue(options)
        self.waiting: list[tuple[Op, list[DispatchEvent]]] = []
        """Inputs issued, but perhaps not all happened."""
        self.chunks: dict[int, deque[TransferChunk]] = {}
        self.moving: deque[tuple[DispatchEvent, TransferRecord | None]] = deque()
        """Chunks on the stream, oldest first; the last one of a transfer with its record."""
        self.records: dict[int, TransferRecord] = {}

    def serve(self) -> None:
        """Issue transfers until all have arrived, or the step is aborted."""
        run, state, lock = self.run, self.state, self.run.progress.lock
        while True:
            with lock:
                if run.progress.aborted:
                    return
                new, state.inbox = state.inbox, []
                self.waiting += [(op, run.inputs(op)) for op in (run.ledger.ops[op_id] for op_id in new)]
            wait_s = self._advance()
            decision = self.queue.next()
            if decision is not None:
                self._move(*decision)
                continue
            with lock:
                if run.progress.aborted:
                    return
                if state.inbox:
                    continue
                if state.closed and not state.num_left and not self.moving:
                    return
                state.condition.wait(wait_s)

    def _advance(self) -> float | None:
        """Retire what has arrived, let in what may go; returns after how long to look again (None: when told)."""
        work, look_s = self.work, None
        while self.moving:
            event, record = self.moving[0]
            left_s = work.happens_in_s(event)
            if left_s > 0:
                look_s = left_s
                break
            self.moving.popleft()
            self.queue.ended()
            if record is not None:
                self._arrived(record, event)
        still: list[tuple[Op, list[DispatchEvent]]] = []
        for op, events in self.waiting:
            left_s = max(map(work.happens_in_s, events), default=0.0)
            if left_s > 0:
                still.append((op, events))
                look_s = left_s if look_s is None else min(look_s, left_s)
            else:
                self._admit(op, events)
        self.waiting = still
        return look_s

    def _admit(self, op: Op, events: list[DispatchEvent]) -> None:
        try:
            chunks = self.work.prepare(op, events)
            if chunks:
                step = self.run.step + op.step
                if op.payload == WEIGHTS and op.lane == UP:
                    fault("prefetch", step=step, worker=op.worker)
                fault(_FAULT_POINTS[op.lane], step=step, worker=op.worker)
        except BaseException as error:  # travels as a value
            self.run.fail(op, error)
            return
        if not chunks:
            self.work.issued(op, None)
            self.run.issue(op.id, None)
            return
        now_s = time.perf_counter()
        ready_s = max((self.work.happened_at_s(event, now_s) for event in events), default=now_s)
        self.records[op.id] = TransferRecord(op.id, op.payload, op.lane, sum(c.num_bytes for c in chunks), ready_s)
        self.chunks[op.id] = deque(chunks)
        self.queue.enter(op.id, op.priority, len(chunks))

    def _move(self, op_id: int, last: bool) -> None:
        op, record, chunks = self.run.ledger.ops[op_id], self.records[op_id], self.chunks[op_id]
        record.start_s = record.start_s or time.perf_counter()
        try:
            event = self.work.copy(op, chunks.popleft())
            self.moving.append((event, record if last else None))
            if last:
                del self.chunks[op_id]
                self.work.issued(op, event)
        except BaseException as error:
            self.queue.ended()
            self.run.fail(op, error)
            return
        if last:
            self.run.issue(op_id, event)

    def _arrived(self, record: TransferRecord, event: DispatchEvent) -> None:
        record.end_s = self.work.happened_at_s(event, time.perf_counter())
        del self.records[record.op_id]
        self.work.ended(self.run.ledger.ops[record.op_id])
        self.run.records.append(record)
