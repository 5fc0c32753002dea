"""The next chunk for a link: pure decisions (events in, chunks out; no thread, no clock), and the time lost by waiting.

One queue per worker and direction. A transfer enters it when everything that it waits for has happened, so nothing on
the device's stream ever waits for anything but the link. It goes in chunks, the most urgent transfer first; one that
turns up later but is more urgent overtakes at the next chunk border. Few chunks are in flight, or overtaking would
come too late:

    queue   weights 3 4 5 6 ...     boundary enters       boundary goes next     weights go on
    stream  [weights 1][weights 2]                        [boundary]             [weights 3]
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from roundpipe_cli.costs.cost import CHUNK_BYTES
from roundpipe_cli.schedule.program import Program
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, UP

MAX_IN_FLIGHT = 2
"""Chunks on a stream at a time: one moves, one follows without a gap."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How transfers share a link."""

    chunk_bytes: int = CHUNK_BYTES
    max_in_flight: int = MAX_IN_FLIGHT
    fifo: bool = False
    """First in, first out, whole transfers at a time; for comparison with priorities."""


class TransferQueue:
    """The transfers of one direction of one worker's link."""

    def __init__(self, options: TransferOptions) -> None:
        self._options = options
        self._ready: list[tuple[tuple[int, int], int, int]] = []
        """Heap of (priority, order of arrival, id)."""
        self._chunks_left: dict[int, int] = {}
        self._num_arrived = 0
        self.num_in_flight = 0

    def __len__(self) -> int:
        """Transfers with chunks that are not yet in flight."""
        return len(self._ready)

    def enter(self, transfer: int, priority: tuple[int, int], num_chunks: int) -> None:
        """Put a transfer, whose inputs have all happened, into the queue."""
        assert num_chunks > 0 and transfer not in self._chunks_left
        self._num_arrived += 1
        self._chunks_left[transfer] = num_chunks
        key = (0, 0) if self._options.fifo else priority
        heapq.heappush(self._ready, (key, self._num_arrived, transfer))

    def next(self) -> tuple[int, bool] | None:
        """Put the next chunk in flight: (transfer, whether it is its last chunk); None: nothing may go now."""
        if not self._ready or self.num_in_flight >= self._options.max_in_flight:
            return None
        transfer = self._ready[0][2]
        self.num_in_flight += 1
        self._chunks_left[transfer] -= 1
        last = not self._chunks_left[transfer]
        if last:
            heapq.heappop(self._ready)
            del self._chunks_left[transfer]
        return transfer, last

    def ended(self) -> None:
        """The oldest chunk in flight has arrived."""
        assert self.num_in_flight > 0
        self.num_in_flight -= 1


@dataclass(slots=True)
class TransferRecord:
    """Times at which a transfer entered its queue, began to move and had arrived; seconds of one clock."""

    op_id: int
    payload: str
    lane: str
    num_bytes: int
    ready_s: float
    start_s: float = 0.0
    end_s: float = 0.0


@dataclass
class ClassStatistics:
    """Sums over the transfers of one class."""

    num_transfers: int = 0
    num_bytes: int = 0
    waiting_s: float = 0.0
    """Time between entering the queue and the start of the copy."""
    moving_s: float = 0.0
    """Sum over the links of the time in which at least one transfer moved."""
    exposed_s: float = 0.0
    """Time in which a worker's compute stood still and waited only for such transfers."""

    def add(self, other: ClassStatistics) -> None:
        self.num_transfers += other.num_transfers
        self.num_bytes += other.num_bytes
        self.waiting_s += other.waiting_s
        self.moving_s += other.moving_s
        self.exposed_s += other.exposed_s


@dataclass
class TransferStatistics:
    """Bytes and seconds of a step's transfers, by class: (`up` or `down`, payload)."""

    classes: dict[tuple[str, str], ClassStatistics] = field(default_factory=lambda: defaultdict(ClassStatistics))
    exposed_s: float = 0.0
    """Exposed time of all classes together; a moment with two of them counts once."""

    def add(self, other: TransferStatistics) -> None:
        """Add the statistics of another step."""
        for key, statistics in other.classes.items():
            self.classes[key].add(statistics)
        self.exposed_s += other.exposed_s


ByteSpan = tuple[float, float]


def statistics_of(
    program: Program, compute_s: Mapping[int, ByteSpan], records: Iterable[TransferRecord], started_s: float
) -> TransferStatistics:
    """Bytes, waiting and exposed time per class.

    A gap in a worker's compute counts as exposed where a transfer that the next operation waits for, or one that such
    a transfer waits for, was in its queue or moving at that time, and everything that had to be computed before had
    been: a worker that waits for another worker's result does not wait for the link.

    Args:
        compute_s: compute operation -> (start, end).
        records: of all transfers.
        started_s: when the step began; same clock as all the others.
    """
    found = TransferStatistics()
    moving: dict[tuple[str, str, int], list[ByteSpan]] = defaultdict(list)
    of_op = {record.op_id: record for record in records}
    for record in of_op.values():
        entry = found.classes[record.lane, record.payload]
        entry.num_transfers += 1
        entry.num_bytes += record.num_bytes
        entry.waiting_s += record.start_s - record.ready_s
        if record.op_id < len(program.ops):
            moving[record.lane, record.payload, program.ops[record.op_id].worker].append((record.start_s, record.end_s))
    for (lane, payload, _), spans in moving.items():
        found.classes[lane, payload].moving_s += covered_s(spans)
    for row in program.compute:
        free_s = started_s
        for op_id in row:
            start_s, end_s = compute_s.get(op_id, (free_s, free_s))
            if start_s > free_s:
                _add_exposed(found, program, of_op, compute_s, op_id, (free_s, start_s))
            free_s = max(free_s, end_s)
    return found


def _add_exposed(
    found: TransferStatistics,
    program: Program,
    records: Mapping[int, TransferRecord],
    compute_s: Mapping[int, ByteSpan],
    op_id: int,
    gap: ByteSpan,
) -> None:
    waited: list[TransferRecord] = []
    begin_s, end_s = gap
    todo = [*program.ops[op_id].deps, *program.ops[op_id].late_deps]
    while todo:
        dep = program.ops[todo.pop()]
        if dep.lane == COMPUTE:
            begin_s = max(begin_s, compute_s[dep.id][1] if dep.id in compute_s else begin_s)
            continue
        record = records.get(dep.id)
        if record is not None:
            waited.append(record)
        if dep.lane in (UP, DOWN):
            todo += [other for other in dep.deps if program.ops[other].lane in (COMPUTE, DOWN)]
    spans: dict[tuple[str, str], list[ByteSpan]] = defaultdict(list)
    for record in waited:
        span = max(record.ready_s, begin_s), min(record.end_s, end_s)
        if span[1] > span[0]:
            spans[record.lane, record.payload].append(span)
    for key, pieces in spans.items():
        found.classes[key].exposed_s += covered_s(pieces)
    found.exposed_s += covered_s([piece for pieces in spans.values() for piece in pieces])


def covered_s(spans: Sequence[ByteSpan]) -> float:
    """Seconds that are covered by at least one span."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
