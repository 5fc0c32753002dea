"""Devices that runs on this machine lost, for `doctor`."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from roundpipe_cli.cache import cache_folder
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.files import append_line
from roundpipe_cli.regular_files import read_regular

LOST_DAYS = 30


def _lost_path() -> Path:
    return cache_folder("lost") / "devices.jsonl"


def note_lost_device(text: str) -> None:
    """Remember that a run lost a device; a cache that cannot be written is no error."""
    with suppress(OSError, ResourceError, RefusedError):
        path = _lost_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, json.dumps({"time": time.time(), "text": text}))


def lost_devices() -> list[tuple[float, str]]:
    """(Unix time, which and why) of devices that runs lost in the last `LOST_DAYS` days, oldest first."""
    losses = []
    with suppress(OSError, RefusedError):
        for line in read_regular(_lost_path(), 1 << 20).decode(errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError, OverflowError):
                row = json.loads(line)
                if time.time() - float(row["time"]) < LOST_DAYS * 86400:
                    losses.append((float(row["time"]), str(row["text"])))
    return losses
