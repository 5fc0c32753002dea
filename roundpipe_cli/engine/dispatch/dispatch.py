"""The dispatcher: threads that issue a program's operations to devices, in order, by priority, behind their events.

    worker r   compute thread   issues compute[r] in order: each once all that it waits for has been issued, then lets
                                the device wait for their events
    up r       lane thread      issues what goes up to worker r: weights, gradient sums, boundaries
    down r     lane thread      issues what comes down: boundaries, weight gradients

It knows no tensors and no device: what an operation does is a `Work`'s business, which the engine supplies with
mathematics and the tests' emulation with costs (`decisions.py`). Here are the threads of a step, for compute and links,
and what they share. PROTOCOL.md says why the order that this gives is safe. An exception in any thread is noted as
a value; the caller raises the first, once.
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
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, NamedTuple

from roundpipe_cli.engine.dispatch.decisions import Dependencies, Ledger, TransferQueue
from roundpipe_cli.engine.dispatch.progress import AbortedError, Progress
from roundpipe_cli.engine.dispatch.work import NOBODY, DispatchEvent, TransferChunk, TransferRecord, Work
from roundpipe_cli.errors import DeviceLostError, InternalError, NoProgressError, OutOfDeviceMemoryError, RoundpipeError
from roundpipe_cli.faults import fault
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.program import WEIGHTS, Op, Program
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP
from roundpipe_cli.units import shown_step

MEMORY_HINT = (
    "lower micro_batch_size (or micro_batch_tokens) or max_seq_length, cut long rows (pipeline.sequence_chunks=4), "
    "set pipeline.recompute=layer, or on_oom=adapt"
)


class Failure(NamedTuple):
    """An error of a step."""

    worker: int
    error: BaseException
    where: str


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
    moving: deque[tuple[DispatchEvent, TransferChunk | None, TransferRecord | None]] = field(default_factory=deque)
    """Chunks on the stream, oldest first, which live until they have arrived, or for ever where the device fails; the
    last one of a transfer with its record."""


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
        """`readers`: layer -> operations that wait until `ready` names it: they read weights that the host writes."""
        self.program, self.step, self.progress = program, step, progress
        self.ledger = Ledger(program, links)
        self._readers = dict(readers or {})
        for op_id in chain.from_iterable(self._readers.values()):
            self.ledger.hold(op_id)
        self.let_go_s: dict[int, float] = {}
        """Operation -> when the last layer that it reads was ready, by `time.perf_counter`."""
        self.records: list[TransferRecord] = []
        self.failures: list[Failure] = []
        """In the order of time."""
        self.parts: dict[int, Any] = {}
        """Worker -> the part that its `Work` takes up, until it does."""
        self.left: queue.Queue[int] = queue.Queue()
        """Workers that have ended their part."""
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
        self._wakes = [progress.new_condition() for _ in program.compute]
        """Each worker's compute thread waits for it."""
        self._waiting_for = [-1 for _ in program.compute]
        """Operation that each last waited for: a transfer until it is issued, others until they may be."""
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

    def give_up(self, error: BaseException, where: str, worker: int = NOBODY) -> None:
        """Note why the step fails, and let all threads leave it."""
        with self.progress.lock:
            self.failures.append(Failure(worker, error, where))
        self.progress.abort()

    def _announce(self, op_id: int) -> None:
        """Tell the thread of `op_id` that it may be issued. Called with the lock held, or before the threads start."""
        op = self.ledger.ops[op_id]
        if op.lane == COMPUTE:
            if self._waiting_for[op.worker] == op_id:
                self._wakes[op.worker].notify()
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
                if self._waiting_for[op.worker] == op_id:
                    self._wakes[op.worker].notify()
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
        self._waiting_for[op.worker] = op.id
        self.progress.wait_for(lambda: bool(self.ledger.is_issued[op.id]), self._wakes[op.worker])
        return self.ledger.events[op.id]

    def wait_issuable(self, op: Op) -> tuple[list[DispatchEvent], list[DispatchEvent]]:
        """Block the compute thread until all that `op` waits for has been issued; returns the events and late ones."""
        self._waiting_for[op.worker] = op.id
        self.progress.wait_for(lambda: not self.ledger.num_missing[op.id], self._wakes[op.worker])
        return self._events(op.deps), self._events(op.late_deps)

    def _events(self, op_ids: Sequence[int]) -> list[DispatchEvent]:
        return [event for op_id in op_ids if (event := self.ledger.events[op_id]) is not None]

    def inputs(self, op: Op) -> list[DispatchEvent]:
        """The events that a transfer waits for; all have been issued."""
        return [event for _, event in self.ledger.inputs(op.id) if event is not None]

    def transfer_failed(self, op: Op, error: BaseException) -> None:
        """Give the step up, in the place of the compute operation that the transfer `op` is for."""
        place = op
        if op.lane == DOWN or op.id >= len(self.program.ops):  # added by the operation that waits for it
            place = self.ledger.ops[op.deps[0]]
        elif op.lane == UP:
            followers = (self.ledger.ops[follower] for follower in self.ledger.followers(op.id))
            place = next((other for other in followers if other.lane == COMPUTE and other.worker == op.worker), op)
        where = self._works[op.worker].where(place, weights=op.lane == UP and op.payload == WEIGHTS)
        self.give_up(error, where, op.worker)

    def end_part(self, worker: int) -> None:
        """Wait until the lanes of `worker`, whose compute thread has ended its part, have ended theirs."""
        lanes = [self.lanes[lane, worker] for lane in self._works[worker].lanes]
        with self.progress.lock:
            for lane in lanes:
                lane.closed = True
                lane.condition.notify()
            while not (self.is_abandoned or all(lane.has_left for lane in lanes)):
                self._wakes[worker].wait()

    def lane_left(self, lane: str, worker: int) -> None:
        """Note that the lane's thread has ended this step."""
        with self.progress.lock:
            self.lanes[lane, worker].has_left = True
            self._wakes[worker].notify()


# Lane threads: each carries out the transfers of one direction of one worker's link. In emulations the host's updates
# are the lane of one more worker.

_FAULT_POINTS = {UP: "upload", DOWN: "download", HOST: "optimizer"}


class _LaneStep:
    """The part of one direction of one worker's link in a step."""

    def __init__(self, run: StepRun, state: _LaneState, work: Work) -> None:
        self.run, self.state, self.work = run, state, work
        self.queue = TransferQueue()
        self.waiting: list[tuple[Op, list[DispatchEvent]]] = []
        """Transfers whose inputs have been issued, but have perhaps not all happened."""
        self.entered: dict[int, tuple[TransferRecord, deque[TransferChunk]]] = {}
        """Transfers in the queue, with the chunks that have not been issued."""

    def serve(self) -> None:
        """Issue transfers until all have arrived, or the step is aborted."""
        run, state = self.run, self.state
        while True:
            wait_s = self._advance()
            decision = self.queue.next()
            if decision is not None:
                self._move(*decision)
            with run.progress.lock:
                if decision is None and not state.inbox and not run.progress.aborted:
                    if state.closed and not state.num_left and not state.moving:
                        return
                    state.condition.wait(wait_s)
                if run.progress.aborted:
                    return
                new, state.inbox = state.inbox, []
                self.waiting += [(op, run.inputs(op)) for op in (run.ledger.ops[op_id] for op_id in new)]

    def _advance(self) -> float | None:
        """Retire arrived chunks and issue new ones; returns the seconds until the next look (None: until woken)."""
        work, moving, look_s = self.work, self.state.moving, None
        while moving:
            event, _, record = moving[0]
            left_s = work.happens_in_s(event)
            if left_s > 0:
                look_s = left_s
                break
            moving.popleft()
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
            self.run.transfer_failed(op, error)
            return
        if not chunks:
            self.work.issued(op, None)
            self.run.issue(op.id, None)
            return
        self.entered[op.id] = TransferRecord(op, sum(chunk.num_bytes for chunk in chunks)), deque(chunks)
        self.queue.enter(op.id, op.priority, len(chunks))

    def _move(self, op_id: int, last: bool) -> None:
        record, chunks = self.entered[op_id]
        op, record.start_s = record.op, record.start_s or time.perf_counter()
        try:
            chunk = chunks.popleft()
            event = self.work.copy(op, chunk)
            self.state.moving.append((event, None if event is None else chunk, record if last else None))
            if last:
                del self.entered[op_id]
                self.work.issued(op, event)
        except BaseException as error:
            self.queue.ended()
            self.run.transfer_failed(op, error)
            return
        if last:
            self.run.issue(op_id, event)

    def _arrived(self, record: TransferRecord) -> None:
        record.end_s = time.perf_counter()
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


Serve = Callable[[StepRun], None]


class _Thread:
    """A thread that is given one step after the other; None ends it."""

    def __init__(self, name: str, setting: Callable[[], AbstractContextManager[None]], serve: Serve) -> None:
        self.orders: queue.Queue[StepRun | None] = queue.Queue()
        self.thread = threading.Thread(target=self._main, args=(setting, serve), name=name, daemon=True)

    def _main(self, setting: Callable[[], AbstractContextManager[None]], serve: Serve) -> None:
        with setting():
            while True:
                run = self.orders.get()
                if run is None:
                    return
                serve(run)
                run = None


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
        self._compute, self._lanes = list[_Thread](), list[list[_Thread]]()
        """Per worker."""
        for worker, work in self.works.items():
            compute, lane = partial(self._serve_compute, worker, work), partial(self._serve_lane, worker, work)
            self._compute.append(_Thread(f"worker-{worker}", work.compute_thread, compute))
            self._lanes.append(
                [_Thread(f"{name}-{worker}", work.lane_thread, partial(lane, name)) for name in work.lanes]
            )

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
        self._join([[one] for one in self._compute], deadline_s)
        # Lanes get their steps from compute threads, so they end after those.
        self._join(self._lanes, max(deadline_s, time.monotonic() + JOIN_LANES_S))

    def _join(self, threads: Sequence[Sequence[_Thread]], deadline_s: float) -> None:
        """Let each worker's threads end, and wait for those that do not hang."""
        for one in chain.from_iterable(threads):
            one.orders.put(None)
        for worker, own in enumerate(threads):
            for one in own if worker not in self._hanging else ():
                one.thread.join(max(0.0, deadline_s - time.monotonic()))

    def end(self) -> tuple[str, ...]:
        """Let the threads end, after a step that failed; returns the names of those that are left behind."""
        self.__exit__(None, None, None)
        for thread in self._all_threads():
            thread.join(END_S)
        return tuple(thread.name for thread in self._all_threads() if thread.is_alive())

    def _all_threads(self) -> list[threading.Thread]:
        return [one.thread for threads in (self._compute, *self._lanes) for one in threads]

    def start(self, run: StepRun) -> None:
        """Give a step to the workers; returns at once."""
        assert not self.is_stuck, "a pool that got stuck cannot be used any more"
        assert self._under_way is None, "one step at a time"
        self._under_way = run
        for one in self._compute:
            one.orders.put(run)

    def wait(self, run: StepRun) -> None:
        """Block until the step is done.

        Raises:
            ResourceError: out of device memory, or a device is lost (exit code 5).
            InternalError: a worker failed or got stuck (exit code 1); names the place.
        """
        assert run is self._under_way
        try:
            self._collect(run)
        except BaseException:  # stuck, or interrupted in this thread: workers leave the step, and no other is taken
            self.is_stuck = run.is_abandoned = True
            run.progress.abort()
            raise
        finally:
            self._under_way = None
        self._raise_first(run)

    def _serve_lane(self, worker: int, work: Work, lane: str, run: StepRun) -> None:
        try:
            _LaneStep(run, run.lanes[lane, worker], work).serve()
        except BaseException as error:  # on a broken device everything that follows fails too
            run.give_up(error, f"worker {worker}, its {lane} lane, step {shown_step(run.step)}", worker)
        run.lane_left(lane, worker)

    def _serve_compute(self, worker: int, work: Work, run: StepRun) -> None:
        part = run.parts.pop(worker, None)  # no cycle: it holds the run
        try:
            work.begin_part(part)
        except BaseException as error:
            run.give_up(error, f"worker {worker}, taking up step {shown_step(run.step)}", worker)
        for lane in self._lanes[worker]:
            lane.orders.put(run)
        if not run.progress.aborted:
            self._issue(run, worker, work)
        run.end_part(worker)
        failed = False
        try:
            work.drain()  # for a failed step too: until then its work reads and writes slots and sums
        except BaseException as error:
            failed = self._is_device_error(error)
            if not run.progress.aborted:  # otherwise the first error says more
                run.give_up(error, f"worker {worker}, finishing the step", worker)
        run.is_broken |= failed or any(self._is_device_error(one.error) for one in run.failures)
        if run.is_broken:
            keep_forever(run, part, *([work] if failed else ()))
        else:  # a step that ran out of memory is to be run again
            for name in work.lanes:
                run.lanes[name, worker].moving.clear()
            for one in run.failures:
                if one.worker == worker:  # another one's device may have failed meanwhile
                    traceback.clear_frames(one.error.__traceback__)  # its frames hold what was computed
        if not failed:
            work.reset()
        run.left.put(worker)
        del run, part  # an error of the step would hold them

    def _issue(self, run: StepRun, worker: int, work: Work) -> None:
        op: Op | None = None
        try:
            for op_id in run.program.compute[worker]:
                op = run.program.ops[op_id]
                ready, late = run.wait_issuable(op)
                run.issue(op_id, work.run(op, ready, late))
        except AbortedError:
            pass
        except BaseException as error:  # passed on as a value; the caller raises it
            assert op is not None
            run.give_up(error, work.where(op, weights=False), worker)

    def _collect(self, run: StepRun) -> None:
        """Wait until all workers have left; a step that stands still is ended by the watchdog."""
        left: set[int] = set()
        seen_s, still_s = run.progress.last_s, 0.0
        while len(left) < len(self.works):
            try:
                left.add(run.left.get(timeout=TICK_S))
            except queue.Empty:
                # The host's updates have a watchdog of their own.
                if run.waits_for_host:
                    run.progress.moved()
                # Counted in ticks: while the whole process was stopped (SIGSTOP) nothing could move.
                still_s = still_s + TICK_S if run.progress.last_s == seen_s else 0.0
                seen_s = run.progress.last_s
                if self._watchdog_s is not None and still_s > self._watchdog_s:
                    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                    self._raise_stuck(run, left, still_s)

    def _raise_stuck(self, run: StepRun, left: set[int], still_s: float) -> None:
        """Raise why a step stands still; given up, it is left by the workers that waited for one that hangs."""
        run.progress.abort()
        deadline_s = time.monotonic() + LEAVE_S
        with suppress(queue.Empty):
            while len(left) < len(self.works):
                left.add(run.left.get(timeout=max(0.0, deadline_s - time.monotonic())))
        self._hanging = frozenset(self.works.keys() - left)
        text = f"no progress for {still_s:.0f} s: a worker is stuck (the stacks of all threads are above)"
        where = f"step {shown_step(run.step)}"
        try:
            self._raise_first(run)  # one failed and another is stuck: the failure says more
            if not self._hanging:
                raise NoProgressError(text, where=where) from None
            raise DeviceLostError(text, where=f"worker {', '.join(map(str, sorted(self._hanging)))}, {where}") from None
        except DeviceLostError as lost:
            lost.workers, lost.is_hang = tuple({*lost.workers, *self._hanging}), bool(self._hanging)
            raise

    def _raise_first(self, run: StepRun) -> None:
        if not run.failures:
            return
        worker, error, where = run.failures[0]
        if isinstance(error, RoundpipeError):
            raise error
        text = f"{type(error).__name__}: {error}".strip()
        if self._is_out_of_memory(error):
            raise OutOfDeviceMemoryError(
                "out of memory on a worker", where=where, found=text, hint=MEMORY_HINT
            ) from error
        if self._is_device_error(error):
            lost = DeviceLostError("a worker's device failed", where=where, found=text)
            lost.workers = (worker,)
            raise lost from error
        raise InternalError(f"a worker failed: {text}", where=where) from error
