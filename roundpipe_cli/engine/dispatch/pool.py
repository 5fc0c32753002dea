"""The pool of workers: their threads, and their steps, at most two at a time.

A worker takes up the next step when its part of the one before is done, whatever the others still do:

    worker 0   step k ............ | step k + 1 .........
    worker 1   step k ................. | step k + 1 ....        no barrier: what drains one step fills the next

Its compute thread hands a step to the lanes of its link once it has taken it up; a step that failed is left quickly.
"""

from __future__ import annotations

import faulthandler
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType

from roundpipe_cli.engine.dispatch.dispatch import (
    MEMORY_HINT,
    StepRun,
    TransferFailedError,
    WorkResult,
)
from roundpipe_cli.engine.dispatch.lane import Lane
from roundpipe_cli.engine.dispatch.progress import AbortedError
from roundpipe_cli.engine.dispatch.transfer import TransferOptions
from roundpipe_cli.engine.dispatch.work import NOBODY, Work
from roundpipe_cli.errors import InternalError, NoProgressError, OutOfDeviceMemoryError, RoundpipeError
from roundpipe_cli.schedule.program import Op
from roundpipe_cli.units import shown_step

TICK_S = 0.25
JOIN_TIMEOUT_S = 5.0
JOIN_AFTER_ERROR_S = 2.0
"""Total for all threads of a pool."""
JOIN_LANES_S = 0.5
"""The lanes get at least this much of it."""


class Pool:
    """Workers with their threads, which live as long as the `with` block."""

    def __init__(
        self,
        works: Sequence[Work],
        *,
        host: Work | None = None,
        options: TransferOptions | None = None,
        watchdog_s: float | None = 600.0,
        is_out_of_memory: Callable[[BaseException], bool] = lambda error: isinstance(error, MemoryError),
    ) -> None:
        """
        Args:
            works: one per worker.
            host: what the host's updates do, where programs have them.
            options: how transfers share a link.
            watchdog_s: fail after this long without progress, with all stacks on stderr; None: wait forever.
            is_out_of_memory: whether an exception means that a device has no more memory.
        """
        self.works: dict[int, Work] = dict(enumerate(works))
        if host is not None:
            self.works[NOBODY] = host
        self.is_stuck = False
        """A thread may still be busy with an old step, so no other step can run."""
        self._watchdog_s, self._is_out_of_memory = watchdog_s, is_out_of_memory
        self._under_way: list[StepRun] = []
        """Steps that were started and not waited for, oldest first."""
        self._orders: list[queue.Queue[StepRun | None]] = [queue.Queue() for _ in works]
        self._threads = [
            threading.Thread(target=self._compute_main, args=(worker,), name=f"worker-{worker}", daemon=True)
            for worker in range(len(works))
        ]
        self._lanes = {
            worker: [Lane(lane, worker, work, options or TransferOptions()) for lane in work.lanes]
            for worker, work in self.works.items()
        }

    def __enter__(self) -> Pool:
        for thread in (*self._threads, *(lane.thread for lanes in self._lanes.values() for lane in lanes)):
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the threads end once they have nothing left to do; a thread that hangs is left behind (a daemon)."""
        self._abort_all()
        deadline_s = time.monotonic() + (JOIN_TIMEOUT_S if error is None else JOIN_AFTER_ERROR_S)
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        deadline_s = max(deadline_s, time.monotonic() + JOIN_LANES_S)
        lanes = [lane for lanes in self._lanes.values() for lane in lanes]
        for lane in lanes:  # lanes get their steps from compute threads, so they end after those
            lane.orders.put(None)
        for lane in lanes:
            lane.thread.join(max(0.0, deadline_s - time.monotonic()))

    def run(self, run: StepRun) -> StepRun:
        """`start` and `wait`."""
        self.start(run)
        return self.wait(run)

    def start(self, run: StepRun) -> None:
        """Queue a step for the workers; returns at once."""
        assert not self.is_stuck, "a pool that got stuck cannot be used any more"
        self._under_way.append(run)
        for lane in self._lanes.get(NOBODY, ()):
            lane.orders.put(run)
        for orders in self._orders:
            orders.put(run)

    def wait(self, run: StepRun) -> StepRun:
        """Block until the oldest step is done; returns it. If it fails, later steps are given up.

        Raises:
            ResourceError: out of device memory (exit code 5).
            InternalError: a worker failed or got stuck (exit code 1); names the place.
        """
        assert self._under_way and run is self._under_way[0], "steps end in the order in which they began"
        try:
            results = self._collect(run)
        except BaseException:  # stuck, or interrupted in this thread: workers leave their steps, and no other is taken
            self.is_stuck = True
            for other in self._under_way:
                other.is_abandoned = True
            self._abort_all()
            raise
        self._under_way.pop(0)
        try:
            self._raise_first([*results, *run.errors])
        except RoundpipeError:
            self.is_stuck = bool(self._under_way)
            self._abort_all()
            raise
        return run

    def _abort_all(self) -> None:
        """Let the workers leave all steps whose results are no longer wanted."""
        for run in self._under_way:
            run.progress.abort()
        self._under_way.clear()

    def _compute_main(self, worker: int) -> None:
        work, orders = self.works[worker], self._orders[worker]
        with work.compute_thread():
            while True:
                run = orders.get()
                if run is None:
                    return
                result = WorkResult(worker)
                try:
                    work.take_up(run.parts.pop(worker, None))  # no cycle: it holds the run
                except BaseException as error:
                    result.error, result.where = error, f"worker {worker}, taking up step {shown_step(run.step)}"
                    run.progress.abort()
                for lane in self._lanes[worker]:
                    lane.orders.put(run)
                if result.error is None:
                    self._compute(run, work, result)
                run.leave(worker)
                try:
                    work.drain()  # for a failed step too: until then its work reads and writes slots and sums
                except BaseException as error:
                    if result.error is None and not run.progress.aborted:  # otherwise the first error says more
                        result.error, result.where = error, f"worker {worker}, finishing the step"
                work.reset()
                run.results.put(result)
                run = None
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
                if max(work.busy_s() for work in self.works.values()) > 0:
                    run.progress.moved()
                # Counted in ticks: while the whole process was stopped (SIGSTOP) nothing could move.
                still_s = still_s + TICK_S if run.progress.last_s == seen_s else 0.0
                seen_s = run.progress.last_s
                if self._watchdog_s is not None and still_s > self._watchdog_s:
                    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                    # one worker failed and another is stuck: the failure says more
                    self._raise_first([*results, *run.errors])
                    raise NoProgressError(
                        f"no progress for {still_s:.0f} s: a worker is stuck (the stacks of all threads are above)",
                        where=f"step {shown_step(run.step)}",
                    ) from None
        return results

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
        raise InternalError(f"a worker failed: {text}", where=failed.where) from error
