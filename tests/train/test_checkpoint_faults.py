"""Fault points: they do nothing unless asked, and what they are asked when they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from roundpipe_cli import faults
from roundpipe_cli.errors import RefusedError

Ask = Callable[[str], None]


def test_unset_they_do_nothing(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError(f"an inert fault point acted: {args}")

    monkeypatch.delenv(faults.ENVIRONMENT_VARIABLE, raising=False)
    faults._rules_of = None
    for holder, name in ((faults, "_act"), (faults, "_parse"), (faults.time, "sleep"), (faults.os, "kill")):
        monkeypatch.setattr(holder, name, forbidden)
    assert {faults.fault(point, step=step, microbatch=0) for point in faults.POINTS for step in range(3)} == {None}
    assert faults._rules_of == {}


def test_exceptions_at_a_step(ask: Ask) -> None:
    ask("compute:raise:step=3,upload:raise=MemoryError:step=4,eval:raise=FaultExit")
    assert faults.fault("compute", step=2) is None and faults.fault("upload", step=3) is None
    for point, kind in (("compute", faults.FaultError), ("upload", MemoryError), ("eval", faults.FaultExit)):
        with pytest.raises(kind, match=f"{point}:raise"):
            faults.fault(point, step=3 if point == "compute" else 4)


def test_nth_counts_matching_passages_only(ask: Ask) -> None:
    ask("compute:nan:step=1:nth=2,compute:inf:step=5")
    passages = [(0, 0), (1, 0), (1, 1), (1, 2), (5, 0)]
    results = [faults.fault("compute", step=step, microbatch=m) for step, m in passages]
    assert results[:2] == [None, None] and results[3] is None
    assert results[2] is not None and math.isnan(results[2])
    assert results[4] == math.inf


def test_slow_sleeps_the_time_given(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    ask("ckpt_writer:slow=0.2")
    assert faults.fault("ckpt_writer", step=7) is None
    assert slept == [0.2]


@pytest.mark.parametrize(
    "text",
    ["compute", "comptue:raise", "compute:explode", "compute:slow=x", "compute:raise=exit", "compute:nan:step=a"],
)
def test_nonsense_is_refused(ask: Ask, text: str) -> None:
    with pytest.raises(RefusedError, match="ROUNDPIPE_FAULT"):
        ask(text)
