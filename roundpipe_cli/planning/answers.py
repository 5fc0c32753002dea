"""Earlier plans, kept in the user's cache: a repeated question needs neither search nor simulation.

A file per question. Its name is a hash of all that the answer depends on: the question's figures and the code that
answers. A file that cannot be read, or is not as it was written, is computed again, and `damage` says so.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from roundpipe_cli.cache import KEPT_S, cache_folder, sealed, unsealed
from roundpipe_cli.errors import ResourceError
from roundpipe_cli.files import write_atomically
from roundpipe_cli.planning.compare import StageCut
from roundpipe_cli.schedule.builders import Options

MAX_BYTES = 1024**2
ROOMS = ("costs", "planning", "schedule")
"""Folders of the code that answers."""

Answer = TypeVar("Answer")


class Answers:
    """Answers to earlier questions."""

    def __init__(self) -> None:
        self.damage: list[str] = []
        """Messages about files that could not be used."""

    def once(
        self,
        question: object,
        work: Callable[[], Answer],
        write: Callable[[Answer], dict[str, Any]],
        read: Callable[[Any], Answer],
    ) -> Answer:
        """The answer to a question: from the cache, or computed and kept.

        Args:
            question: its `repr` is the question, so it holds plain data and dataclasses of such.
            write, read: an answer to JSON's types and back.
        """
        name = hashlib.sha256(f"{code_digest()} {question!r}".encode()).hexdigest()[:32]
        path = cache_folder("plans") / f"{name}.json"
        try:
            return read(unsealed(path, MAX_BYTES))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self.damage.append(f"the remembered plan in {path} cannot be used and is made again: {error}")
        with _paused_collector():
            answer = work()
        with suppress(OSError, ResourceError):  # a cache that cannot be written is no error
            path.parent.mkdir(parents=True, exist_ok=True)
            _forget_old(path.parent)
            write_atomically(path, sealed(write(answer)))
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


def _forget_old(folder: Path) -> None:
    oldest_s = time.time() - KEPT_S
    for path in folder.glob("*.json"):
        if path.stat().st_mtime < oldest_s:
            path.unlink(missing_ok=True)


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
