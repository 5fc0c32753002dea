"""Files of a repository at one commit, and where its files lie in the hub's cache."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Say
from roundpipe_cli.hub.ask import TIMEOUT, Repository, UnreachableError, ask_hub, check_name, is_offline, no_hub
from roundpipe_cli.plain_files import read_regular

MAX_REF_BYTES = 1024


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

    def num_bytes(self, names: list[str]) -> int:
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
    from huggingface_hub import HfApi, constants

    if offline or is_offline() or constants.HF_HUB_OFFLINE:
        raise UnreachableError("offline")
    key = (constants.ENDPOINT, name, revision)
    if key not in _known:
        try:
            _known[key] = _ask_listing(HfApi(), Repository(name), revision, tell)
        except UnreachableError as error:
            _known[key] = error
    found = _known[key]
    if isinstance(found, UnreachableError):
        raise UnreachableError(str(found)) from found
    _known[constants.ENDPOINT, name, found.commit] = found
    return found


def _ask_listing(api: object, repository: Repository, revision: str | None, tell: Say) -> Listing:
    from huggingface_hub import HfApi

    assert isinstance(api, HfApi)

    def question() -> object:
        return api.model_info(repository.name, revision=revision, files_metadata=True, timeout=TIMEOUT)

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
