"""Builders against literal grids, and every small schedule through the validator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe_cli.choices import BOUND_SCHEDULES, SCHEDULE_KINDS, SCHEDULES
from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.schedule.actions import equal_costs
from roundpipe_cli.schedule.builders import Options, Rounds, build_schedule, place_on, schedule_name
from roundpipe_cli.schedule.simulate import simulate
from tests.support.covering import swept
from tests.support.schedules import dealt, parse_rows, validate_schedule


def cut(num_layers: int, num_stages: int) -> list[StageRange]:
    """Even stages in layer order; empty ones where there are more stages than layers."""
    stages, first = [], 0
    for index in range(num_stages):
        size = num_layers // num_stages + (index < num_layers % num_stages)
        stages.append((first, first + size - 1))
        first += size
    return stages


def words(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


@pytest.mark.parametrize(
    ("name", "stages", "num_workers", "num_microbatches", "grid"),
    [
        (
            "gpipe", cut(4, 2), 2, 2,
            """
            0F0 0F1 1R0 1B0 1R1 1B1
            1F0 1F1 0R0 0B0 0R1 0B1
            """,
        ),
        (
            "1f1b", cut(3, 3), 3, 4,
            """
            0F0 0F1 0F2 2R0 2B0 0F3 2R1 2B1 2R2 2B2 2R3 2B3
            1F0 1F1 1R0 1B0 1F2 1R1 1B1 1F3 1R2 1B2 1R3 1B3
            2F0 0R0 0B0 2F1 0R1 0B1 2F2 0R2 0B2 2F3 0R3 0B3
            """,
        ),
    ],
)  # fmt: skip
def test_grids(name: str, stages: list[StageRange], num_workers: int, num_microbatches: int, grid: str) -> None:
    schedule = build_schedule(name, forward_stages=stages, num_workers=num_workers, rounds=Rounds(num_microbatches))
    assert str(schedule) == words(grid)
    assert schedule.backward_stages == tuple(reversed(stages)) and not schedule.fused_head


STAGES = [(0, 1), (2, 3)], [(4, 4), (2, 3), (0, 1)]


def test_roundpipe_deals_stages_round_robin_and_goes_on_where_a_worker_is_free() -> None:
    schedule = dealt(*STAGES, 2, 3)
    # five stages a round: the first round ends on worker 0, so worker 1 starts the second
    assert str(schedule) == words(
        """
        0F0 0F1 0B0 0B1 2R0 2B0 2R1 2B1 1F2 1R2 1B2
        1F0 1F1 1R0 1B0 1R1 1B1 0F2 0B2 2R2 2B2
        """
    )
    assert schedule.fused_head
    assert schedule.microbatches_per_round == 2


def every_small_schedule(num_workers: int, num_microbatches: int):  # type: ignore[no-untyped-def]
    for num_stages in range(1, 13):
        for name in BOUND_SCHEDULES:
            if num_stages % num_workers or (SCHEDULE_KINDS[name].one_stage_each and num_stages != num_workers):
                continue
            yield name, {"forward_stages": cut(13, num_stages)}
        for num_backward in {1, 12, 13 - num_stages}:
            backward = [(12, 12), *reversed(cut(12, num_backward))]
            yield "roundpipe", {"forward_stages": cut(12, num_stages), "backward_stages": backward}


@pytest.mark.parametrize("num_workers", [5, *swept([1, 2, 3, 4, 6])])
def test_every_schedule_up_to_12_stages_and_12_microbatches_is_valid(num_workers: int) -> None:
    costs, built = equal_costs(13), set()
    for num_microbatches in range(1, 13):
        for name, stages in every_small_schedule(num_workers, num_microbatches):
            schedule = build_schedule(
                name, **stages, num_workers=num_workers, rounds=Rounds(num_microbatches), costs=costs
            )
            validate_schedule(schedule)
            assert parse_rows(str(schedule)) == schedule.actions
            built.add(name)
    assert built == {"roundpipe", *BOUND_SCHEDULES}


def test_names_in_other_spellings() -> None:
    assert schedule_name("Looped-BFS") == "looped_bfs"
    assert [schedule_name(name) for name in SCHEDULES] == list(SCHEDULES)
    with pytest.raises(RefusedError, match="unknown schedule") as raised:
        schedule_name("roundpip")
    assert "did you mean roundpipe?" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "forward", "backward", "message"),
    [
        ("roundpipe", [(0, 1), (1, 3)], [(4, 4), (0, 3)], "forward stages overlap"),
        ("roundpipe", [(0, 1), (3, 3)], [(4, 4), (0, 3)], "forward stages leave a gap"),
        ("roundpipe", [(0, 3)], [(4, 4), (1, 3)], "backward stages leave a gap"),
        ("roundpipe", [(0, 4)], [(4, 4), (0, 3)], "forward stages overlap"),
        ("roundpipe", [(0, 2)], [(4, 4), (0, 3)], r"(?s)forward stages leave a gap.*they end with layer 2"),
        ("roundpipe", [(0, 3)], [(0, 3), (4, 4)], "must hold the head"),
        ("roundpipe", [(0, 3)], [], "no backward stages"),
        ("roundpipe", [(0, 0)] * 6, [(4, 4), (0, 3)], "more stages than layers"),
        ("roundpipe", [(0, 9)], [(4, 4), (0, 3)], "not a range of layers"),
        ("roundpipe", [(3, 0)], [(4, 4), (0, 3)], "not a range of layers"),
        ("gpipe", [(0, 4)], None, "one stage per worker"),
        ("looped_bfs", [(0, 1), (2, 3), (4, 4)], None, "multiple of the workers"),
        ("looped_bfs", [(0, 4), *[(5, 4)] * 7], None, "more stages than layers"),
        ("gpipe", [(0, 1), (2, 4)], [(0, 1), (2, 4)], "mirror"),
    ],
)
def test_refused_stages(name: str, forward: list[StageRange], backward: list[StageRange] | None, message: str) -> None:
    costs: CostModel = equal_costs(5)
    with pytest.raises(RefusedError, match=message):
        build_schedule(
            name, forward_stages=forward, backward_stages=backward, num_workers=2, rounds=Rounds(2), costs=costs
        )


def test_the_heads_microbatches_spread_over_the_workers() -> None:
    schedule = dealt([(0, 1)], [(2, 2), (0, 1)], 2, 2, options=Options(head_workers=2))
    assert str(schedule) == "0F0 0F1 0B1 1R0 1B0 1R1 1B1\n0B0"
    validate_schedule(schedule)


def test_earliest_free_dispatch_takes_microbatches_where_they_can_start_first() -> None:
    costs = replace(equal_costs(5), hop_s=0.5)
    schedule = dealt(*STAGES, 2, 2, costs, options=Options(earliest_free=True))
    validate_schedule(schedule)
    assert str(schedule) == "0F0 1F0 0B0 1R0 1B0 2R0 2B0\n0F1 1F1 0B1 1R1 1B1 2R1 2B1"


def test_the_last_stages_of_a_step_are_shared_and_those_before_go_in_turn() -> None:
    def rows(shared: int) -> list[str]:
        options = Options(shared_stages=shared)
        schedule = dealt([(0, 1)], [(2, 2), (1, 1), (0, 0)], 2, 4, per_round=2, options=options)
        validate_schedule(schedule)
        return str(schedule).split("\n")

    first = ["0F0 0F1 1R0 1B0 1R1 1B1", "0B0 0B1 2R0 2B0 2R1 2B1"]
    assert [row.startswith(before) for row, before in zip(rows(9), first, strict=True)] == [True, True]
    assert rows(0) == [f"{first[0]} 0F2 0F3 1R2 1B2 1R3 1B3", f"{first[1]} 0B2 0B3 2R2 2B2 2R3 2B3"]
    assert rows(2) == [f"{first[0]} 0F2 0F3 0B3 1R3 1B3 2R3 2B3", f"{first[1]} 0B2 1R2 1B2 2R2 2B2"]


def test_a_schedule_of_few_workers_can_be_placed_among_many() -> None:
    few = dealt([(0, 1)], [(2, 3), (0, 1)], 1, 3)
    placed = place_on(few, (2,), 4)
    assert placed.num_workers == 4
    assert [len(row) for row in placed.actions] == [0, 0, len(few.actions[0]), 0]
    assert [str(action) for action in placed.actions[2]] == [str(action) for action in few.actions[0]]
    assert {action.worker for action in placed.actions[2]} == {2}
    assert place_on(few, (0,), 1) is few


def test_the_simulator_does_not_hang_on_a_deadlock() -> None:
    gpipe = build_schedule("gpipe", forward_stages=cut(4, 2), num_workers=2, rounds=Rounds(2))
    stuck = replace(gpipe, actions=parse_rows("0F0 1R0 1B0 0F1 1R1 1B1\n1F0 1F1 0R0 0B0 0R1 0B1"))
    with pytest.raises(ValueError, match="deadlocks"):
        simulate(stuck, equal_costs(4))
