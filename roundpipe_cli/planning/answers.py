"""Earlier plans, kept in the user's cache: a repeated question needs neither search nor simulation.

A file per question, JSON. Its name is a hash of all that the answer depends on: the question's figures and the code
that answers. A file that cannot be read is computed again, and `damage` says so.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.files import KEPT_S, cache_folder, read_regular, write_atomically
from roundpipe_cli.planning.compare import Result, SimulationCase, StageCut, make_schedule
from roundpipe_cli.schedule.builders import Options, check_stages
from roundpipe_cli.schedule.timeline import Bubble, Timeline

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
            write, read: an answer to JSON's types and back; `read` raises ValueError, TypeError, KeyError or
                RefusedError for what cannot be.
        """
        name = hashlib.sha256(f"{code_digest()} {question!r}".encode()).hexdigest()[:32]
        path = cache_folder("plans") / f"{name}.json"
        try:
            return read(json.loads(read_regular(path, MAX_BYTES)))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, RecursionError, RefusedError) as error:
            reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
            self.damage.append(f"the remembered plan in {path} cannot be used and is made again: {reason}")
        with _paused_collector():
            answer = work()
        with suppress(OSError, ResourceError):  # a cache that cannot be written is no error
            path.parent.mkdir(parents=True, exist_ok=True)
            _forget_old(path.parent)
            write_atomically(path, json.dumps(write(answer)).encode())
        return answer


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Stops the search for reference cycles, up to a quarter of a long simulation's time: its objects form none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _forget_old(folder: Path) -> None:
    """Remove answers that are older than the cache keeps anything."""
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


def cut_from(document: Any, schedule: str, num_layers: int, num_workers: int) -> StageCut:
    """The inverse of `asdict`, for a schedule of these counts.

    Raises:
        ValueError, TypeError, KeyError, RefusedError: not such a document, or stages that do not suit.
    """
    dealing, per_round = document["dealing"], document["microbatches_per_round"]
    cut = StageCut(
        _ranges(document["forward_stages"]),
        _ranges(document["backward_stages"]),
        None if per_round is None else _count(per_round),
        tuple(_count(worker, least=0) for worker in document["workers"]),
        None if dealing is None else _dealing(dealing),
        tuple(str(sentence) for sentence in document["explanation"]),
    )
    if not set(cut.workers) <= set(range(num_workers)):
        raise ValueError(f"workers {cut.workers} of {num_workers}")
    stages = cut.forward_stages, cut.backward_stages
    check_stages(schedule, *stages, num_layers=num_layers, num_workers=len(cut.workers) or num_workers)
    return cut


def result_document(result: Result) -> dict[str, Any]:
    """A schedule's figures in JSON's types."""
    return {"makespan_s": result.makespan_s, "parts": asdict(result.parts), "step_s": result.step_s}


def result_from(document: Any, name: str, cut: StageCut, case: SimulationCase) -> Result:
    """The inverse of `result_document` for these stages; its timeline is empty.

    Raises:
        ValueError, TypeError, KeyError, RefusedError: not such a document.
    """
    schedule, shares = make_schedule(name, cut, case), document["parts"]
    if not all(-1 <= shares[field.name] <= 1 for field in fields(Bubble)):
        raise ValueError("a share that cannot be")
    return Result(
        schedule,
        Timeline(schedule.num_workers, ()),
        number(document["makespan_s"]),
        Bubble(**{field.name: float(shares[field.name]) for field in fields(Bubble)}),
        number(document["step_s"]),
        case.num_workers if case.accounting == "published" else schedule.microbatches_per_round,
        cut.dealing or case.options,
    )


def number(value: Any) -> float:
    """A finite number from 0 up.

    Raises:
        ValueError: it is none.
    """
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no number from 0 up")
    return float(value)


def _count(value: Any, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no count")
    return value


def _dealing(document: Any) -> Options:
    shared = _count(document["shared_stages"], least=0)
    return Options(_count(document["head_workers"]), document["earliest_free"] is True, shared)


def _ranges(stages: Any) -> tuple[StageRange, ...]:
    return tuple((_count(first, least=0), _count(last, least=-1)) for first, last in stages)
