"""Lane threads: each carries out the transfers of one direction of one worker's link, or the host's updates."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque

from roundpipe_cli.engine.dispatch.dispatch import StepRun, WorkResult
from roundpipe_cli.engine.dispatch.transfer import TransferOptions, TransferQueue, TransferRecord
from roundpipe_cli.engine.dispatch.work import NOBODY, DispatchEvent, TransferChunk, Work
from roundpipe_cli.faults import fault
from roundpipe_cli.schedule.program import WEIGHTS, Op
from roundpipe_cli.schedule.timeline import DOWN, HOST, UP

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
                except BaseException as error:  # passed on as a value, as errors of compute threads are
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
        except BaseException as error:  # passed on as a value
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
