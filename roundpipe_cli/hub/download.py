"""Models of the hub: what a repository holds at one commit, and its files in the hub's own cache.

huggingface_hub fetches, locks and links a file; a few threads call it here. A file that was cut off starts anew, and
finished files are kept. The library compares sizes, so hashes are compared here, once, with those of the listing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import queue
import re
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.events import Fetching, Notice, Say, Tell
from roundpipe_cli.files import disk_error, free_bytes, write_atomically
from roundpipe_cli.hub.ask import (
    READ_S,
    TIMEOUT,
    Repository,
    UnreachableError,
    ask_hub,
    check_name,
    is_offline,
    library_messages,
    no_hub,
    other_settings,
)
from roundpipe_cli.regular_files import read_regular, stays_inside
from roundpipe_cli.units import format_bytes

MAX_REF_BYTES = 1024
NUM_AT_ONCE = 4
LOOK_S = 0.5
FINISH_S = 2.0
"""Seconds for the other files to end after one has failed, and for threads to end after a stop."""
CHUNK_BYTES = 256 * 1024
"""Bytes written at a time, so that progress shows and a stop is soon; the library writes 10 MiB at a time."""
STALL_S = 10.0
"""Seconds of silence after which the user is told that the program waits."""
AGAIN = "run it again: finished files are kept"
LOCK_S = 0.1
"""Wait for the lock of a file that another program may be fetching."""
READ_BYTES = 8 * 1024**2
_SHA256, _HASH = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository, as its listing has it; None where that does not say."""

    name: str
    num_bytes: int | None
    blob_id: str | None
    """Git's SHA-1."""
    sha256: str | None
    """SHA-256 of large files."""


@dataclass(frozen=True)
class Listing:
    """The files of a model at one commit."""

    repository: Repository
    revision: str | None
    """The revision that was asked for."""
    commit: str
    files: Mapping[str, RemoteFile]

    def num_bytes(self, names: Sequence[str]) -> int:
        """Bytes of these files together, without those whose size is not listed."""
        return sum(self.files[name].num_bytes or 0 for name in names if name in self.files)


_known: dict[tuple[str, str, str | None], Listing | UnreachableError] = {}
"""(endpoint, model, revision) -> the hub's answer: a run asks once, so that all its files are of one commit."""


def find_listing(name: str, revision: str | None, *, offline: bool, tell: Say) -> Listing:
    """The files of a model.

    Args:
        revision: branch, tag or commit; None: the default branch.

    Raises:
        RefusedError: see `ask_hub`.
        UnreachableError: offline, or the hub cannot be reached.
    """
    from huggingface_hub import constants

    if offline or is_offline() or constants.HF_HUB_OFFLINE:
        raise UnreachableError("offline")
    key = (constants.ENDPOINT, name, revision)
    if key not in _known:
        try:
            _known[key] = _ask_listing(Repository(name), revision, tell)
        except UnreachableError as error:
            _known[key] = error
    found = _known[key]
    if isinstance(found, UnreachableError):
        raise UnreachableError(str(found)) from found
    _known[constants.ENDPOINT, name, found.commit] = found
    return found


def _ask_listing(repository: Repository, revision: str | None, tell: Say) -> Listing:
    from huggingface_hub import HfApi

    def question() -> object:
        return HfApi().model_info(repository.name, revision=revision, files_metadata=True, timeout=TIMEOUT)

    info = ask_hub(repository, question, tell)
    files = {}
    for entry in getattr(info, "siblings", None) or ():
        lfs = entry.lfs
        sha256 = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
        texts = (entry.rfilename, entry.blob_id or "", sha256 or "")
        if not all(isinstance(text, str) for text in texts) or not isinstance(entry.size, (int, type(None))):
            raise no_hub(repository, f"a file {entry.rfilename!r} of {entry.size!r} bytes"[:200])
        files[entry.rfilename] = RemoteFile(entry.rfilename, entry.size, entry.blob_id, sha256)
    commit = check_name(repository, "commit", getattr(info, "sha", None) or revision)
    return Listing(repository, revision, commit, files)


def repository_folder(name: str) -> Path:
    """A model's folder in the hub's cache, which may not be there."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")


def snapshot_folder(listing: Listing) -> Path:
    """The place of a commit's files in the hub's cache, which may not be there yet."""
    return repository_folder(listing.repository.name) / "snapshots" / listing.commit


def commit_in(ref: Path) -> str | None:
    """The commit that a file of the cache's `refs` names; None where it names none."""
    try:
        commit = read_regular(ref, MAX_REF_BYTES).decode("ascii").strip()
    except (OSError, ValueError, RefusedError):
        return None
    return commit if re.fullmatch(r"[\w-]+", commit) else None


def cached_snapshots(name: str, revision: str | None) -> Iterator[Path]:
    """Snapshots of a model in the cache that may stand for a revision, the best first; they may lack files.

    The named one, or the one that the default branch led to. Then, where no revision was asked for, all others, the
    newest first.
    """
    folder = repository_folder(name)
    ref = folder / "refs" / (revision or "main")
    try:
        commit = commit_in(ref) or revision
        wanted = folder / "snapshots" / commit if commit else None
        if wanted is not None and wanted.is_dir():
            yield wanted
        others = [path for path in (folder / "snapshots").iterdir() if path.is_dir() and path != wanted]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return
    if revision is None:
        yield from others


def missing_files(listing: Listing, names: Sequence[str]) -> list[str]:
    """The files that are not in the cache at this commit."""
    folder = snapshot_folder(listing)
    return [name for name in names if not (folder / name).is_file()]


def missing_bytes(listing: Listing, names: Sequence[str]) -> int:
    """Bytes to bring for these files; those that another commit brought count as here."""
    blobs = repository_folder(listing.repository.name) / "blobs"
    missing = [listing.files[name] for name in missing_files(listing, names)]
    return sum(
        file.num_bytes or 0
        for file in missing
        if not any((blobs / blob).is_file() for blob in (file.sha256, file.blob_id) if blob)
    )


def _require_space(listing: Listing, names: Sequence[str]) -> None:
    """Refuse a download that the disk has no room for, before it begins."""
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


def _remove_leftovers(listing: Listing, names: Sequence[str]) -> None:
    """Remove what killed downloads left of these files, unless another program is fetching them now.

    The library gives each download a random name, so it neither continues nor removes them. A link is not followed.
    """
    from huggingface_hub import utils

    library: Any = utils  # its types do not name what it exports
    folder = repository_folder(listing.repository.name)
    for blob in [text for name in names for text in (listing.files[name].sha256, listing.files[name].blob_id)]:
        leftovers = list((folder / "blobs").glob(f"{blob}*.incomplete")) if blob and _HASH.fullmatch(blob) else []
        lock = folder.parent / ".locks" / folder.name / f"{blob}.lock"
        with contextlib.suppress(OSError):  # held by another program (a timeout is an OSError), or not ours to remove
            if leftovers:
                lock.parent.mkdir(parents=True, exist_ok=True)
                with library.WeakFileLock(str(lock), timeout=LOCK_S):
                    for path in leftovers:
                        path.unlink(missing_ok=True)


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
        _refuse_above_limit(listing, wanted)
        _remove_leftovers(listing, wanted)
        _require_space(listing, wanted)
        with library_messages(lambda text: tell(Notice(text))), _library_settings():
            _Fetch(listing, wanted, tell).run()
    return snapshot_folder(listing)


def remember_revision(listing: Listing) -> None:
    """Note in the cache which commit the revision is, as huggingface_hub does, so that it is found without the hub."""
    refs = repository_folder(listing.repository.name) / "refs"
    ref = refs / (listing.revision or "main")
    if listing.revision != listing.commit and commit_in(ref) != listing.commit and stays_inside(ref, refs):
        with contextlib.suppress(OSError, ResourceError):  # then it is not found without the hub
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, listing.commit.encode(), mode=0o644)


def _refuse_above_limit(listing: Listing, names: Sequence[str]) -> None:
    from huggingface_hub import constants

    for file in (listing.files[name] for name in names):
        if (file.num_bytes or 0) > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise RefusedError(
                f"{file.name} is too large for a plain download",
                where=f"{listing.repository.where}: {listing.repository.name}",
                found=format_bytes(file.num_bytes or 0),
                expected=f"at most {format_bytes(constants.MAX_HTTP_DOWNLOAD_SIZE)}, the hub's limit without Xet",
                hint=f"`hf download {listing.repository.name} --revision {listing.commit}` fetches it into this cache",
            )


@contextlib.contextmanager
def _library_settings() -> Iterator[None]:
    """Settings of huggingface_hub while files come: small chunks, no Xet (plain HTTP serves its files too, and its
    progress, stops and errors are the same everywhere), and as much patience with a slow server of files as with the
    hub, unless the user said otherwise."""
    from huggingface_hub import constants

    patience = {} if "HF_HUB_DOWNLOAD_TIMEOUT" in os.environ else {"HF_HUB_DOWNLOAD_TIMEOUT": int(READ_S)}
    with (
        warnings.catch_warnings(),
        other_settings(constants, DOWNLOAD_CHUNK_SIZE=CHUNK_BYTES, HF_HUB_DISABLE_XET=True, **patience),
    ):
        warnings.filterwarnings("ignore", "Not enough free disk space")  # an error says so where it is true
        yield


class StoppedFetchError(Exception):
    """Another file failed, or a signal came, so this file is not fetched to its end."""


class _Bar:
    """Counts the bytes of one file where the library would draw a tqdm bar."""

    def __init__(self, fetch: _Fetch, name: str, *, initial: int = 0, **_: object) -> None:
        self._fetch, self._name = fetch, name
        fetch.num_bytes_of[name] = initial

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, num_bytes: float | None = 1) -> None:
        """Count bytes that came, before they are written; fewer than none where the file starts again."""
        if self._fetch.cut.is_set():
            raise StoppedFetchError
        self._fetch.num_bytes_of[self._name] += int(num_bytes or 0)
        self._fetch.moved_s = time.monotonic()


class _Fetch:
    """Fetches files with a few threads, each file with one.

    The threads are daemons: a stop does not wait for a server that is silent.
    """

    def __init__(self, listing: Listing, names: Sequence[str], tell: Tell) -> None:
        self._listing, self._names, self._tell = listing, names, tell
        self._num_bytes = missing_bytes(listing, names)
        self._blobs = repository_folder(listing.repository.name) / "blobs"
        self._place = f"{listing.repository.where}: {listing.repository.name}"
        self._stop = threading.Event()
        """Set: no further file is begun."""
        self.cut = threading.Event()
        """Set: files end where they are, and the library removes them."""
        self.num_bytes_of = dict.fromkeys(names, 0)
        """Bytes that came of each file; each is counted by one thread."""
        self._done: list[str] = []
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        """The error, if any, with which each thread ended."""
        self._num_running = 0
        self._error: BaseException | None = None
        self.moved_s = time.monotonic()
        """Time of the last bytes that came, or of the last look while a file was compared; infinite once a wait was
        told."""
        self._compared: set[str] = set()
        """Files that are being compared: it is not the hub that takes long."""

    def run(self) -> None:
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in self._names:
            waiting.put(name)

        def work() -> None:
            found: BaseException | None = None
            try:
                while not self._stop.is_set():
                    self._fetch(waiting.get_nowait())
            except (queue.Empty, StoppedFetchError):
                pass
            except BaseException as error:
                found = error
            self._ended.put(found)

        self._num_running = min(NUM_AT_ONCE, len(self._names))
        start_s = time.monotonic()
        try:
            for number in range(self._num_running):
                threading.Thread(target=work, name=f"download {number}", daemon=True).start()
            while self._num_running and self._error is None:
                self._wait(LOOK_S)
                self._report(time.monotonic() - start_s)
            self._stop.set()
            self._wait(FINISH_S)  # small files are finished
        finally:
            self._stop.set()
            self.cut.set()
            self._wait(FINISH_S)
        if self._error is not None:
            raise self._error

    def _wait(self, seconds: float) -> None:
        """Wait for threads to end, at most so long; `join` would count a thread as ended where a signal interrupts."""
        end_s = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while self._num_running:
                found = self._ended.get(timeout=max(end_s - time.monotonic(), 0.0))
                self._num_running -= 1
                self._error = self._error or found

    def _report(self, seconds: float) -> None:
        here = sum(self.num_bytes_of.values())
        if self._compared:
            self.moved_s = time.monotonic()
        elif time.monotonic() - self.moved_s > STALL_S:
            self._notice(f"no bytes for {STALL_S:.0f} s: the hub is slow, or another program fetches the same files")
            self.moved_s = float("inf")
        total = max(self._num_bytes, here)
        self._tell(Fetching(len(self._done), len(self._names), here, total, here / max(seconds, 1e-3)))

    def _notice(self, text: str) -> None:
        if not self.cut.is_set():  # threads that are left behind lose their connections
            self._tell(Notice(text))

    def _fetch(self, name: str) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        repository, commit, timeout = self._listing.repository, self._listing.commit, TIMEOUT
        bar: Any = functools.partial(_Bar, self, name)

        def head() -> str | None:
            return get_hf_file_metadata(hf_hub_url(repository.name, name, revision=commit), timeout=timeout).etag

        def file() -> str:
            return hf_hub_download(repository.name, name, revision=commit, etag_timeout=timeout, tqdm_class=bar)

        try:
            etag = ask_hub(repository, head, self._notice)
            if etag is not None:
                check_name(repository, "ETag", etag)  # the library makes a path of it
            path = Path(ask_hub(repository, file, self._notice, is_transfer=True))
            if etag is not None and self.num_bytes_of[name]:
                self._compare(self._listing.files[name], etag, path)
        except UnreachableError as error:
            raise self._lost(name, str(error)) from error
        except OSError as error:
            raise self._disk_failed(name, error) from error
        except ValueError as error:  # the library makes no path of such a name
            raise no_hub(repository, f"a file {name!r}: {error}"[:200]) from error
        self._done.append(name)

    def _compare(self, file: RemoteFile, etag: str, path: Path) -> None:
        """Compare the hash of a file that came with the hub's; what is wrong is removed."""
        expected = file.sha256 or etag
        if _SHA256.fullmatch(expected):
            digests = [hashlib.sha256()]
        elif _HASH.fullmatch(expected) and expected == file.blob_id:
            digests = [hashlib.sha1(f"blob {path.stat().st_size}\0".encode()), hashlib.sha1()]  # git's, or a plain one
        else:
            return  # not a hash of the content: a mirror's own
        found: list[str] = []
        self._compared.add(file.name)
        try:
            with path.open("rb") as content:
                while chunk := content.read(READ_BYTES):
                    for digest in digests:
                        digest.update(chunk)
                os.fsync(content.fileno())
            found = [digest.hexdigest() for digest in digests]
        finally:
            self._compared.discard(file.name)
            if expected not in found:
                for place in (path, self._blobs / etag):
                    place.unlink(missing_ok=True)
        if expected in found:
            return
        raise RefusedError(
            f"the file that came is not the one the hub lists: {file.name}",
            where=self._place,
            found=f"hash {found[0]}",
            expected=f"hash {expected}",
            hint=f"{AGAIN}; if it comes again, a proxy or mirror (HF_ENDPOINT) changes files",
        )

    def _disk_failed(self, name: str, error: OSError) -> RefusedError | ResourceError:
        if error.errno is None:  # too few bytes, for instance
            return self._lost(name, str(error).splitlines()[0][:200])
        problem = disk_error(error, self._blobs, f"{name} of {self._listing.repository.name}").problems[0]
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space, or set HF_HUB_CACHE= to a folder " + ("on a larger disk" if is_full else "to write to")
        if error.errno == errno.EFBIG:
            hint = "ulimit -f unlimited, or set HF_HUB_CACHE= to a file system that takes such files"
        return ResourceError(problem.what, where=problem.where, found=problem.found, hint=f"{hint}; {AGAIN}")

    def _lost(self, name: str, why: str) -> RefusedError:
        return RefusedError(
            f"the hub was lost while {name} was downloaded",
            where=self._place,
            found=why,
            expected="the rest of it",
            hint=AGAIN,
        )
