"""Fits lines to a terminal. In a pipe or a file they stay whole, for `grep` and comparisons."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator

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


def wrapped(lines: Iterable[str], width: int | None) -> Iterator[str]:
    """Lines of at most `width` columns, cut between words; what follows a cut is indented two more than its line.

    A word that is longer, such as a path, stays whole, so that it can be copied.
    """
    for line in lines:
        if width is None or len(line) <= width:
            yield line
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        words = line.strip()
        yield from textwrap.wrap(
            words,
            width,
            initial_indent=indent,
            subsequent_indent=indent + "  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
