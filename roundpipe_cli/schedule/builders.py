"""Builders: from a partition, which they check, to the list of actions of each worker.

Five schedules. Three bind stages to workers in turn (`interleaved_1f1b`, `looped_bfs`: stage s on worker s mod
workers), two have as many stages as workers (`gpipe`, `1f1b`), and `roundpipe` binds nothing: stages are dealt out
round-robin, forward stages first, then backward stages, and the next round starts on the worker that is free first:

    worker 0   0F0 0F1 0F2   3F0 3F1 3F2   2R0 2B0 2R1 2B1 ...      stage s of the round on (start + s) mod workers,
    worker 1   0F0 ...       0B0 0B1 0B2   3R0 ...                  backward stage b on (start + forward stages + b)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from roundpipe_cli.choices import CHUNK_SCHEDULES, SCHEDULE_KINDS, SCHEDULES, ScheduleName
from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.schedule.actions import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Action,
    Kind,
    Schedule,
    equal_costs,
    in_backward_order,
    stage_times,
)

# roundpipe's dispatch: the stages of a round are dealt out to workers, round after round.
#
# By default stage after stage goes to the next worker in turn, forward stages first, then backward stages, and a round
# starts on the worker that is free first. `Options` has what may be better where the planner says so. With the last
# stages shared nobody waits for the others to end a step:
#
#     in turn    worker 0   ... 5B0 5B1 5B2 5B3                          the last two shared   ... 5B0 5B2 6B0 6B2
#                worker 1   ...     6B0 6B1 6B2 6B3                                            ... 5B1 5B3 6B1 6B3
#
#
#     head spread over all workers
#     worker 0   0F0 0F1   0B0
#     worker 1   1F0 1F1   0B1
#
# Where workers differ in speed, in turn means that all wait for the slowest. Earliest-free dispatch gives each
# microbatch of a stage to the worker that would be done with it first, so that a worker of half the speed takes half as
# many, and none of the last ones if that would make the others wait:
#
#     earliest free, worker 1 half as fast
#     worker 0   0F0 0F1 0F3 0F4 ...
#     worker 1   0F2     0F5 ...

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
    shared_stages: int = 0
    """So many stages at the end of a step's last round, at most the whole round, and where there are any also its
    head, are shared by all workers: their microbatches go as with `earliest_free`. All others go in turn."""

    @property
    def splits_stages(self) -> bool:
        """Whether several workers may hold one stage with blocks at a time."""
        return self.earliest_free or self.shared_stages > 0

    @property
    def why(self) -> str:
        """Sentence for `plan` where the planner has chosen this dealing."""
        if self.shared_stages:
            return (
                f"all workers share the last {self.shared_stages} stages of a step and its last head: it drains faster"
            )
        if self.earliest_free:
            return "earliest-free dispatch: each microbatch of a stage goes to the worker that ends it first"
        return "all workers share the head's microbatches: faster here than one worker in turn"


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
    """0: each step is dealt out anew when the one before has ended. 1: steps follow each other like rounds."""
    sequence_chunks: int = 1
    """So many consecutive microbatches are one sequence; rounds hold whole sequences."""
    options: Options = Options()
    """How roundpipe deals stages out."""


def backward_run(stage: int, microbatches: Iterable[int]) -> WorkerRow:
    """The row with each backward directly preceded by its recompute."""
    return [(kind, stage, microbatch) for microbatch in microbatches for kind in (RECOMPUTE, BACKWARD)]


def backward_order(microbatches: Sequence[int], sequence_chunks: int) -> Sequence[int]:
    """Microbatches in the order of a backward stage with blocks: each sequence from its last chunk to its first."""
    if sequence_chunks == 1:
        return microbatches
    return [in_backward_order(microbatch, sequence_chunks) for microbatch in microbatches]


def forward_run(stage: int, microbatches: Iterable[int]) -> WorkerRow:
    """The forwards of one stage, in order."""
    return [(FORWARD, stage, microbatch) for microbatch in microbatches]


class Dealer:
    """Deals rounds to the workers' rows and keeps a clock per worker by the published rules (`simulate.py`).

    Stages are dealt in the order in which they run, which is also the order of every worker's row, so one pass settles
    all times.
    """

    def __init__(
        self,
        num_workers: int,
        costs: CostModel,
        stages: tuple[Sequence[StageRange], Sequence[StageRange]],
        options: Options,
        *,
        sequence_chunks: int = 1,
    ) -> None:
        """
        Args:
            stages: forward and backward.
        """
        times = stage_times(costs, *stages, fused_head=True)
        self.times = replace(times, head_forward_s=0.0) if costs.boundaries_move else times
        self.hop_s, self.options = costs.hop_s, options
        self.sequence_chunks = sequence_chunks
        """See `Schedule`; a round holds whole sequences."""
        self.rows: list[WorkerRow] = [[] for _ in range(num_workers)]
        self.free_s = [0.0] * num_workers
        """Times at which each worker's last action ends."""
        self.step_ends_s = [0.0, 0.0]
        """Ends of the last two steps dealt; 0 where there are none."""
        self.waits = False
        """Whether a step begins no sooner than the one two before it has ended: at staleness 1."""

    def deal_step(self, microbatches: range, per_round: int) -> None:
        """Deal the rounds of one step, of at most `per_round` microbatches, each from the first free worker on."""
        stop = microbatches.stop
        ends_s = [
            self.deal_round(range(start, min(start + per_round, stop)), is_last=start + per_round >= stop)
            for start in range(microbatches.start, stop, per_round)
        ]
        self.step_ends_s = [self.step_ends_s[1], max(ends_s)]

    def deal_round(self, microbatches: range, *, is_last: bool = True) -> float:
        """Deal all stages of one round, the last one of a step or another; returns when it ends."""
        num_forward = len(self.times.forward_s)
        num_stages, num_shared = num_forward + len(self.times.backward_s), self.options.shared_stages
        shared = {num_forward, *range(num_stages - num_shared, num_stages)} if is_last and num_shared else set()
        first_worker = self.free_s.index(min(self.free_s))
        arrivals: list[_Arrival] = [None] * len(microbatches)
        """End and worker of the previous stage for each microbatch of the round."""
        for position in range(num_stages):
            is_free = self.options.earliest_free or position in shared
            deal = self._earliest_free if is_free else self._in_turn
            for worker, indices in deal(first_worker, position, len(microbatches), arrivals):
                stage, dealt = position - num_forward, microbatches[indices.start : indices.stop]
                if stage < 0:
                    self.rows[worker] += forward_run(position, dealt)
                elif stage == 0:  # the head's stage keeps its activations: nothing to recompute
                    self.rows[worker] += [(BACKWARD, 0, microbatch) for microbatch in dealt]
                else:
                    self.rows[worker] += backward_run(stage, backward_order(dealt, self.sequence_chunks))
                order = backward_order(indices, self.sequence_chunks) if stage > 0 else indices
                self._advance(worker, position, order, arrivals)
        return max(end_s for end_s, _ in filter(None, arrivals))

    def _earliest_free(
        self, first_worker: int, position: int, count: int, arrivals: list[_Arrival]
    ) -> Iterator[tuple[int, range]]:
        """As `_in_turn`, each microbatch on the worker that would end it first."""
        for start in range(0, count, self.sequence_chunks):
            dealt = range(start, start + self.sequence_chunks)
            order = backward_order(dealt, self.sequence_chunks) if position > len(self.times.forward_s) else dealt
            ends = [self._ends_s(worker, position, order, arrivals)[-1] for worker in range(len(self.rows))]
            yield ends.index(min(ends)), dealt

    def _in_turn(
        self, first_worker: int, position: int, count: int, arrivals: list[_Arrival]
    ) -> Iterator[tuple[int, range]]:
        """Workers of one stage and the microbatches of the round, by index, that each takes."""
        num_workers = len(self.rows)
        is_head = position == len(self.times.forward_s)
        width = max(1, min(self.options.head_workers if is_head else 1, num_workers, count))
        first = first_worker + position
        for share in range(width):
            yield (first + share) % num_workers, range(count * share // width, count * (share + 1) // width)

    def _ends_s(self, worker: int, position: int, indices: Iterable[int], arrivals: list[_Arrival]) -> list[float]:
        """Times at which a worker would finish each of a stage's microbatches, taken in this order."""
        stage = position - len(self.times.forward_s)
        if stage < 0:
            lead, rest = 0.0, self.times.action_s(FORWARD, position, worker)
        else:  # before and after it needs what the stage before delivers
            lead = self.times.lead_s(stage, worker)
            rest = self.times.action_s(BACKWARD, stage, worker) - (lead if stage == 0 else 0.0)
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


def schedule_name(name: str) -> ScheduleName:
    """The name of a schedule, from any spelling with dashes, spaces or capitals.

    Raises:
        RefusedError: no such schedule.
    """
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    if known := next((known for known in SCHEDULES if plain == known), None):
        return known
    nearest = closest(plain, list(SCHEDULES))
    raise RefusedError(
        "unknown schedule",
        found=repr(name),
        expected=", ".join(SCHEDULES),
        hint=f"did you mean {nearest}?" if nearest else None,
    )


def build_schedule(
    name: str,
    *,
    forward_stages: Sequence[StageRange],
    backward_stages: Sequence[StageRange] | None = None,
    num_workers: int,
    rounds: Rounds,
    costs: CostModel | None = None,
) -> Schedule:
    """Build any of the schedules.

    Args:
        name: one of `SCHEDULES`, or a spelling that `schedule_name` accepts.
        forward_stages: layer ranges in execution order. For roundpipe they leave out what the first backward stage
            computes itself; for the bound schedules they cover every layer.
        backward_stages: layer ranges in execution order, head first. None for the bound schedules: the mirror.
        costs: decides on which worker the next round of roundpipe starts; None takes equal cost per layer.

    Raises:
        RefusedError: unknown schedule, or stages or chunks that do not fit it.
    """
    name = schedule_name(name)
    binds_stages = SCHEDULE_KINDS[name].binds_stages
    forward, backward = tuple(forward_stages), tuple(backward_stages or ())
    if binds_stages and not backward:
        backward = tuple(reversed(forward))
    num_microbatches, chunks = rounds.num_microbatches, rounds.sequence_chunks
    num_layers = len(costs.layers) if costs else 1 + max((last for _, last in (*forward, *backward)), default=-1)
    check_stages(name, forward, backward, num_layers=num_layers, num_workers=num_workers)
    per_round = rounds.per_round
    if per_round is None:  # whole sequences
        per_round = -(-num_workers // chunks) * chunks
    check_chunks(name, backward[0], num_layers, num_microbatches, per_round=per_round, sequence_chunks=chunks)
    if not binds_stages:
        costs = costs or equal_costs(num_layers)
        dealer = Dealer(num_workers, costs, (forward, backward), rounds.options, sequence_chunks=chunks)
        dealer.waits = rounds.staleness == 1 and costs.has_updates
        for step in range(rounds.num_steps):
            if rounds.staleness == 0:  # a barrier: all workers are free at once, time counts from here
                dealer.free_s = [0.0] * num_workers
            dealer.deal_step(range(step * num_microbatches, (step + 1) * num_microbatches), per_round)
        rows = dealer.rows
    else:
        row_of = _BOUND_ROWS[name]
        one_step = [row_of(worker, num_workers, len(forward), num_microbatches) for worker in range(num_workers)]
        if chunks > 1:
            one_step = [_in_chunk_order(row, num_microbatches, chunks) for row in one_step]
        starts = range(0, num_microbatches * rounds.num_steps, num_microbatches)
        rows = [[(kind, stage, start + index) for start in starts for kind, stage, index in row] for row in one_step]
        per_round = num_microbatches
    return Schedule(
        name=name,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        forward_stages=forward,
        backward_stages=backward,
        fused_head=not binds_stages,
        actions=_actions(rows),
        microbatches_per_round=min(per_round, num_microbatches),
        num_steps=rounds.num_steps,
        sequence_chunks=chunks,
    )


def _actions(rows: Sequence[WorkerRow]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action(*item, worker) for item in row) for worker, row in enumerate(rows))


SCORED_PER_WORKER = 4
"""Microbatches of one pass of forwards: about as long as a step, since a signal waits for its end."""


def build_forward(stages: Sequence[StageRange], *, num_workers: int, num_microbatches: int) -> Schedule:
    """Forwards alone, for evaluation, stages dealt out in turn: in one round where each worker gets as many, else in
    rounds of as many microbatches as workers, which deal on where the last one ended.

    Of one or two stages, which a worker's slots hold together, each microbatch goes through all on one worker, or some
    workers would get none.

    Args:
        stages: layer ranges in execution order, every layer, the head included.
    """
    rows: list[WorkerRow] = [[] for _ in range(num_workers)]
    stays = len(stages) <= 2
    size = 1 if stays else num_microbatches if len(stages) % num_workers == 0 else num_workers
    for turn, start in enumerate(range(0, num_microbatches, size)):
        dealt = range(start, min(start + size, num_microbatches))
        for stage in range(len(stages)):
            worker = turn if stays else turn * len(stages) + stage
            rows[worker % num_workers] += forward_run(stage, dealt)
    return Schedule(
        name="forward",
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        forward_stages=tuple(stages),
        backward_stages=(),
        fused_head=False,
        actions=_actions(rows),
        microbatches_per_round=min(max(size, num_workers), num_microbatches),
    )


def every_stage(schedule: Schedule) -> tuple[StageRange, ...]:
    """The forward stages of a schedule and, where its first backward stage computes layers' only forward, those."""
    stages = schedule.forward_stages + (schedule.backward_stages[:1] if schedule.fused_head else ())
    return tuple(stage for stage in stages if stage[0] <= stage[1])


def _in_chunk_order(row: WorkerRow, num_microbatches: int, sequence_chunks: int) -> WorkerRow:
    """The row with each backward stage's microbatches in the order that chunks need, behind all forwards."""
    stages = dict.fromkeys(stage for kind, stage, _ in row if kind is BACKWARD)
    order = backward_order(range(num_microbatches), sequence_chunks)
    backward = [item for stage in stages for item in backward_run(stage, order)]
    return [item for item in row if item[0] is FORWARD] + backward


def _gpipe_row(worker: int, num_workers: int, num_stages: int, num_microbatches: int) -> WorkerRow:
    microbatches = range(num_microbatches)
    return forward_run(worker, microbatches) + backward_run(num_stages - 1 - worker, microbatches)


def _1f1b_row(worker: int, num_workers: int, num_stages: int, num_microbatches: int) -> WorkerRow:
    """The order of PyTorch's `Schedule1F1B`: warm up, then one backward and one forward in turn, then drain."""
    num_warmup = min(num_microbatches, num_workers - worker)
    mirrored = num_stages - 1 - worker
    row = forward_run(worker, range(num_warmup))
    for microbatch in range(num_microbatches):
        row += backward_run(mirrored, [microbatch])
        row += forward_run(worker, range(microbatch + num_warmup, min(microbatch + num_warmup + 1, num_microbatches)))
    return row


def _looped_bfs_row(worker: int, num_workers: int, num_stages: int, num_microbatches: int) -> WorkerRow:
    """Breadth first (arXiv 2211.05953): each local stage for all microbatches; then all that in reverse."""
    local_stages = range(worker, num_stages, num_workers)
    row: WorkerRow = []
    for stage in local_stages:
        row += forward_run(stage, range(num_microbatches))
    for stage in reversed(local_stages):
        row += backward_run(num_stages - 1 - stage, reversed(range(num_microbatches)))
    return row


def _interleaved_1f1b_row(worker: int, num_workers: int, num_stages: int, num_microbatches: int) -> WorkerRow:
    """The order of PyTorch's `ScheduleInterleaved1F1B` (arXiv 2104.04473).

    Microbatches go in groups, about as large as there are workers; PyTorch wants groups of equal size, here the last
    ones may be one smaller. Within a group each local stage takes the group's microbatches, forwards first to last
    stage, backwards last to first; after a warm-up, one forward and one backward take turns.
    """
    local_stages = range(worker, num_stages, num_workers)
    groups = interleaved_groups(num_microbatches, num_workers)
    forwards = [(stage, microbatch) for group in groups for stage in local_stages for microbatch in group]
    backwards = [(stage, microbatch) for group in groups for stage in reversed(local_stages) for microbatch in group]
    num_warmup = (len(local_stages) - 1) * len(groups[0]) + 2 * (num_workers - 1 - worker)
    num_warmup = min(num_warmup, len(forwards))
    row: WorkerRow = []
    for stage, microbatch in forwards[:num_warmup]:
        row += forward_run(stage, [microbatch])
    for position, (stage, microbatch) in enumerate(backwards):
        for ahead, ahead_microbatch in forwards[num_warmup + position : num_warmup + position + 1]:
            row += forward_run(ahead, [ahead_microbatch])
        row += backward_run(num_stages - 1 - stage, [microbatch])
    return row


def interleaved_groups(num_microbatches: int, num_workers: int) -> list[range]:
    """Consecutive microbatches in `max(1, microbatches // workers)` groups, larger ones first."""
    num_groups = max(1, num_microbatches // num_workers)
    size, larger = divmod(num_microbatches, num_groups)
    groups: list[range] = []
    for index in range(num_groups):
        first = groups[-1].stop if groups else 0
        groups.append(range(first, first + size + (index < larger)))
    return groups


_BOUND_ROWS: dict[ScheduleName, Callable[[int, int, int, int], WorkerRow]] = {
    "gpipe": _gpipe_row,
    "1f1b": _1f1b_row,
    "looped_bfs": _looped_bfs_row,
    "interleaved_1f1b": _interleaved_1f1b_row,
}


def place_on(schedule: Schedule, workers: Sequence[int], num_workers: int) -> Schedule:
    """A schedule on some of `num_workers` workers, the others idle.

    Args:
        workers: for each worker of the schedule, the worker that takes its place.
    """
    if list(workers) == list(range(num_workers)):
        return schedule
    rows: list[tuple[Action, ...]] = [()] * num_workers
    for row, worker in zip(schedule.actions, workers, strict=True):
        rows[worker] = tuple(action._replace(worker=worker) for action in row)
    return replace(schedule, num_workers=num_workers, actions=tuple(rows))


# Checks of a schedule's stages: they cover the layers and suit its kind and the chunks of sequences.


def check_stages(
    name: str,
    forward_stages: Sequence[StageRange],
    backward_stages: Sequence[StageRange],
    *,
    num_layers: int,
    num_workers: int,
) -> None:
    """Refuse stages that overlap, leave a gap, run out of the model or do not suit the schedule.

    Raises:
        RefusedError: names the direction, the stage and what was expected there.
    """
    kind, count, last_layer = SCHEDULE_KINDS[name], len(forward_stages), num_layers - 1
    if not backward_stages:
        raise RefusedError("no backward stages", expected="at least the stage that holds the head")
    most = -(-num_layers // num_workers) * num_workers if kind.binds_stages else num_layers
    for direction, stages in (("forward", forward_stages), ("backward", backward_stages)):
        for index, (first, last) in enumerate(stages):
            if first < 0 or last < first - 1 or last > last_layer:
                where, found = f"{direction} stage {index}", str([first, last])
                expected = f"[a, b] with 0 <= a <= b <= {last_layer}, or [a, a - 1] for an empty stage"
                raise RefusedError("not a range of layers", where=where, found=found, expected=expected)
        if len(stages) > most:
            found, expected = f"{len(stages)} stages", f"at most {most} for {num_layers} layers"
            raise RefusedError("more stages than layers", where=f"{direction} stages", found=found, expected=expected)
    ends_before, head_stage = num_layers, backward_stages[0]
    if not kind.binds_stages:
        ends_before = head_stage[0]
        if head_stage[1] != last_layer or ends_before > last_layer:
            raise RefusedError(
                "the first backward stage must hold the head",
                where="backward stage 0",
                found=str(list(head_stage)),
                expected=f"a range that ends with layer {last_layer}",
            )
    elif count != num_workers if kind.one_stage_each else not count or count % num_workers:
        raise RefusedError(
            f"{name} has one stage per worker"
            if kind.one_stage_each
            else f"{name} needs a multiple of the workers as stages",
            where="forward stages",
            found=f"{count} stages, {num_workers} workers",
            expected=f"{num_workers}{'' if kind.one_stage_each else f', {2 * num_workers}, ...'} stages",
            hint="an empty stage is [a, a - 1]",
        )
    elif tuple(backward_stages) != tuple(reversed(forward_stages)):
        raise RefusedError(
            f"the backward stages of {name} are the mirror of its forward stages",
            where="backward stages",
            found=str([list(stage) for stage in backward_stages]),
            hint="leave them out",
        )
    _check_cover("forward", forward_stages, ends_before)
    _check_cover("backward", tuple(reversed(backward_stages)), num_layers)


def check_chunks(
    name: str, head_stage: StageRange, num_layers: int, num_microbatches: int, *, per_round: int, sequence_chunks: int
) -> None:
    """Refuse chunks of sequences that do not suit the schedule.

    Raises:
        RefusedError: names what does not fit.
    """
    if sequence_chunks == 1:
        return
    if name not in CHUNK_SCHEDULES:
        raise RefusedError(
            "this schedule cannot take a sequence in chunks: it goes backward before all chunks have gone forward",
            where="sequence_chunks",
            found=f"{name}, {sequence_chunks} chunks",
            expected=", ".join(CHUNK_SCHEDULES),
        )
    is_dealt = not SCHEDULE_KINDS[name].binds_stages
    for what, count in (("a step", num_microbatches), ("a round", per_round)):
        if (what == "a step" or is_dealt) and count % sequence_chunks:
            raise RefusedError(
                f"{what} holds whole sequences",
                where="microbatches",
                found=f"{count} microbatches, {sequence_chunks} chunks a sequence",
                expected=f"a multiple of {sequence_chunks}",
            )
    if is_dealt and head_stage != (num_layers - 1, num_layers - 1):
        raise RefusedError(
            "the stage with the head goes forward and backward at once, so it holds no blocks where sequences are cut",
            where="backward stage 0",
            found=str(list(head_stage)),
            expected=str([num_layers - 1, num_layers - 1]),
        )


def _check_cover(direction: str, ascending: Sequence[StageRange], end: int) -> None:
    """Layers 0 .. end - 1 exactly once; `ascending` in layer order, empty stages anywhere."""
    next_layer = 0
    for first, last in (*(stage for stage in ascending if stage[0] <= stage[1]), (end, None)):
        where, found, expected = f" [{first}, {last}]", f"it starts with layer {first}", f"layer {next_layer}"
        if last is None:
            where, found, expected = "s", f"they end with layer {next_layer - 1}", f"layer {end - 1}"
            expected += ", the rest belongs to the first backward stage" if direction == "forward" else ""
        if first != next_layer:
            what = f"{direction} stages {'overlap' if first < next_layer else 'leave a gap'}"
            raise RefusedError(what, where=f"{direction} stage{where}", found=found, expected=expected)
        next_layer = first if last is None else last + 1
