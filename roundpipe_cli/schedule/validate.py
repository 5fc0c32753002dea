"""Checks of a schedule: stages cover the layers; actions are complete, in order and free of deadlock.

An error shows the grid of actions, one row a worker, with the wrong cell marked:

    worker 0:   0F0  0F1  [0F1]  ...
"""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_cli.choices import CHUNK_SCHEDULES, SCHEDULE_KINDS
from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.schedule.actions import Action, Kind, Schedule

_COLUMNS_SHOWN = 6
"""Cells shown on either side of the marked one."""

Key = tuple[Kind, int, int]
"""(kind, stage, microbatch): an action, on whichever worker it runs."""


class InvalidScheduleError(RefusedError):
    """The list of actions cannot be carried out. Exit code 2."""

    def __init__(
        self, what: str, schedule: Schedule, worker: int, position: int, *, expected: str | None = None
    ) -> None:
        grid = marked_grid(schedule.actions, worker, position)
        super().__init__(
            what,
            where=f"schedule {schedule.name}, worker {worker}, action {position}",
            found=f"\n{grid}",
            expected=expected,
        )
        self.worker = worker
        self.position = position
        """Index within the worker's list; one past its end when an action is missing."""


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
    if not backward_stages:
        raise RefusedError("no backward stages", expected="at least the stage that holds the head")
    for direction, stages in (("forward", forward_stages), ("backward", backward_stages)):
        _check_ranges(direction, stages, num_layers)
    if not SCHEDULE_KINDS[name].binds_stages:
        _check_count("backward", len(backward_stages), num_layers, 1)
        _check_count("forward", len(forward_stages), num_layers, 1)
        head_first, head_last = backward_stages[0]
        if head_last != num_layers - 1 or head_first > head_last:
            raise RefusedError(
                "the first backward stage must hold the head",
                where="backward stage 0",
                found=str([head_first, head_last]),
                expected=f"a range that ends with layer {num_layers - 1}",
            )
        _check_cover("forward", forward_stages, head_first)
    else:
        _check_count("forward", len(forward_stages), num_layers, num_workers)
        _check_bound_count(name, len(forward_stages), num_workers)
        _check_cover("forward", forward_stages, num_layers)
        if tuple(backward_stages) != tuple(reversed(forward_stages)):
            raise RefusedError(
                f"the backward stages of {name} are the mirror of its forward stages",
                where="backward stages",
                found=str([list(stage) for stage in backward_stages]),
                hint="leave them out",
            )
    _check_cover("backward", tuple(reversed(backward_stages)), num_layers)


def check_chunks(
    name: str,
    head_stage: StageRange,
    num_layers: int,
    num_microbatches: int,
    per_round: int,
    sequence_chunks: int,
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


def _check_ranges(direction: str, stages: Sequence[StageRange], num_layers: int) -> None:
    for index, (first, last) in enumerate(stages):
        if first < 0 or last < first - 1 or last >= num_layers:
            raise RefusedError(
                "not a range of layers",
                where=f"{direction} stage {index}",
                found=str([first, last]),
                expected=f"[a, b] with 0 <= a <= b <= {num_layers - 1}, or [a, a - 1] for an empty stage",
            )


def _check_count(direction: str, num_stages: int, num_layers: int, multiple: int) -> None:
    limit = -(-num_layers // multiple) * multiple
    if num_stages > limit:
        raise RefusedError(
            "more stages than layers",
            where=f"{direction} stages",
            found=f"{num_stages} stages",
            expected=f"at most {limit} for {num_layers} layers",
        )


def _check_bound_count(name: str, num_stages: int, num_workers: int) -> None:
    if SCHEDULE_KINDS[name].one_stage_each and num_stages != num_workers:
        raise RefusedError(
            f"{name} has one stage per worker",
            where="forward stages",
            found=f"{num_stages} stages, {num_workers} workers",
            expected=f"{num_workers} stages",
        )
    if num_stages == 0 or num_stages % num_workers:
        raise RefusedError(
            f"{name} needs a multiple of the workers as stages",
            where="forward stages",
            found=f"{num_stages} stages, {num_workers} workers",
            expected=f"{num_workers}, {2 * num_workers}, ... stages; an empty stage is [a, a - 1]",
        )


def _check_cover(direction: str, ascending: Sequence[StageRange], end: int) -> None:
    """Layers 0 .. end - 1 exactly once; `ascending` in layer order, empty stages anywhere."""
    next_layer = 0
    for first, last in ascending:
        if last < first:
            continue
        if first != next_layer:
            problem = "overlap" if first < next_layer else "leave a gap"
            raise RefusedError(
                f"{direction} stages {problem}",
                where=f"{direction} stage [{first}, {last}]",
                found=f"it starts with layer {first}",
                expected=f"layer {next_layer}",
            )
        next_layer = last + 1
    if next_layer != end:
        raise RefusedError(
            f"{direction} stages {'overlap' if next_layer > end else 'leave a gap'}",
            where=f"{direction} stages",
            found=f"they end with layer {next_layer - 1}",
            expected=f"layer {end - 1}"
            + (", the rest belongs to the first backward stage" if direction == "forward" else ""),
        )


def needs(schedule: Schedule, key: Key) -> list[Key]:
    """The actions that a compute action waits for, apart from its turn.

    A recompute comes directly before its backward, so it may be held to wait for what that waits for: this settles
    deadlocks either way, whether or not it really waits.
    """
    kind, stage, microbatch = key
    if kind is Kind.FORWARD:
        return [(Kind.FORWARD, stage - 1, microbatch)] if stage else []
    waits: list[Key] = []
    num_forward = len(schedule.forward_stages)
    if num_forward and schedule.fused_head:
        waits.append((Kind.FORWARD, num_forward - 1, microbatch))
    elif num_forward:
        waits.append((Kind.FORWARD, num_forward - 1 - stage, microbatch))
    if stage:
        waits.append((Kind.BACKWARD, stage - 1, microbatch))
    if kind is Kind.BACKWARD and has_recompute(schedule, stage):
        waits.append((Kind.RECOMPUTE, stage, microbatch))
    return waits


def has_recompute(schedule: Schedule, stage: int) -> bool:
    """Whether a backward stage is preceded by a recompute action: all but the stage with the fused head."""
    return stage > 0 or not schedule.fused_head


def validate_schedule(schedule: Schedule) -> None:
    """Check that the actions are known, complete, without duplicates, in a possible order and free of deadlock.

    Raises:
        InvalidScheduleError: shows the grid with the wrong cell marked.
        RefusedError: the stages themselves are wrong.
    """
    num_layers = 1 + max((last for _, last in (*schedule.forward_stages, *schedule.backward_stages)), default=-1)
    check_stages(
        schedule.name,
        schedule.forward_stages,
        schedule.backward_stages,
        num_layers=num_layers,
        num_workers=schedule.num_workers,
    )
    first = schedule.backward_stages[0]
    per_round, chunks = schedule.microbatches_per_round, schedule.sequence_chunks
    check_chunks(schedule.name, first, num_layers, schedule.num_microbatches, per_round, chunks)
    places = _places(schedule)
    _check_complete(schedule, places)
    _check_chunk_order(schedule, places)
    _check_order(schedule, places)


def _places(schedule: Schedule) -> dict[Key, tuple[int, int]]:
    """(worker, position) of every action; refuses unknown, misplaced and duplicate ones."""
    total = schedule.num_microbatches * schedule.num_steps
    num_stages = {
        Kind.FORWARD: len(schedule.forward_stages),
        Kind.RECOMPUTE: len(schedule.backward_stages),
        Kind.BACKWARD: len(schedule.backward_stages),
    }
    places: dict[Key, tuple[int, int]] = {}
    for worker, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            key = (action.kind, action.stage, action.microbatch)
            problem = None
            if action.kind not in num_stages:
                problem = f"{action} is not a compute action"
            elif action.worker != worker:
                problem = f"{action} belongs to worker {action.worker}"
            elif action.stage >= num_stages[action.kind]:
                problem = f"{action} is of a stage that does not exist ({num_stages[action.kind]} stages)"
            elif action.microbatch >= total:
                problem = f"{action} is of a microbatch that does not exist ({total} microbatches)"
            elif key in places:
                problem = f"{action} is there twice, first as action {places[key][1]} of worker {places[key][0]}"
            elif action.kind is Kind.RECOMPUTE and not has_recompute(schedule, action.stage):
                problem = f"{action}: the stage with the head is not recomputed"
            if problem:
                raise InvalidScheduleError(problem, schedule, worker, position)
            places[key] = (worker, position)
    if len(schedule.actions) != schedule.num_workers:
        raise RefusedError(
            "a schedule has one row per worker",
            found=f"{len(schedule.actions)} rows",
            expected=f"{schedule.num_workers}",
        )
    return places


def _check_complete(schedule: Schedule, places: dict[Key, tuple[int, int]]) -> None:
    for microbatch in range(schedule.num_microbatches * schedule.num_steps):
        wanted = [(Kind.FORWARD, stage, microbatch) for stage in range(len(schedule.forward_stages))]
        for stage in range(len(schedule.backward_stages)):
            if has_recompute(schedule, stage):
                wanted.append((Kind.RECOMPUTE, stage, microbatch))
            wanted.append((Kind.BACKWARD, stage, microbatch))
        for kind, stage, index in wanted:
            if (kind, stage, index) not in places:
                # mark the cell where it is expected: after a neighbour microbatch of the same stage, else at the end
                worker, position = places.get((kind, stage, index - 1), (0, len(schedule.actions[0]) - 1))
                missing = f"{stage}{kind.value}{index}"
                raise InvalidScheduleError(f"{missing} is missing", schedule, worker, position + 1)


def _check_chunk_order(schedule: Schedule, places: dict[Key, tuple[int, int]]) -> None:
    """One worker takes the chunks of a sequence through a stage: forward in order, backward in reverse order."""
    chunks = schedule.sequence_chunks
    for (kind, stage, microbatch), (worker, position) in places.items():
        if microbatch % chunks == 0 or (kind is not Kind.FORWARD and stage == 0 and schedule.fused_head):
            continue
        before = places[kind, stage, microbatch - 1]
        in_order = before[1] < position if kind is Kind.FORWARD else before[1] > position
        if before[0] != worker or not in_order:
            text, other = f"{stage}{kind.value}{microbatch}", f"{stage}{kind.value}{microbatch - 1}"
            follows = "comes after" if kind is Kind.FORWARD else "comes before"
            what = f"{text} and {other} are chunks of one sequence: {text} {follows} {other} on the same worker"
            raise InvalidScheduleError(what, schedule, worker, position)


def _check_order(schedule: Schedule, places: dict[Key, tuple[int, int]]) -> None:
    """Walk all rows at once, each as far as the actions that it waits for are done."""
    for worker, row in enumerate(schedule.actions):
        _check_row(schedule, worker, row, places)
    done: set[Key] = set()
    next_position = [0] * schedule.num_workers
    progress = True
    while progress:
        progress = False
        for worker, row in enumerate(schedule.actions):
            while next_position[worker] < len(row):
                action = row[next_position[worker]]
                key = (action.kind, action.stage, action.microbatch)
                if not all(need in done for need in needs(schedule, key)):
                    break
                done.add(key)
                next_position[worker] += 1
                progress = True
    for worker, row in enumerate(schedule.actions):
        position = next_position[worker]
        if position < len(row):
            action = row[position]
            missing = [need for need in needs(schedule, _key(action)) if need not in done]
            waits = " and ".join(
                f"{stage}{kind.value}{microbatch} (worker {places[kind, stage, microbatch][0]})"
                for kind, stage, microbatch in missing
            )
            raise InvalidScheduleError(f"deadlock: {action} waits for {waits} for ever", schedule, worker, position)


def _check_row(schedule: Schedule, worker: int, row: Sequence[Action], places: dict[Key, tuple[int, int]]) -> None:
    """Check one worker's list for mistakes that show in this list alone."""
    step = 0
    for position, action in enumerate(row):
        for need in needs(schedule, _key(action)):
            other_worker, other_position = places[need]
            if other_worker == worker and other_position > position:
                text = f"{need[1]}{need[0].value}{need[2]}"
                raise InvalidScheduleError(f"{action} needs {text}, which comes later", schedule, worker, position)
        if action.kind is Kind.RECOMPUTE:
            follower = row[position + 1] if position + 1 < len(row) else None
            if follower is None or _key(follower) != (Kind.BACKWARD, action.stage, action.microbatch):
                raise InvalidScheduleError(
                    f"{action} is not directly before its backward",
                    schedule,
                    worker,
                    position,
                    expected=f"{action.stage}B{action.microbatch} next",
                )
        if action.microbatch // schedule.num_microbatches < step:
            raise InvalidScheduleError(
                f"{action} belongs to step {action.microbatch // schedule.num_microbatches}, after one of step {step}",
                schedule,
                worker,
                position,
            )
        step = action.microbatch // schedule.num_microbatches


def _key(action: Action) -> Key:
    return (action.kind, action.stage, action.microbatch)


def marked_grid(rows: Sequence[Sequence[Action]], worker: int, position: int) -> str:
    """The rows around one position, aligned, with the cell at (worker, position) in brackets."""
    first = max(0, position - _COLUMNS_SHOWN)
    end = position + _COLUMNS_SHOWN + 1
    lines: list[list[str]] = []
    for row_worker, row in enumerate(rows):
        cells = [str(action) for action in row[first:end]]
        if row_worker == worker:
            cells += [""] * (position - first + 1 - len(cells))
            cells[position - first] = f"[{cells[position - first] or '?'}]"
        lines.append(cells)
    width = max((len(cell) for cells in lines for cell in cells), default=1)
    lead, tail = "... " if first else "", " ..." if any(len(row) > end for row in rows) else ""
    return "\n".join(
        f"    worker {index}: {lead}" + " ".join(cell.rjust(width) for cell in cells) + tail
        for index, cells in enumerate(lines)
    )
