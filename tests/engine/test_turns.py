"""Threads take turns, and none waits for one that waits for its device."""

from __future__ import annotations

import threading
import time

import pytest

from roundpipe_cli.engine.backends import cuda as module
from roundpipe_cli.engine.backends.cuda import IssueTurns


def test_one_pass_at_a_time() -> None:
    turns, inside, seen = IssueTurns(stuck_s=60.0), [0], []

    def work() -> None:
        for _ in range(50):
            with turns.turn():
                inside[0] += 1
                seen.append(inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 200 and turns.num_stuck == 0


def test_a_pass_that_waits_for_its_device_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STUCK", 2)
    turns, go, passed = IssueTurns(stuck_s=0.02), threading.Event(), threading.Event()

    def stuck() -> None:
        with turns.turn():
            passed.set()
            go.wait(60)

    thread = threading.Thread(target=stuck)
    thread.start()
    assert passed.wait(60)
    for expected in (1, 2, 2):  # then it is given up
        with turns.turn():
            assert turns.num_stuck == expected
    go.set()
    thread.join()
    with turns.turn():
        pass
    assert turns.num_stuck == 2


def test_a_turn_ends_with_its_error_and_may_be_taken_within_itself() -> None:
    turns = IssueTurns(stuck_s=60.0)
    with pytest.raises(ValueError, match="x"), turns.turn(), turns.turn():
        raise ValueError("x")
    taken = threading.Thread(target=lambda: turns.turn().__enter__())
    taken.start()
    taken.join(60)
    assert not taken.is_alive()


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of others that are each short enough, or one whose beginning nobody knows."""
    monkeypatch.setattr(module, "MOST_STUCK_TURNS", 2)
    turns, go, passed = IssueTurns(stuck_s=0.01), threading.Event(), threading.Event()

    def hold() -> None:
        with turns.turn():
            with turns.turn():
                pass
            passed.set()
            go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert passed.wait(60)
    start_s = time.perf_counter()
    with turns.turn():
        assert turns.num_stuck == 0
    assert time.perf_counter() - start_s >= 0.02
    go.set()
    thread.join()
