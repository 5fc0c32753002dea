"""Schedules as text, and checks of their actions: complete, in order and free of deadlock.

An error shows the grid of actions, one row a worker, with the wrong cell marked:

    worker 0:   0F0  0F1  [0F1]  ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.schedule.actions import Action, Kind, Schedule
from roundpipe_cli.schedule.validate import check_chunks, check_stages

_TEXT = re.compile(r"^(\d+)([FRBUDO])(\d+)$")
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


def parse_action(text: str, worker: int) -> Action:
    """The inverse of `str(action)`.

    Raises:
        ValueError: `text` is not of the form `2F0`.
    """
    match = _TEXT.match(text.strip())
    if match is None:
        raise ValueError(f"not an action: {text!r} (expected for instance '2F0')")
    return Action(Kind(match.group(2)), int(match.group(1)), int(match.group(3)), worker)


def parse_rows(text: str) -> tuple[tuple[Action, ...], ...]:
    """The inverse of `str(schedule)`: one line per worker, actions separated by spaces.

    Raises:
        RefusedError: names the worker and the word that is not an action.
    """
    rows: list[tuple[Action, ...]] = []
    for worker, line in enumerate(text.split("\n")):
        row: list[Action] = []
        for position, word in enumerate(line.split()):
            try:
                row.append(parse_action(word, worker))
            except ValueError as error:
                raise RefusedError(
                    "not a schedule", where=f"worker {worker}, action {position}", found=repr(word), expected="like 2F0"
                ) from error
        rows.append(tuple(row))
    return tuple(rows)


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
    check_chunks(
        schedule.name, first, num_layers, schedule.num_microbatches, per_round=per_round, sequence_chunks=chunks
    )
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
