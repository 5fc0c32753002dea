"""Earlier plans, kept in the user's cache: a repeated question needs neither search nor simulation.

The key is all that the answer depends on: the question's figures and the code that answers. What cannot be read, or is
not as it was written, is computed again, and `damage` says so.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from roundpipe_cli.cache import Remembered
from roundpipe_cli.planning.compare import StageCut
from roundpipe_cli.schedule.builders import Options

ROOMS = ("costs", "planning", "schedule")
"""Folders of the code that answers."""

Answer = TypeVar("Answer")


class Answers:
    """Answers to earlier questions."""

    def __init__(self) -> None:
        self.damage: list[str] = []
        """Messages about files that could not be used."""

    def once(
        self, question: object, work: Callable[[], Answer], read: Callable[[Any], Answer] = lambda known: known
    ) -> Answer:
        """The answer to a question: from the cache, or computed and kept.

        Args:
            question: its `repr` is the question, so it holds plain data and dataclasses of such.
            work: gives plain data, or a dataclass of such.
            read: makes an answer of what JSON has kept of it.
        """
        kept = Remembered("plans", f"{code_digest()} {question!r}")
        found = kept.load()
        if kept.damage:
            self.damage.append(f"the remembered plan in {kept.path} cannot be used and is made again: {kept.damage}")
        if found is not None:
            return read(found)
        with _paused_collector():
            answer = work()
        kept.save(asdict(answer) if is_dataclass(answer) and not isinstance(answer, type) else answer)
        return answer


def answered(
    answers: Answers | None,
    question: object,
    work: Callable[[], Answer],
    read: Callable[[Any], Answer] = lambda known: known,
) -> Answer:
    """As `Answers.once`; None: nothing is remembered."""
    return work() if answers is None else answers.once(question, work, read)


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


def cut_from(document: Any) -> StageCut:
    """Stages from what `asdict` made of them."""
    dealing = document["dealing"]
    values = {key: _as_tuples(value) for key, value in document.items()}
    return StageCut(**{**values, "dealing": None if dealing is None else Options(**dealing)})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
