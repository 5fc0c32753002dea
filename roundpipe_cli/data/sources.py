"""Finds the files or the hub dataset that a `DatasetSpec` names, and their slice."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from roundpipe_cli.data.digests import digest_file
from roundpipe_cli.data.files import (
    SUFFIXES,
    ReadProgress,
    csv_delimiter,
    known_suffix,
    own_delimiter,
    read_file,
    structs_of,
    table_row,
)
from roundpipe_cli.data.folders import folder_files, pattern_files
from roundpipe_cli.data.rows import DELIMITERS, RawRow, printable
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.files import named_path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
MAX_BESIDE = 1000
"""Most names among which a suggestion is searched."""
SPLIT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


@dataclass(frozen=True)
class Split:
    """`train[10%:200]`: a name and two bounds as the user wrote them (None: open)."""

    name: str
    start: str | None = None
    stop: str | None = None

    @property
    def text(self) -> str:
        """The text as the user wrote it."""
        return f"{self.name}[{self.start or ''}:{self.stop or ''}]"

    @property
    def needs_length(self) -> bool:
        """Whether the bounds say nothing before the rows are counted."""
        return any(bound is not None and (bound.startswith("-") or bound.endswith("%")) for bound in self.bounds)

    @property
    def bounds(self) -> tuple[str | None, str | None]:
        return self.start, self.stop

    def range(self, num_rows: int) -> tuple[int, int]:
        """The half-open range of rows, percentages rounded to the closest row as `datasets` does."""
        start = 0 if self.start is None else _bound(self.start, num_rows)
        stop = num_rows if self.stop is None else _bound(self.stop, num_rows)
        return start, stop


def _bound(bound: str, num_rows: int) -> int:
    value = round(int(bound[:-1]) * num_rows / 100) if bound.endswith("%") else int(bound)
    if value < 0:
        value += num_rows
    return min(max(value, 0), num_rows)


def parse_split(text: str) -> Split:
    """
    Raises:
        RefusedError: `text` is not a name with an optional slice.
    """
    match = SPLIT.fullmatch(text.strip())
    if match is None:
        raise RefusedError(
            "this split cannot be read",
            where="datasets: split",
            found=printable(text),
            expected="a name with an optional slice: train, train[:200], train[10%:20%], test[-100:]",
            hint="to join splits, list the dataset once for each of them",
        )
    return Split(match["name"], match["start"], match["stop"])


@dataclass
class Source:
    """Rows of one file, or of one hub dataset that `datasets` reads."""

    name: str
    """As shown in messages: the path as found, or the hub id with its split."""
    file: Path | None
    spec: DatasetSpec
    offline: bool
    progress: ReadProgress = field(default_factory=ReadProgress)
    """How far `rows` has come."""
    notices: tuple[str, ...] = ()
    """Notes for the user on how it was chosen."""
    _table: Any = None

    def rows(self) -> Iterator[RawRow]:
        """
        Raises:
            RefusedError: missing, unreadable, or changed while it was read.
        """
        if self.file is not None:
            return self._file_rows(self.file)
        return self._table_rows()

    def fingerprint(self) -> str | None:
        """A fingerprint of the content; None where it cannot be known.

        Raises:
            RefusedError: the source is missing or cannot be read.
        """
        if self.file is None:
            text = getattr(self._loaded_table(), "_fingerprint", None)  # as the `datasets` library's own caches
            return f"table {text}" if isinstance(text, str) else None
        try:
            return f"{known_suffix(self.file)} {self.file.suffix} {digest_file(self.file, self.spec.txt_rows)}"
        except OSError as error:
            raise RefusedError(f"cannot read the dataset: {error.strerror}", where=self.name) from error

    def _file_rows(self, file: Path) -> Iterator[RawRow]:
        before = _stamp(file)
        yield from _local_rows(file, self.spec, self.progress)
        if _stamp(file) != before:
            raise RefusedError("the file was changed while it was read", where=self.name, hint="start again")

    def _table_rows(self) -> Iterator[RawRow]:
        table = self._loaded_table()
        structs = structs_of(table.features.arrow_schema)
        for number, columns in enumerate(table, start=1):
            self.progress.known_share = number / len(table)
            yield table_row(number, columns, structs)

    def _loaded_table(self) -> Any:
        if self._table is None:
            from roundpipe_cli.data.hub import load_table

            self._table = load_table(self.spec, self.offline)
        return self._table

    def where(self, number: int) -> str:
        """`data/train.jsonl:17`, or `row 17` where there are no lines."""
        has_lines = self.file is not None and known_suffix(self.file) != ".parquet"
        return f"{self.name}:{number}" if has_lines else f"{self.name}: row {number}"


def find_sources(spec: DatasetSpec, folder: Path | None, offline: bool) -> list[Source]:
    """The sources that `spec.path` names: one file, a folder, each file of a pattern (sorted), or a hub dataset.

    A file or folder of exactly this name is no pattern: `data[1].jsonl`. Relative paths are tried from the working
    directory, then from `folder`.

    Raises:
        RefusedError: nothing there, and it cannot be a hub id.
    """
    split = parse_split(spec.split)
    tried, left_out = _candidates(spec.path, folder), tuple[str, ...]()
    for candidate in tried:
        if candidate.is_file():
            return [_file_source(candidate, spec, offline)]
        if candidate.is_dir():
            return _folder_sources(candidate, spec, split, offline)
        found = pattern_files(candidate)
        left_out += found.notices
        if found.files:
            first, *rest = (_file_source(path, spec, offline) for path in found.files)
            return _sliced([replace(first, notices=(*first.notices, *found.notices)), *rest], split)
    missing = f"no file or folder {tried[0]}" if len(tried) == 1 else "neither " + " nor ".join(map(str, tried))
    if _looks_like_file(spec.path) or HUB_ID.fullmatch(spec.path) is None:
        raise RefusedError(
            "dataset not found",
            where=f"datasets: {printable(spec.path)}",
            found="; ".join([missing, *left_out]),
            expected="a file, a folder or the id of a hub dataset",
            hint=f"did you mean {near}?"
            if (near := _near(tried))
            else "a relative path begins here or beside the recipe",
        )
    return [Source(f"{spec.path}[{split.name}]", None, spec, offline)]


def _folder_sources(folder: Path, spec: DatasetSpec, split: Split, offline: bool) -> list[Source]:
    found = folder_files(folder, split.name, spec.name)
    whole = replace(spec, split="train")
    sources = [Source(_shown(path), path, whole, offline, notices=_delimiter_notice(path)) for path in found.files]
    first, *rest = _sliced(sources, split)
    return [replace(first, notices=(*first.notices, *found.notices)), *rest]


def _sliced(sources: list[Source], split: Split) -> list[Source]:
    """The sources cut to a slice of all their rows, those without a row of it left out.

    Raises:
        RefusedError: one of them cannot be read, or no row is left.
    """
    if split.bounds == (None, None):
        return sources
    counts = [
        sum(1 for _ in read_file(source.file, txt_rows=source.spec.txt_rows))
        for source in sources
        if source.file is not None
    ]
    start, stop = split.range(sum(counts))
    cut, before = [], 0
    for source, count in zip(sources, counts, strict=True):
        begin, end = max(start - before, 0), min(stop - before, count)
        if begin < end:
            cut.append(replace(source, spec=replace(source.spec, split=f"train[{begin}:{end}]")))
        before += count
    if not cut:
        raise RefusedError(
            "the slice holds no rows",
            where=f"datasets: {printable(split.text)}",
            found=f"{before} rows in {len(sources)} files",
            expected="at least one row",
        )
    return cut


def _near(tried: Sequence[Path]) -> str | None:
    """The file with the most similar name beside one of these."""
    for path in tried:
        with contextlib.suppress(OSError, ValueError):
            beside = [file.name for file in path.parent.iterdir() if file.suffix == path.suffix][:MAX_BESIDE]
            if near := closest(path.stem, [Path(name).stem for name in beside]):
                return str(path.parent / f"{near}{path.suffix}")
    return None


def _candidates(path: str, folder: Path | None) -> list[Path]:
    written = named_path(path)
    candidates = [Path.cwd() / written]
    if folder is not None and (Path.cwd() / folder / written) not in candidates:
        candidates.append(folder / written)
    return candidates


def _looks_like_file(path: str) -> bool:
    return path.startswith((".", "/", "~")) or "\\" in path or known_suffix(Path(path)) is not None


def _file_source(path: Path, spec: DatasetSpec, offline: bool) -> Source:
    shown = _shown(path)
    if known_suffix(path) is None:
        raise RefusedError("no reader for this kind of file", where=shown, expected="*" + ", *".join(SUFFIXES))
    split = parse_split(spec.split)
    if split.name not in ("train", "all", path.name.split(".")[0]):
        raise RefusedError(
            "a local file has only the split `train`",
            where=f"datasets: {shown}",
            found=f"split: {spec.split}",
            hint="split: " + spec.split.replace(split.name, "train", 1),
        )
    return Source(shown, path, spec, offline, notices=_delimiter_notice(path))


def _delimiter_notice(path: Path) -> tuple[str, ...]:
    if known_suffix(path) not in (".csv", ".tsv"):
        return ()
    own, used = own_delimiter(path), csv_delimiter(path)
    between = f"{DELIMITERS[used]} between its columns, not {DELIMITERS[own]}"
    return () if used == own else (f"{_shown(path)} has {between}, and is read so",)


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _local_rows(path: Path, spec: DatasetSpec, progress: ReadProgress) -> Iterator[RawRow]:
    split = parse_split(spec.split)
    if split.bounds == (None, None):
        return read_file(path, progress, spec.txt_rows)
    if split.needs_length:
        start, stop = split.range(sum(1 for _ in read_file(path, txt_rows=spec.txt_rows)))
    else:
        start, stop = int(split.start or 0), int(split.stop) if split.stop else None  # type: ignore[assignment]
    return islice(read_file(path, progress, spec.txt_rows), start, stop)
