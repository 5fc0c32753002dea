"""The simulator: interprets a lowered program in virtual time. Deterministic, discrete-event. Seconds and bytes.

The default accounting: every worker has its compute stream and one link per direction, the host updates layers one
at a time. With all bytes and optimizer times zero nothing is left but compute and hops, and the result is that of the
published accounting (`published.py`).

A link moves one transfer at a time. A more urgent one that turns up meanwhile goes first from the next chunk border:

    link  |weights chunk 1|weights chunk 2|boundary|weights chunk 3|...
                             ^ boundary is ready
"""

from __future__ import annotations

import heapq

from roundpipe_cli.costs.cost import CHUNK_BYTES, CostModel
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.durations import StageTimes, stage_times
from roundpipe_cli.schedule.lower import lower
from roundpipe_cli.schedule.operations import Op, Program
from roundpipe_cli.schedule.peak import device_peak_bytes
from roundpipe_cli.schedule.published import simulate_published
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP, Interval, Timeline

ACCOUNTINGS = ("default", "published")


def simulate(schedule: Schedule, costs: CostModel, *, accounting: str = "default", staleness: int = 0) -> Timeline:
    """Time a schedule under either accounting.

    Raises:
        ValueError: unknown accounting, or the schedule deadlocks (`validate_schedule` shows where).
    """
    if accounting == "published":
        return simulate_published(schedule, costs, staleness=staleness)
    if accounting != "default":
        raise ValueError(f"accounting {accounting!r} is not one of {ACCOUNTINGS}")
    return simulate_program(lower(schedule, costs, staleness=staleness), costs)


def simulate_program(program: Program, costs: CostModel) -> Timeline:
    """Interpret a lowered program.

    Raises:
        ValueError: the program deadlocks.
    """
    schedule = program.schedule
    times = stage_times(costs, schedule.forward_stages, schedule.backward_stages, fused_head=schedule.fused_head)
    run = _Run(program, costs, times)
    run.go()
    return Timeline(
        num_workers=schedule.num_workers,
        intervals=tuple(run.intervals()),
        fused_head=schedule.fused_head,
        updates_overlap=program.staleness == 1,
        device_peak_bytes=device_peak_bytes(program, costs, run.start_s, run.end_s),
    )


class _Link:
    """One resource that serves one operation at a time: a direction of a worker's link, or the host's optimizer."""

    __slots__ = ("chunk_s", "current", "ends_s", "pieces", "queue", "serial", "started_s")

    def __init__(self, chunk_s: float) -> None:
        self.chunk_s = chunk_s
        """Seconds of a chunk; infinite where nothing overtakes."""
        self.queue: list[tuple[tuple[int, int], int]] = []
        self.current = -1
        self.started_s = 0.0
        self.ends_s = 0.0
        self.serial = 0
        """Counts what was put on the link, so that an end that was moved is known by its old number."""
        self.pieces: list[tuple[int, float, float]] = []


class _Run:
    """State of one simulation. Times of an operation are final once they are written to `start_s` and `end_s`.

    A recompute and its backward are settled together, as are all compute operations as soon as everything that they
    wait for is known: then their end is known too, however far in the future it lies.
    """

    def __init__(self, program: Program, costs: CostModel, times: StageTimes) -> None:
        ops = program.ops
        self.ops, self.compute, self.times = ops, program.compute, times
        self.hop_s = costs.hop_s
        self.bytes_per_s = costs.link_bytes_per_s
        self.layers = costs.layers
        self.paired = [False] * len(ops)
        """Whether a recompute is settled with the operation after it."""
        self.waiting = [len(op.deps) + len(op.late_deps) for op in ops]
        self.ready_s = [0.0] * len(ops)
        self.late_s = [0.0] * len(ops)
        self.start_s = [-1.0] * len(ops)
        self.end_s = [0.0] * len(ops)
        self.remaining_s = [0.0] * len(ops)
        self.followers: list[list[tuple[Op, list[float], float]]] = [[] for _ in ops]
        """Per operation: (who waits for it, where its arrival is noted, latency)."""
        for op in ops:
            for dep in op.deps:
                self.followers[dep].append((op, self.ready_s, self._latency_s(ops[dep], op)))
            for dep in op.late_deps:
                self.followers[dep].append((op, self.late_s, self._latency_s(ops[dep], op)))
            if op.lane == COMPUTE:
                if op.kind is Kind.RECOMPUTE:
                    self.paired[op.id] = True
                    self.waiting[op.id + 1] -= 1  # the recompute itself
            elif op.lane == HOST:
                self.remaining_s[op.id] = self.layers[op.stage].optimizer_s if op.stage >= 0 else 0.0
            else:
                self.remaining_s[op.id] = op.num_bytes / self.bytes_per_s
        chunk_s = CHUNK_BYTES / self.bytes_per_s
        workers = range(len(self.compute))
        self.links = {(UP, worker): _Link(chunk_s) for worker in workers}
        self.links.update({(DOWN, worker): _Link(chunk_s) for worker in workers})
        self.links[HOST, -1] = _Link(float("inf"))
        self.position = [0 for _ in workers]
        self.free_s = [0.0 for _ in workers]
        self.events: list[tuple[float, int, int, int]] = []
        """(time, order, operation, serial): the end of an operation; serial -1 is the arrival of its last input."""
        self.order = 0

    def go(self) -> None:
        """Run every operation to its end.

        Raises:
            ValueError: the program deadlocks.
        """
        for op in self.ops:
            if not self.waiting[op.id] and op.lane != COMPUTE:
                self._push(0.0, op.id, -1)
        for worker in range(len(self.compute)):
            self._advance(worker)
        events, ops = self.events, self.ops
        while events:
            now_s, _, op_id, serial = heapq.heappop(events)
            op = ops[op_id]
            if op.lane == COMPUTE:
                self._finish(op, now_s)
                continue
            link = self.links[op.lane, op.worker]
            if serial < 0:
                self._enqueue(link, op, now_s)
            elif serial == link.serial:
                self._end_piece(link, now_s)
        if any(position < len(row) for position, row in zip(self.position, self.compute, strict=True)):
            raise ValueError("the program deadlocks")

    def _latency_s(self, producer: Op, consumer: Op) -> float:
        """A hop between two different workers; the host is near everyone."""
        return self.hop_s if producer.worker != consumer.worker and min(producer.worker, consumer.worker) >= 0 else 0.0

    def _push(self, time_s: float, op_id: int, serial: int) -> None:
        self.order += 1
        heapq.heappush(self.events, (time_s, self.order, op_id, serial))

    def _finish(self, op: Op, now_s: float) -> None:
        """Tell the followers of an operation that it has ended."""
        waiting = self.waiting
        for follower, times_s, latency_s in self.followers[op.id]:
            follower_id = follower.id
            if now_s + latency_s > times_s[follower_id]:
                times_s[follower_id] = now_s + latency_s
            waiting[follower_id] -= 1
            if waiting[follower_id]:
                continue
            if follower.lane == COMPUTE:
                self._advance(follower.worker)
            elif self.ready_s[follower_id] > now_s:
                self._push(self.ready_s[follower_id], follower_id, -1)
            else:
                self._enqueue(self.links[follower.lane, follower.worker], follower, now_s)

    def _advance(self, worker: int) -> None:
        """Settle a worker's next operations, as far as all they wait for is known."""
        row = self.compute[worker]
        while self.position[worker] < len(row):
            op = self.ops[row[self.position[worker]]]
            paired = self.paired[op.id]
            backward = self.ops[row[self.position[worker] + 1]] if paired else op
            if self.waiting[op.id] or self.waiting[backward.id]:
                return
            self._settle(op, backward)
            self.position[worker] += 2 if paired else 1

    def _settle(self, op: Op, backward: Op) -> None:
        """Fix the times of one operation, or of a recompute and its backward.

        What comes before the gradient is needed (the lead) is placed right before the rest.
        """
        worker = op.worker
        earliest_s = max(self.free_s[worker], self.ready_s[op.id])
        if op.kind is Kind.FORWARD:
            start_s = earliest_s
        else:
            lead_s = self.times.lead_s(op.stage, worker)
            needed_s = max(self.late_s[backward.id], self.ready_s[backward.id] if backward is not op else 0.0)
            start_s = max(earliest_s, needed_s - lead_s)
        self.start_s[op.id] = start_s
        end_s = self.end_s[op.id] = start_s + self.times.action_s(op.kind, op.stage, worker)
        if backward is not op:
            self.start_s[backward.id] = end_s
            end_s = self.end_s[backward.id] = end_s + self.times.action_s(Kind.BACKWARD, op.stage, worker)
        self.free_s[worker] = end_s
        if self.followers[backward.id]:
            self._push(end_s, backward.id, 0)

    def _enqueue(self, link: _Link, op: Op, now_s: float) -> None:
        heapq.heappush(link.queue, (op.priority, op.id))
        if link.current < 0:
            self._start_next(link, now_s)
        elif op.priority < self.ops[link.current].priority:
            if link.started_s == now_s:  # both turned up at this moment: nothing has been moved yet
                heapq.heappush(link.queue, (self.ops[link.current].priority, link.current))
                if self.start_s[link.current] == now_s:
                    self.start_s[link.current] = -1.0
                self._start_next(link, now_s)
            else:
                self._cut(link, now_s)

    def _cut(self, link: _Link, now_s: float) -> None:
        """End the running transfer's piece at the next chunk border, if it does not end before that."""
        num_chunks = int((now_s - link.started_s) / link.chunk_s) + 1
        border_s = link.started_s + num_chunks * link.chunk_s
        if border_s < link.ends_s:
            link.ends_s = border_s
            link.serial += 1
            self._push(border_s, link.current, link.serial)

    def _start_next(self, link: _Link, now_s: float) -> None:
        _, op_id = heapq.heappop(link.queue)
        if self.start_s[op_id] < 0:
            self.start_s[op_id] = now_s
        link.current, link.started_s = op_id, now_s
        link.ends_s = now_s + self.remaining_s[op_id]
        link.serial += 1
        self._push(link.ends_s, op_id, link.serial)

    def _end_piece(self, link: _Link, now_s: float) -> None:
        op_id = link.current
        link.pieces.append((op_id, link.started_s, now_s))
        self.remaining_s[op_id] -= now_s - link.started_s
        link.current = -1
        if self.remaining_s[op_id] > 1e-12 * now_s:  # what rounding leaves over is not worth another piece
            heapq.heappush(link.queue, (self.ops[op_id].priority, op_id))
        else:
            self.end_s[op_id] = now_s
            self._finish(self.ops[op_id], now_s)
        if link.queue and link.current < 0:
            self._start_next(link, now_s)

    def intervals(self) -> list[Interval]:
        """Compute operations worker by worker, then the pieces on links and host."""
        found = [
            Interval(worker, COMPUTE, self.ops[op].kind, self.ops[op].stage, self.ops[op].microbatch, start, end)
            for worker, row in enumerate(self.compute)
            for op, start, end in ((op, self.start_s[op], self.end_s[op]) for op in row)
        ]
        for (lane, worker), link in self.links.items():
            for op_id, start_s, end_s in link.pieces:
                op = self.ops[op_id]
                found.append(Interval(worker, lane, op.kind, op.stage, op.microbatch, start_s, end_s))
        return found
