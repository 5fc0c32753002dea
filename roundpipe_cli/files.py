"""Files that are wholly there or not at all, checks of files from outside, and the cache of what can be made again.

The order that makes it true: write under a temporary name, fsync the file, fsync the folder it is in, rename, fsync the
parent. An error of fsync is final: after one the kernel may have dropped the bytes, and a second fsync would report
success (P. Rebello et al., "Can applications recover from fsync failures?", USENIX ATC 2020).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.units import format_bytes
from roundpipe_cli.watchdog import at_work

STATE_FILE_MODE = 0o600
"""Run state holds private data (optimizer moments, rows' positions): for the owner only."""
STATE_FOLDER_MODE = 0o700
TEMPORARY_PREFIX = ".tmp-"
DELETED_PREFIX = ".del-"
"""A file with one of these prefixes is removed at the next start."""


_user_umask = 0o022


def keep_private() -> None:
    """Create files for this user alone from here on; `shared_mode` gives what the user's own umask leaves."""
    global _user_umask
    _user_umask = os.umask(0o077)


def shared_mode(mode: int) -> int:
    """The mode of a file or folder that is meant for others, as far as the user's umask allows."""
    return mode & ~_user_umask


_CHUNK_BYTES = 8 * 1024**2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write below `folder` (root's reserve excluded)."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def require_free_bytes(folder: Path, needed_bytes: int, what: str) -> None:
    """Refuse early what cannot end well.

    Raises:
        ResourceError: the file system of `folder` has less than `needed_bytes` left.
    """
    free = free_bytes(folder)
    if free < needed_bytes:
        raise ResourceError(
            f"not enough disk space for {what}",
            where=str(folder),
            found=f"{format_bytes(free)} free ({free} bytes)",
            expected=f"{format_bytes(needed_bytes)} ({needed_bytes} bytes)",
            hint="free some space and run again with --resume, or set output_dir= to a larger disk",
        )


def disk_error(error: OSError, path: Path, what: str, needed_bytes: int | None = None) -> ResourceError:
    """The exit-5 error for a failed write, fsync or rename below `path`."""
    if error.errno == errno.ENOENT and not path.is_dir() and not path.parent.is_dir():
        return ResourceError(
            f"could not write {what}: the folder was removed or moved during the run",
            where=str(path.parent),
            hint="--resume continues where it is now",
        )
    found = f"{os.strerror(error.errno) if error.errno else error}"
    hint = "look at the disk (dmesg), then run again with --resume"
    try:
        status = os.statvfs(path if path.is_dir() else path.parent)
    except OSError:
        status = None
    if error.errno in _FULL:
        hint = "free some space and run again with --resume, or set output_dir= to a larger disk"
    if error.errno == errno.EFBIG:
        found += ": a limit on the size of files is set"
        hint = "ulimit -f unlimited, or set output_dir= to a file system that takes such files, and --resume"
    elif error.errno == errno.ENOSPC and status is not None and status.f_files and not status.f_favail:
        found += f": all {status.f_files:,} inodes are taken"
        hint = "remove small files and run again with --resume, or set output_dir= to another disk"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = "make the folder writable for this user and run again with --resume, or set output_dir= elsewhere"
    elif status is not None:
        free = status.f_bavail * status.f_frsize
        found += f", {format_bytes(free)} free ({free} bytes)"
    expected = None if needed_bytes is None else f"{format_bytes(needed_bytes)} ({needed_bytes} bytes)"
    return ResourceError(f"could not write {what}", where=str(path), found=found, expected=expected, hint=hint)


class NewFile:
    """A file that does not exist yet, written piece by piece. `close` is for those that fail.

    Size and digest are of the bytes as they are handed over, so a later mismatch means that the disk changed them.
    Every method may raise OSError as the system reports it; the file may then be there in part.
    """

    def __init__(self, path: Path, mode: int = STATE_FILE_MODE) -> None:
        self._name = path.name
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor: int | None = os.open(path, flags, mode)
        try:
            os.fchmod(self._descriptor, mode)
        except BaseException:
            self.close()
            raise

    def write(self, chunk: bytes | memoryview) -> None:
        """Append all of `chunk`."""
        assert self._descriptor is not None
        view = memoryview(chunk)
        rest = view.cast("B") if view.nbytes else memoryview(b"")
        while rest:
            piece = rest[:_CHUNK_BYTES]
            with at_work(f"writing {self._name}"):
                written = os.write(self._descriptor, piece)
            self._digest.update(piece[:written])
            self.num_bytes += written
            rest = rest[written:]

    def finish(self) -> tuple[int, str]:
        """fsync and close. Returns the size in bytes and the SHA-256, hexadecimal."""
        assert self._descriptor is not None
        with at_work(f"fsync of {self._name}"):
            os.fsync(self._descriptor)
        self.close()
        return self.num_bytes, self._digest.hexdigest()

    def close(self) -> None:
        """Close without a promise; does nothing after `finish`."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def write_new_file(path: Path, chunks: Iterable[bytes | memoryview], mode: int = STATE_FILE_MODE) -> tuple[int, str]:
    """Write a `NewFile` and fsync it. Returns its size in bytes and its SHA-256, hexadecimal.

    Raises:
        OSError: as the system reports it; the file may then be there in part.
    """
    file = NewFile(path, mode)
    try:
        for chunk in chunks:
            file.write(chunk)
        return file.finish()
    finally:
        file.close()


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable.

    Raises:
        OSError: as the system reports it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, mode: int = STATE_FILE_MODE) -> None:
    """Replace the small file `path` by `data`: a reader sees the old bytes or the new ones, whatever happens.

    Raises:
        ResourceError: disk full or failing; the old file is then as it was.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{os.urandom(4).hex()}")
    try:
        write_new_file(temporary, [data], mode)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise disk_error(error, path, path.name, len(data)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_named(path: Path, text: str) -> None:
    """Write a page or picture to the file that a user named: as `write_atomically`, but a link stays a link, and a pipe
    or device (/dev/stdout, /dev/null) is written to and not replaced.

    Raises:
        RefusedError: a folder, or a file in a folder that is not there.
        ResourceError: disk full or failing; the old file is then as it was.
    """
    path, data = Path(os.path.realpath(path)), text.encode(errors="replace")
    if path.is_dir() or not path.parent.is_dir():
        found = "a folder" if path.is_dir() else f"no folder {path.parent}"
        raise RefusedError(
            f"cannot write {path.name or path}",
            where=str(path),
            found=found,
            hint=f"mkdir -p {path.parent}, or name another file",
        )
    try:
        is_other = path.exists() and not path.is_file()
        if is_other:
            with path.open("wb", buffering=0) as file:
                file.write(data)
    except OSError as error:
        raise disk_error(error, path, path.name) from error
    if not is_other:
        write_atomically(path, data, mode=0o644)


def append_line(path: Path, line: str) -> bytes:
    """Add one line to a log, durably; returns its bytes. A kill may leave it torn; the reader then cuts it off.

    Raises:
        ResourceError: disk full or failing.
    """
    data = f"{line}\n".encode()
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, STATE_FILE_MODE)
        try:
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise disk_error(error, path, path.name, len(data)) from error
    return data


def remove_tree(path: Path) -> None:
    """Delete a file or folder, never following a link.

    Raises:
        OSError: as the system reports it.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Checks of untrusted files: regular, inside their folder, of limited size, opened without waiting.
#
# And of paths that no file can have.

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


def open_regular(path: Path) -> BinaryIO:
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


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            digest.update(buffer[:num_read])
    return digest.hexdigest()


def read_json_of_ours(path: Path, max_bytes: int = 4 * 1024**2) -> Any:
    """A document that this program wrote, which a crash or somebody else may have damaged.

    Raises:
        OSError, ValueError: not there, no regular file, too large, or no JSON; nesting too deep is a ValueError too.
    """
    try:
        return json.loads(read_regular(path, max_bytes))
    except (RefusedError, RecursionError) as error:
        raise ValueError(f"{path.name}: {type(error).__name__}") from error


def kind_of_file(mode: int) -> str:
    """The kind of file that a mode of `stat` means, for the reader."""
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device" if not stat.S_ISREG(mode) else "a regular file")


# Where the tool keeps what it can make again: a leaf that any room may ask.
#
# What is several files is made in a folder of its own and renamed when it is whole and durable (`new_folder`, `sync`).

CACHE_VARIABLE = "ROUNDPIPE_CACHE"
KEPT_S = 30 * 24 * 3600.0
"""Age in seconds since a file's last use from which it is removed."""
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
        found = f"{existing} is no folder" if not existing.is_dir() else ""
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long; `~` of nobody
        folder, found = Path(os.devnull), str(error)
    if found:
        raise RefusedError(
            "the cache cannot be kept where the environment says",
            where=CACHE_VARIABLE,
            found=found,
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
