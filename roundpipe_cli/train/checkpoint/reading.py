"""Reading checkpoints: manifests, and the newest one without a damaged byte."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from roundpipe_cli.errors import NoCheckpointError, Problem
from roundpipe_cli.events import Say
from roundpipe_cli.files import write_new_file
from roundpipe_cli.train.checkpoint.output_dir import STEP_FOLDER, list_checkpoints

# Manifests: name, size and SHA-256 of every file of a folder, so that damage is found before anything is used.

_FILE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
_MAX_JSON_BYTES = 16 * 1024**2
STATE_NAME = "state.json"
"""Step and JSON part of a checkpoint."""


@dataclass(frozen=True)
class FileRecord:
    """One line of the manifest."""

    name: str
    size: int
    """In bytes."""
    sha256: str
    """Lower-case hexadecimal."""


class DamagedError(Exception):
    """A damaged folder; callers turn this into a warning and do without the folder."""

    def __init__(self, path: Path, found: str, expected: str) -> None:
        super().__init__(f"{path}: found {found}, expected {expected}")


def write_manifest(folder: Path, manifest_name: str, head: Mapping[str, Any]) -> None:
    """Write the manifest of all files below `folder`, after `head`'s own keys.

    Raises:
        OSError, DamagedError: as the system reports it.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    records = [
        FileRecord(path.relative_to(folder).as_posix(), path.stat().st_size, file_sha256(path)) for path in paths
    ]
    document = {**head, "files": [asdict(record) for record in records]}
    write_new_file(folder / manifest_name, [json.dumps(document).encode() + b"\n"])


def verify_files(folder: Path, records: Sequence[FileRecord], manifest_name: str) -> None:
    """Compare every byte of `folder` with its manifest's records.

    Raises:
        DamagedError: the first difference.
    """
    named = [Path(record.name) for record in records]
    expected = {manifest_name, *map(Path.as_posix, named), *(path.parts[0] for path in named)}
    extra = sorted({entry.relative_to(folder).as_posix() for entry in folder.rglob("*")} - expected)
    if extra:
        raise DamagedError(folder / extra[0], "a file that is not in the manifest", "only the files saved")
    for record in records:  # sizes first: it is cheap, and files cut short are the usual damage
        path = folder / record.name
        is_link = path.is_symlink() or (path.parent != folder and path.parent.is_symlink())
        if is_link or (path.exists() and not path.is_file()):
            raise DamagedError(path, "a link or special file", "a regular file")
        size = path.stat().st_size if path.exists() else None
        if size != record.size:
            raise DamagedError(path, "no file" if size is None else f"{size} bytes", f"{record.size} bytes")
    for record in records:
        found = file_sha256(folder / record.name)
        if found != record.sha256:
            raise DamagedError(folder / record.name, f"SHA-256 {found}", record.sha256)


def read_records(path: Path, lines: object, *, depth: int = 1) -> list[FileRecord]:
    """The list of files in the manifest at `path`.

    Args:
        depth: 2 where the folder may have folders of its own, as a result has `additional_chat_templates/`.

    Raises:
        DamagedError: not such a list, a file twice, or a name that leaves the folder.
    """
    if not isinstance(lines, list) or not lines:
        raise DamagedError(path, "no list of files", "name, size and SHA-256 of each file")
    records = [_read_record(path, line, depth) for line in lines]
    names = [record.name for record in records]
    if len(set(names)) != len(names):
        raise DamagedError(path, f"files {', '.join(names)}", "each file once")
    return records


def _read_record(path: Path, line: object, depth: int) -> FileRecord:
    if not isinstance(line, dict) or set(line) != {"name", "size", "sha256"}:
        raise DamagedError(path, "a line without name, size and sha256", "all three")
    name, size, sha256 = line["name"], line["size"], line["sha256"]
    if not isinstance(name, str) or not _is_inside(name, depth) or name == path.name:
        raise DamagedError(path, f"the file name {str(name)[:80]!r}", "a plain name inside the manifest's folder")
    if type(size) is not int or size < 0 or not isinstance(sha256, str):
        raise DamagedError(path, f"size {size!r} for {name}", "a number of bytes and a SHA-256")
    return FileRecord(name, size, sha256)


def _is_inside(name: str, depth: int) -> bool:
    """Whether a record names a file of the folder, at most `depth` names down."""
    parts = name.split("/")
    return len(parts) <= depth and all(_FILE_NAME.match(part) for part in parts)


def read_own_json(path: Path) -> dict[str, Any]:
    """A JSON object from a small file that must be our own.

    Raises:
        DamagedError: missing, a link, too large, or not a JSON object.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise DamagedError(path, error.strerror or "an error", "a file") from error
    if len(data) > _MAX_JSON_BYTES:
        raise DamagedError(path, f"over {_MAX_JSON_BYTES} bytes", "a small file")
    try:
        value = json.loads(data, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, f"{len(data)} bytes that are not JSON", "JSON") from error
    if not isinstance(value, dict):
        raise DamagedError(path, "JSON that is not an object", "an object")
    return value


def _finite(text: str) -> float:
    """The value of a JSON number; we write finite ones alone, and could not write others again."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def file_sha256(path: Path) -> str:
    """Hexadecimal.

    Raises:
        DamagedError: the file cannot be read, or is a link.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1024**2))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            while num_read := file.readinto(buffer):
                digest.update(buffer[:num_read])
    except OSError as error:
        raise DamagedError(path, error.strerror or "an error", "a readable file") from error
    return digest.hexdigest()


FORMAT_NAME = "roundpipe-checkpoint"
FORMAT_VERSION = 1
"""Raised when a release writes files that older releases would misread. Older versions stay readable."""

MANIFEST_NAME = "manifest.json"


class LazyTensors(Mapping[str, torch.Tensor]):
    """The tensors of one group, each read from the disk when it is asked for.

    A tensor may be a private view of the mapped file: copy it into place and let go of it.
    """

    def __init__(self, path: Path) -> None:
        self._file = cast(Any, safe_open(str(path), framework="pt", device="cpu"))
        self._names: dict[str, None] = dict.fromkeys(self._file.offset_keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path
    step: int
    """Finished optimizer updates; the next step to run has this number, counted from 0."""
    meta: dict[str, Any]
    groups: tuple[str, ...]

    def tensors(self, group: str) -> LazyTensors:
        """Raises:
        KeyError: the checkpoint has no such group.
        """
        if group not in self.groups:
            raise KeyError(group)
        return LazyTensors(self.folder / f"{group}.safetensors")


def load_newest(output_dir: Path, path: Path | None = None, warn: Say | None = None) -> Checkpoint:
    """The newest checkpoint of `output_dir` whose every byte is as written, or the one named by `path`.

    Nothing is changed on the disk. Each damaged checkpoint passed over gives one warning that names the file, what
    was found and what was expected.

    Raises:
        NoCheckpointError: none there, none valid, or one was written by a newer release.
    """
    if path is not None:
        match = STEP_FOLDER.match(path.name)
        candidates = [(int(match.group(1)), path)] if match and os.path.lexists(path) else []
    else:
        candidates = list_checkpoints(output_dir)
    if not candidates:
        raise NoCheckpointError(
            "no checkpoint to resume from",
            where=str(path or output_dir),
            found="nothing named step-*" if path is None else "no such checkpoint",
            expected="a folder such as step-00000200",
            hint="run without --resume to start afresh, or name the run's folder with output_dir=",
        )
    damages: list[str] = []
    for step, folder in candidates:
        try:
            return _load(folder, step)
        except DamagedError as damage:
            damages.append(str(damage))
            if warn is not None:
                warn(f"checkpoint {folder.name} is damaged and passed over: {damage}")
    error = NoCheckpointError(
        f"no valid checkpoint to resume from: tried {', '.join(folder.name for _, folder in candidates)}",
        where=str(path or output_dir),
        hint="nothing was deleted; restore one from a copy, or start afresh with another output_dir=",
    )
    error.problems += tuple(Problem(damage) for damage in damages)
    raise error


def peek(folder: Path) -> dict[str, Any] | None:
    """The `meta` of a checkpoint without any look at its other files; None where it cannot be read."""
    try:
        meta = read_own_json(folder / STATE_NAME).get("meta")
    except DamagedError:
        return None
    return meta if isinstance(meta, dict) else None


def kept_step_of(folder: Path) -> int | None:
    """The step whose weights a checkpoint counts on as the best ones kept; None: it names none, or cannot be read."""
    evaluation = (peek(folder) or {}).get("evaluation")
    state = evaluation if isinstance(evaluation, dict) else {}
    step = state.get("kept_step", state.get("best_step"))  # earlier releases kept the weights of each best evaluation
    return step if type(step) is int else None


def _load(folder: Path, step: int) -> Checkpoint:
    records = verify_checkpoint(folder, step)
    groups = []
    for record in records:
        if record.name.endswith(".safetensors"):
            groups.append(record.name.removesuffix(".safetensors"))
            _check_readable(folder / record.name)
    state = read_own_json(folder / STATE_NAME)
    if state.get("step") != step or not isinstance(state.get("meta"), dict):
        raise DamagedError(folder / STATE_NAME, f"step {state.get('step')!r}", f"step {step} and its state")
    return Checkpoint(folder, step, state["meta"], tuple(groups))


def verify_checkpoint(folder: Path, step: int) -> list[FileRecord]:
    """Compare every byte of the checkpoint with its manifest.

    Raises:
        DamagedError: the first difference.
        NoCheckpointError: the format is newer than this release.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise DamagedError(folder, "a link or a file, not a folder", "a folder")
    records = _read_manifest(folder, step)
    verify_files(folder, records, MANIFEST_NAME)
    return records


def _read_manifest(folder: Path, step: int) -> list[FileRecord]:
    path = folder / MANIFEST_NAME
    manifest = read_own_json(path)
    version = manifest.get("format_version")
    if manifest.get("format") != FORMAT_NAME or type(version) is not int or version < 1:
        raise DamagedError(path, "no manifest of a checkpoint", f"format {FORMAT_NAME!r}, version {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise NoCheckpointError(
            "the newest checkpoint was written by a newer release of roundpipe",
            where=str(path),
            found=f"checkpoint format version {version}",
            expected=f"version {FORMAT_VERSION} or older",
            hint="upgrade roundpipe, or move that checkpoint away to resume from the one before",
        )
    if manifest.get("step") != step:
        raise DamagedError(path, f"step {manifest.get('step')!r}", f"step {step}")
    records = read_records(path, manifest.get("files"))
    names = [record.name for record in records]
    if STATE_NAME not in names:
        raise DamagedError(path, f"files {', '.join(names)}", f"{STATE_NAME} among them")
    return records


def _check_readable(path: Path) -> None:
    """A header that lies must be found before any tensor is used."""
    try:
        LazyTensors(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedError(path, f"no safetensors file ({error})", "a safetensors file") from error
