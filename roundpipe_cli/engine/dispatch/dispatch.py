"""The dispatcher: threads that issue a program's operations to devices, in order, by priority, behind their events.

    worker r   compute thread   issues compute[r] in order: each once all that it waits for has been issued, then lets
                                the device wait for their events
    up r       lane thread      issues what goes up to worker r: weights, gradient sums, boundaries
    down r     lane thread      issues what comes down: boundaries, weight gradients

It knows no tensors and no device: what an operation does is a `Work`'s business, which the engine supplies with
mathematics and the tests' emulation with costs (`decisions.py`). Here are the threads of a step, for compute and links,
and what they share. PROTOCOL.md says why the order that this gives is safe. An exception in any thread is put into the
results as a value; the caller raises it, once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType
from typing import Any

from roundpipe_cli.engine.dispatch.decisions import (
    NOBODY,
    AbortedError,
    Dependencies,
    DispatchEvent,
    Ledger,
    Progress,
    TransferChunk,
    TransferQueue,
    TransferRecord,
    Work,
)
from roundpipe_cli.errors import DeviceLostError, InternalError, NoProgressError, OutOfDeviceMemoryError, RoundpipeError
from roundpipe_cli.faults import fault
from roundpipe_cli.schedule.actions import Kind
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
        self,
        program: Program,
        links: Dependencies,
        step: int,
        progress: Progress,
        *,
        works: dict[int, Work],
        readers: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """
        Args:
            readers: layer -> operations that wait until `ready` names it: they read weights that the host writes.
        """
        self.program, self.step, self.progress = program, step, progress
        self.ledger = Ledger(program, links)
        self._readers = dict(readers or {})
        for op_id in chain.from_iterable(self._readers.values()):
            self.ledger.hold(op_id)
        self.let_go_s: dict[int, float] = {}
        """Operation -> when the last layer that it reads was ready, by `time.perf_counter`."""
        self.records: list[TransferRecord] = []
        self.errors: list[WorkResult] = []
        self.parts: dict[int, Any] = {}
        """Worker -> the part that its `Work` takes up, until it does."""
        self.results: queue.Queue[WorkResult] = queue.Queue()
        """One of each worker."""
        self.is_abandoned = False
        """The step was given up: one of its threads may never return."""
        self.is_broken = False
        """A device failed in it."""
        self._works = works
        self.lanes = {
            (lane, worker): _LaneState(progress.new_condition())
            for worker, work in works.items()
            for lane in work.lanes
        }
        self._workers = [_WorkerState(progress.new_condition()) for _ in program.compute]
        for op in program.ops:
            if (op.lane, op.worker) in self.lanes:
                self.lanes[op.lane, op.worker].num_left += 1
        with progress.lock:
            for op_id in self.ledger.issuable():
                self._announce(op_id)

    @property
    def waits_for_host(self) -> bool:
        """Whether the host has not written all the weights that the step reads."""
        return bool(self._readers)

    def ready(self, layer: int) -> None:
        """Let go of the operations that read the weights of `layer`: the host has them. Any thread calls this."""
        with self.progress.lock:
            for op_id in self._readers.pop(layer, ()):
                self.let_go_s[op_id] = time.perf_counter()
                if self.ledger.let_go(op_id):
                    self._announce(op_id)
            self.progress.last_s = time.monotonic()

    def host_failed(self, error: BaseException) -> None:
        """Give the step up: the host will not write the weights that it, or a step behind it, reads."""
        with self.progress.lock:
            self.errors.append(WorkResult(NOBODY, error, "the host's updates"))
        self.progress.abort()

    def _announce(self, op_id: int) -> None:
        """Tell the thread of `op_id` that it may be issued. Called with the lock held, or before the threads start."""
        op = self.ledger.ops[op_id]
        if op.lane == COMPUTE:
            state = self._workers[op.worker]
            if state.waiting_for == op_id:
                state.condition.notify()
            return
        lane = self.lanes.get((op.lane, op.worker))
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
                self.lanes[op.lane, op.worker].num_left -= 1
                if self._workers[op.worker].waiting_for == op_id:
                    self._workers[op.worker].condition.notify()
            self.progress.last_s = time.monotonic()

    def release(self, op_id: int, event: DispatchEvent) -> None:
        """Let the transfer `op_id` start once `event` has happened, before the operation that feeds it has ended."""
        with self.progress.lock:
            self.ledger.release(op_id, event)
            self._announce(op_id)

    def add(
        self, like: Op, event: DispatchEvent, *, lane: str, payload: str, boundary: int, priority: tuple[int, int]
    ) -> Op:
        """Add a transfer of a boundary that the program does not have, for the worker and microbatch of `like`, behind
        `event`; fields as those of `Op`."""
        kind, deps = Kind.UPLOAD if lane == UP else Kind.DOWNLOAD, [like.id]
        op = like._replace(kind=kind, lane=lane, payload=payload, boundary=boundary, priority=priority)
        with self.progress.lock:
            op = op._replace(id=len(self.ledger.ops), num_bytes=0, visit=-1, deps=deps, late_deps=[])
            self.ledger.add(op, event)
            self.lanes[op.lane, op.worker].num_left += 1
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
        return self._events(op.deps), self._events(op.late_deps)

    def _check(self, state: _WorkerState, op_id: int) -> None:
        if op_id in state.failed:
            raise TransferFailedError(*state.failed[op_id])
        if self.progress.aborted:
            raise AbortedError

    def _events(self, op_ids: Sequence[int]) -> list[DispatchEvent]:
        return [event for op_id in op_ids if (event := self.ledger.events[op_id]) is not None]

    def inputs(self, op: Op) -> list[DispatchEvent]:
        """The events that a transfer waits for; all have been issued."""
        return [event for _, event in self.ledger.inputs(op.id) if event is not None]

    def fail(self, op: Op, error: BaseException) -> None:
        """Note that a transfer failed. The operation that needs it raises the error, so that the place is right."""
        is_added = op.id >= len(self.program.ops)  # by the current compute operation, which needs it
        followers = (self.ledger.ops[follower] for follower in self.ledger.followers(op.id))
        readers = [op] if is_added else [other for other in followers if other.lane == COMPUTE]
        consumer = next((other for other in readers if other.worker == op.worker), None)
        if op.lane == UP and consumer is not None:
            with self.progress.lock:
                state = self._workers[op.worker]
                state.failed[consumer.id] = (error, op.payload == WEIGHTS)
                state.failed[op.id] = (error, False)
                state.condition.notify()
            return
        with self.progress.lock:
            place = self.ledger.ops[op.deps[0]] if op.lane == DOWN else op
            where = self._works[op.worker].where(place, weights=False)
            self.errors.append(WorkResult(op.worker, error, where))
        self.progress.abort()

    def end_part(self, worker: int) -> None:
        """Wait until the lanes of `worker`, whose compute thread has ended its part, have ended theirs."""
        state = self._workers[worker]
        lanes = [self.lanes[lane, worker] for lane in self._works[worker].lanes]
        with self.progress.lock:
            for lane in lanes:
                lane.closed = True
                lane.condition.notify()
            while not (self.is_abandoned or all(lane.has_left for lane in lanes)):
                state.condition.wait()

    def lane_failed(self, lane: str, worker: int, error: BaseException) -> None:
        """Note that the lane's thread gave this step up: on a broken device everything that follows fails too."""
        where = f"worker {worker}, its {lane} lane, step {shown_step(self.step)}"
        with self.progress.lock:
            self.errors.append(WorkResult(worker, error, where))
        self.progress.abort()

    def lane_left(self, lane: str, worker: int) -> None:
        """Note that the lane's thread has ended this step."""
        with self.progress.lock:
            self.lanes[lane, worker].has_left = True
            self._workers[worker].condition.notify()


class TransferFailedError(Exception):
    """A transfer that a compute operation needs has failed."""

    def __init__(self, error: BaseException, weights: bool) -> None:
        super().__init__(str(error))
        self.error, self.weights = error, weights


# Lane threads: each carries out the transfers of one direction of one worker's link. In emulations the host's updates
# are the lane of one more worker.

_FAULT_POINTS = {UP: "upload", DOWN: "download", HOST: "optimizer"}


class Lane:
    """The thread of one direction of one worker's link."""

    def __init__(self, lane: str, worker: int, work: Work) -> None:
        self.name, self.worker, self.work = lane, worker, work
        self.orders: queue.Queue[StepRun | None] = queue.Queue()
        self.thread = threading.Thread(target=self._main, name=f"{lane}-{worker}", daemon=True)

    def _main(self) -> None:
        with self.work.lane_thread():
            while True:
                run = self.orders.get()
                if run is None:
                    return
                try:
                    _LaneStep(self, run).serve()
                except BaseException as error:  # passed on as a value, as errors of compute threads are
                    run.lane_failed(self.name, self.worker, error)
                run.lane_left(self.name, self.worker)
                run = None


class _LaneStep:
    def __init__(self, lane: Lane, run: StepRun) -> None:
        self.run, self.work, self.lane = run, lane.work, lane
        self.state = run.lanes[lane.name, lane.worker]
        self.queue = TransferQueue()
        self.waiting: list[tuple[Op, list[DispatchEvent]]] = []
        """Transfers whose inputs have been issued, but have perhaps not all happened."""
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
        """Retire arrived chunks and issue new ones; returns the seconds until the next look (None: until woken)."""
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
                self._arrived(record)
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
        except BaseException as error:  # passed on as a value
            self.run.fail(op, error)
            return
        if not chunks:
            self.work.issued(op, None)
            self.run.issue(op.id, None)
            return
        self.records[op.id] = TransferRecord(op, sum(chunk.num_bytes for chunk in chunks))
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

    def _arrived(self, record: TransferRecord) -> None:
        record.end_s = time.perf_counter()
        del self.records[record.op.id]
        self.work.ended(record.op)
        self.run.records.append(record)


def keep_forever(*things: object) -> None:
    """Never free what lies on a device that failed, or was being copied by it: the driver would be asked, and what
    torch raises there ends the process."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


# The pool of workers: their threads, and the step that they are at.
#
# A worker's compute thread hands a step to the lanes of its link once it has taken it up; a step that failed is left
# quickly.

TICK_S = 0.25
JOIN_TIMEOUT_S = 5.0
JOIN_AFTER_ERROR_S = 2.0
"""Total for all threads of a pool."""
JOIN_LANES_S = 0.5
"""The lanes get at least this much of it."""
END_S = 0.1
"""A thread that is to end after a step that failed, and does not, hangs."""
LEAVE_S = 5.0
"""Workers that wait leave a step that was given up within this time; the others hang."""


class Pool:
    """Workers with their threads, which live as long as the `with` block."""

    def __init__(
        self,
        works: Sequence[Work],
        *,
        watchdog_s: float | None = 600.0,
        is_out_of_memory: Callable[[BaseException], bool] = lambda error: isinstance(error, MemoryError),
        is_device_error: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        """
        Args:
            works: one per worker.
            watchdog_s: fail after this long without progress, with all stacks on stderr; None: wait forever.
            is_out_of_memory: whether an exception means that a device has no more memory.
            is_device_error: whether it means that a device failed for another reason.
        """
        self.works: dict[int, Work] = dict(enumerate(works))
        self.is_stuck = False
        """A thread may still be busy with an old step, so no other step can run."""
        self._watchdog_s, self._is_out_of_memory, self._is_device_error = watchdog_s, is_out_of_memory, is_device_error
        self._hanging: frozenset[int] = frozenset()
        """Workers whose threads may never return."""
        self._under_way: StepRun | None = None
        self._orders: list[queue.Queue[StepRun | None]] = [queue.Queue() for _ in works]
        self._threads = [
            threading.Thread(target=self._compute_main, args=(worker,), name=f"worker-{worker}", daemon=True)
            for worker in range(len(works))
        ]
        self._lanes = {worker: [Lane(lane, worker, work) for lane in work.lanes] for worker, work in self.works.items()}

    def __enter__(self) -> Pool:
        for thread in self._all_threads():
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the threads end once they have nothing left to do; a thread that hangs is left behind (a daemon)."""
        if self._under_way is not None:
            self._under_way.progress.abort()
        deadline_s = time.monotonic() + (JOIN_TIMEOUT_S if error is None else JOIN_AFTER_ERROR_S)
        for orders in self._orders:
            orders.put(None)
        for worker, thread in enumerate(self._threads):
            if worker not in self._hanging:
                thread.join(max(0.0, deadline_s - time.monotonic()))
        deadline_s = max(deadline_s, time.monotonic() + JOIN_LANES_S)
        for lanes in self._lanes.values():  # lanes get their steps from compute threads, so they end after those
            for lane in lanes:
                lane.orders.put(None)
        for worker, lanes in self._lanes.items():
            for lane in lanes if worker not in self._hanging else ():
                lane.thread.join(max(0.0, deadline_s - time.monotonic()))

    def end(self) -> tuple[str, ...]:
        """Let the threads end, after a step that failed; returns the names of those that are left behind."""
        self.__exit__(None, None, None)
        for thread in self._all_threads():
            thread.join(END_S)
        return tuple(thread.name for thread in self._all_threads() if thread.is_alive())

    def _all_threads(self) -> list[threading.Thread]:
        return [*self._threads, *(lane.thread for lanes in self._lanes.values() for lane in lanes)]

    def start(self, run: StepRun) -> None:
        """Give a step to the workers; returns at once."""
        assert not self.is_stuck, "a pool that got stuck cannot be used any more"
        assert self._under_way is None, "one step at a time"
        self._under_way = run
        for orders in self._orders:
            orders.put(run)

    def wait(self, run: StepRun) -> StepRun:
        """Block until the step is done; returns it.

        Raises:
            ResourceError: out of device memory, or a device is lost (exit code 5).
            InternalError: a worker failed or got stuck (exit code 1); names the place.
        """
        assert run is self._under_way
        try:
            results = self._collect(run)
        except BaseException:  # stuck, or interrupted in this thread: workers leave the step, and no other is taken
            self.is_stuck = run.is_abandoned = True
            run.progress.abort()
            raise
        finally:
            self._under_way = None
        self._raise_first([*results, *run.errors])
        return run

    def _compute_main(self, worker: int) -> None:
        work, orders = self.works[worker], self._orders[worker]
        with work.compute_thread():
            while True:
                run = orders.get()
                if run is None:
                    return
                result, part = WorkResult(worker), run.parts.pop(worker, None)  # no cycle: it holds the run
                try:
                    work.begin_part(part)
                except BaseException as error:
                    result.error, result.where = error, f"worker {worker}, taking up step {shown_step(run.step)}"
                    run.is_broken |= self._is_device_error(error)
                    run.progress.abort()
                for lane in self._lanes[worker]:
                    lane.orders.put(run)
                if result.error is None:
                    self._compute(run, work, result)
                run.end_part(worker)
                failed = False
                run.is_broken |= any(self._is_device_error(one.error) for one in run.errors if one.error)
                try:
                    work.drain()  # for a failed step too: until then its work reads and writes slots and sums
                except BaseException as error:
                    failed = self._is_device_error(error)
                    if result.error is None and not run.progress.aborted:  # otherwise the first error says more
                        result.error, result.where = error, f"worker {worker}, finishing the step"
                run.is_broken |= failed
                if run.is_broken:
                    keep_forever(run, part, result.error, *([work] if failed else ()))
                if not failed:
                    work.reset()
                run.results.put(result)
                run = part = None
                del result  # a failed step's error holds what was computed

    def _compute(self, run: StepRun, work: Work, result: WorkResult) -> None:
        op: Op | None = None
        try:
            for op_id in run.program.compute[result.worker]:
                op = run.program.ops[op_id]
                work.begin(op)
                ready, late = run.wait_issuable(op)
                run.issue(op_id, work.run(op, ready, late))
        except AbortedError:
            pass
        except BaseException as error:  # passed on as a value; the caller raises it
            assert op is not None
            result.error = error
            weights = False
            if isinstance(error, TransferFailedError):
                result.error, weights = error.error, error.weights
            run.is_broken |= self._is_device_error(result.error)
            if not run.is_broken:
                # Its frames hold what was computed, and a step that ran out of memory is to be run again.
                traceback.clear_frames(result.error.__traceback__)
            result.where = work.where(op, weights=weights)
            run.progress.abort()

    def _collect(self, run: StepRun) -> list[WorkResult]:
        """One result per worker; a step that stands still is ended by the watchdog."""
        results: list[WorkResult] = []
        seen_s, still_s = run.progress.last_s, 0.0
        while len(results) < len(self.works):
            try:
                results.append(run.results.get(timeout=TICK_S))
            except queue.Empty:
                # The host's updates have a watchdog of their own.
                if run.waits_for_host:
                    run.progress.moved()
                # Counted in ticks: while the whole process was stopped (SIGSTOP) nothing could move.
                still_s = still_s + TICK_S if run.progress.last_s == seen_s else 0.0
                seen_s = run.progress.last_s
                if self._watchdog_s is not None and still_s > self._watchdog_s:
                    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                    self._raise_stuck(run, results, still_s)
        return results

    def _raise_stuck(self, run: StepRun, results: list[WorkResult], still_s: float) -> None:
        """Raise why a step stands still; given up, it is left by the workers that waited for one that hangs."""
        run.progress.abort()
        deadline_s = time.monotonic() + LEAVE_S
        with suppress(queue.Empty):
            while len(results) < len(self.works):
                results.append(run.results.get(timeout=max(0.0, deadline_s - time.monotonic())))
        self._hanging = frozenset(range(len(self._threads))) - {result.worker for result in results}
        text = f"no progress for {still_s:.0f} s: a worker is stuck (the stacks of all threads are above)"
        where = f"step {shown_step(run.step)}"
        try:
            self._raise_first([*results, *run.errors])  # one failed and another is stuck: the failure says more
            if not self._hanging:
                raise NoProgressError(text, where=where) from None
            raise DeviceLostError(text, where=f"worker {', '.join(map(str, sorted(self._hanging)))}, {where}") from None
        except DeviceLostError as lost:
            lost.workers, lost.is_hang = tuple({*lost.workers, *self._hanging}), bool(self._hanging)
            raise

    def _raise_first(self, results: Sequence[WorkResult]) -> None:
        failed = next((result for result in results if result.error is not None), None)
        if failed is None:
            return
        error = failed.error
        assert error is not None
        if isinstance(error, RoundpipeError):
            raise error
        text = f"{type(error).__name__}: {error}".strip()
        if self._is_out_of_memory(error):
            raise OutOfDeviceMemoryError(
                "out of memory on a worker", where=failed.where, found=text, hint=MEMORY_HINT
            ) from error
        if self._is_device_error(error):
            lost = DeviceLostError("a worker's device failed", where=failed.where, found=text)
            lost.workers = (failed.worker,)
            raise lost from error
        raise InternalError(f"a worker failed: {text}", where=failed.where) from error
