"""Replaces huggingface_hub's progress bars and messages by this program's."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

from roundpipe_cli.events import Say

_SIGNED = re.compile(r"\?\S+")
"""Parts of an address that hold keys."""


class _Handler(logging.Handler):
    def __init__(self, tell: Say) -> None:
        super().__init__(logging.WARNING)
        self._tell_user = tell
        self._told: set[str] = set()
        """Messages that are not told again: each of five tries to reach a hub that is not there told the same."""

    def emit(self, record: logging.LogRecord) -> None:
        lines = [line.strip() for line in record.getMessage().splitlines() if line.strip()]
        text = _SIGNED.sub("", f"the hub's client: {' '.join(lines)}")[:300]
        if text not in self._told:
            self._told.add(text)
            self._tell_user(text)


@contextlib.contextmanager
def library_messages(tell: Say) -> Iterator[None]:
    """While the body runs, the library draws no bars, and its warnings become notices."""
    from huggingface_hub import utils

    library: Any = utils  # its types do not name what it exports

    logger = logging.getLogger("huggingface_hub")
    before, had_bars = logger.handlers[:], not library.are_progress_bars_disabled()
    logger.handlers[:] = [_Handler(tell)]
    if had_bars:
        library.disable_progress_bars()
    try:
        yield
    finally:
        logger.handlers[:] = before
        if had_bars:
            library.enable_progress_bars()
