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
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.engine.dispatch.decisions import (
    Progress,
    TransferChunk,
    TransferOptions,
    TransferStatistics,
    links_of,
    statistics_of,
)
from roundpipe_cli.engine.dispatch.dispatch import Pool, StepRun
from roundpipe_cli.engine.program import describe_op
from roundpipe_cli.faults import fault
from roundpipe_cli.schedule.actions import Kind, Schedule, StageTimes, stage_times
from roundpipe_cli.schedule.program import Op, Program, lower
from roundpipe_cli.schedule.simulate import host_s
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP, Interval, Timeline, bubble_ratio, makespan_s
from roundpipe_cli.units import shown_step

EmulatedEvent = float | None
"""The absolute time at which something ends; None: it has already happened."""


class StreamClock:
    """One stream of an emulated device."""

    def __init__(self) -> None:
        self.end_s = 0.0
        """End of the last operation issued."""
        self.late_s = 0.0
        """Time that the stream lost because the host issued too late."""

    def start_step(self, now_s: float) -> None:
        """Start counting at `now_s`."""
        self.end_s, self.late_s = now_s, 0.0

    def issue(
        self,
        seconds: float,
        after: Sequence[EmulatedEvent] = (),
        lead_s: float = 0.0,
        late: Sequence[EmulatedEvent] = (),
    ) -> tuple[float, float]:
        """Put an operation on the stream; returns (start, end).

        Args:
            seconds: what it takes.
            after: events that it waits for.
            lead_s: its first part, which does not need `late`; it runs right before the rest.
            late: events that only the rest waits for.
        """
        now_s = time.perf_counter()
        could_s = max(self.end_s, *(event for event in after if event is not None), 0.0)
        needed_s = max((event for event in late if event is not None), default=0.0)
        could_s = max(could_s, needed_s - lead_s)
        start_s = max(now_s, could_s)
        self.late_s += start_s - could_s
        self.end_s = start_s + seconds
        return start_s, self.end_s


class EmulatedDevice:
    """One worker's streams."""

    def __init__(self) -> None:
        self.compute, self.up, self.down = StreamClock(), StreamClock(), StreamClock()

    def start_step(self, now_s: float) -> None:
        """Set all streams idle and start counting at `now_s`."""
        for clock in (self.compute, self.up, self.down):
            clock.start_step(now_s)

    @property
    def late_s(self) -> float:
        """Time that the compute stream and the links lost because the host issued too late."""
        return self.compute.late_s + self.up.late_s + self.down.late_s


def happens_in_s(event: EmulatedEvent) -> float:
    """0 if `event` has happened, else the seconds until it does."""
    return 0.0 if event is None else max(0.0, event - time.perf_counter())


def finish(event: EmulatedEvent) -> None:
    """Block the host until `event` has happened."""
    while (left_s := happens_in_s(event)) > 0:
        time.sleep(left_s)


@dataclass(frozen=True)
class Emulated:
    """The outcome of one run."""

    timeline: Timeline
    late_s: tuple[float, ...]
    """Per worker: time that its streams lost because the host issued too late, compute and links together."""
    compute_late_s: tuple[float, ...]
    """Per worker: the part of `late_s` that its compute stream lost; a link's lost time seldom delays anybody."""
    host_late_s: float
    """Time that the updates lost in the same way."""
    transfers: TransferStatistics

    @property
    def makespan_s(self) -> float:
        return makespan_s(self.timeline)

    @property
    def bubble_ratio(self) -> float:
        return bubble_ratio(self.timeline)


class _Emulation:
    """State that all workers of one run share."""

    def __init__(self, program: Program, costs: CostModel) -> None:
        self.program, self.costs = program, costs
        schedule = program.schedule
        self.times: StageTimes = stage_times(
            costs, schedule.forward_stages, schedule.backward_stages, fused_head=schedule.fused_head
        )
        self.chunk_bytes = TransferOptions().chunk_bytes


class EmulatedWork:
    """Carries out operations of one worker, or of the host (worker -1), as times on clocks."""

    def __init__(self, worker: int, emulation: _Emulation) -> None:
        self.worker = worker
        self.lanes: tuple[str, ...] = (UP, DOWN) if worker >= 0 else (HOST,)
        self.device = EmulatedDevice()
        self.intervals: list[tuple[int, Interval]] = []
        """(operation, what it did), of all threads of this worker."""
        self._emulation = emulation
        self._after: dict[int, Sequence[EmulatedEvent]] = {}

    def compute_thread(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lane_thread(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_part(self, part: None) -> None:
        return None

    def begin(self, op: Op) -> None:
        return None

    def run(self, op: Op, ready: Sequence[EmulatedEvent], late: Sequence[EmulatedEvent]) -> EmulatedEvent:
        fault("compute", step=op.step, worker=self.worker)
        times = self._emulation.times
        lead_s = 0.0
        if op.kind is Kind.BACKWARD and op.stage == 0 and self._emulation.program.schedule.fused_head:
            lead_s = times.lead_s(0, self.worker)
        start_s, end_s = self.device.compute.issue(times.action_s(op.kind, op.stage, self.worker), ready, lead_s, late)
        self._note(op, COMPUTE, start_s, end_s)
        return end_s

    def prepare(self, op: Op, after: Sequence[EmulatedEvent]) -> Sequence[TransferChunk]:
        """The chunks of a transfer, each with its seconds."""
        costs = self._emulation.costs
        if op.lane == HOST:
            seconds = host_s(op, costs)
            chunks = [TransferChunk(0, seconds)] if seconds else []
        else:
            size = self._emulation.chunk_bytes
            sizes = [min(size, op.num_bytes - start) for start in range(0, op.num_bytes, size)]
            chunks = [TransferChunk(num_bytes, num_bytes / costs.link_bytes_per_s) for num_bytes in sizes]
        if chunks:
            self._after[op.id] = after
        return chunks

    def copy(self, op: Op, chunk: TransferChunk) -> EmulatedEvent:
        clock = {UP: self.device.up, DOWN: self.device.down, HOST: self.device.compute}[op.lane]
        start_s, end_s = clock.issue(chunk.content, self._after[op.id])
        self._note(op, op.lane, start_s, end_s)
        return end_s

    def issued(self, op: Op, event: EmulatedEvent) -> None:
        self._after.pop(op.id, None)

    def ended(self, op: Op) -> None:
        return None

    def arrival(self, dep: Op, op: Op, event: EmulatedEvent) -> EmulatedEvent:
        """The arrival is a hop later between two different workers, but not from or to the host."""
        if event is None or dep.worker == op.worker or min(dep.worker, op.worker) < 0:
            return event
        return event + self._emulation.costs.hop_s

    def happens_in_s(self, event: EmulatedEvent) -> float:
        return happens_in_s(event)

    def happened_at_s(self, event: EmulatedEvent, now_s: float) -> float:
        return now_s if event is None else event

    def where(self, op: Op, *, weights: bool) -> str:
        if op.lane == HOST:
            return f"host (emulated), update of layer {op.stage}, step {shown_step(op.step)}"
        what = "weights for " if weights else ""
        return f"worker {self.worker} (emulated), {what}{describe_op(op, self._emulation.program.schedule, op.step)}"

    def drain(self) -> None:
        finish(self._end_s())

    def busy_s(self) -> float:
        return happens_in_s(self._end_s())

    def reset(self) -> None:
        self._after.clear()

    def _end_s(self) -> float:
        return max(clock.end_s for clock in (self.device.compute, self.device.up, self.device.down))

    def _note(self, op: Op, lane: str, start_s: float, end_s: float) -> None:
        self.intervals.append((op.id, Interval(op.worker, lane, op.kind, op.stage, op.microbatch, start_s, end_s)))


def run_emulated(
    schedule: Schedule,
    costs: CostModel,
    *,
    staleness: int = 0,
    after_update: bool = False,
    fifo: bool = False,
    watchdog_s: float | None = 600.0,
) -> Emulated:
    """Carry a schedule out, all of its chained steps, on emulated devices; takes as long as it says.

    Args:
        staleness, after_update: as in the simulator.
        fifo: transfers go first in, first out, in place of priorities and overtaking.
        watchdog_s: fail after this long without progress.

    Raises:
        InternalError: a fault, or a thread that is stuck.
    """
    program = lower(schedule, costs, staleness=staleness, after_update=after_update)
    emulation = _Emulation(program, costs)
    works = [EmulatedWork(worker, emulation) for worker in range(schedule.num_workers)]
    host = EmulatedWork(-1, emulation)
    pool = Pool(works, host=host, options=TransferOptions(fifo=fifo), watchdog_s=watchdog_s)
    run = StepRun(program, links_of(program), 0, Progress(), works=pool.works)
    with pool:
        started_s = time.perf_counter()
        for work in (*works, host):
            work.device.start_step(started_s)
        pool.run(run)
    return _result(program, [*works, host], run, started_s)


def _result(program: Program, works: Sequence[EmulatedWork], run: StepRun, started_s: float) -> Emulated:
    found = [entry for work in works for entry in work.intervals]
    compute_s = {op_id: (item.start_s, item.end_s) for op_id, item in found if item.lane == COMPUTE}
    intervals = tuple(
        item._replace(start_s=item.start_s - started_s, end_s=item.end_s - started_s) for _, item in found
    )
    schedule = program.schedule
    timeline = Timeline(
        schedule.num_workers, intervals, fused_head=schedule.fused_head, updates_overlap=program.staleness == 1
    )
    return Emulated(
        timeline,
        tuple(work.device.late_s for work in works if work.worker >= 0),
        tuple(work.device.compute.late_s for work in works if work.worker >= 0),
        works[-1].device.late_s,
        statistics_of(program, compute_s, run.records, started_s),
    )
