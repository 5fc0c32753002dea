"""Files and paths from outside: regular, inside their folder, of limited size, opened without waiting."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.units import format_bytes

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095
"""Linux's limits.h: NAME_MAX, and PATH_MAX without the zero behind it."""


def named_path(text: str | Path) -> Path:
    """The path that a user or a file wrote, with `~` expanded.

    Raises:
        RefusedError: a user without a home folder, or longer than any path.
    """
    path = Path(text)
    longest = max((len(part.encode("utf-8", errors="replace")) for part in path.parts), default=0)
    if longest > MAX_NAME_BYTES or len(str(path)) > MAX_PATH_BYTES:
        raise RefusedError(
            "a path is longer than any can be",
            where=f"{str(path)[:60]!r}...",
            found=f"{len(str(path))} characters, {longest} bytes between two slashes",
            expected=f"at most {MAX_PATH_BYTES}, and {MAX_NAME_BYTES} between two slashes",
        )
    try:
        return path.expanduser()
    except RuntimeError:
        raise RefusedError("there is no home folder of this user", where=repr(str(path)[:200])) from None


def tried_paths(text: str, folder: Path | None) -> tuple[Path, ...]:
    """Where a path of a recipe is looked for: the working directory, then the recipe's `folder`. `~` is expanded.

    Raises:
        RefusedError: as of `named_path`.
    """
    path, places = named_path(text), [Path.cwd()] + ([folder.absolute()] if folder is not None else [])
    return tuple(dict.fromkeys(place / path for place in places))


def stays_inside(path: Path, folder: Path) -> bool:
    """Whether `path` leads to a file of this folder, or to a blob of the hub's own cache."""
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError):  # a link that leads to itself
        return False
    blobs = home.parent.parent / "blobs"
    return real.is_relative_to(home) or (home.parent.name == "snapshots" and real.is_relative_to(blobs))


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it; a pipe without a writer or a device would make a plain `open` wait or never end.

    Raises:
        OSError: it cannot be opened.
        RefusedError: it is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        kind = kind_of_file(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        raise RefusedError("this is no regular file", where=str(path), found=kind, expected="a regular file")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read.
        RefusedError: it is no regular file, or larger than `max_bytes`.
    """
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise RefusedError(
            f"{path.name} is too large",
            where=str(path),
            found=f"more than {format_bytes(max_bytes)}",
            expected=f"at most {format_bytes(max_bytes)}",
        )
    return data


def read_json_of_ours(path: Path, max_bytes: int = 4 * 1024**2) -> Any:
    """A document that this program wrote, which a crash or somebody else may have damaged.

    Raises:
        OSError, ValueError: not there, no regular file, too large, or no JSON; nesting too deep is a ValueError too.
    """
    try:
        return json.loads(read_regular(path, max_bytes))
    except (RefusedError, RecursionError) as error:
        raise ValueError(f"{path.name}: {type(error).__name__}") from error


MAX_LOCK_BYTES = 1 << 16


class Holder(NamedTuple):
    """Who wrote its name into the file of a lock."""

    pid: str = "unknown"
    host: str = "unknown"
    may_live: bool = True
    """As far as this machine can tell."""


def lock_holder(path: Path) -> Holder | None:
    """Who holds a lock, or did until it was killed; None: no name can be read."""
    try:
        named = read_json_of_ours(path, MAX_LOCK_BYTES)
        pid, host = int(named["pid"]), str(named["host"])
    except PermissionError:
        return Holder()
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    try:
        if host == socket.gethostname():
            os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return Holder(str(pid), host, may_live=False)
    except PermissionError:  # somebody else's
        pass
    return Holder(str(pid), host)


MAX_LINE_BYTES = 16 * 1024**2


def json_objects(lines: bytes) -> list[dict[str, Any]]:
    """The JSON objects that lines hold, one a line; what is none, or longer than `MAX_LINE_BYTES`, is left out."""
    found = []
    for line in lines.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line) if 0 < len(line) <= MAX_LINE_BYTES else None
            found += [value] if isinstance(value, dict) else []
    return found


def kind_of_file(mode: int) -> str:
    """The kind of file that a mode of `stat` means, for the reader."""
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device" if not stat.S_ISREG(mode) else "a regular file")
