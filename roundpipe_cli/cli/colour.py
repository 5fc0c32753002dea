"""Colour of single words in lines that are printed on a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TextIO

_GOOD, _WARN, _BAD = "1;32", "1;33", "1;31"  # bold green, yellow and red
VERDICTS = {r"\bFITS\b": _GOOD, r"\bSLOW\b": _WARN, r"\bDOES NOT FIT\b": _BAD, r"\bASSUMED\b": _WARN}
"""Words of `plan`, anywhere in a line."""
CHECKS = {"^good ": _GOOD, "^note ": _WARN, "^fails ": _BAD}
"""First words of `doctor`'s lines."""


def has_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that may be coloured (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def with_colours(line: str, colours: Mapping[str, str]) -> str:
    """A line with escape sequences around words.

    Args:
        line: without control characters.
        colours: patterns of words, which do not overlap, to codes.
    """
    for pattern, code in colours.items():
        line = re.sub(pattern, lambda found, code=code: f"\x1b[{code}m{found[0]}\x1b[0m", line)  # type: ignore[misc]
    return line
