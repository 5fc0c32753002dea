"""The validator: every way in which a list of actions can be wrong, and the grid that shows where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.schedule.actions import Action, Kind, Schedule, equal_costs
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from roundpipe_cli.schedule.published import simulate_published
from roundpipe_cli.schedule.simulate import simulate
from tests.support.schedules import InvalidScheduleError, marked_grid, parse_rows, validate_schedule


def gpipe(num_steps: int = 1) -> Schedule:
    """
    0F0 0F1 1R0 1B0 1R1 1B1
    1F0 1F1 0R0 0B0 0R1 0B1
    """
    return build_schedule(
        "gpipe", forward_stages=[(0, 1), (2, 3)], num_workers=2, rounds=Rounds(2, num_steps=num_steps)
    )


def refused(text: str, schedule: Schedule | None = None) -> InvalidScheduleError:
    with pytest.raises(InvalidScheduleError) as raised:
        validate_schedule(replace(schedule or gpipe(), actions=parse_rows(text)))
    assert raised.value.exit_code == 2
    return raised.value


@pytest.mark.parametrize(
    ("text", "message", "worker", "position"),
    [
        ("0F0 0F1 1R0 1B0 1R1 1B1\n1F0 1F0 0R0 0B0 0R1 0B1", "1F0 is there twice, first as action 0 of worker 1", 1, 1),
        ("0F0 0F1 1R0 1B0 1R1 1B1\n1F0 0R0 0B0 0R1 0B1", "1F1 is missing", 1, 1),
        ("0F0 0F1 1R0 1B0 1R1 1B1\n1F0 1F1 0R0 0B0 0R1 0B1 2B0", "2B0 is of a stage that does not exist", 1, 6),
        ("0F0 0F1 0F7 1R0 1B0 1R1 1B1\n1F0 1F1 0R0 0B0 0R1 0B1", "0F7 is of a microbatch that does not exist", 0, 2),
        ("0F0 0F1 1R0 1B0 1R1 1B1\n1F0 1F1 0R0 0R1 0B0 0B1", "0R0 is not directly before its backward", 1, 2),
        ("0F0 0F1 1R0 1B0 1R1 1B1\n0R0 0B0 1F0 1F1 0R1 0B1", "0R0 needs 1F0, which comes later", 1, 0),
        ("0F0 1R0 1B0 0F1 1R1 1B1\n1F0 1F1 0R0 0B0 0R1 0B1", "deadlock", 0, 1),
        ("0F0 0F1 1R0 1B0 1R1 1B1\n1F0 1F1 0R0 0B0 0R1 0U1", "0U1 is not a compute action", 1, 5),
    ],
)
def test_wrong_cells_are_marked(text: str, message: str, worker: int, position: int) -> None:
    error = refused(text)
    assert message in str(error)
    assert (error.worker, error.position) == (worker, position)
    row = text.split("\n")[worker].split()
    cell = f"[{row[position]}]"
    assert cell in str(error)


def test_a_deadlock_says_who_waits_for_what() -> None:
    """Both workers wait: stage 1's second forward for the first stage's, which waits behind a backward."""
    error = refused("0F0 1R0 1B0 0F1 1R1 1B1\n1F0 1F1 0R0 0B0 0R1 0B1")
    assert "1R0 waits for 0B0 (worker 1) for ever" in str(error)
    assert "worker 0:   0F0 [1R0]" in str(error)


def test_steps_follow_each_other() -> None:
    schedule = gpipe(num_steps=2)
    validate_schedule(schedule)
    first, second = (list(row) for row in schedule.actions)
    first[1], first[6] = first[6], first[1]
    text = "\n".join(" ".join(map(str, row)) for row in (first, second))
    assert "after one of step 1" in str(refused(text, schedule))


def test_the_fused_head_is_not_recomputed() -> None:
    schedule = build_schedule(
        "roundpipe", forward_stages=[(0, 1)], backward_stages=[(2, 2), (0, 1)], num_workers=1, rounds=Rounds(1)
    )
    assert str(schedule) == "0F0 0B0 1R0 1B0"
    assert "0R0: the stage with the head is not recomputed" in str(refused("0F0 0R0 0B0 1R0 1B0", schedule))


def test_a_row_too_many_and_a_foreign_worker() -> None:
    schedule = gpipe()
    with pytest.raises(RefusedError, match="one row per worker"):
        validate_schedule(replace(schedule, actions=(*schedule.actions, ())))
    moved = (schedule.actions[0], (Action(Kind.FORWARD, 1, 0, 0), *schedule.actions[1][1:]))
    with pytest.raises(InvalidScheduleError, match="1F0 belongs to worker 0"):
        validate_schedule(replace(schedule, actions=moved))


def test_the_grid_shows_a_window_around_the_cell() -> None:
    schedule = build_schedule("gpipe", forward_stages=[(0, 0), (1, 1)], num_workers=2, rounds=Rounds(12))
    lines = marked_grid(schedule.actions, 1, 20).split("\n")
    assert lines[0].startswith("    worker 0: ... ") and lines[0].endswith(" ...")
    assert "[0R4]" in lines[1]
    assert len({len(line) for line in lines}) == 1


def test_text_that_is_no_schedule_is_refused() -> None:
    with pytest.raises(RefusedError, match="not a schedule") as raised:
        parse_rows("0F0\n1F0 forward")
    assert "worker 1, action 1" in str(raised.value)


def test_simulators_do_not_hang_on_a_deadlock() -> None:
    stuck = replace(gpipe(), actions=parse_rows("0F0 1R0 1B0 0F1 1R1 1B1\n1F0 1F1 0R0 0B0 0R1 0B1"))
    with pytest.raises(ValueError, match="deadlocks"):
        simulate_published(stuck, equal_costs(4))
    with pytest.raises(ValueError, match="deadlocks"):
        simulate(stuck, equal_costs(4))
