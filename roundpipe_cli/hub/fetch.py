"""Fetches files of a repository into the hub's own cache: each once, continued where an earlier run was cut off, and
compared with the hub's hash.

The cache's folders, links and locks are huggingface_hub's. Its releases since 2.0 write to a file of a random name, so
that nothing is left to continue from after a kill; here the bytes go to `blobs/HASH.incomplete`, the name of the
releases before. Files that the hub keeps in Xet are left to huggingface_hub and hf_xet, which checks them itself.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from roundpipe_cli.durable import disk_error, free_bytes
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.events import Fetching, Notice, Say, Tell
from roundpipe_cli.hub.ask import READ_S, TIMEOUT, UnreachableError, ask_hub, check_name
from roundpipe_cli.hub.listing import Listing, commit_in, repository_folder, snapshot_folder
from roundpipe_cli.hub.quiet import library_messages
from roundpipe_cli.hub.sink import Sink, StoppedFetchError, hashes
from roundpipe_cli.library_names import library_name
from roundpipe_cli.units import format_bytes

NUM_AT_ONCE = 4
LOOK_S = 0.5
FINISH_S = 2.0
"""Seconds for the other files to end after one has failed."""
WRITE_BYTES = 64 * 1024
"""Bytes written at a time; a kill loses at most as many. The library writes 10 MiB at a time."""
STALL_S = 10.0
"""Seconds of silence after which the user is told that the program waits."""
AGAIN = "run it again: what is here already is kept"


def missing_files(listing: Listing, names: Sequence[str]) -> list[str]:
    """The files that are not in the cache at this commit."""
    folder = snapshot_folder(listing)
    return [name for name in names if not (folder / name).is_file()]


def missing_bytes(listing: Listing, names: Sequence[str]) -> int:
    """Bytes to bring for these files; those of files cut off before are counted as here."""
    blobs = repository_folder(listing.repository.name) / "blobs"
    total = 0
    for name in missing_files(listing, names):
        file = listing.files[name]
        here = 0
        for blob in filter(None, (file.sha256, file.blob_id)):
            for path in (blobs / blob, blobs / f"{blob}.incomplete"):
                with contextlib.suppress(OSError):
                    here = max(here, path.stat().st_size)
        total += max((file.num_bytes or 0) - here, 0)
    return total


def require_space(listing: Listing, names: Sequence[str]) -> None:
    """Refuse a download that the disk has no room for, before it begins.

    Raises:
        ResourceError: the cache's file system has less left than the files take.
    """
    needed = missing_bytes(listing, names)
    folder = repository_folder(listing.repository.name)
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = free_bytes(existing)
    if free < needed:
        raise ResourceError(
            f"not enough disk space to download {listing.repository.name}",
            where=str(folder),
            found=f"{format_bytes(free)} free ({free} bytes)",
            expected=f"{format_bytes(needed)} ({needed} bytes)",
            hint="free some space, or set HF_HUB_CACHE= to a folder on a larger disk",
        )


def fetch_files(listing: Listing, names: Sequence[str], tell: Tell) -> Path:
    """Fetch the files that are not here yet; returns the folder that then holds all of them.

    Args:
        tell: called with the progress, and with every wait.

    Raises:
        RefusedError: a file is not to be had, or not what the hub says it is.
        ResourceError: the disk is full.
    """
    wanted = missing_files(listing, names)
    if wanted:
        with library_messages(lambda text: tell(Notice(text))), _patience():
            _Fetch(listing, tell, sum(listing.files[name].num_bytes or 0 for name in wanted)).run(wanted)
    return snapshot_folder(listing)


def remember_revision(listing: Listing, name: str, tell: Tell) -> None:
    """Let huggingface_hub note in the cache which commit the revision is, so that it is found there without the hub.

    Args:
        name: a file that is here.
    """
    revision = listing.revision or "main"
    ref = repository_folder(listing.repository.name) / "refs" / revision
    if commit_in(ref) == listing.commit:
        return
    if revision != listing.commit:
        with library_messages(lambda text: tell(Notice(text))):
            _link(listing, name, revision, lambda text: tell(Notice(text)))


def _link(listing: Listing, name: str, revision: str, say: Say) -> None:
    """Let huggingface_hub link a file from its snapshot; it fetches what is not here."""
    from huggingface_hub import hf_hub_download

    timeout: Any = TIMEOUT

    def question() -> str:
        return hf_hub_download(listing.repository.name, name, revision=revision, etag_timeout=timeout)

    ask_hub(listing.repository, question, say, is_transfer=True)


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """A slow server of files is waited for as long as the hub itself, unless the user said otherwise; what comes is
    written soon."""
    from huggingface_hub import constants

    before = constants.HF_HUB_DOWNLOAD_TIMEOUT, constants.DOWNLOAD_CHUNK_SIZE
    constants.DOWNLOAD_CHUNK_SIZE = WRITE_BYTES
    if "HF_HUB_DOWNLOAD_TIMEOUT" not in os.environ:
        constants.HF_HUB_DOWNLOAD_TIMEOUT = int(READ_S)
    try:
        yield
    finally:
        constants.HF_HUB_DOWNLOAD_TIMEOUT, constants.DOWNLOAD_CHUNK_SIZE = before


class _Fetch:
    """Fetches files with a few threads, each file with one.

    The threads are daemons: where one fails, or a signal stops the program, the others end with the bytes they have.
    """

    def __init__(self, listing: Listing, tell: Tell, num_bytes: int) -> None:
        self._listing, self._tell, self._num_bytes = listing, tell, num_bytes
        self._blobs = repository_folder(listing.repository.name) / "blobs"
        self._stop = threading.Event()
        """Set: no further file is begun."""
        self._cut = threading.Event()
        """The files that are being written end where they are."""
        self._lock = threading.Lock()
        self._bytes = self._bytes_before = self._num_done = 0
        self._seen = (0, time.monotonic())
        """Bytes at the last look that found new ones, and when it was; the time is infinite once it was told."""
        self._by_library: set[str] = set()
        """Hashes of files that huggingface_hub is writing."""

    def run(self, names: Sequence[str]) -> None:
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in names:
            waiting.put(name)
        failed: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def work() -> None:
            while not self._stop.is_set():
                try:
                    name = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    self._fetch(name)
                except StoppedFetchError:
                    return
                except BaseException as error:
                    self._stop.set()
                    failed.put(error)

        count = min(NUM_AT_ONCE, len(names))
        threads = [threading.Thread(target=work, name=f"download {n}", daemon=True) for n in range(count)]
        start_s = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads) and failed.empty():
                end_s = time.monotonic() + LOOK_S
                for thread in threads:
                    thread.join(max(end_s - time.monotonic(), 0.0))
                self._report(len(names), time.monotonic() - start_s)
            for thread in threads if not failed.empty() else ():
                thread.join(FINISH_S / len(threads))  # small files are finished
        finally:
            self._stop.set()
            self._cut.set()
        if not failed.empty():
            raise failed.get()

    def _report(self, num_files: int, seconds: float) -> None:
        with self._lock:
            done, here = self._num_done, self._bytes + sum(map(self._bytes_of, self._by_library))
            came = max(here - self._bytes_before, 0)
        if here != self._seen[0]:
            self._seen = (here, time.monotonic())
        elif time.monotonic() - self._seen[1] > STALL_S:
            self._notice(f"no bytes for {STALL_S:.0f} s: the hub is slow, or another program fetches the same files")
            self._seen = (here, float("inf"))
        self._tell(Fetching(done, num_files, here, max(self._num_bytes, here), came / max(seconds, 1e-3)))

    def _bytes_of(self, blob: str) -> int:
        """Bytes that huggingface_hub has written of a file, of which it does not tell before its newer releases."""
        found = 0
        for path in self._blobs.glob(f"{blob}*.incomplete"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found = max(found, min(status.st_size, status.st_blocks * 512))
        return found

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes += num_bytes

    def _fetch(self, name: str) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        repository, commit = self._listing.repository, self._listing.commit
        url = hf_hub_url(repository.name, name, revision=commit)

        def question() -> Any:
            return get_hf_file_metadata(url, timeout=TIMEOUT)

        try:
            found = ask_hub(repository, question, self._notice)
            if found.etag is not None:
                check_name(repository, "ETag", found.etag)
                if found.xet_file_data is not None and _has_xet():
                    with self._watched(found.etag):
                        _link(self._listing, name, commit, self._notice)
                else:
                    self._bring(name, url, found)
            _link(self._listing, name, commit, self._notice)
        except UnreachableError as error:
            raise self._lost(name, str(error)) from error
        except (OSError, RuntimeError) as error:
            raise self._failed(name, error) from error
        with self._lock:
            self._num_done += 1

    def _failed(self, name: str, error: OSError | RuntimeError) -> Exception:
        number = error.errno if isinstance(error, OSError) else None
        if os.strerror(errno.ENOSPC) in str(error):  # hf_xet says so only in its message
            number = errno.ENOSPC
        if number is None:
            return self._lost(name, str(error).splitlines()[0][:200]) if isinstance(error, OSError) else error
        what = f"{name} of {self._listing.repository.name}"
        problem = disk_error(OSError(number, str(error)), self._blobs, what).problems[0]
        is_full = number in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space, or set HF_HUB_CACHE= to a folder " + ("on a larger disk" if is_full else "to write to")
        if number == errno.EFBIG:
            hint = "ulimit -f unlimited, or set HF_HUB_CACHE= to a file system that takes such files"
        return ResourceError(problem.what, where=problem.where, found=problem.found, hint=f"{hint}; {AGAIN}")

    def _notice(self, text: str) -> None:
        if not self._cut.is_set():  # threads that are left behind lose their connections
            self._tell(Notice(text))

    @contextlib.contextmanager
    def _watched(self, blob: str) -> Iterator[None]:
        with self._lock:
            self._by_library.add(blob)
        try:
            yield
        finally:
            with self._lock:
                self._by_library.discard(blob)
                with contextlib.suppress(OSError):
                    self._bytes += (self._blobs / blob).stat().st_size

    def _bring(self, name: str, url: str, found: Any) -> None:
        """The bytes of one file into `blobs`, under the lock that huggingface_hub takes for it."""
        from huggingface_hub import utils

        library: Any = utils  # its types do not name what it exports
        blob = self._blobs / found.etag
        lock = self._blobs.parents[1] / ".locks" / self._blobs.parent.name / f"{found.etag}.lock"
        for folder in (self._blobs, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with library.WeakFileLock(str(lock)):
            if blob.exists():
                self._count(blob.stat().st_size)
                return
            partial = self._blobs / f"{found.etag}.incomplete"
            if not self._get(name, url, found, partial):
                self._notice(f"{name}: what was here of it was damaged, so it is fetched anew")
                self._get(name, url, found, partial)
            partial.replace(blob)

    def _get(self, name: str, url: str, found: Any, partial: Path) -> bool:
        """Write `partial` to its end; False where bytes of an earlier run spoilt it, which are removed then.

        Raises:
            RefusedError: the hub sent other bytes than it says it has.
        """
        from huggingface_hub import utils

        library: Any = utils
        http_get = library_name("huggingface_hub.file_download", "http_get")
        headers = library.build_hf_headers()
        if urlsplit(found.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # a signed address elsewhere
        if partial.is_symlink() or (partial.exists() and not partial.is_file()):  # a cache may be shared
            partial.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o666), "r+b", buffering=0) as file:
            sink = Sink(cast(BinaryIO, file), self._count, self._cut)
            here = sink.take_in()
            if found.size is not None and here > found.size:
                file.seek(0)
                file.truncate()
                here = 0
            self._count(here)
            with self._lock:
                self._bytes_before += here
            target = cast(BinaryIO, sink)

            def question() -> None:
                have = file.tell()
                http_get(found.location, target, resume_size=have, headers=headers, expected_size=found.size)

            ask_hub(self._listing.repository, question, self._notice, is_transfer=True)
            os.fsync(file.fileno())
            expected, actual = hashes(self._listing.files.get(name), found.etag, sink)
        if expected in actual:
            return True
        self._count(-partial.stat().st_size)
        partial.unlink()
        if here:
            return False
        raise RefusedError(
            f"the file that came is not the one the hub lists: {name}",
            where=f"{self._listing.repository.where}: {self._listing.repository.name}",
            found=f"hash {actual[0]}",
            expected=f"hash {expected}",
            hint=f"{AGAIN}; if it comes again, a proxy or mirror (HF_ENDPOINT) changes files",
        )

    def _lost(self, name: str, why: str) -> RefusedError:
        return RefusedError(
            f"the hub was lost while {name} was downloaded",
            where=f"{self._listing.repository.where}: {self._listing.repository.name}",
            found=why,
            expected="the rest of it",
            hint=AGAIN,
        )


def _has_xet() -> bool:
    from huggingface_hub import constants

    return not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None
