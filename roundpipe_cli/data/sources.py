"""Finds the files, the folder or the hub dataset that a `DatasetSpec` names, and their slice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from roundpipe_cli.data.columns import flattened
from roundpipe_cli.data.encodings import is_text_encoding, is_utf8
from roundpipe_cli.data.files import (
    SUFFIXES,
    TABLES,
    ReadProgress,
    RowCount,
    count_rows,
    encoding_of,
    head_of,
    is_packed,
    known_suffix,
    own_delimiter,
    read_file,
    refuse_other_kind,
    refuse_useless,
    structs_of,
    table_form,
    table_row,
)
from roundpipe_cli.data.rows import DELIMITERS, RawRow, printable
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.files import digests_of
from roundpipe_cli.hub.ask import TIMEOUT, Repository, UnreachableError, ask_hub, notice, other_settings
from roundpipe_cli.regular_files import read_regular, stays_inside, tried_paths

# Data folders and patterns: chooses the files of a split, or of a pattern, by their names alone.
#
# A folder is untrusted: its README.md and other files decide neither which files are read (they could be
# anywhere) nor how (archives, scripts). Regular files inside the folder are read, of kinds that `files.py` knows:
#
#     train.jsonl  data/train-00000-of-00002.parquet  test/a.csv       of the split in their name, or in a folder's
#     a.jsonl  b.jsonl                                                 all of split `train` if no name has a split

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


def folder_files(folder: Path, split: str, configuration: str | None) -> tuple[list[Path], list[str]]:
    """The files that hold a split's rows, sorted by name, and notes for the user on how they were chosen.

    Args:
        configuration: a folder inside the folder; None: the folder itself.

    Raises:
        RefusedError: no such folder or split, no file that can be read, or files of several kinds.
    """
    inside = folder if configuration is None else _inner(folder, configuration)
    found = (path for path in inside.rglob("*") if path.is_dir() or (known_suffix(path) and path.name not in METADATA))
    plain = (path for path in found if not any(part.startswith("__") for part in path.relative_to(inside).parts))
    all_files, notices = _regular_files(inside, plain, hidden=False, links=False)
    texts = [path for path in all_files if known_suffix(path) == ".txt"]
    files = [path for path in all_files if known_suffix(path) != ".txt"] or texts
    if not files:
        shown = ", ".join(sorted(printable(path.name, 40) for path in inside.iterdir())[:5])
        raise RefusedError(
            "the data folder holds no file that can be read",
            where=str(inside),
            found="; ".join(notices) or shown or "an empty folder",
            expected="*.jsonl, *.json, *.parquet, *.csv, *.tsv or *.txt inside the folder; archives are not opened",
        )
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(path.relative_to(inside)), []).append(path)
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
    if _asks_for_files(inside / "README.md"):
        notices.append(f"{inside}/README.md says which files to read: files are chosen by their own names instead")
    if texts and texts is not files:
        notices.append(f"{inside}: {len(texts)} .txt files are left out, as there are files with columns beside them")
    if "" in by_split:
        notices.append(f"{inside}: {len(by_split[''])} files without a split in their names are left out")
    return chosen, notices


def pattern_files(path: Path) -> tuple[list[Path], list[str]]:
    """The files that an absolute path fits, in the order of their names, and a note on those that are left out.

    `*`, `?` and `[...]` work in every part of the path, and `**` as a part is any number of folders. Names that begin
    with a dot fit no pattern without such a part. `**` reads what lies in its folder: links that lead out are left out.
    A part that exists under just this name is no pattern; a path without a pattern fits nothing.

    Raises:
        RefusedError: too many files.
    """
    folder, parts = Path(path.anchor), list(path.parts[1:])
    while parts and (not GLOB_CHARACTERS & {*parts[0]} or (folder / parts[0]).exists()):
        folder /= parts.pop(0)
    pattern = [part if part == "**" else re.sub(r"\*\*+", "*", part) for part in parts]
    if not pattern:
        return [], []
    pattern += ["*"] if pattern[-1] == "**" else []
    is_recursive, hidden = "**" in pattern, any(part.startswith(".") for part in pattern)
    return _regular_files(folder, folder.glob("/".join(pattern)), hidden=hidden, links=not is_recursive)


def _regular_files(folder: Path, found: Iterable[Path], *, hidden: bool, links: bool) -> tuple[list[Path], list[str]]:
    """The regular files among `found`, sorted, and a note on others.

    Args:
        hidden: whether names that begin with a dot count.
        links: whether links that lead out of the folder count.
    """
    files, left_out = [], Counter[str]()
    for path in sorted(set(found)):
        mode = 0
        with contextlib.suppress(OSError):
            mode = path.stat().st_mode
        leads_out = not links and not stays_inside(path, folder)
        if stat.S_ISDIR(mode) and not leads_out:
            continue
        if not hidden and any(part.startswith(".") for part in path.relative_to(folder).parts):
            left_out["hidden"] += 1
        elif leads_out:
            left_out["links that lead out of the folder"] += 1
        elif not stat.S_ISREG(mode):
            left_out["no regular files"] += 1
        else:
            files.append(path)
        if len(files) > MAX_FILES:
            raise RefusedError("there are too many files", where=str(folder), expected=f"{MAX_FILES:,} at most")
    kinds = ", ".join(f"{count} ({kind})" for kind, count in left_out.items())
    return files, [f"{folder}: files are left out: {kinds}"] if kinds else []


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


def _split_of(path: Path) -> str:
    """The split that a path names, empty for none; its last part counts first."""
    shard = SHARD.fullmatch(path.name)
    if shard is not None:
        return SPLIT_WORDS.get(shard["split"].lower(), shard["split"])
    words = (word for part in reversed(path.parts) for word in re.split(r"[^a-z]+", part.lower()))
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "")


def _asks_for_files(readme: Path) -> bool:
    """Whether a data card has `configs:` in its head."""
    if not readme.is_file() or not stays_inside(readme, readme.parent):
        return False
    with readme.open("rb") as file:
        head = file.read(1 << 16)
    return head.startswith(b"---") and re.search(rb"^(configs|data_files)\s*:", head, re.MULTILINE) is not None


# Datasets of the Hugging Face hub, through the `datasets` library.
#
# No code of a repository is ever run (`datasets` >= 4 has no loading scripts), and `offline` opens no connection. A
# repository's README.md decides which files are read; they must be tables of this repository (`check_files`).

READERS = frozenset({"json", "csv", "parquet", "text", "arrow"})
"""Readers of `datasets` that only parse tables; the others open archives, images or pickles."""
HUB_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt", ".arrow")
HUB_ENDINGS = tuple(suffix + packed for suffix in HUB_SUFFIXES for packed in ("", ".gz", ".bz2", ".xz", ".zst", ".lz4"))
"""Compressed ones too: one file each, not a collection of files."""


def load_table(spec: DatasetSpec, offline: bool) -> Any:
    """All rows of a hub dataset's split, as the memory-mapped table that `datasets` makes of them.

    Raises:
        RefusedError: missing, private, unreachable and not cached, or without the split or configuration.
    """
    import datasets.config
    import huggingface_hub.constants

    use_cache_only = offline or not _hub_answers(spec)
    mode = {"HF_HUB_OFFLINE": True} if use_cache_only else {}
    try:
        with other_settings(datasets.config, **mode), other_settings(huggingface_hub.constants, **mode):
            builder = datasets.load_dataset_builder(spec.path, spec.name)
            check_files(spec, builder)
            builder.download_and_prepare()
            found = (builder.info.splits or {}).get(name := parse_split(spec.split).name)
            if found is not None and not found.num_examples:  # which `datasets` calls "no data"
                return datasets.Dataset.from_dict({})
            return builder.as_dataset(split=name)
    except RefusedError:
        raise
    except Exception as error:
        # `datasets` raises a dozen unrelated types here (ValueError for a split, OSError, DatasetsError, pyarrow's).
        raise _refusal(spec, error, use_cache_only, offline) from error


def check_files(spec: DatasetSpec, builder: Any) -> None:
    """Refuse a repository that wants other files read than tables of its own.

    Args:
        builder: of `datasets`; one from the cache names no files, as they were read before.

    Raises:
        RefusedError: a file elsewhere, an archive, or a reader that does more than parse.
    """
    reader = type(builder).__module__.rsplit(".", 1)[-1]
    files = [str(file) for group in (builder.config.data_files or {}).values() for file in group]
    outside = [file for file in files if not file.startswith(f"hf://datasets/{spec.path}@")]
    others = [file for file in files if not file.lower().endswith(HUB_ENDINGS)]
    if files and (outside or others or reader not in READERS):
        raise RefusedError(
            "the hub dataset asks for files that are not its own tables",
            where=f"datasets: {printable(spec.path)}",
            found=printable((outside or others or [f"the reader {reader}"])[0]),
            expected=f"files of this dataset named *{', *'.join(HUB_SUFFIXES)}",
            hint="download it, and name the files that hold the rows",
        )


def _hub_answers(spec: DatasetSpec) -> bool:
    """Whether the hub can be asked for this dataset; False without a network, and then only the cache can help.

    Asked before `datasets` does, which retries for 23 s without a network, and takes a slow hub for none.
    """
    from huggingface_hub import HfApi

    try:
        ask_hub(Repository(spec.path, "dataset"), lambda: HfApi().dataset_info(spec.path, timeout=TIMEOUT), notice)
    except UnreachableError as error:
        notice(f"the hub cannot be reached ({error}): {spec.path} is looked for in the cache")
        return False
    return True


def _refusal(spec: DatasetSpec, error: Exception, use_cache_only: bool, offline: bool) -> RefusedError:
    where = f"datasets: {printable(spec.path)}"
    if use_cache_only and isinstance(error, OSError):
        return RefusedError(
            "the hub dataset is not in the local cache",
            where=where,
            found="offline mode" if offline else "the hub cannot be reached",
            expected="a local file or folder, or a dataset that was downloaded before",
            hint="run once with a network, or name a local .jsonl, .json, .csv or .parquet file",
        )
    return RefusedError(
        f"cannot load split `{printable(spec.split)}` of the dataset",
        where=where,
        found=printable(f"{type(error).__name__}: {error}"),
        hint=None if spec.name else "some datasets need a configuration: `name: ...` beside `path:`",
    )


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
MAX_INFO_BYTES = 16 * 1024**2
MAX_BESIDE = 1000
"""Most names among which a suggestion is searched."""
SPLIT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


@dataclass(frozen=True)
class Split:
    """`train[10%:200]`: a name and two bounds as the user wrote them (empty: open)."""

    name: str
    start: str = ""
    stop: str = ""

    def range(self, num_rows: int) -> tuple[int, int]:
        """The half-open range of rows, percentages rounded to the closest row as `datasets` does."""
        bounds = (self.start or "0", self.stop or "100%")
        values = (round(int(one[:-1]) * num_rows / 100) if one.endswith("%") else int(one) for one in bounds)
        start, stop = (min(max(value + num_rows * (value < 0), 0), num_rows) for value in values)
        return start, stop


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
    return Split(match["name"], match["start"] or "", match["stop"] or "")


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
    cut: Split = Split("")
    """Which of all rows are read, by its bounds."""
    content: str = ""
    """A fingerprint of the whole content, once `fingerprint` has set it."""
    stamp: tuple[int, int] | None = None
    """Time and size of the file when its content was read."""
    _table: Any = None

    def rows(self) -> Iterator[RawRow]:
        """The rows; where the recipe names a column inside an object, such as `data.question`, as of `flattened`.

        Raises:
            RefusedError: missing, unreadable, or changed while it was read.
        """
        inside = [name for name in self.spec.columns.values() if "." in name]
        for row in self._rows():
            is_flat = all(name in row.columns for name in inside)
            yield row if is_flat else replace(row, columns=flattened(row.columns))

    def _rows(self) -> Iterator[RawRow]:
        if self.file is not None:
            before = self.stamp or _stamp(self.file)
            is_plain = f"0{self.cut.start}{self.cut.stop}".isdigit()  # else the bounds depend on the number of rows
            count = sys.maxsize if is_plain else _num_rows(self.file, self.spec)
            yield from islice(read_file(self.file, self.spec, self.progress), *self.cut.range(count))
            if _stamp(self.file) != before:
                raise RefusedError("the file was changed while it was read", where=self.name, hint="start again")
            return
        table = self.table()
        structs = structs_of(table.features.arrow_schema)
        start, stop = self.cut.range(len(table))
        for number, columns in enumerate(table.select(range(start, stop)), start=start + 1):
            self.progress.known_share = (number - start) / (stop - start)
            yield table_row(number, columns, structs)

    def table(self) -> Any:
        """The rows of a hub dataset, loaded once."""
        if self._table is None:
            self._table = load_table(self.spec, self.offline)
        return self._table

    def where(self, number: int) -> str:
        """`data/train.jsonl:17`, or `row 17` where there are no lines."""
        has_lines = self.file is not None and known_suffix(self.file) != ".parquet"
        return f"{self.name}:{number}" if has_lines else f"{self.name}: row {number}"


def fingerprint(sources: Sequence[Source]) -> None:
    """Set the `content` of each source. Files are read side by side.

    Raises:
        RefusedError: a source is missing or cannot be read.
    """
    files = [(source, source.file) for source in sources if source.file is not None]
    for source, file in files:
        with _refusing(source):
            refuse_useless(file, source.spec)
            source.stamp = _stamp(file)
    for (source, file), digest in zip(files, digests_of([file for _, file in files], hashlib.sha256), strict=True):
        with _refusing(source):
            if isinstance(digest, OSError):
                raise digest
        source.content = f"{known_suffix(file)} {file.suffix} {digest}"
    for source in sources:
        if source.file is None:
            source.content = f"table {source.table()._fingerprint}"  # as the `datasets` library's own caches


@contextlib.contextmanager
def _refusing(source: Source) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RefusedError(f"cannot read the dataset: {error.strerror}", where=source.name) from error


def find_sources(spec: DatasetSpec, folder: Path | None, offline: bool) -> list[Source]:
    """The sources that `spec.path` names: one file, a folder, each file of a pattern (sorted), or a hub dataset.

    A file or folder of exactly this name is no pattern: `data[1].jsonl`. Relative paths are tried from the working
    directory, then from `folder`.

    Raises:
        RefusedError: nothing there, and it cannot be a hub id.
    """
    split = parse_split(spec.split)
    tried, left_out = tried_paths(spec.path, folder), list[str]()
    for candidate in tried:
        if candidate.is_dir():
            files, notices = folder_files(candidate, split.name, spec.name)
        else:
            files, notices = ([candidate], []) if candidate.is_file() else pattern_files(candidate)
            for path in files:
                _refuse_other_split(path, split, spec)
        if files:
            return _sliced([_file_source(path, spec, offline) for path in files], split, notices)
        left_out += notices
    missing = f"no file or folder {tried[0]}" if len(tried) == 1 else "neither " + " nor ".join(map(str, tried))
    if known_suffix(Path(spec.path)) is not None or HUB_ID.fullmatch(spec.path) is None:
        raise RefusedError(
            "dataset not found",
            where=f"datasets: {printable(spec.path)}",
            found="; ".join([missing, *left_out]),
            expected="a file, a folder or the id of a hub dataset",
            hint=f"did you mean {near}?"
            if (near := _near(tried))
            else "a relative path begins here or beside the recipe",
        )
    return [Source(f"{spec.path}[{split.name}]", None, spec, offline, cut=split)]


def no_rows(sources: Sequence[Source]) -> RefusedError:
    """The error for an entry of `datasets` of whose sources none has a row."""
    spec, files = sources[0].spec, f" of {len(sources)} files" if len(sources) > 1 else ""
    return RefusedError(
        "the dataset is empty",
        where=f"datasets: {printable(spec.path)}" if files else sources[0].name,
        found=f"no rows in split `{printable(spec.split)}`{files}",
        expected="at least one row",
        hint="put rows into it, or name another file or split",
    )


def count_dataset(spec: DatasetSpec, folder: Path | None) -> RowCount | None:
    """Rows of what `spec` names, without a network; None where they are not known.

    Args:
        folder: as of `find_sources`.
    """
    try:
        split = parse_split(spec.split)
        sources = find_sources(replace(spec, split=split.name), folder, offline=True)
    except (RefusedError, OSError, ValueError):
        return None
    counts: list[RowCount] = []
    for one in sources:
        found = count_rows(one.file, spec) if one.file else cached_hub_rows(spec, split.name)
        if found is None:
            return None
        counts.append(found)
    total, sizes = sum(count.num_rows for count in counts), [count.num_bytes for count in counts if count.num_rows]
    start, stop = split.range(total)
    kept = max(0, stop - start)
    num_bytes = sum(sizes) * kept / max(1, total) if all(sizes) else 0
    return RowCount(kept, round(num_bytes), all(count.is_exact for count in counts))


def cached_hub_rows(spec: DatasetSpec, split: str) -> RowCount | None:
    """Rows of a hub dataset's split, as the `datasets` library noted them beside what it has downloaded."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home, "datasets")).expanduser()
    folder = cache / spec.path.lower().replace("/", "___")
    try:
        infos = sorted(folder.glob(f"{spec.name or '*'}/*/*/dataset_info.json"), key=lambda path: path.stat().st_mtime)
        found = json.loads(read_regular(infos[-1], MAX_INFO_BYTES))["splits"][split] if infos else {}
        count, size = found.get("num_examples"), found.get("num_bytes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RefusedError):
        return None
    return RowCount(count, size if isinstance(size, int) else 0) if isinstance(count, int) else None


def _sliced(sources: list[Source], split: Split, notices: list[str]) -> list[Source]:
    """The sources cut to a slice of all rows, without those of whose rows it takes none; the first has the notices."""
    cut, before = sources, 0
    if len(sources) == 1:
        sources[0].cut = split
    elif split.start or split.stop:
        counts = [_num_rows(one.file, one.spec) for one in sources if one.file]
        start, stop = split.range(sum(counts))
        cut = []
        for source, count in zip(sources, counts, strict=True):
            begin, end = max(start - before, 0), min(stop - before, count)
            if begin < end or not count:
                cut.append(replace(source, cut=Split("", str(begin), str(end))))
            before += count
        cut = cut if start < min(stop, before) else []
    if not cut:
        raise RefusedError(
            "the slice holds no rows",
            where=f"datasets: {printable(split.name)}[{split.start}:{split.stop}]",
            found=f"{before} rows in {len(sources)} files",
            expected="at least one row",
        )
    return [replace(cut[0], notices=(*cut[0].notices, *notices)), *cut[1:]]


def _num_rows(file: Path, spec: DatasetSpec) -> int:
    return sum(1 for _ in read_file(file, spec))


def _near(tried: Sequence[Path]) -> str | None:
    """The file with the most similar name beside one of these."""
    for path in tried:
        with contextlib.suppress(OSError, ValueError):
            beside = [file.name for file in path.parent.iterdir() if file.suffix == path.suffix][:MAX_BESIDE]
            if near := closest(path.stem, [Path(name).stem for name in beside]):
                return str(path.parent / f"{near}{path.suffix}")
    return None


def _refuse_other_split(path: Path, split: Split, spec: DatasetSpec) -> None:
    if split.name not in ("train", "all", path.name.split(".")[0]):
        raise RefusedError(
            "a local file has only the split `train`",
            where=f"datasets: {_shown(path)}",
            found=f"split: {spec.split}",
            hint="split: " + spec.split.replace(split.name, "train", 1),
        )


def _file_source(path: Path, spec: DatasetSpec, offline: bool) -> Source:
    shown = _shown(path)
    if not is_text_encoding(spec.encoding):
        expected, hint = "a name that Python knows: utf-8, cp1252, latin-1 ...", "without `encoding:` it is UTF-8"
        raise RefusedError("unknown encoding", where=shown, found=spec.encoding, expected=expected, hint=hint)
    if known_suffix(path) is None:
        refuse_other_kind(head_of(path)[:32], path)
        raise RefusedError("no reader for this kind of file", where=shown, expected="*" + ", *".join(SUFFIXES))
    notices: list[str] = []
    if known_suffix(path) in TABLES:
        form, own = table_form(path, spec), own_delimiter(path)
        if form.delimiter != own:
            used = DELIMITERS[form.delimiter]
            notices.append(f"{shown} has {used} between its columns, not {DELIMITERS[own]}, and is read so")
        if form.header is not None:
            first = f"{form.header[0]} to {form.header[-1]}" if len(form.header) > 1 else form.header[0]
            notices.append(f"{shown} has no line with names: its columns are called {first}")
    with contextlib.suppress(OSError, EOFError, zlib.error):  # told where it is read
        if is_packed(path) and path.suffix.lower() != ".gz" and known_suffix(path) != ".parquet":
            notices.append(f"{shown} is compressed by gzip, and is read so")
        if known_suffix(path) != ".parquet" and (used := encoding_of(path, spec)) != spec.encoding:
            notices.append(f"{shown} is in {used.upper()} by its first bytes, and is read so")
    if known_suffix(path) == ".parquet" and not is_utf8(spec.encoding):
        notices.append(f"{shown} is a parquet file: `encoding: {spec.encoding}` has no effect on it")
    return Source(shown, path, spec, offline, notices=tuple(notices))


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
