"""Fault points: they do nothing unless asked, and what they are asked when they are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from roundpipe_cli import faults
from roundpipe_cli.errors import RefusedError


@pytest.fixture(autouse=True)
def _forget_faults() -> Iterator[None]:
    yield
    faults._rules_of = None


def _set(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(faults.ENVIRONMENT_VARIABLE, text)
    faults.load_faults()


def test_unset_they_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.ENVIRONMENT_VARIABLE, raising=False)
    faults._rules_of = None

    def forbidden(*args: object) -> None:
        raise AssertionError(f"an inert fault point acted: {args}")

    for name in ("_act", "_parse"):
        monkeypatch.setattr(faults, name, forbidden)
    monkeypatch.setattr(faults.time, "sleep", forbidden)
    monkeypatch.setattr(faults.os, "kill", forbidden)
    for point in faults.POINTS:
        for step in range(3):
            assert faults.fault(point, step=step, microbatch=0) is None
    assert faults._rules_of == {}


def test_raise_at_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, "compute:raise:step=3")
    assert faults.fault("compute", step=2) is None
    assert faults.fault("upload", step=3) is None
    with pytest.raises(faults.FaultError, match="compute:raise:step=3"):
        faults.fault("compute", step=3)


def test_nth_counts_matching_passages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, "compute:nan:step=1:nth=2,compute:inf:step=5")
    passages = [(0, 0), (1, 0), (1, 1), (1, 2), (5, 0)]
    results = [faults.fault("compute", step=step, microbatch=m) for step, m in passages]
    assert results[:2] == [None, None] and results[3] is None
    assert results[2] is not None and math.isnan(results[2])
    assert results[4] == math.inf


def test_named_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, "upload:raise=MemoryError,eval:raise=FaultExit")
    with pytest.raises(MemoryError):
        faults.fault("upload", step=0)
    with pytest.raises(faults.FaultExit):
        faults.fault("eval", step=0)


def test_slow_sleeps_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    _set(monkeypatch, "ckpt_writer:slow=0.2")
    assert faults.fault("ckpt_writer", step=7) is None
    assert slept == [0.2]


@pytest.mark.parametrize(
    "text",
    ["compute", "comptue:raise", "compute:explode", "compute:slow=x", "compute:raise=exit", "compute:nan:step=a"],
)
def test_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(faults.ENVIRONMENT_VARIABLE, text)
    with pytest.raises(RefusedError, match="ROUNDPIPE_FAULT"):
        faults.load_faults()
