"""Files that are wholly there or not at all.

The order that makes it true: write under a temporary name, fsync the file, fsync the folder it is in, rename, fsync the
parent. An error of fsync is final: after one the kernel may have dropped the bytes, and a second fsync would report
success (P. Rebello et al., "Can applications recover from fsync failures?", USENIX ATC 2020).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.regular_files import open_regular
from roundpipe_cli.units import format_bytes
from roundpipe_cli.watchdog import at_work

STATE_FILE_MODE = 0o600
"""Run state holds private data (optimizer moments, rows' positions): for the owner only."""
STATE_FOLDER_MODE = 0o700
TEMPORARY_PREFIX = ".tmp-"
DELETED_PREFIX = ".del-"
"""A file with one of these prefixes is removed at the next start."""


_user_umask = 0o022


def keep_private() -> int:
    """Create files for this user alone from here on; `shared_mode` gives what the user's own umask leaves, which is
    returned."""
    global _user_umask
    _user_umask = os.umask(0o077)
    return _user_umask


def shared_mode(mode: int) -> int:
    """The mode of a file or folder that is meant for others, as far as the user's umask allows."""
    return mode & ~_user_umask


_CHUNK_BYTES = 8 * 1024**2
_TELL_S = 0.25
AGAIN = "run the command again, or name a folder on another disk"
RESUME_AGAIN = "run the command again, with --resume if there is a checkpoint, or with output_dir= on another disk"
"""Next steps once a disk has room: of any command, and of a run that has begun."""


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write below `folder` (root's reserve excluded)."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def require_free_bytes(folder: Path, needed_bytes: int, what: str, *, again: str = AGAIN) -> None:
    """Refuse early what cannot end well; `again`: as of `disk_error`.

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
            hint=f"free some space and {again}",
        )


def disk_error(
    error: OSError, path: Path, what: str, needed_bytes: int | None = None, *, again: str = AGAIN
) -> ResourceError:
    """The exit-5 error for a failed write, fsync or rename below `path`; `again`: how the command goes on then."""
    if error.errno == errno.ENOENT and not path.is_dir() and not path.parent.is_dir():
        return ResourceError(
            f"could not write {what}: the folder was removed or moved during the run",
            where=str(path.parent),
            hint=f"where it is now, {again}",
        )
    found = f"{os.strerror(error.errno) if error.errno else error}"
    hint = f"look at the disk (dmesg), then {again}"
    try:
        status = os.statvfs(path if path.is_dir() else path.parent)
    except OSError:
        status = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"free some space and {again}"
    if error.errno == errno.EFBIG:
        found += ": a limit on the size of files is set"
        hint = f"ulimit -f unlimited; then {again}"
    elif error.errno == errno.ENOSPC and status is not None and status.f_files and not status.f_favail:
        found += f": all {status.f_files:,} inodes are taken"
        hint = f"remove small files and {again}"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = f"make the folder writable for this user and {again}"
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
            del chunk  # it may hold a tensor, while the next one is made
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


def file_to_write(path: Path) -> Path:
    """The file that a user named, where it may be written; of a link the file that it leads to.

    Raises:
        RefusedError: a folder, or a file in a folder that is not there.
    """
    path = Path(os.path.realpath(path))
    if path.is_dir() or not path.parent.is_dir():
        found = "a folder" if path.is_dir() else f"no folder {path.parent}"
        raise RefusedError(
            f"cannot write {path.name or path}",
            where=str(path),
            found=found,
            hint=f"mkdir -p {shlex.quote(str(path.parent))}, or name another file",
        )
    return path


def write_named(path: Path, text: str) -> None:
    """Write a page or picture to the file that a user named: as `write_atomically`, but a link stays a link, and a pipe
    or device (/dev/stdout, /dev/null) is written to and not replaced.

    Raises:
        RefusedError: as of `file_to_write`.
        ResourceError: disk full or failing; the old file is then as it was.
    """
    path, data = file_to_write(path), text.encode(errors="replace")
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


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            digest.update(buffer[:num_read])
    return digest.hexdigest()


def digests_of(
    paths: Sequence[Path], new: Callable[[], Any], progress: Callable[[float], None] = lambda share: None
) -> list[str | OSError]:
    """The hexadecimal digest of each file, or the error of reading it; files are read side by side, one a core.

    Args:
        new: makes an empty digest of `hashlib`.
        progress: is told the share of all bytes that has been read, in this thread.
    """
    from concurrent.futures import ThreadPoolExecutor, wait  # which takes 9 ms to import, and few commands need it

    sizes, num_read, stopped = [_size_of(path) for path in paths], [0] * len(paths), threading.Event()

    def digest_of(index: int) -> str | OSError:
        digest, buffer = new(), memoryview(bytearray(1024**2))
        try:
            with open_regular(paths[index]) as file:
                while not stopped.is_set() and (count := file.readinto(buffer)):
                    digest.update(buffer[:count])  # which releases the interpreter's lock
                    num_read[index] += count
        except OSError as error:
            return error
        except RefusedError as error:  # a device would be read without an end
            return OSError(errno.EINVAL, str(error.problems[0].what))
        return str(digest.hexdigest())

    largest_first = sorted(range(len(paths)), key=lambda index: -sizes[index])
    with ThreadPoolExecutor(max(1, min(len(paths), len(os.sched_getaffinity(0))))) as pool:
        try:
            futures = {index: pool.submit(digest_of, index) for index in largest_first}
            while wait(futures.values(), _TELL_S).not_done:
                progress(sum(num_read) / max(1, sum(sizes)))
        finally:
            stopped.set()
    progress(1.0)
    return [futures[index].result() for index in range(len(paths))]


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
