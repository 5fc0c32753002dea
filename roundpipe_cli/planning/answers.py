"""Earlier plans, kept in the user's cache: a repeated question needs neither search nor simulation.

The key is all that the answer depends on: the question's figures and the code that answers. What cannot be read, or is
not as it was written, is computed again, and `damage` says so.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from roundpipe_cli.cache import Remembered
from roundpipe_cli.events import from_json

ROOMS = ("costs", "planning", "schedule")
"""Folders of the code that answers."""

Answer = TypeVar("Answer")


@dataclass
class Answers:
    """Answers to earlier questions."""

    damage: list[str] = field(default_factory=list)
    """Messages about files that could not be used."""


def answered(answers: Answers | None, question: object, work: Callable[[], Answer], kind: Any = None) -> Answer:
    """The answer to a question: from the cache, or computed and kept.

    Args:
        answers: None: nothing is remembered.
        question: its `repr` is the question, so it holds plain data and dataclasses of such.
        work: gives plain data, or a dataclass of such.
        kind: of the dataclass; None: plain data.
    """
    if answers is None:
        return work()
    kept = Remembered("plans", f"{code_digest()} {question!r}")
    found = kept.load()
    if kept.damage:
        answers.damage.append(f"the remembered plan in {kept.path} cannot be used and is made again: {kept.damage}")
    if found is not None:
        known: Answer = found if kind is None else from_json(found, kind)
        return known
    with _paused_collector():
        answer = work()
    kept.save(answer if kind is None else asdict(cast(Any, answer)))
    return answer


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Stop the search for reference cycles, up to a quarter of a long simulation's time: its objects form none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@cache
def code_digest() -> str:
    """A hash of the code that answers, so that another version's answers are not used."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
