"""Where the tool keeps what it can make again: a leaf that any room may ask."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "ROUNDPIPE_CACHE"


def cache_folder(name: str) -> Path:
    """The cache's folder `name`; it need not exist. `$ROUNDPIPE_CACHE`, else roundpipe in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser() / name
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "roundpipe" / name
