"""Progress of a download: one line that is painted over on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable

from roundpipe_cli.cli.output import say
from roundpipe_cli.dashboard.state import fetching_line
from roundpipe_cli.events import Fetching

EVERY_S = 10.0
"""Least seconds between two lines where lines cannot be painted over."""


class ProgressLine:
    """Shows `Fetching` events on stderr."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown_s = clock()
        self._is_last = False
        """Whether the line above the cursor is ours."""

    def show(self, event: Fetching) -> None:
        text = fetching_line(event)
        if _can_paint():
            width = shutil.get_terminal_size().columns - 1
            say(("\x1b[1A\x1b[2K" if self._is_last else "") + text[:width], painted=True)
            self._is_last = True
        elif event.files_done == event.num_files or self._clock() - self._shown_s >= EVERY_S:
            self._shown_s = self._clock()
            say(text)

    def leave(self) -> None:
        """Something else is said next."""
        self._is_last = False


def _can_paint() -> bool:
    return os.environ.get("TERM", "") not in ("", "dumb") and sys.stderr is not None and sys.stderr.isatty()
