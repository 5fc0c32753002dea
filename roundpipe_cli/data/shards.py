"""The tokens of one source on disk, and the report on its rows: written once, mapped into memory from then on.

    <cache>/tokens/<key>/
      input_ids.bin   int32, all kept rows end to end        rows.bin      int64 [rows, 2]: place in the source, number
      trained.bin     one byte a token                       lengths.bin   int64 [rows]
      shard.json      written last: sizes, checksums, digest, report

A shard is written in a folder of its own and renamed when it is complete and durable, so that neither a killed run nor
two runs at once leave half of one behind. One from the cache is compared with its checksums, byte by byte, before any
row of it is used. Whatever cannot be used is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from roundpipe_cli.choices import RowType
from roundpipe_cli.data.row_chunks import ChunkResult
from roundpipe_cli.data.rows import RowFault, printable
from roundpipe_cli.errors import ResourceError
from roundpipe_cli.files import cache_folder, new_folder, prune_cache, sync

# Checksums of a file's blocks, so that several threads can compare a large file with them.
#
# BLAKE2b: faster than SHA-256 on processors without instructions for it, and as good at finding damage.

BLOCK_BYTES = 16 * 1024**2
MAX_THREADS = 16

ToldShare = Callable[[float], None]
"""Called with the share of the blocks that has been read."""


class DamageError(Exception):
    """A file differs from what was written."""


def checksum(data: bytes) -> str:
    """Checksum of one piece, hexadecimal."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def block_sums(folder: Path, progress: ToldShare = lambda share: None) -> dict[str, list[str]]:
    """Checksums of the blocks of each array's file, which are read once, on all cores.

    Raises:
        OSError: a file cannot be read.
    """
    blocks = [(name, start) for name in ARRAYS for start in range(0, (folder / name).stat().st_size, BLOCK_BYTES)]

    def sum_of(block: tuple[str, int]) -> str:
        with (folder / block[0]).open("rb", buffering=0) as file:
            return checksum(os.pread(file.fileno(), BLOCK_BYTES, block[1]))

    sums: dict[str, list[str]] = {name: [] for name in ARRAYS}
    num_threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="token-sums") as threads:
        try:
            for done, ((name, _), found) in enumerate(zip(blocks, threads.map(sum_of, blocks), strict=True), start=1):
                sums[name].append(found)
                progress(done / len(blocks))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return sums


# The report on rows: everything that was dropped, cut or skipped is counted.

MAX_LISTED = 10
"""Rows named in one message; the report holds them all."""

MAX_UNUSED_NAMES = 100
"""Unused columns that are counted one by one; rows of JSON can have a name of their own each."""
OTHER_NAMES = "(others)"


@dataclass
class SourceReport:
    """Counts of one file or hub dataset, filled while it is read. Row numbers count as in `RawRow.number`."""

    name: str
    type: RowType | None = None
    """Type of the rows, from the recipe or the columns; None where no row could be read."""
    rows_read: int = 0
    rows_kept: int = 0
    """Sequences to train: a row that is split is several."""
    bad_rows: list[tuple[int, RowFault]] = field(default_factory=list)
    too_long_rows: list[int] = field(default_factory=list)
    """Rows of more than `max_seq_length` tokens: kept and cut, split, dropped or refused, as `long_rows` says."""
    untrained_rows: list[int] = field(default_factory=list)
    """Rows without one token to train (left), always dropped."""
    control_token_rows: list[int] = field(default_factory=list)
    """Rows of a conversation whose text spells a special token of the tokenizer, such as `<|im_end|>`; kept."""
    placeholder_rows: list[int] = field(default_factory=list)
    """Rows whose text has `<image>`, `<video>` or `<audio>` and that have no column with it: letters to the model."""
    unused_columns: dict[str, int] = field(default_factory=dict)
    """Rows with a column that is not used, by its name; keys in messages are called `messages[].id`."""
    trained_tokens: int = 0
    """Labels that count in the loss: all but each row's first token, which nothing predicts."""
    total_tokens: int = 0
    lost_tokens: int = 0
    """Tokens of rows that were read and could be used, and that no sequence has: cut off, or dropped with their row."""
    longest_row_tokens: int = 0
    """Before any cut."""

    def count_unused(self, counts: Mapping[str, int]) -> None:
        """Add rows with unused columns, by name; behind `MAX_UNUSED_NAMES` names, others are counted together."""
        for name, count in counts.items():
            has_room = name in self.unused_columns or len(self.unused_columns) < MAX_UNUSED_NAMES
            key = name if has_room else OTHER_NAMES
            self.unused_columns[key] = self.unused_columns.get(key, 0) + count

    def unused_text(self) -> str:
        """`id, source (3 of 12 rows)`; empty if all columns are used."""
        return ", ".join(
            printable(name, 80) + (f" ({count} of {self.rows_read} rows)" if count < self.rows_read else "")
            for name, count in self.unused_columns.items()
        )

    def to_json(self) -> dict[str, Any]:
        """In the types of JSON; `from_json` takes it back."""
        return {**asdict(self), "bad_rows": [[number, *astuple(fault)] for number, fault in self.bad_rows]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SourceReport:
        """
        Raises:
            TypeError, ValueError: not what `to_json` makes.
        """
        bad_rows = [(int(number), RowFault(*texts)) for number, *texts in data["bad_rows"]]
        return cls(**{**data, "bad_rows": bad_rows})


@dataclass(frozen=True)
class DataReport:
    """Totals of all sources."""

    sources: tuple[SourceReport, ...]
    long_rows: str
    """Treatment of `too_long_rows`: error, drop, truncate or split."""

    @property
    def rows_read(self) -> int:
        return sum(source.rows_read for source in self.sources)

    @property
    def rows_kept(self) -> int:
        return sum(source.rows_kept for source in self.sources)

    @property
    def rows_bad(self) -> int:
        return sum(len(source.bad_rows) for source in self.sources)

    @property
    def rows_too_long(self) -> int:
        return sum(len(source.too_long_rows) for source in self.sources)

    @property
    def rows_truncated(self) -> int:
        return self.rows_too_long if self.long_rows == "truncate" else 0

    @property
    def rows_untrained(self) -> int:
        return sum(len(source.untrained_rows) for source in self.sources)

    @property
    def trained_tokens(self) -> int:
        return sum(source.trained_tokens for source in self.sources)

    @property
    def total_tokens(self) -> int:
        return sum(source.total_tokens for source in self.sources)

    @property
    def lost_tokens(self) -> int:
        return sum(source.lost_tokens for source in self.sources)

    def filter_counts(self) -> str:
        """`120 rows read, 3 bad, 2 too long, 0 without a trained token, 115 kept`."""
        long_verb = {"truncate": "cut", "split": "split"}.get(self.long_rows, "too long")
        kept = f"{self.rows_kept} sequences" if self.long_rows == "split" else f"{self.rows_kept} kept"
        return (
            f"{self.rows_read} rows read, {self.rows_bad} bad, {self.rows_too_long} {long_verb}, "
            f"{self.rows_untrained} without a trained token, {kept}"
        )


def listed(places: Sequence[str]) -> str:
    """The first places, and how many more there are."""
    shown = ", ".join(places[:MAX_LISTED])
    rest = len(places) - MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown


FOLDER = "tokens"
SHARD_NAME = "shard.json"
ARRAYS = {"input_ids.bin": np.int32, "trained.bin": np.bool_, "rows.bin": np.int64, "lengths.bin": np.int64}


@dataclass(frozen=True)
class Shard:
    """The kept rows of one source."""

    input_ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    places: npt.NDArray[np.int64]
    """[rows, 2]: place among all rows of the source, from 0, ascending, and the row's number in there."""
    lengths: npt.NDArray[np.int64]
    max_id: int
    """Largest of `input_ids`; -1 without any."""
    digest: str
    """SHA-256 over lengths, ids and trained: equal exactly if every row is."""
    report: SourceReport
    notices: tuple[str, ...]
    """Decisions about this source, for the user."""


class ShardWriter:
    """Takes chunks in order; `finish` makes a `Shard` of them. Use it inside `with`: unfinished, it leaves nothing."""

    def __init__(self, key: str | None) -> None:
        """
        Args:
            key: name in the cache; None keeps the shard out of the cache, for this process only.
        """
        self._key = key
        in_cache = new_folder(FOLDER) if key is not None else None  # read-only, no home: without a cache, then
        self._folder = in_cache or Path(tempfile.mkdtemp(prefix="roundpipe-tokens-"))
        self._files: dict[str, IO[bytes]] = {name: (self._folder / name).open("wb") for name in ARRAYS}
        self._digests = {name: hashlib.sha256(name.encode()) for name in ARRAYS if name != "rows.bin"}
        self._max_id = -1

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, chunk: ChunkResult, first_place: int) -> None:
        """Append a chunk whose first row has the place `first_place`.

        Raises:
            ResourceError: the disk is full.
        """
        kept = chunk.lengths > 0
        places = chunk.places[kept]
        self._max_id = max(self._max_id, int(chunk.input_ids.max(initial=-1)))
        rows = np.stack([first_place + places, chunk.numbers[places]], axis=1)
        arrays = {
            "input_ids.bin": chunk.input_ids,
            "trained.bin": chunk.trained,
            "rows.bin": rows,
            "lengths.bin": chunk.lengths[kept],
        }
        with self._writing():
            for name, array in arrays.items():
                data = np.ascontiguousarray(array, dtype=ARRAYS[name]).tobytes()
                self._files[name].write(data)
                if name in self._digests:
                    self._digests[name].update(data)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ResourceError(
                f"cannot write the tokens: {error.strerror}",
                where=str(self._folder),
                hint="make room there, or name another folder in the environment variable ROUNDPIPE_CACHE",
            ) from error

    def finish(self, report: SourceReport, notices: tuple[str, ...], *, to_cache: bool = True) -> Shard:
        """The shard; in the cache too, if it is to be, was given a key and the cache can be written.

        Raises:
            ResourceError: the disk is full.
        """
        with self._writing():
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
        digest = hashlib.sha256("".join(item.hexdigest() for item in self._digests.values()).encode()).hexdigest()
        content = {
            "digest": digest,
            "max_id": self._max_id,
            "sums": block_sums(self._folder),
            "report": report.to_json(),
            "notices": list(notices),
        }
        document = {"content": content, "checksum": _content_sum(content)}
        (self._folder / SHARD_NAME).write_text(json.dumps(document), encoding="utf-8")
        shard = _open(self._folder)  # mapped: it outlives the folder's name, and the folder
        if to_cache and self._key is not None:
            with suppress(OSError):
                sync(self._folder / SHARD_NAME)
                self._folder.rename(cache_folder(FOLDER) / self._key)  # fails if another run was faster
                sync(cache_folder(FOLDER))
                prune_cache(cache_folder(FOLDER), SHARD_NAME)
        return shard


def load_shard(key: str, vocabulary: int, progress: ToldShare) -> Shard | None:
    """The shard of that key, every byte of it compared with its checksums; None if it is not there.

    Args:
        vocabulary: ids are below it.
        progress: is told which share has been compared.

    Raises:
        DamageError: it is not as it was written; it is removed.
    """
    folder = cache_folder(FOLDER) / key
    if not folder.is_dir():
        return None
    try:
        written, found = _content(folder)["sums"], block_sums(folder, progress)
        for name, sums in found.items():
            if sums != written[name]:
                raise DamageError(f"{name} is not as it was written")
        shard = _open(folder)
        if len(shard.input_ids) and not 0 <= shard.input_ids.min() <= shard.input_ids.max() < vocabulary:
            raise DamageError(f"input_ids.bin: ids outside of a vocabulary of {vocabulary}")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, DamageError) as damage:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete shard would block its successor
        raise DamageError(str(damage)) from damage
    with suppress(OSError):
        os.utime(folder)  # mark it as used
    return shard


def _content_sum(content: dict[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())


def _content(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / SHARD_NAME).read_bytes())
    content: dict[str, Any] = document["content"]
    if _content_sum(content) != document["checksum"]:
        raise ValueError(f"{SHARD_NAME} is not as it was written")
    return content


def _open(folder: Path) -> Shard:
    document = _content(folder)
    arrays: dict[str, Any] = {}
    for name, dtype in ARRAYS.items():
        path = folder / name
        # As a plain array: slices of numpy's memmap class are slow.
        mapped = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray) if path.stat().st_size else np.empty(0, dtype)
        mapped.flags.writeable = False
        arrays[name] = mapped
    lengths, rows = arrays["lengths.bin"], arrays["rows.bin"].reshape(-1, 2)
    num_tokens = len(arrays["input_ids.bin"])
    if len(lengths) != len(rows) or int(lengths.sum()) != num_tokens or len(arrays["trained.bin"]) != num_tokens:
        raise ValueError("arrays that do not fit each other")
    facts = int(document["max_id"]), str(document["digest"]), SourceReport.from_json(document["report"])
    notices = tuple(str(text) for text in document["notices"])
    return Shard(arrays["input_ids.bin"], arrays["trained.bin"], rows, np.array(lengths), *facts, notices)
