"""The dispatcher: threads that issue a program's operations to devices, in order, by priority, behind their events.

    worker r   compute thread   issues compute[r] in order: each once all that it waits for has been issued, then lets
                                the device wait for their events
    up r       lane thread      issues what goes up to worker r: weights, gradient sums, boundaries
    down r     lane thread      issues what comes down: boundaries, weight gradients
    host       lane thread      the host's updates, where a program has them

It knows no tensors and no device: what an operation does is a `Work`'s business, which the engine supplies with
mathematics and the tests' emulation with costs (`work.py`). Here is what the threads of a step share; `pool.py` has the
compute threads, `lane.py` the others. PROTOCOL.md says why the order that this gives is safe. An exception in any
thread is put into the results as a value; the caller raises it, once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from roundpipe_cli.engine.dispatch.ledger import Dependencies, Ledger
from roundpipe_cli.engine.dispatch.progress import AbortedError, Progress
from roundpipe_cli.engine.dispatch.transfer import TransferRecord
from roundpipe_cli.engine.dispatch.work import NOBODY, AddedTransfer, DispatchEvent, Work
from roundpipe_cli.schedule.program import WEIGHTS, Op, Program
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP
from roundpipe_cli.units import shown_step

MEMORY_HINT = (
    "lower micro_batch_size (or micro_batch_tokens) or max_seq_length, set pipeline.recompute=layer, or on_oom=adapt"
)


@dataclass
class WorkResult:
    """The outcome of one worker's part of a step."""

    worker: int
    error: BaseException | None = None
    where: str = ""


@dataclass
class _LaneState:
    """State that a lane's thread shares with the others during a step, under the step's lock."""

    condition: threading.Condition
    inbox: list[int] = field(default_factory=list)
    """Transfers whose inputs have all been issued."""
    num_left: int = 0
    """Number of transfers that are not issued yet."""
    closed: bool = False
    """No transfer will be added any more."""
    has_left: bool = False


@dataclass
class _WorkerState:
    condition: threading.Condition
    waiting_for: int = -1
    """Operation that the compute thread waits for: a transfer until it is issued, others until they may be."""
    failed: dict[int, tuple[BaseException, bool]] = field(default_factory=dict)
    """Compute operation -> error of a transfer that it needs, and whether that transfer carries its weights."""


class StepRun:
    """A program that is being carried out: the state that its threads share."""

    def __init__(
        self, program: Program, links: Dependencies, step: int, progress: Progress, works: dict[int, Work]
    ) -> None:
        self.program, self.step, self.progress = program, step, progress
        self.ledger = Ledger(program, links)
        self.records: list[TransferRecord] = []
        self.errors: list[WorkResult] = []
        self.parts: dict[int, Any] = {}
        """Worker -> the part that its `Work` takes up, until it does."""
        self.results: queue.Queue[WorkResult] = queue.Queue()
        """One of each worker, and one of the host where it has work."""
        self.is_abandoned = False
        """The step was given up: one of its threads may never return."""
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
        """Tell the thread of `op_id` that it may be issued. Called with the lock held, or before the threads start."""
        op = self.ledger.ops[op_id]
        if op.lane == COMPUTE:
            state = self._workers[op.worker]
            if state.waiting_for == op_id:
                state.condition.notify()
            return
        lane = self._lanes.get((op.lane, op.worker))
        if lane is not None:  # in the engine's steps nobody carries out the host's updates
            lane.inbox.append(op_id)
            lane.condition.notify()

    def issue(self, op_id: int, event: DispatchEvent) -> None:
        """Note that `op_id` has been issued, and wake the threads that wait for it."""
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
        """Let the transfer `op_id` start once `event` has happened, before the operation that feeds it has ended."""
        with self.progress.lock:
            self.ledger.release(op_id, event)
            self._announce(op_id)

    def add(self, transfer: AddedTransfer, like: Op, event: DispatchEvent) -> Op:
        """Add a transfer that the program does not have, for the worker and microbatch of `like`, behind `event`."""
        with self.progress.lock:
            new_id = len(self.ledger.ops)
            op = like._replace(id=new_id, num_bytes=0, visit=-1, deps=[], late_deps=[], **transfer._asdict())
            self.ledger.add(op, event)
            self._lanes[op.lane, op.worker].num_left += 1
        return op

    def start(self, op_id: int) -> None:
        """Give an added transfer to its lane."""
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
        """Note that a transfer failed. The operation that needs it raises the error, so that the place is right."""
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
        if op.id >= len(self.program.ops):  # added by the current compute operation
            return [op]
        ops = (self.ledger.ops[follower] for follower in self.ledger.followers(op.id))
        return [other for other in ops if other.lane == COMPUTE]

    def leave(self, worker: int) -> None:
        """Wait until the lanes of `worker`, whose compute thread has ended its part, have ended theirs."""
        state = self._workers[worker]
        lanes = [self._lanes[lane, worker] for lane in self._works[worker].lanes]
        with self.progress.lock:
            for lane in lanes:
                lane.closed = True
                lane.condition.notify()
            while not (self.is_abandoned or all(lane.has_left for lane in lanes)):
                state.condition.wait()

    def lane_failed(self, lane: str, worker: int, error: BaseException) -> None:
        """Note that the lane's thread gave this step up: on a broken device everything that follows fails too."""
        what = "host updates" if worker == NOBODY else f"worker {worker}, its {lane} lane"
        with self.progress.lock:
            self.errors.append(WorkResult(worker, error, f"{what}, step {shown_step(self.step)}"))
        self.progress.abort()

    def lane_left(self, lane: str, worker: int) -> None:
        """Note that the lane's thread has ended this step."""
        with self.progress.lock:
            self._lanes[lane, worker].has_left = True
            if worker >= 0:
                self._workers[worker].condition.notify()


class TransferFailedError(Exception):
    """A transfer that a compute operation needs has failed."""

    def __init__(self, error: BaseException, weights: bool) -> None:
        super().__init__(str(error))
        self.error, self.weights = error, weights
