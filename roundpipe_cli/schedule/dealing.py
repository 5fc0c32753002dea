"""roundpipe's dispatch: the stages of a round are dealt out to workers, round after round.

By default stage after stage goes to the next worker in turn, forward stages first, then backward stages, and a round
starts on the worker that is free first. `Options` has what may be better where the planner says so:

    head spread over all workers
    worker 0   0F0 0F1   0B0
    worker 1   1F0 1F1   0B1

Where workers differ in speed, in turn means that all wait for the slowest. Earliest-free dispatch gives each microbatch
of a stage to the worker that would be done with it first, so that a worker of half the speed takes half as many, and
none of the last ones if that would make the others wait:

    earliest free, worker 1 half as fast
    worker 0   0F0 0F1 0F3 0F4 ...
    worker 1   0F2     0F5 ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from roundpipe_cli.schedule.actions import Kind, in_backward_order
from roundpipe_cli.schedule.durations import StageTimes

WorkerRow = list[tuple[Kind, int, int]]
"""(kind, stage, microbatch) of one worker, in order. Backward stages count from the head."""

_Arrival = tuple[float, int] | None
"""End of a microbatch's previous stage, and the worker on which it ran."""


@dataclass(frozen=True, slots=True)
class Options:
    """How roundpipe deals out stages; the defaults are the published way."""

    head_workers: int = 1
    """Workers that share the microbatches of the stage with the head."""
    earliest_free: bool = False
    """Every microbatch of a stage goes to the worker that would end it first, in place of the next in turn; of a
    sequence in chunks, all of them together."""

    @property
    def why(self) -> str:
        """Sentence for `plan` where the planner has chosen this dealing."""
        if self.earliest_free:
            return "earliest-free dispatch: each microbatch of a stage goes to the worker that ends it first"
        return "the head is frozen, so all workers share its microbatches: faster here than one worker in turn"


@dataclass(frozen=True, slots=True)
class Rounds:
    """Microbatches that a schedule is built for: how many, how they are grouped, and how roundpipe deals them out."""

    num_microbatches: int
    """Per step."""
    per_round: int | None = None
    """Microbatches of a round of roundpipe; None takes the number of workers."""
    num_steps: int = 1
    """Chained optimizer steps."""
    staleness: int = 0
    """0: each step starts behind a barrier. 1: steps follow each other like rounds."""
    sequence_chunks: int = 1
    """So many consecutive microbatches are one sequence; rounds hold whole sequences."""
    options: Options = Options()
    """How roundpipe deals stages out."""


def options_of(
    head_workers: int | Literal["auto"], dispatch: Literal["auto", "round_robin", "earliest_free"]
) -> Options:
    """The dealing that a recipe asks for; `auto` is the published way until the workers' speeds are known."""
    return Options(1 if head_workers == "auto" else head_workers, dispatch == "earliest_free")


def backward_run(stage: int, microbatches: Iterable[int]) -> WorkerRow:
    """The row with each backward directly preceded by its recompute."""
    return [(kind, stage, microbatch) for microbatch in microbatches for kind in (Kind.RECOMPUTE, Kind.BACKWARD)]


def backward_order(microbatches: Sequence[int], sequence_chunks: int) -> Sequence[int]:
    """Microbatches in the order of a backward stage with blocks: each sequence from its last chunk to its first."""
    if sequence_chunks == 1:
        return microbatches
    return [in_backward_order(microbatch, sequence_chunks) for microbatch in microbatches]


def forward_run(stage: int, microbatches: Iterable[int]) -> WorkerRow:
    """The forwards of one stage, in order."""
    return [(Kind.FORWARD, stage, microbatch) for microbatch in microbatches]


class Dealer:
    """Deals rounds to the workers' rows and keeps a clock per worker by the published rules (`published.py`).

    Stages are dealt in the order in which they run, which is also the order of every worker's row, so one pass settles
    all times.
    """

    def __init__(
        self, num_workers: int, times: StageTimes, hop_s: float, options: Options, sequence_chunks: int = 1
    ) -> None:
        self.sequence_chunks = sequence_chunks
        """See `Schedule`; a round holds whole sequences."""
        self.rows: list[WorkerRow] = [[] for _ in range(num_workers)]
        self.free_s = [0.0] * num_workers
        """Times at which each worker's last action ends."""
        self.step_ends_s = [0.0, 0.0]
        """Ends of the last two steps dealt; 0 where there are none."""
        self.waits = False
        """Whether a step begins no sooner than the one two before it has ended, as real ones do at staleness 1."""
        self.times, self.hop_s, self.options = times, hop_s, options

    def start_step(self) -> None:
        """A barrier: all workers are free at once, time counts from here."""
        self.free_s = [0.0] * len(self.rows)

    def deal_step(self, microbatches: range, per_round: int) -> None:
        """Deal the rounds of one step, of at most `per_round` microbatches, each from the first free worker on."""
        ends_s = [
            self.deal_round(range(start, min(start + per_round, microbatches.stop)))
            for start in range(microbatches.start, microbatches.stop, per_round)
        ]
        self.step_ends_s = [self.step_ends_s[1], max(ends_s)]

    def deal_round(self, microbatches: range) -> float:
        """Deal all stages of one round; returns when it ends."""
        num_forward = len(self.times.forward_s)
        first_worker = self.free_s.index(min(self.free_s))
        arrivals: list[_Arrival] = [None] * len(microbatches)
        """End and worker of the previous stage for each microbatch of the round."""
        for position in range(num_forward + len(self.times.backward_s)):
            for worker, indices in self._shares(first_worker, position, len(microbatches), arrivals):
                stage, dealt = position - num_forward, microbatches[indices.start : indices.stop]
                if stage < 0:
                    self.rows[worker] += forward_run(position, dealt)
                elif stage == 0:  # the head's stage keeps its activations: nothing to recompute
                    self.rows[worker] += [(Kind.BACKWARD, 0, microbatch) for microbatch in dealt]
                else:
                    self.rows[worker] += backward_run(stage, backward_order(dealt, self.sequence_chunks))
                order = backward_order(indices, self.sequence_chunks) if stage > 0 else indices
                self._advance(worker, position, order, arrivals)
        return max(end_s for end_s, _ in filter(None, arrivals))

    def _shares(
        self, first_worker: int, position: int, count: int, arrivals: list[_Arrival]
    ) -> Iterator[tuple[int, range]]:
        """Workers of one stage and the microbatches of the round, by index, that each takes."""
        num_workers = len(self.rows)
        if self.options.earliest_free:
            for start in range(0, count, self.sequence_chunks):
                dealt = range(start, start + self.sequence_chunks)
                order = backward_order(dealt, self.sequence_chunks) if position > len(self.times.forward_s) else dealt
                ends = [self._ends_s(worker, position, order, arrivals)[-1] for worker in range(num_workers)]
                yield ends.index(min(ends)), dealt
            return
        is_head = position == len(self.times.forward_s)
        width = max(1, min(self.options.head_workers if is_head else 1, num_workers, count))
        first = first_worker + position
        for share in range(width):
            yield (first + share) % num_workers, range(count * share // width, count * (share + 1) // width)

    def _parts_s(self, worker: int, position: int) -> tuple[float, float]:
        """Seconds of a stage before and after it needs what the stage before delivers."""
        stage = position - len(self.times.forward_s)
        if stage < 0:
            return 0.0, self.times.action_s(Kind.FORWARD, position, worker)
        lead = self.times.lead_s(stage, worker)
        return lead, self.times.action_s(Kind.BACKWARD, stage, worker) - (lead if stage == 0 else 0.0)

    def _ends_s(self, worker: int, position: int, indices: Iterable[int], arrivals: list[_Arrival]) -> list[float]:
        """Times at which a worker would finish each of a stage's microbatches, taken in this order."""
        lead, rest = self._parts_s(worker, position)
        clock_s, ends_s = self.free_s[worker], []
        ready_s = self.step_ends_s[0] if self.waits else 0.0
        for before in (arrivals[index] for index in indices):
            arrival = ready_s if before is None else before[0] + (self.hop_s if before[1] != worker else 0.0)
            clock_s = max(clock_s + lead, arrival) + rest
            ends_s.append(clock_s)
        return ends_s

    def _advance(self, worker: int, position: int, indices: Sequence[int], arrivals: list[_Arrival]) -> None:
        """Move one worker's clock over a stage's microbatches."""
        for index, end_s in zip(indices, self._ends_s(worker, position, indices, arrivals), strict=True):
            self.free_s[worker] = end_s
            arrivals[index] = (end_s, worker)
