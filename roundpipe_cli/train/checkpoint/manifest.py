"""Manifests: name, size and SHA-256 of every file of a folder, so that damage is found before anything is used."""

from __future__ import annotations

import json
import math
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import sha256_of, write_new_file
from roundpipe_cli.regular_files import kind_of_file, read_regular

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
    """Write the manifest of all files below `folder`, after `head`'s own keys."""
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    records = [FileRecord(path.relative_to(folder).as_posix(), path.stat().st_size, _sha256(path)) for path in paths]
    document = {**head, "files": [asdict(record) for record in records]}
    write_new_file(folder / manifest_name, [json.dumps(document).encode() + b"\n"])


def verify_files(folder: Path, records: Sequence[FileRecord], manifest_name: str) -> None:
    """Raise a DamagedError for the first byte of `folder` that is another than in its manifest's records."""
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
        found = _sha256(folder / record.name)
        if found != record.sha256:
            raise DamagedError(folder / record.name, f"SHA-256 {found}", record.sha256)


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder that holds nothing but folders and regular files.

    Raises:
        DamagedError: it holds something else, which a copy might wait for.
        OSError: of the first file that cannot be copied.
    """
    target.mkdir()
    for path in sorted(source.rglob("*")):  # a folder comes before what is in it
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            (target / path.relative_to(source)).mkdir()
        elif stat.S_ISREG(mode):
            shutil.copy2(path, target / path.relative_to(source))
        else:
            raise DamagedError(path, kind_of_file(mode), "a regular file")


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
    parts = name.split("/") if isinstance(name, str) else []  # the folder's, at most `depth` names down
    if not 0 < len(parts) <= depth or not all(map(_FILE_NAME.match, parts)) or name == path.name:
        raise DamagedError(path, f"the file name {str(name)[:80]!r}", "a plain name inside the manifest's folder")
    if type(size) is not int or size < 0 or not isinstance(sha256, str):
        raise DamagedError(path, f"size {size!r} for {name}", "a number of bytes and a SHA-256")
    return FileRecord(name, size, sha256)


def read_own_json(path: Path) -> dict[str, Any]:
    """A JSON object from a small file that must be our own.

    Raises:
        DamagedError: missing, a link, too large, or not a JSON object.
    """
    try:
        value = json.loads(read_regular(path, _MAX_JSON_BYTES), parse_float=_finite, parse_constant=_finite)
    except OSError as error:
        raise DamagedError(path, error.strerror or "an error", "a file") from error
    except RefusedError as error:
        raise DamagedError(path, error.in_short, "a small file") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, "bytes that are not JSON", "JSON") from error
    if path.is_symlink() or not isinstance(value, dict):
        raise DamagedError(path, "a link, or JSON that is not an object", "an object")
    return value


def peek(folder: Path) -> dict[str, Any] | None:
    """The `meta` of a checkpoint without any look at its other files; None where it cannot be read."""
    try:
        meta = read_own_json(folder / STATE_NAME).get("meta")
    except DamagedError:
        return None
    return meta if isinstance(meta, dict) else None


def _finite(text: str) -> float:
    """The value of a JSON number; we write finite ones alone, and could not write others again."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise DamagedError(path, error.strerror or "an error", "a readable file") from error
