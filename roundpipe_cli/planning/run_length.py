"""How long a run will be, as far as its recipe and the files that it names say."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import read_regular
from roundpipe_cli.recipe.load import LoadedRecipe, resolve_path
from roundpipe_cli.recipe.schema import DatasetConfig

# How many rows a file holds, without reading rows: as far as that is cheap. No torch, no pyarrow.
#
# jsonl, csv, txt   lines of the first `MAX_COUNTED_BYTES`, scaled to the file; unpacked where it ends in .gz
# json              the list's items, of files up to `MAX_PARSED_BYTES`
# parquet           the footer's `num_rows`
# hub dataset       what the `datasets` library noted when it was downloaded

MAX_COUNTED_BYTES = 256 * 1024**2
MAX_PARSED_BYTES = 32 * 1024**2
"""Largest JSON list or quoted table that is counted: every byte has to be read."""
MAX_FOOTER_BYTES = 16 * 1024**2
MAX_INFO_BYTES = 16 * 1024**2
MAX_DEPTH = 16
"""Depth of structures in a parquet footer; real ones have six."""
PARQUET_MARK = b"PAR1"


@dataclass(frozen=True, slots=True)
class RowCount:
    """Rows of a file."""

    num_rows: int
    num_bytes: int
    """Approximate bytes of text; 0: unknown."""
    is_exact: bool = True


def count_rows(path: Path, txt_rows: str = "paragraph") -> RowCount | None:
    """Rows of one local file; None where they cannot be counted cheaply, or it cannot be read.

    Args:
        txt_rows: as the recipe's key.
    """
    name = path.name.lower()
    is_packed, name = name.endswith(".gz"), name.removesuffix(".gz")
    try:
        if name.endswith(".parquet"):
            return None if is_packed else _parquet_rows(path)
        most = MAX_PARSED_BYTES if name.endswith((".json", ".csv", ".tsv")) else MAX_COUNTED_BYTES
        with path.open("rb") as raw:
            head = _unpacked(raw, most + 1) if is_packed else raw.read(most + 1)
            read, size = raw.tell(), path.stat().st_size
        is_whole = len(head) <= most
        if name.endswith(".json") and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return RowCount(len(json.loads(head)), len(head)) if is_whole else None
        rows = _rows_in(head, name, txt_rows)
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error):
        return None
    if rows is None or is_whole or not read:
        return None if rows is None else RowCount(rows, len(head))
    return RowCount(round(rows * size / read), round(len(head) * size / read), is_exact=False)


def _unpacked(raw: IO[bytes], most: int) -> bytes:
    """At most so many bytes of what was compressed."""
    with gzip.open(raw, "rb") as stream:
        return stream.read(most)


def _rows_in(head: bytes, name: str, txt_rows: str) -> int | None:
    """Rows of the start of a file; None for a kind of file that is not counted."""
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return sum(1 for line in head.split(b"\n") if line.strip())
    if name.endswith((".csv", ".tsv")):
        text = io.StringIO(head.decode("utf-8", errors="replace"), newline="")
        return max(0, sum(1 for row in csv.reader(text, delimiter="\t" if name.endswith(".tsv") else ",") if row) - 1)
    if not name.endswith(".txt"):
        return None
    if txt_rows == "line":
        return sum(1 for line in head.split(b"\n") if line.strip())
    if txt_rows == "paragraph":
        return sum(1 for part in re.split(rb"\n[ \t\r]*\n", head) if part.strip())
    return 1 if txt_rows == "file" else sum(1 for part in head.split(txt_rows.encode()) if part.strip())


def cached_hub_rows(name: str, config: str | None, split: str) -> RowCount | None:
    """Rows of a hub dataset's split, as the `datasets` library noted them beside what it has downloaded."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home, "datasets")).expanduser()
    folder = cache / name.lower().replace("/", "___")
    try:
        infos = sorted(folder.glob(f"{config or '*'}/*/*/dataset_info.json"), key=lambda path: path.stat().st_mtime)
        found = json.loads(read_regular(infos[-1], MAX_INFO_BYTES))["splits"][split] if infos else {}
        count, size = found.get("num_examples"), found.get("num_bytes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RefusedError):
        return None
    return RowCount(count, size if isinstance(size, int) else 0) if isinstance(count, int) else None


# --- parquet's footer: Thrift's compact protocol, of which only `num_rows` is wanted -------------------------------


def _parquet_rows(path: Path) -> RowCount:
    """
    Raises:
        ValueError: not such a file.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - 8))
        tail = stream.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != PARQUET_MARK or not 0 < length <= min(size - 12, MAX_FOOTER_BYTES):
            raise ValueError("no parquet footer")
        stream.seek(size - 8 - length)
        footer = _Footer(stream.read(length))
    return RowCount(footer.num_rows(), 0)


class _Footer:
    """A reader of `FileMetaData`, whose third field is the number of rows."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def num_rows(self) -> int:
        field = 0
        while (head := self._byte()) != 0:
            field = field + (head >> 4) if head >> 4 else self._signed()
            if field == 3:
                rows = self._signed()
                if rows < 0:
                    break
                return rows
            self._skip(head & 15, 0)
        raise ValueError("a parquet footer without a number of rows")

    def _byte(self) -> int:
        if self._at >= len(self._data):
            raise ValueError("a parquet footer that is cut off")
        self._at += 1
        return self._data[self._at - 1]

    def _number(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a number in a parquet footer that is too long")

    def _signed(self) -> int:
        value = self._number()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, kind: int, depth: int) -> None:
        """Skip a value of this type of the compact protocol."""
        if depth > MAX_DEPTH:
            raise ValueError("a parquet footer that is nested too deeply")
        if kind in (1, 2):  # true and false are their own values
            return
        if kind == 3:
            self._byte()
        elif kind in (4, 5, 6):
            self._number()
        elif kind == 7:
            self._at += 8
        elif kind == 8:
            length = self._number()
            self._at += length
        elif kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._number()
            for _ in range(count):
                if head & 15 in (1, 2):
                    self._byte()
                else:
                    self._skip(head & 15, depth + 1)
        elif kind == 12:
            while (head := self._byte()) != 0:
                if not head >> 4:
                    self._number()
                self._skip(head & 15, depth + 1)
        else:
            raise ValueError("a parquet footer with an unknown type")


BYTES_PER_TOKEN = 4
"""Bytes of text a token: usual for English and code (assumed); other languages have fewer, so longer runs."""
SLICE = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>\d*):(?P<stop>\d*)\])?")


@dataclass(frozen=True, slots=True)
class RunLength:
    """Optimizer steps of a whole run."""

    steps: int | None
    """None: the rows cannot be counted here."""
    why: str
    """How the number is known, or why it is not."""
    is_packed: bool = False
    """Rows are packed, so there are fewer sequences than rows."""


def length_of(loaded: LoadedRecipe, *, packs: bool = False) -> RunLength:
    """The length of a recipe's run.

    Args:
        packs: rows will be packed, by the recipe or by what `auto` is for the model.
    """
    recipe = loaded.recipe
    if recipe.max_steps is not None:
        return RunLength(recipe.max_steps, "max_steps", packs)
    counts = []
    for dataset in recipe.datasets:
        found = _rows_of(dataset, loaded.folder)
        if found is None:
            return RunLength(None, f"the rows of {dataset.path} cannot be counted here", packs)
        counts.append(found)
    rows = sum(count.num_rows for count in counts)
    held_out = recipe.val_set_size if recipe.val_set_size >= 1 else recipe.val_set_size * rows
    trained = max(0, rows - int(held_out))
    about = "" if all(count.is_exact for count in counts) else "about "
    if packs and rows and all(count.num_bytes for count in counts):
        tokens = sum(count.num_bytes for count in counts) / BYTES_PER_TOKEN * trained / rows
        each = min(recipe.max_seq_length, tokens / max(1, trained))
        sequences = math.ceil(trained * each / recipe.max_seq_length)
        why = f"{about}{rows} rows of about {max(1, round(each))} tokens, packed"
        return RunLength(math.ceil(sequences / recipe.rows_per_step) * recipe.num_train_epochs, why, is_packed=True)
    steps = math.ceil(trained / recipe.rows_per_step) * recipe.num_train_epochs
    return RunLength(steps, f"{about}{rows} rows")


def _rows_of(dataset: DatasetConfig, folder: Path) -> RowCount | None:
    """Rows of a source, where its split is known without reading them."""
    match = SLICE.fullmatch(dataset.split.strip())
    if match is None:
        return None
    path = resolve_path(dataset.path, folder)
    if path is None:
        found = cached_hub_rows(dataset.path, dataset.name, match["name"])
    else:
        found = count_rows(path, dataset.txt_rows) if path.is_file() else None
    if found is None or not (match["start"] or match["stop"]):
        return found
    stop = min(found.num_rows, int(match["stop"] or found.num_rows))
    kept = max(0, stop - int(match["start"] or 0))
    return RowCount(kept, round(found.num_bytes * kept / max(1, found.num_rows)), found.is_exact)
