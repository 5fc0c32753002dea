"""Small schedules, schedules as text, and checks of their actions: complete, in order and free of deadlock."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from roundpipe_cli.choices import SCHEDULE_KINDS
from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.schedule.actions import Action, Kind, Schedule
from roundpipe_cli.schedule.builders import Rounds, build_schedule, check_chunks, check_stages

Key = tuple[Kind, int, int]  # (kind, stage, microbatch): an action, on whichever worker it runs
Stages = Sequence[StageRange]


def dealt(
    forward: Stages, backward: Stages, workers: int, microbatches: int, costs: CostModel | None = None, **rounds: Any
) -> Schedule:
    """Roundpipe's schedule of these stages; `rounds`: more values of `Rounds`."""
    given: Any = {"forward_stages": forward, "backward_stages": backward, "num_workers": workers}
    return build_schedule("roundpipe", **given, rounds=Rounds(microbatches, **rounds), costs=costs)


def small_schedule(
    name: str, workers: int, microbatches: int, num_blocks: int, costs: CostModel | None = None, **rounds: Any
) -> Schedule:
    """Any schedule of so many blocks and a head: roundpipe with half of the blocks a stage, others with one stage for
    each worker, or two."""
    if name == "roundpipe":
        halves = [(0, num_blocks // 2 - 1), (num_blocks // 2, num_blocks - 1)]
        return dealt(halves, [(num_blocks, num_blocks), *reversed(halves)], workers, microbatches, costs, **rounds)
    count = workers if SCHEDULE_KINDS[name].one_stage_each else 2 * workers
    cut = [round(index * (num_blocks + 1) / count) for index in range(count + 1)]
    stages = [(first, end - 1) for first, end in pairwise(cut)]
    return build_schedule(name, forward_stages=stages, num_workers=workers, rounds=Rounds(microbatches, **rounds))


def parse_rows(text: str) -> tuple[tuple[Action, ...], ...]:
    """The inverse of `str(schedule)`: one line per worker, actions separated by spaces."""
    rows = [re.findall(r"(\d+)([FRBUDO])(\d+)", line) for line in text.split("\n")]
    return tuple(
        tuple(Action(Kind(kind), int(stage), int(microbatch), worker) for stage, kind, microbatch in row)
        for worker, row in enumerate(rows)
    )


def needs(schedule: Schedule, key: Key) -> list[Key]:
    """The actions that a compute action waits for, apart from its turn. A recompute, directly before its backward, may
    wait for what that waits for: it settles deadlocks either way."""
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


def every_action(schedule: Schedule) -> Iterator[Key]:
    """The actions that a schedule of these stages and microbatches has."""
    for microbatch in range(schedule.num_microbatches * schedule.num_steps):
        yield from ((Kind.FORWARD, stage, microbatch) for stage in range(len(schedule.forward_stages)))
        for stage in range(len(schedule.backward_stages)):
            yield Kind.BACKWARD, stage, microbatch
            if has_recompute(schedule, stage):
                yield Kind.RECOMPUTE, stage, microbatch


def validate_schedule(schedule: Schedule) -> None:
    """Assert that the actions are known, complete, without duplicates, in a possible order and free of deadlock."""
    forward, backward = schedule.forward_stages, schedule.backward_stages
    num_layers = 1 + max((last for _, last in (*forward, *backward)), default=-1)
    check_stages(schedule.name, forward, backward, num_layers=num_layers, num_workers=schedule.num_workers)
    per_round, chunks = schedule.microbatches_per_round, schedule.sequence_chunks
    head, count = backward[0], schedule.num_microbatches
    check_chunks(schedule.name, head, num_layers, count, per_round=per_round, sequence_chunks=chunks)
    assert len(schedule.actions) == schedule.num_workers, "not one row per worker"
    assert all(a.worker == worker for worker, row in enumerate(schedule.actions) for a in row), "of another worker"
    rows = [[(action.kind, action.stage, action.microbatch) for action in row] for row in schedule.actions]
    found, wanted = Counter(key for row in rows for key in row), Counter(every_action(schedule))
    assert found == wanted, f"missing: {[*(wanted - found)]}, unknown or there twice: {[*(found - wanted)]}"
    for row in rows:
        assert [key[2] // count for key in row] == sorted(key[2] // count for key in row), "steps out of order"
        for key, follower in pairwise([*row, None]):
            if key is not None and key[0] is Kind.RECOMPUTE:
                assert follower == (Kind.BACKWARD, *key[1:]), f"{key} is not directly before its backward"
    _check_chunk_order(schedule, rows)
    _check_deadlock(schedule, rows)


def _check_chunk_order(schedule: Schedule, rows: list[list[Key]]) -> None:
    """One worker takes the chunks of a sequence through a stage: forward in order, backward in reverse order."""
    places = {key: (worker, position) for worker, row in enumerate(rows) for position, key in enumerate(row)}
    for (kind, stage, microbatch), (worker, position) in places.items():
        if microbatch % schedule.sequence_chunks == 0 or (
            kind is not Kind.FORWARD and stage == 0 and schedule.fused_head
        ):
            continue
        before = places[kind, stage, microbatch - 1]
        in_order = before[1] < position if kind is Kind.FORWARD else before[1] > position
        assert before[0] == worker and in_order, f"chunks out of order: {stage}{kind.value}{microbatch}"


def _check_deadlock(schedule: Schedule, rows: list[list[Key]]) -> None:
    """Walk all rows at once, each as far as the actions that it waits for are done."""
    done: set[Key] = set()
    left, num_done = [row[::-1] for row in rows], -1
    while len(done) > num_done:
        num_done = len(done)
        for row in left:
            while row and done.issuperset(needs(schedule, row[-1])):
                done.add(row.pop())
    assert not any(left), f"deadlock: {[row[-1] for row in left if row]} wait for ever"
