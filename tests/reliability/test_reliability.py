"""The promises of tests/README.md, "Reliability", each tried a few times; `scripts/torture` tries them often."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torture.arena import Arena
from tests.torture.promises import PROMISES, Promise

BUSY = 8.0
"""Factor on time limits: the suite's processes share the machine."""


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    """On a file system in memory where there is one: fsync is free there, and SIGKILL needs no real disk."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="roundpipe-", dir=memory if os.access(memory, os.W_OK) else None))
    yield Arena(folder, jobs=1, patience=BUSY)
    shutil.rmtree(folder)


HELD_BY_OTHERS = ("lost",)
"""Promises that files of tests/train try in the suite: lost_devices."""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # on a busy machine; what hangs is ended by `Arena.patience`
@pytest.mark.parametrize(
    "promise",
    [pytest.param(one, id=one.name, marks=[pytest.mark.sweep] * (one.name in HELD_BY_OTHERS)) for one in PROMISES],
)
def test_promise(arena: Arena, promise: Promise) -> None:
    if lack := promise.missing():
        pytest.skip(lack)
    seen = promise.trial(arena, promise.suite_count)
    assert seen.total == promise.suite_count
    assert not seen.failures, "\n".join(seen.failures)


def test_the_table_says_how_often_the_suite_tries() -> None:
    """tests/README.md gives the script's figure and the suite's own number of tries, one row a promise."""
    page = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| `scripts/torture --only (\S+)` \| [^|]+ \| (\d+)( by `tests/\S+`)? \|$", page, re.MULTILINE)
    assert {name for name, _, by in rows if by} == {*HELD_BY_OTHERS}
    own = {one.name: one.suite_count for one in PROMISES if one.name not in HELD_BY_OTHERS}
    assert {name: int(tries) for name, tries, by in rows if not by} == own
