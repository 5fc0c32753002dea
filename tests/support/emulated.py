"""A schedule carried out by the engine's dispatcher on emulated devices: measured against simulated, on any machine.

    measured = run_emulated(schedule, costs, staleness=0)      # sleeps as long as the schedule takes

No tensors, no mathematics, no torch: every operation of the lowered program is issued by the same threads, queues and
events as in training, to clocks that know from the cost model what it takes.

A stream is a clock, as CUDA's is seen from the host: issuing returns at once. An operation starts at the latest of
the wall time of its issue, the end of the operation before it on that stream, and the ends of the events that it waits
for; its end is fixed then and is its event: an absolute time of `time.perf_counter`. Nothing sleeps per operation;
only a host wait sleeps, until an absolute deadline. So work that the host issues too late shows, and is counted, as on
a GPU.

    wall    issue A    issue B                issue C (late)
    stream  |---- A ----|---- B ----|  late   |---- C ----|
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

from roundpipe_cli.costs.cost import CHUNK_BYTES, CostModel
from roundpipe_cli.engine.dispatch import dispatch
from roundpipe_cli.engine.dispatch.decisions import TransferQueue, links_of
from roundpipe_cli.engine.dispatch.dispatch import Pool, StepRun
from roundpipe_cli.engine.dispatch.progress import Progress
from roundpipe_cli.engine.dispatch.work import TransferChunk, Work
from roundpipe_cli.engine.program import describe_op
from roundpipe_cli.faults import fault
from roundpipe_cli.schedule.actions import Kind, Schedule, stage_times
from roundpipe_cli.schedule.program import Op, Program, lower
from roundpipe_cli.schedule.simulate import host_s
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP, Interval, Timeline, bubble_ratio, makespan_s
from roundpipe_cli.units import shown_step


class EmulatedEvent(NamedTuple):
    """The absolute time at which an operation ends, and its worker."""

    end_s: float
    worker: int


class StreamClock:
    """One stream of an emulated device."""

    def __init__(self) -> None:
        self.end_s = 0.0  # end of the last operation issued
        self.late_s = 0.0  # time that the stream lost because the host issued too late

    def start_step(self, now_s: float) -> None:
        self.end_s, self.late_s = now_s, 0.0

    def issue(
        self, seconds: float, after: Sequence[float] = (), lead_s: float = 0.0, late: Sequence[float] = ()
    ) -> tuple[float, float]:
        """Put an operation on the stream, which waits for `after`; its first part, `lead_s`, does not need `late`.
        Returns (start, end)."""
        now_s = time.perf_counter()
        could_s = max(self.end_s, *after, max(late, default=0.0) - lead_s)
        start_s = max(now_s, could_s)
        self.late_s += start_s - could_s
        self.end_s = start_s + seconds
        return start_s, self.end_s


@dataclass(frozen=True)
class Emulated:
    """The outcome of one run."""

    timeline: Timeline
    late_s: tuple[float, ...]  # per worker: lost by its streams because the host issued too late, links included
    compute_late_s: tuple[float, ...]  # the part of its compute stream; a link's lost time seldom delays anybody
    host_late_s: float  # time that the updates lost in the same way
    exposed_s: float  # time in which a worker's compute stood still and waited for transfers only

    @property
    def makespan_s(self) -> float:
        return makespan_s(self.timeline)

    @property
    def bubble_ratio(self) -> float:
        return bubble_ratio(self.timeline)


class EmulatedWork(Work):
    """Carries out operations of one worker, or of the host (behind the workers), as times on clocks."""

    def __init__(self, worker: int, program: Program, costs: CostModel) -> None:
        self.worker, self._schedule, self._costs = worker, program.schedule, costs
        self._host = program.schedule.num_workers
        self.lanes: tuple[str, ...] = (UP, DOWN) if worker != self._host else (HOST,)
        self.streams = {lane: StreamClock() for lane in (COMPUTE, *self.lanes)}
        self.intervals: list[tuple[int, Interval]] = []  # (operation, what it did), of all threads of this worker
        self.transfers_s: dict[int, tuple[float, float]] = {}  # transfer -> when it could begin, and its end
        stages = self._schedule.forward_stages, self._schedule.backward_stages
        self._times = stage_times(costs, *stages, fused_head=self._schedule.fused_head)
        self._after: dict[int, Sequence[float]] = {}

    def compute_thread(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lane_thread(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _arrivals_s(self, events: Sequence[EmulatedEvent]) -> list[float]:
        """When each is known here: a hop later from another worker, but not from the host, nor there."""
        hop_s = self._costs.hop_s
        return [
            end_s if worker == self.worker or self._host in (worker, self.worker) else end_s + hop_s
            for end_s, worker in events
        ]

    def run(self, op: Op, ready: Sequence[EmulatedEvent], late: Sequence[EmulatedEvent]) -> EmulatedEvent:
        fault("compute", step=op.step, worker=self.worker)
        times = self._times
        lead_s = 0.0
        if op.kind is Kind.BACKWARD and op.stage == 0 and self._schedule.fused_head:
            lead_s = times.lead_s(0, self.worker)
        after_s, late_s = self._arrivals_s(ready), self._arrivals_s(late)
        seconds = times.action_s(op.kind, op.stage, self.worker)
        start_s, end_s = self.streams[COMPUTE].issue(seconds, after_s, lead_s, late_s)
        self._note(op, COMPUTE, start_s, end_s)
        return EmulatedEvent(end_s, self.worker)

    def prepare(self, op: Op, after: Sequence[EmulatedEvent]) -> Sequence[TransferChunk]:
        """The chunks of a transfer, each with its seconds."""
        costs = self._costs
        if op.lane == HOST:
            seconds = host_s(op, costs)
            chunks = [TransferChunk(0, seconds)] if seconds else []
        else:
            starts = range(0, op.num_bytes, CHUNK_BYTES)
            sizes = [min(CHUNK_BYTES, op.num_bytes - start) for start in starts]
            chunks = [TransferChunk(num_bytes, num_bytes / costs.link_bytes_per_s) for num_bytes in sizes]
        if chunks:
            self._after[op.id] = self._arrivals_s(after)
            ready_s = max(self._after[op.id], default=time.perf_counter())
            self.transfers_s[op.id] = ready_s, ready_s
        return chunks

    def copy(self, op: Op, chunk: TransferChunk) -> EmulatedEvent:
        start_s, end_s = self.streams[op.lane].issue(chunk.content, self._after[op.id])
        self._note(op, op.lane, start_s, end_s)
        self.transfers_s[op.id] = self.transfers_s[op.id][0], end_s
        return EmulatedEvent(end_s, self.worker)

    def issued(self, op: Op, event: EmulatedEvent | None) -> None:
        self._after.pop(op.id, None)

    def happens_in_s(self, event: EmulatedEvent) -> float:
        return max(0.0, self._arrivals_s([event])[0] - time.perf_counter())

    def where(self, op: Op, *, weights: bool) -> str:
        if op.lane == HOST:
            return f"host (emulated), update of layer {op.stage}, step {shown_step(op.step)}"
        what = "weights for " if weights else ""
        return f"worker {self.worker} (emulated), {what}{describe_op(op, self._schedule, op.step)}"

    def drain(self) -> None:
        end_s = max(clock.end_s for clock in self.streams.values())
        while (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)

    def reset(self) -> None:
        self._after.clear()

    def _note(self, op: Op, lane: str, start_s: float, end_s: float) -> None:
        worker = -1 if lane == HOST else op.worker
        self.intervals.append((op.id, Interval(worker, lane, op.kind, op.stage, op.microbatch, start_s, end_s)))


class _Fifo(TransferQueue):
    """First in, first out, whole transfers at a time; for comparison with priorities."""

    def enter(self, transfer: int, priority: tuple[int, int], num_chunks: int) -> None:
        super().enter(transfer, (0, 0), num_chunks)


def run_emulated(
    schedule: Schedule, costs: CostModel, *, fifo: bool = False, watchdog_s: float | None = 600.0, **how: Any
) -> Emulated:
    """Carry a schedule out, all its chained steps, on emulated devices; takes as long as it says.
    `how`: as in the simulator; `fifo`: transfers go first in, first out. Fails after `watchdog_s` without progress."""
    program = lower(schedule, costs, **how)
    host = schedule.num_workers
    ops = [op._replace(worker=host) if op.lane == HOST else op for op in program.ops]
    program = replace(program, ops=ops, compute=[*program.compute, []])
    works = [EmulatedWork(worker, program, costs) for worker in range(host + 1)]
    pool = Pool(works, watchdog_s=watchdog_s)
    run = StepRun(program, links_of(program), 0, Progress(), works=pool.works)
    with mock.patch.object(dispatch, "TransferQueue", _Fifo if fifo else TransferQueue), pool:
        started_s = time.perf_counter()
        for work in works:
            for clock in work.streams.values():
                clock.start_step(started_s)
        pool.start(run)
        pool.wait(run)
    return _result(program, works, started_s)


def _result(program: Program, works: Sequence[EmulatedWork], started_s: float) -> Emulated:
    found = [entry for work in works for entry in work.intervals]
    compute_s = {op_id: (item.start_s, item.end_s) for op_id, item in found if item.lane == COMPUTE}
    intervals = tuple(one._replace(start_s=one.start_s - started_s, end_s=one.end_s - started_s) for _, one in found)
    schedule = program.schedule
    timeline = Timeline(
        schedule.num_workers, intervals, fused_head=schedule.fused_head, updates_overlap=program.staleness == 1
    )
    return Emulated(
        timeline,
        tuple(sum(clock.late_s for clock in work.streams.values()) for work in works[:-1]),
        tuple(work.streams[COMPUTE].late_s for work in works[:-1]),
        works[-1].streams[HOST].late_s,
        exposed_s(program, compute_s, {op: span for work in works for op, span in work.transfers_s.items()}, started_s),
    )


Span = tuple[float, float]


def exposed_s(
    program: Program, compute_s: Mapping[int, Span], transfers_s: Mapping[int, Span], started_s: float
) -> float:
    """Seconds in which a worker's compute stood still and waited for transfers only.
    A gap counts where a transfer that the next operation waits for, or one that such a transfer waits for, was in its
    queue or moving, and everything that had to be computed before had been: a worker that waits for another worker's
    result does not wait for the link. Computed operations have (start, end), transfers (entered their queue, end)."""
    total = 0.0
    for row in program.compute:
        free_s = started_s
        for op_id in row:
            start_s, end_s = compute_s.get(op_id, (free_s, free_s))
            begin_s, waited = free_s, list[Span]()
            todo = [*program.ops[op_id].deps, *program.ops[op_id].late_deps] if start_s > free_s else []
            while todo:
                dep = program.ops[todo.pop()]
                if dep.lane == COMPUTE:
                    begin_s = max(begin_s, compute_s[dep.id][1] if dep.id in compute_s else begin_s)
                    continue
                waited += [transfers_s[dep.id]] if dep.id in transfers_s else []
                if dep.lane in (UP, DOWN):
                    todo += [other for other in dep.deps if program.ops[other].lane in (COMPUTE, DOWN)]
            total += covered_s([(max(ready_s, begin_s), min(arrived_s, start_s)) for ready_s, arrived_s in waited])
            free_s = max(free_s, end_s)
    return total


def covered_s(spans: Sequence[Span]) -> float:
    """Seconds that are covered by at least one span."""
    total, reached_s = 0.0, float("-inf")
    for start_s, end_s in sorted(spans):
        total += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total
