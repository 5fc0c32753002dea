"""The simulator: interprets a lowered program in virtual time. Deterministic, discrete-event. Seconds and bytes.

The default accounting: every worker has its compute stream and one link per direction, the host updates layers one
at a time. A link moves one transfer at a time. A more urgent one that turns up meanwhile goes first from the next chunk
border:

    link  |weights chunk 1|weights chunk 2|boundary|weights chunk 3|...
                             ^ boundary is ready

The published accounting, under which arXiv 2604.27085 reports its schedules, is the same of a model of which nothing is
moved or updated: compute and hops are left. What a backward stage of roundpipe does before it needs its gradient may
run before that has arrived, and is placed right before the backward: the recompute and, as the published figures show
(Qwen3-32B: 23978.8 ms; 24042.8 ms otherwise), the fused head's forward:

    gradient of microbatch m              |->
    worker        BBBBBB.......RRRRRRRRRRRBBBBBBBBBBB
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from roundpipe_cli.costs.cost import CHUNK_BYTES, CostModel, without_bytes
from roundpipe_cli.schedule.actions import BACKWARD, FORWARD, RECOMPUTE, Schedule, stage_times
from roundpipe_cli.schedule.program import Op, Program, lower
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP, Interval, Timeline


def simulate(
    schedule: Schedule, costs: CostModel, *, accounting: str = "default", staleness: int = 0, after_update: bool = False
) -> Timeline:
    """Time a schedule under either accounting, `default` or `published`.

    Args:
        after_update: as of `lower`.

    Raises:
        ValueError: the schedule deadlocks.
    """
    costs = without_bytes(costs) if accounting == "published" else costs
    return simulate_program(lower(schedule, costs, staleness=staleness, after_update=after_update), costs)


def simulated_step_s(schedule: Schedule, costs: CostModel, *, accounting: str = "default", staleness: int = 0) -> float:
    """Seconds of one step as it follows another one, in three quarters of the time of `simulate`; at staleness 1 of the
    first step.

    Raises:
        ValueError: as `simulate`.
    """
    costs = without_bytes(costs) if accounting == "published" else costs
    return simulated_ends(lower(schedule, costs, staleness=staleness, after_update=staleness == 0), costs).makespan_s


@dataclass(frozen=True, slots=True)
class Ends:
    """The figures of a timeline that say how fast a schedule is, see `timeline.py`."""

    makespan_s: float
    busy_s: list[float]
    """Per worker."""
    links_s: float
    """Time in which the host's memory could serve what all links carry; 0 where its rate is unknown."""
    host_memory_s: float
    """Time in which the host's memory could serve the links and the host's own work together."""


def host_s(op: Op, costs: CostModel) -> float:
    """Seconds of an operation on the host's lane."""
    update_s = costs.layers[op.stage].optimizer_s if op.stage >= 0 else 0.0
    return update_s + (op.num_bytes / costs.host_bytes_per_s if costs.host_bytes_per_s else 0.0)


def host_memory_s(program: Program, costs: CostModel) -> tuple[float, float]:
    """Seconds in which the host's memory serves all links, and with them the host's own work: no step is faster. Both 0
    where its rate is unknown."""
    if costs.host_bytes_per_s is None:
        return 0.0, 0.0
    links_s = sum(op.num_bytes for op in program.ops if op.lane in (UP, DOWN)) / costs.host_bytes_per_s
    return links_s, links_s + sum(host_s(op, costs) for op in program.ops if op.lane == HOST)


def simulated_ends(program: Program, costs: CostModel) -> Ends:
    """The figures of `simulate_program`'s timeline, without intervals and memory.

    Raises:
        ValueError: the program deadlocks.
    """
    run = _Run(program, costs)
    run.go()
    links_s, least_s = host_memory_s(program, costs)
    makespan_s = max(run.makespan_s(updates_overlap=program.staleness == 1), least_s)
    return Ends(makespan_s, run.busy_s(), links_s, least_s)


def simulate_program(program: Program, costs: CostModel) -> Timeline:
    """Interpret a lowered program.

    Raises:
        ValueError: the program deadlocks.
    """
    run, schedule = _Run(program, costs), program.schedule
    run.go()
    return Timeline(
        num_workers=schedule.num_workers,
        intervals=tuple(run.intervals()),
        fused_head=schedule.fused_head,
        updates_overlap=program.staleness == 1,
        host_memory_s=host_memory_s(program, costs)[1],
    )


class _Link:
    """One resource that serves one operation at a time: a direction of a worker's link, or the host's optimizer."""

    __slots__ = ("chunk_s", "current", "ends_s", "pieces", "queue", "serial", "started_s")

    def __init__(self, chunk_s: float) -> None:
        self.chunk_s = chunk_s
        """Seconds of a chunk; infinite where transfers do not overtake each other."""
        self.queue: list[tuple[tuple[int, int], int]] = []
        self.current = -1
        self.started_s = 0.0
        self.ends_s = 0.0
        self.serial = 0
        """Number of pieces put on the link: a moved end still has the old number and is ignored."""
        self.pieces: list[tuple[int, float, float]] = []


class _Run:
    """State of one simulation. Times of an operation are final once they are written to `start_s` and `end_s`.

    A recompute and its backward are settled together, as are all compute operations as soon as everything that they
    wait for is known: then their end is known too, however far in the future it lies.
    """

    def __init__(self, program: Program, costs: CostModel) -> None:
        ops, schedule = program.ops, program.schedule
        self.ops, self.compute = ops, program.compute
        stages = schedule.forward_stages, schedule.backward_stages
        self.times = stage_times(costs, *stages, fused_head=schedule.fused_head)
        self.paired = [False] * len(ops)
        """Per operation: whether it is a recompute, settled together with the operation after it."""
        self.waiting = [len(op.deps) + len(op.late_deps) for op in ops]
        self.ready_s = [0.0] * len(ops)
        self.late_s = [0.0] * len(ops)
        self.start_s = [-1.0] * len(ops)
        self.end_s = [0.0] * len(ops)
        self.remaining_s = [0.0] * len(ops)
        self.followers: list[list[tuple[int, list[float], float]]] = [[] for _ in ops]
        """Per operation: (who waits for it, where its arrival is noted, latency)."""
        chunk_s = CHUNK_BYTES / costs.link_bytes_per_s
        workers = range(len(self.compute))
        self.links = {(UP, worker): _Link(chunk_s) for worker in workers}
        self.links.update({(DOWN, worker): _Link(chunk_s) for worker in workers})
        self.links[HOST, -1] = _Link(float("inf"))
        self.link_of: list[_Link | None] = [None] * len(ops)
        """The link that carries an operation; None for compute."""
        self._connect(costs)
        self.position = [0 for _ in workers]
        self.free_s = [0.0 for _ in workers]
        self.events: list[tuple[float, int, int, int]] = []
        """(time, order, operation, serial): the end of an operation; serial -1 is the arrival of its last input."""
        self.order = count()

    def _connect(self, costs: CostModel) -> None:
        """Who follows whom, on which link, and how long a link takes. This and `_finish` are most of a simulation."""
        followers, ready_s, late_s = self.followers, self.ready_s, self.late_s
        worker_of = [op.worker for op in self.ops]
        hop_s, bytes_per_s = costs.hop_s, costs.link_bytes_per_s
        for op in self.ops:
            op_id, lane, worker = op.id, op.lane, op.worker
            for deps, times_s in ((op.deps, ready_s), (op.late_deps, late_s)):
                for dep in deps:  # a hop between two different workers; the host is near everyone
                    is_near = worker_of[dep] == worker or worker < 0 or worker_of[dep] < 0
                    followers[dep].append((op_id, times_s, 0.0 if is_near else hop_s))
            if lane == COMPUTE:
                if op.kind is RECOMPUTE:
                    self.paired[op_id] = True
                    self.waiting[op_id + 1] -= 1  # the recompute itself
                continue
            self.link_of[op_id] = self.links[lane, worker]
            if lane == HOST:
                self.remaining_s[op_id] = host_s(op, costs)
            else:
                self.remaining_s[op_id] = op.num_bytes / bytes_per_s

    def go(self) -> None:
        """Run every operation to its end.

        Raises:
            ValueError: the program deadlocks.
        """
        events, link_of = self.events, self.link_of
        for op_id, num_awaited in enumerate(self.waiting):
            if not num_awaited and link_of[op_id] is not None:
                heappush(events, (0.0, next(self.order), op_id, -1))
        for worker in range(len(self.compute)):
            self._advance(worker)
        while events:
            now_s, _, op_id, serial = heappop(events)
            link = link_of[op_id]
            if link is None:
                self._finish(op_id, now_s)
            elif serial < 0:
                self._enqueue(link, op_id, now_s)
            elif serial == link.serial:
                self._end_piece(link, now_s)
        if any(position < len(row) for position, row in zip(self.position, self.compute, strict=True)):
            raise ValueError("the program deadlocks")

    def _finish(self, op_id: int, now_s: float) -> None:
        """Pass the end of an operation on to its followers."""
        waiting = self.waiting
        for follower, times_s, latency_s in self.followers[op_id]:
            arrival_s = now_s + latency_s
            if arrival_s > times_s[follower]:
                times_s[follower] = arrival_s
            waiting[follower] -= 1
            if waiting[follower]:
                continue
            link = self.link_of[follower]
            if link is None:
                self._advance(self.ops[follower].worker)
            elif self.ready_s[follower] > now_s:
                heappush(self.events, (self.ready_s[follower], next(self.order), follower, -1))
            else:
                self._enqueue(link, follower, now_s)

    def _advance(self, worker: int) -> None:
        """Settle a worker's next operations, as long as all their inputs are known."""
        row, waiting, position = self.compute[worker], self.waiting, self.position[worker]
        while position < len(row):
            op_id = row[position]
            paired = self.paired[op_id]
            backward = row[position + 1] if paired else op_id
            if waiting[op_id] or waiting[backward]:
                break
            self._settle(self.ops[op_id], backward)
            position += 2 if paired else 1
        self.position[worker] = position

    def _settle(self, op: Op, backward: int) -> None:
        """Fix the times of one operation, or of a recompute and its backward.

        What comes before the gradient is needed (the lead) is placed right before the rest.
        """
        op_id, kind, worker, stage = op.id, op.kind, op.worker, op.stage
        start_s = max(self.free_s[worker], self.ready_s[op_id])
        if kind is not FORWARD:
            lead_s = self.times.lead_s(stage, worker)
            needed_s = max(self.late_s[backward], self.ready_s[backward] if backward != op_id else 0.0)
            start_s = max(start_s, needed_s - lead_s)
        self.start_s[op_id] = start_s
        end_s = self.end_s[op_id] = start_s + self.times.action_s(kind, stage, worker)
        if backward != op_id:
            self.start_s[backward] = end_s
            end_s = self.end_s[backward] = end_s + self.times.action_s(BACKWARD, stage, worker)
        self.free_s[worker] = end_s
        if self.followers[backward]:
            heappush(self.events, (end_s, next(self.order), backward, 0))

    def _enqueue(self, link: _Link, op_id: int, now_s: float) -> None:
        priority, current = self.ops[op_id].priority, link.current
        heappush(link.queue, (priority, op_id))
        if current < 0:
            self._start_next(link, now_s)
        elif priority < self.ops[current].priority:
            if link.started_s == now_s:  # both became ready at this moment: nothing has been moved yet
                heappush(link.queue, (self.ops[current].priority, current))
                if self.start_s[current] == now_s:
                    self.start_s[current] = -1.0
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
            heappush(self.events, (border_s, next(self.order), link.current, link.serial))

    def _start_next(self, link: _Link, now_s: float) -> None:
        op_id = heappop(link.queue)[1]
        if self.start_s[op_id] < 0:
            self.start_s[op_id] = now_s
        link.current, link.started_s = op_id, now_s
        link.ends_s = now_s + self.remaining_s[op_id]
        link.serial += 1
        heappush(self.events, (link.ends_s, next(self.order), op_id, link.serial))

    def _end_piece(self, link: _Link, now_s: float) -> None:
        op_id = link.current
        link.pieces.append((op_id, link.started_s, now_s))
        self.remaining_s[op_id] -= now_s - link.started_s
        link.current = -1
        if self.remaining_s[op_id] > 1e-12 * now_s:  # a remainder from rounding gets no piece
            heappush(link.queue, (self.ops[op_id].priority, op_id))
        else:
            self.end_s[op_id] = now_s
            self._finish(op_id, now_s)
        if link.queue and link.current < 0:
            self._start_next(link, now_s)

    def makespan_s(self, *, updates_overlap: bool) -> float:
        """As `timeline.makespan_s` of a timeline of these intervals."""
        return max(
            (
                end_s
                for op, start_s, end_s in zip(self.ops, self.start_s, self.end_s, strict=True)
                if end_s > start_s and not (updates_overlap and op.lane == HOST)
            ),
            default=0.0,
        )

    def busy_s(self) -> list[float]:
        """As `timeline.busy_s` of a timeline of these intervals."""
        return [sum((self.end_s[op] - self.start_s[op] for op in row), 0.0) for row in self.compute]

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
