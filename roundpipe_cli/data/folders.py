"""Data folders and patterns: chooses the files of a split, or of a pattern, by their names alone.

A folder is untrusted: its README.md and other files decide neither which files are read (they could be
anywhere) nor how (archives, scripts). Regular files inside the folder are read, of kinds that `files.py` knows:

    train.jsonl  data/train-00000-of-00002.parquet  test/a.csv       of the split in their name, or in a folder's
    a.jsonl  b.jsonl                                                 all of split `train` if no name has a split
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from roundpipe_cli.data.files import known_suffix
from roundpipe_cli.data.rows import printable
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import stays_inside

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in names -> the split that they mean, as in the `datasets` library."""
GLOB_CHARACTERS = frozenset("*?[")
SHARD = re.compile(r"(?P<split>\w[\w.]*)-\d{5,}-of-\d{5,}.*")
METADATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
"""Files about a dataset that hold no rows."""
MAX_FILES = 100_000


@dataclass(frozen=True)
class FolderFiles:
    """Files of one split of a folder, or of a pattern."""

    files: tuple[Path, ...]
    notices: tuple[str, ...]
    """Notes for the user on how they were chosen."""


def folder_files(folder: Path, split: str, configuration: str | None) -> FolderFiles:
    """The files that hold a split's rows, sorted by name.

    Args:
        configuration: a folder inside the folder; None: the folder itself.

    Raises:
        RefusedError: no such folder or split, no file that can be read, or files of several kinds.
    """
    inside = folder if configuration is None else _inner(folder, configuration)
    all_files, num_links = _data_files(inside)
    texts = [path for path in all_files if known_suffix(path) == ".txt"]
    files = [path for path in all_files if known_suffix(path) != ".txt"] or texts
    if not files:
        shown = ", ".join(sorted(printable(path.name, 40) for path in inside.iterdir())[:5])
        found = "links that lead out of it" if num_links else shown or "an empty folder"
        raise RefusedError(
            "the data folder holds no file that can be read",
            where=str(inside),
            found=found,
            expected="*.jsonl, *.json, *.parquet, *.csv, *.tsv or *.txt inside the folder; archives are not opened",
        )
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(path.relative_to(inside)) or "", []).append(path)
    if set(by_split) == {""}:
        by_split = {"train": files}
    chosen = files if split == "all" else by_split.get(split)
    if not chosen:
        raise RefusedError(
            f"cannot load split `{printable(split)}` of the dataset",
            where=str(inside),
            found=", ".join(sorted(printable(name, 40) if name else "files without a split" for name in by_split)[:8]),
            expected=f"files named {printable(split)}.* or in a folder {printable(split)}",
        )
    kinds = sorted({known_suffix(path) or "" for path in chosen})
    if len(kinds) > 1:
        raise RefusedError(
            "the data folder holds files of several kinds",
            where=str(inside),
            found=", ".join(kinds),
            expected="files of one kind",
            hint=f"path: {inside}/*{kinds[0]}",
        )
    return FolderFiles(tuple(chosen), tuple(_notices(inside, by_split, files, texts, num_links)))


def pattern_files(path: Path) -> FolderFiles:
    """The files that a path fits, in the order of their names.

    `*`, `?` and `[...]` work in every part of the path, and `**` as a part is any number of folders. Names that begin
    with a dot fit no pattern without such a part. `**` reads what lies in its folder: links that lead out are left out.
    A part that exists under just this name is no pattern; a path without a pattern fits nothing.

    Raises:
        RefusedError: too many files.
    """
    folder, parts = Path(path.anchor), list(path.parts[1:] if path.anchor else path.parts)
    while parts and (not GLOB_CHARACTERS & {*parts[0]} or (folder / parts[0]).exists()):
        folder /= parts.pop(0)
    pattern = [part if part == "**" else re.sub(r"\*\*+", "*", part) for part in parts]
    if not pattern:
        return FolderFiles((), ())
    pattern += ["*"] if pattern[-1] == "**" else []
    names_hidden = any(part.startswith(".") for part in pattern)
    files, left_out = [], Counter[str]()
    for found in sorted(set(folder.glob("/".join(pattern)))):
        is_hidden = any(part.startswith(".") for part in found.relative_to(folder).parts)
        if found.is_dir():
            continue
        if is_hidden and not names_hidden:
            left_out["hidden"] += 1
        elif "**" in pattern and not stays_inside(found, folder):
            left_out["links that lead out of the folder"] += 1
        elif not _is_regular(found):
            left_out["no regular files"] += 1
        else:
            files.append(found)
        if len(files) > MAX_FILES:
            raise RefusedError("the pattern fits too many files", where=str(path), expected=f"{MAX_FILES:,} at most")
    kinds = ", ".join(f"{count} ({kind})" for kind, count in left_out.items())
    return FolderFiles(tuple(files), (f"{folder}: files that fit the pattern are left out: {kinds}",) if kinds else ())


def _notices(
    folder: Path, by_split: dict[str, list[Path]], files: list[Path], texts: list[Path], num_links: int
) -> list[str]:
    notices = []
    if _asks_for_files(folder / "README.md"):
        notices.append(f"{folder}/README.md says which files to read: files are chosen by their own names instead")
    if texts and texts is not files:
        notices.append(f"{folder}: {len(texts)} .txt files are left out, as there are files with columns beside them")
    if "" in by_split:
        notices.append(f"{folder}: {len(by_split[''])} files without a split in their names are left out")
    if num_links:
        notices.append(f"{folder}: {num_links} links that lead out of the folder are left out")
    return notices


def _inner(folder: Path, configuration: str) -> Path:
    inside = folder / configuration
    if not re.fullmatch(r"\w[\w.-]*", configuration) or not inside.is_dir() or not stays_inside(inside, folder):
        raise RefusedError(
            "the data folder has no such configuration",
            where=f"datasets: name: {printable(configuration)}",
            found=f"no folder {printable(configuration)} in {folder}",
            expected="a folder inside it; a README's `configs:` are not read",
        )
    return inside


def _data_files(folder: Path) -> tuple[list[Path], int]:
    """Files of known kinds at any depth, sorted, and how many links lead out of the folder."""
    files, num_links = [], 0
    for place, folders, names in os.walk(folder):  # does not follow links to folders
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        num_links += sum(not stays_inside(Path(place) / name, folder) for name in links)
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for path in (Path(place) / name for name in names if not name.startswith((".", "__"))):
            if path.name in METADATA or known_suffix(path) is None:
                continue
            if not stays_inside(path, folder):
                num_links += 1
            elif _is_regular(path):
                files.append(path)
        if len(files) > MAX_FILES:
            raise RefusedError("the data folder holds too many files", where=str(folder), expected=f"{MAX_FILES:,}")
    return sorted(files), num_links


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _split_of(path: Path) -> str | None:
    """The split that a path names; its last part counts first."""
    shard = SHARD.fullmatch(path.name)
    if shard is not None:
        return SPLIT_WORDS.get(shard["split"].lower(), shard["split"])
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


def _asks_for_files(readme: Path) -> bool:
    """Whether a data card has `configs:` in its head."""
    if not readme.is_file() or not stays_inside(readme, readme.parent):
        return False
    with readme.open("rb") as file:
        head = file.read(1 << 16)
    return head.startswith(b"---") and re.search(rb"^(configs|data_files)\s*:", head, re.MULTILINE) is not None
