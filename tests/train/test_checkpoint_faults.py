"""Fault points do nothing unless asked; what they do then, the tests show that ask them."""

from __future__ import annotations

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


@pytest.mark.parametrize("text", ["comptue:raise", "compute:explode", "compute:slow=x", "compute:nan:step=a"])
def test_nonsense_is_refused(ask: Ask, text: str) -> None:
    with pytest.raises(RefusedError, match="ROUNDPIPE_FAULT"):
        ask(text)
