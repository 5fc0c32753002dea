"""Every error that a user can meet, with its exit code, and the words that no error or log may repeat: secrets.

An error says what went wrong, where, what was found, what was expected, and a hint: the command or line that fixes it.
Raise one of these for anything the user caused or can fix; `assert` and plain exceptions are for our own bugs
(exit code 1). One place, `roundpipe_cli.cli.output`, turns them into text and an exit code.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Keeps secrets out of what is printed or written: the values of the environment's secret variables, and passwords in
# addresses. No recipe key or flag takes a secret, so a message can repeat no others.

SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL|NETRC_PASS)", re.IGNORECASE)
IN_ADDRESS = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")
"""A name and password, or a token alone, in front of an address' host."""
MIN_LENGTH = 8
"""Shorter values are no secrets, and replacing them would spoil words."""
MASK = "***"


def redact(text: str) -> str:
    """`text` with every secret replaced by ***, also where it stands as JSON or as Python writes it."""
    if len(text) < MIN_LENGTH:
        return text
    text = IN_ADDRESS.sub(MASK, text)
    for name, value in os.environ.items():
        if len(value) >= MIN_LENGTH and SECRET_NAME.search(name):
            for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1]):
                text = text.replace(form, MASK)
    return text


def redact_values(document: Any) -> Any:
    """Plain JSON values with `redact` applied to every text. To be called before they are encoded, which would leave
    secrets in forms that nothing finds."""
    if isinstance(document, str):
        return redact(document)
    if isinstance(document, Mapping):
        return {key: redact_values(value) for key, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [redact_values(value) for value in document]
    return document


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""A disk that is full, limited or failing: a lack of resources, and not a mistake in what was asked for."""


NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "std::bad_alloc", "Cannot allocate memory")
"""Texts of torch, and of libraries below it, that Python knows as no MemoryError."""


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether the host had no memory left, whoever asked for it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_said = isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)
    return is_said or isinstance(error, MemoryError)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, worded for the reader."""

    what: str
    where: str | None = None
    """File, line and key path: `recipes/a.yaml:12: lora.r`."""
    found: str | None = None
    expected: str | None = None
    hint: str | None = None
    """The remedy, as a command or a line to write."""


class RoundpipeError(Exception):
    """Base of all errors that are shown without a traceback."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        found: str | None = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.problems: tuple[Problem, ...] = (Problem(what, where, found, expected, hint),)

    def __str__(self) -> str:
        return "\n".join(render_problem(problem) for problem in self.problems)

    @property
    def in_short(self) -> str:
        """The first problem in half a line: what, where, found."""
        first = self.problems[0]
        details = ": ".join(filter(None, [first.where, first.found]))
        return f"{first.what} ({details})" if details else first.what


class InternalError(RoundpipeError):
    """A bug of this program, for instance an exception inside a worker. Exit code 1."""


class NoProgressError(InternalError):
    """Work that should be short did not end. Exit code 1."""


class RefusedError(RoundpipeError):
    """Recipe, data or model refused before training. Exit code 2."""

    exit_code = 2


class RecipeError(RefusedError):
    """A recipe with one or more mistakes; all of them are listed at once. Exit code 2."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems[0].what)
        self.problems = tuple(problems)


class ContradictionError(RecipeError):
    """A recipe whose values are each as they should be, but not together. Exit code 2."""


class OutputInUseError(RoundpipeError):
    """Another run holds the output directory. Exit code 3."""

    exit_code = 3


class NotFiniteError(RoundpipeError):
    """Loss or gradient is NaN or infinite. Exit code 4."""

    exit_code = 4


class ResourceError(RoundpipeError):
    """Out of disk, host memory, device memory, threads or processes. Exit code 5."""

    exit_code = 5


class OutOfDeviceMemoryError(ResourceError):
    """A worker's device is out of memory; the step can be computed again with less. Exit code 5."""


class DeviceLostError(ResourceError):
    """Devices failed or hang; where others are left, they can compute the step again. Exit code 5."""

    workers: tuple[int, ...] = ()
    """Workers of the engine on which it showed."""
    is_hang = False
    """Whether the workers make no progress, so that their threads may never return."""
    rest: tuple[str, ...] = ()
    """Devices on which another run may go on."""
    at: str = ""
    """Work that the device had, such as `step 5`; empty while the run may go on."""


class NodeLostError(RoundpipeError):
    """Another machine's process of the same run ended. Exit code 1, as nothing is wrong here."""


class NoCheckpointError(RoundpipeError):
    """Nothing valid to resume from. Exit code 6."""

    exit_code = 6


class StoppedError(RoundpipeError):
    """Stopped by a signal at a step border. Exit code 130 (SIGINT), 143 (SIGTERM) or 129 (SIGHUP)."""

    def __init__(self, what: str, *, exit_code: int, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.exit_code = exit_code


def as_ours(error: BaseException, what: str, where: str) -> RoundpipeError:
    """The error for whatever ended `what`: itself if it is one of ours, else one with it as its cause."""
    if isinstance(error, RoundpipeError):
        return error
    text = f"{type(error).__name__}: {error}".strip()
    ours: RoundpipeError = InternalError(f"{what} failed: {text}", where=where)
    if is_out_of_host_memory(error):
        ours = ResourceError(f"out of host memory in {what}", where=where, found=text)
    ours.__cause__ = error
    return ours


def render_problem(problem: Problem) -> str:
    """The plain text of one problem, one fact a line."""
    where = _without_repeated_key(problem.where, problem.what) if problem.where else ""
    head = f"{where}: {problem.what}" if where else problem.what
    facts = (("found", problem.found), ("expected", problem.expected), ("hint", problem.hint))
    return "\n".join([head, *(f"  {name}: {text}" for name, text in facts if text is not None)])


def _without_repeated_key(where: str, what: str) -> str:
    """`where` without its last part where that is a key which `what` begins with or names: said once is enough."""
    before, _, last = where.rpartition(": ")
    is_named = any(f" {last}{end}" in f" {what} " for end in (" ", ":"))
    return before if before and is_named else where


MAX_WORD = 1000
"""Characters of a misspelt word; to compare longer ones would take seconds."""


def closest(word: str, candidates: list[str]) -> str | None:
    """The candidate nearest to a misspelt `word` (for "did you mean"), or None if none is near."""
    import difflib

    if len(word) > MAX_WORD:
        return None
    lowered = {candidate.lower(): candidate for candidate in candidates}
    near = [candidate for candidate in lowered if num_edits(word.lower(), candidate) <= 1]
    if near:
        return lowered[max(near, key=lambda one: difflib.SequenceMatcher(None, word.lower(), one).ratio())]
    matches = difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.6)
    return lowered[matches[0]] if matches else None


def num_edits(one: str, other: str, most: int = 1) -> int:
    """Letters to drop, add, change or swap with their neighbour to get from one word to the other; above `most`, any
    number above it."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        row = [i + 1]
        for j, theirs in enumerate(other):
            row.append(min(last[j] + (letter != theirs), last[j + 1] + 1, row[j] + 1))
            if i and j and letter == other[j - 1] and theirs == one[i - 1]:
                row[-1] = min(row[-1], before[j - 1] + 1)
        before, last = last, row
    return last[-1]
