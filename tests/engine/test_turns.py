"""Threads that issue work: they take turns, and each computes with its own number of threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from roundpipe_cli.engine.backends import turns as module
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.backends.turns import IssueTurns


def together(*works: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_pass_at_a_time() -> None:
    turns, inside, seen = IssueTurns(stuck_s=60.0), [0], []

    def work() -> None:
        for _ in range(50):
            with turns.turn():
                inside[0] += 1
                seen.append(inside[0])
                time.sleep(0)
                inside[0] -= 1

    together(*[work] * 4)
    assert seen == [1] * 200 and turns.num_stuck == 0


@contextmanager
def stuck_pass(turns: IssueTurns, *, within_itself: bool = False) -> Iterator[None]:
    """Another thread's pass is stuck while the body runs; a turn within it, when it ends, hides its beginning."""
    go, passed = threading.Event(), threading.Event()

    def stuck() -> None:
        with turns.turn():
            if within_itself:
                with turns.turn():
                    pass
            passed.set()
            go.wait(60)

    thread = threading.Thread(target=stuck)
    thread.start()
    assert passed.wait(60)
    yield
    go.set()
    thread.join()


def test_a_pass_that_waits_for_its_device_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(module, "MAX_STUCK", 2)
    turns = IssueTurns(stuck_s=0.02)
    for pause_s in (10.0, 20.0, 10.0):  # twice as long, unless it went well for as long as the last one
        with stuck_pass(turns):
            now_s[0] += 1
            for _ in range(8):  # one pass, however many wait for it
                with turns.turn():
                    assert turns.num_stuck == 1
        assert turns.are_on() and turns.notice is None
        with stuck_pass(turns):
            now_s[0] += 1
            with turns.turn():
                assert not turns.are_on() and turns.num_stuck == 0
        assert turns.notice is not None and f"take no turns for {pause_s:.0f} s" in turns.notice
        turns.notice = None
        now_s[0] += pause_s - 0.1
        assert not turns.are_on()
        now_s[0] += 0.2 if pause_s < 20 else 41
        assert turns.are_on()


def test_slow_first_passes_of_eight_cards_do_not_end_the_turns() -> None:
    """Story: eight waiters for one slow first pass, in which kernels are compiled, ended them for the whole run."""
    turns, barrier = IssueTurns(stuck_s=0.01), threading.Barrier(8)

    def card() -> None:
        for _ in range(3):
            barrier.wait()
            for number in range(module.FORGIVEN):
                with turns.turn():
                    time.sleep(0.03 if number == 0 else 0)

    together(*[card] * 8)
    assert turns.are_on() and turns.notice is None


def test_a_turn_ends_with_its_error_and_may_be_taken_within_itself() -> None:
    turns = IssueTurns(stuck_s=60.0)
    with pytest.raises(ValueError, match="x"), turns.turn(), turns.turn():
        raise ValueError("x")
    taken = threading.Thread(target=lambda: turns.turn().__enter__())
    taken.start()
    taken.join(60)
    assert not taken.is_alive()


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STUCK_TURNS", 2)
    turns = IssueTurns(stuck_s=0.01)
    with stuck_pass(turns, within_itself=True):
        start_s = time.perf_counter()
        with turns.turn():
            assert turns.num_stuck == 0
        assert time.perf_counter() - start_s >= 0.02


def test_another_thread_does_not_change_a_worker() -> None:
    """The optimizer's thread begins after the workers' and takes all cores: they used to take its number over."""
    others, found = queue.Queue[int](), queue.Queue[int]()
    before = torch.get_num_threads()

    def work() -> None:
        with CpuBackend(3).worker_thread():
            for _ in range(2):
                found.put(others.get())
                torch.ones(100_000).sum()
                found.put(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for other in (2, 4):
            torch.set_num_threads(other)
            others.put(other)
            assert [found.get(timeout=30), found.get(timeout=30)] == [other, 3]
    finally:
        thread.join(30)
        torch.set_num_threads(before)
