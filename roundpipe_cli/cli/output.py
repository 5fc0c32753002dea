"""Messages on stderr, results on stdout, errors as text and exit codes: fitted to the terminal, in its colours."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from roundpipe_cli.errors import (
    DISK_ERRORS,
    InternalError,
    ResourceError,
    RoundpipeError,
    is_out_of_host_memory,
    redact,
    render_problem,
)
from roundpipe_cli.library_settings import hide_bars
from roundpipe_cli.units import escape_controls

# Fits lines to a terminal. In a pipe or a file they stay whole, for `grep` and comparisons.

LEAST_WIDTH = 40
"""Narrower terminals get lines of this width."""


def terminal_width(stream: int = 1) -> int | None:
    """Columns of the terminal behind a stream (1: stdout, 2: stderr); None where there is none."""
    try:
        if not os.isatty(stream):
            return None
        columns = int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream).columns
    except (OSError, ValueError):
        columns = 0
    return max(LEAST_WIDTH, columns or shutil.get_terminal_size().columns)


_TABLE = re.compile(r"\S {3,}\S.*\S {3,}\S")
"""Three columns side by side: such a line is left to the terminal."""
_COMMAND = r"(?:roundpipe|python3?|pip|git|hf|export|scripts/\w+|xdg-open) "
UNCUT = re.compile(rf"`[^`]+`|^\s*{_COMMAND}.*|(?<=: ){_COMMAND}.*|\d (?:%|[mu]?s|[KMGT]i?B)(?:/s)?(?!\w)")
"""Words that stay together: something to copy, and a figure with its unit."""


def wrapped(lines: Iterable[str], width: int | None) -> Iterator[str]:
    """Lines of at most `width` columns, cut between words; what follows a cut is indented two more than its line.

    A word that is longer, such as a path, stays whole, so that it can be copied; so does a command.
    """
    for line in lines:
        if width is None or len(line) <= width or _TABLE.search(line):
            yield line
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        parts = textwrap.wrap(
            UNCUT.sub(lambda found: found[0].replace(" ", "\0"), line.strip()),
            width,
            initial_indent=indent,
            subsequent_indent=indent + "  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        yield from (part.replace("\0", " ") for part in parts)


# Colour of single words in lines that are printed on a terminal.

_GOOD, _WARN, _BAD = "1;32", "1;33", "1;31"  # bold green, yellow and red
VERDICTS = {r"\bFITS\b": _GOOD, r"\bSLOW\b": _WARN, r"\bDOES NOT FIT\b": _BAD, r"\bASSUMED\b": _WARN}
"""Words of `plan`, anywhere in a line."""
CHECKS = {"^good ": _GOOD, "^note ": _WARN, "^fails ": _BAD}
"""First words of `doctor`'s lines."""


def has_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that may be coloured (https://no-color.org)."""
    try:
        return not os.environ.get("NO_COLOR") and has_codes() and stream.isatty()
    except ValueError:  # closed
        return False


def has_codes() -> bool:
    """Whether terminals here know codes that move the cursor and colour words."""
    return os.environ.get("TERM", "") not in ("", "dumb")


def with_colours(line: str, colours: Mapping[str, str]) -> str:
    """A line with escape sequences around words.

    Args:
        line: without control characters.
        colours: patterns of words, which do not overlap, to codes.
    """
    for pattern, code in colours.items():
        line = re.sub(pattern, lambda found, code=code: f"\x1b[{code}m{found[0]}\x1b[0m", line)  # type: ignore[misc]
    return line


# Settings of the libraries that commands use: no network, no progress bars.


def go_offline() -> None:
    """Keep the hub's libraries from opening connections; they read these variables when imported."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"


def quiet_libraries() -> None:
    """Our own messages say what matters; the libraries' advice is for programmers."""
    import warnings

    hide_bars()
    from transformers.utils import logging

    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@functools.cache
def load_libraries() -> None:
    """Load torch and transformers, which takes seconds, and say so; once in a process."""
    say("loading torch and transformers ...")
    quiet_libraries()


DEBUG_VARIABLE = "ROUNDPIPE_DEBUG"
PACKAGE = str(Path(__file__).resolve().parents[1])

_broken: set[int] = set()
"""Streams that nobody reads any more; a run continues without them."""
_lost: list[OSError] = []
"""Why data for stdout are lost: its disk is full or failing. Nobody must take what is there for whole."""


def say(text: str, *, stream: TextIO | None = None, painted: bool = False, is_data: bool = False) -> None:
    """Print one line to stderr (or `stream`). A closed or full stream does not end a run.

    Args:
        painted: `text` moves the cursor by codes of its own, and holds nothing of anyone else.
        is_data: it is what the command is asked for, so that a disk without room for it is an error at its end.
    """
    target = sys.stderr if stream is None else stream
    if target is None or id(target) in _broken:
        return
    line = text if painted else _printable(text)
    if stream is None and not painted:  # cut between words where the terminal is narrower
        line = "\n".join(wrapped(line.split("\n"), terminal_width(2)))
    try:
        try:
            print(line, file=target, flush=True)
        except UnicodeEncodeError:  # a terminal or pipe that is not UTF-8
            print(line.encode("ascii", "backslashreplace").decode(), file=target, flush=True)
    except (OSError, ValueError) as error:
        _broken.add(id(target))
        if is_data and isinstance(error, OSError) and error.errno in DISK_ERRORS:
            _lost.append(error)


def say_data(text: str, *, colours: Mapping[str, str] | None = None, is_kept: bool = False) -> None:
    """Print one line to stdout.

    Args:
        is_kept: files of a run have it too, so that nothing is lost where stdout has no room for it.
        colours: of words, as `with_colours` takes them; only on a terminal are they used.
    """
    if sys.stdout is None:  # the program was started without one
        return
    if colours and has_colour(sys.stdout):
        say(with_colours(_printable(text), colours), stream=sys.stdout, painted=True)
        return
    say(text, stream=sys.stdout, is_data=not is_kept)


def say_json(document: object, *, indent: int | None = 1) -> None:
    """Print a document to stdout; without `indent` on one line."""
    import json

    say_data(json.dumps(document, indent=indent))


def open_closed_streams() -> None:
    """Put the null device in place of stdin, stdout or stderr where the program was started without it.

    The next files to be opened would get their numbers otherwise, and be written to by whoever prints.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def say_at_once(text: str) -> None:
    """Print one line to stderr past all buffers: safe inside a signal's handler."""
    with contextlib.suppress(OSError):
        os.write(2, f"{_printable(text)}\n".encode())


def _printable(text: str) -> str:
    """Secrets masked, and control characters escaped, so that no name or row can steer the terminal."""
    return escape_controls(redact(text), kept="\n\t")


def show_error(error: RoundpipeError) -> None:
    """One error block: each problem with its facts."""
    for problem in error.problems:
        say(f"error: {render_problem(problem)}" if error.exit_code < 128 else render_problem(problem))


def run_command(command: Callable[[], Any]) -> int:
    """Run a command; returns its exit code. Errors for the reader are shown without a traceback, our own bugs with."""
    try:
        command()
    except KeyboardInterrupt:
        say("stopped by SIGINT")
        return 130
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS and error.filename is None:
            _lost.append(error)  # a table, of which rich does not catch it
        else:
            ours = explained(error)
            if ours.exit_code == 1 and ours.__cause__ is not None and os.environ.get(DEBUG_VARIABLE):
                say("".join(traceback.format_exception(ours.__cause__)).rstrip())
            show_error(ours)
            return ours.exit_code
    if _lost:
        found = _lost.pop().strerror
        show_error(ResourceError("the output could not be written whole", where="stdout", found=found))
        return ResourceError.exit_code
    return 0


def explained(error: BaseException) -> RoundpipeError:
    """The error for the reader of whatever ended a command: itself if it is one of ours, a lack of memory or threads,
    or a bug of ours."""
    if isinstance(error, RoundpipeError):
        return error
    if is_out_of_host_memory(error):
        hint = "`roundpipe plan` says what a recipe needs; of `generate`: a smaller --batch-size, or --stream"
        return ResourceError("out of host memory", found=str(error).partition("\n")[0], hint=hint)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not be loaded
        hint = "end other programs there; of `generate`: a smaller --batch-size or --weight-cache-gib, or --stream"
        return ResourceError("out of device memory", found=str(error).partition("\n")[0], hint=hint)
    # Rust and C++ libraries say only in their messages that a limit on threads and processes was reached
    if any(text in str(error) for text in ("can't start new thread", os.strerror(errno.EAGAIN))):
        what = "the system lets this user start no more threads or processes"
        return ResourceError(what, found=str(error), hint="raise the limit: `ulimit -u`, or the container's")
    return _bug(error)


def _bug(error: BaseException) -> InternalError:
    """The text of an unexpected exception, with the innermost line of this program that it passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in frame.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name}" if frames else None
    internal = InternalError(
        f"{type(error).__name__}: {error}".strip(),
        where=place,
        hint=f"this is a bug of roundpipe: please report it with the traceback that {DEBUG_VARIABLE}=1 shows",
    )
    internal.__cause__ = error
    return internal
