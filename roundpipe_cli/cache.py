"""The cache of what can be made again.

Several files that belong together are written to a folder of their own, renamed when it is whole and durable
(`new_folder`, `sync`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.files import TEMPORARY_PREFIX, write_atomically
from roundpipe_cli.regular_files import read_json_of_ours

CACHE_VARIABLE = "ROUNDPIPE_CACHE"
KEPT_S = 30 * 24 * 3600.0
"""Age in seconds since a file's last use from which it is removed."""
MAX_BYTES = 16 * 1024**2
"""Largest remembered value."""
ABANDONED_S = 24 * 3600.0
"""Age in seconds of an unfinished file that never will be finished."""


def cache_folder(name: str) -> Path:
    """The cache's folder `name`; it need not exist. `$ROUNDPIPE_CACHE`, else roundpipe in the user's cache folder.

    Raises:
        RefusedError: `$ROUNDPIPE_CACHE` is a file, or lies below one.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return _chosen_folder(chosen) / name
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path("~/.cache").expanduser()) / "roundpipe" / name
    except RuntimeError:  # a user without a home, as in containers: nothing can be read or written there
        return Path(os.devnull) / name


def _chosen_folder(chosen: str) -> Path:
    try:
        folder = Path(chosen).expanduser()
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        wrong = f"{existing} is no folder" if not existing.is_dir() else ""
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long; `~` of nobody
        folder, wrong = Path(os.devnull), str(error)
    if wrong:
        raise RefusedError(
            "the cache cannot be kept where the environment says",
            where=CACHE_VARIABLE,
            found=wrong,
            expected="a folder; it is made where it does not exist",
            hint=f"unset {CACHE_VARIABLE}",
        )
    return folder


def new_folder(name: str) -> Path | None:
    """An empty folder in `cache_folder(name)`, to be renamed; None where nothing can be written there."""
    try:
        folder = cache_folder(name)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=folder))
    except OSError:  # read-only; no home
        return None


def prune_cache(folder: Path, mark: str) -> None:
    """Remove what nobody used for long, and what killed runs left; only folders that are ours.

    Args:
        mark: name of the file that tells a finished one.

    Raises:
        OSError: the folder cannot be read.
    """
    now = time.time()
    for entry in folder.iterdir():
        age_s = now - entry.stat().st_mtime
        is_finished = (entry / mark).is_file()
        if (is_finished and age_s > KEPT_S) or (entry.name.startswith(TEMPORARY_PREFIX) and age_s > ABANDONED_S):
            shutil.rmtree(entry, ignore_errors=True)


class Remembered:
    """A value in the cache, as JSON in a file of its own, which a hash of all that the value depends on names.

    A file that cannot be read, or is not as it was written, counts as none. One that nobody has read for long goes.
    """

    def __init__(self, room: str, key: str, max_bytes: int = MAX_BYTES) -> None:
        self.path = cache_folder(room) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        self._max_bytes, self.damage = max_bytes, ""
        """The reason why `load` could not use the file; empty: it could, or there was none."""

    def load(self) -> Any:
        """The value, in JSON's types; None: nothing is remembered."""
        try:
            value = unsealed(self.path, self._max_bytes)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.damage = str(error)
            return None
        with suppress(OSError):
            os.utime(self.path)
        return value

    def save(self, value: object) -> None:
        """Remember a value of JSON's types; a cache that cannot be written is no error."""
        with suppress(OSError, ResourceError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, sealed(value))
            for path in self.path.parent.glob("*.json*"):  # those too that killed runs had not finished
                if path.stat().st_mtime < time.time() - KEPT_S:
                    path.unlink(missing_ok=True)


def sealed(content: object) -> bytes:
    """JSON with its hash, by which `unsealed` knows damage."""
    return json.dumps({"sha256": _hash(content), "content": content}).encode()


def unsealed(path: Path, max_bytes: int) -> Any:
    """The content of a file of `sealed`.

    Raises:
        OSError, ValueError: it is not there, no regular file, too large, or not as it was written.
    """
    found = read_json_of_ours(path, max_bytes)
    if not isinstance(found, dict) or "sha256" not in found:
        raise ValueError("another document")
    if found["sha256"] != _hash(found.get("content")):
        raise ValueError("it is not as it was written")
    return found["content"]


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
