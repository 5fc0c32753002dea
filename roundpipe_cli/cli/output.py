"""Words to stderr, data to stdout, errors to text and exit codes: the one place where that happens."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from roundpipe_cli.errors import RoundpipeError, render_problem

_broken: set[int] = set()
"""Streams that nobody reads any more; a run goes on without them."""


def say(text: str, *, stream: TextIO | None = None) -> None:
    """Print one line to stderr (or `stream`). A closed or full stream does not end a run."""
    target = sys.stderr if stream is None else stream
    if id(target) in _broken:
        return
    try:
        print(_printable(text), file=target, flush=True)
    except (OSError, ValueError):
        _broken.add(id(target))


def say_data(text: str) -> None:
    """Print one line to stdout."""
    say(text, stream=sys.stdout)


def say_at_once(text: str) -> None:
    """Print one line to stderr past all buffers: safe inside a signal's handler."""
    with contextlib.suppress(OSError):
        os.write(2, f"{_printable(text)}\n".encode())


def _printable(text: str) -> str:
    """Control characters escaped, so that no name or row can steer the terminal."""
    return "".join(
        c if c == "\n" or c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text
    )


def show_error(error: RoundpipeError) -> None:
    """One error block: each problem with its facts."""
    for problem in error.problems:
        say(f"error: {render_problem(problem)}" if error.exit_code < 128 else render_problem(problem))


def run_command(command: Callable[[], Any]) -> int:
    """Run a command; returns its exit code. Errors for the reader are shown without a traceback, our own bugs with."""
    try:
        command()
    except RoundpipeError as error:
        if error.exit_code == 1 and error.__cause__ is not None and os.environ.get("ROUNDPIPE_DEBUG"):
            traceback.print_exception(error.__cause__)
        show_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        say("stopped by SIGINT")
        return 130
    return 0
