"""The tokens of one source on disk: written once, chunk by chunk, and mapped into memory from then on.

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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.block_sums import BlockSums, DamageError, ToldShare, checksum, num_blocks, verify_blocks
from roundpipe_cli.data.report import SourceReport
from roundpipe_cli.data.row_chunks import ChunkResult
from roundpipe_cli.errors import ResourceError
from roundpipe_cli.files import cache_folder, new_folder, prune_cache, sync

FOLDER = "tokens"
SHARD_NAME = "shard.json"
IDS_NAME = "input_ids.bin"
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
        self._folder = _new_folder(key is not None)
        self._files: dict[str, IO[bytes]] = {name: (self._folder / name).open("wb") for name in ARRAYS}
        self._digests = {name: hashlib.sha256(name.encode()) for name in ARRAYS if name != "rows.bin"}
        self._sums = {name: BlockSums() for name in ARRAYS}
        self._max_id = -1
        self.num_rows = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, chunk: ChunkResult, first_place: int, numbers: npt.NDArray[np.int64]) -> None:
        """Append a chunk whose first row has the place `first_place`; `numbers` [rows of the chunk] name its rows.

        Raises:
            ResourceError: the disk is full.
        """
        kept = chunk.lengths > 0
        places = chunk.places[kept]
        self.num_rows += len(places)
        self._max_id = max(self._max_id, int(chunk.input_ids.max(initial=-1)))
        rows = np.stack([first_place + places, numbers[places]], axis=1)
        arrays = {
            "input_ids.bin": chunk.input_ids,
            "trained.bin": chunk.trained,
            "rows.bin": rows,
            "lengths.bin": chunk.lengths[kept],
        }
        for name, array in arrays.items():
            data = np.ascontiguousarray(array, dtype=ARRAYS[name]).tobytes()
            self._write(name, data)
            self._sums[name].update(data)
            if name in self._digests:
                self._digests[name].update(data)

    def leave_out_of_cache(self) -> None:
        """Keep the shard for this process only."""
        self._key = None

    def _write(self, name: str, data: bytes) -> None:
        try:
            self._files[name].write(data)
        except OSError as error:
            raise ResourceError(
                f"cannot write the tokens: {error.strerror}",
                where=str(self._folder),
                hint="make room there, or name another folder in the environment variable ROUNDPIPE_CACHE",
            ) from error

    def finish(self, report: SourceReport, notices: tuple[str, ...]) -> Shard:
        """The shard; in the cache too, if it was given a key and the cache can be written.

        Raises:
            ResourceError: the disk is full.
        """
        for name, file in self._files.items():
            self._write(name, b"")
            try:
                file.flush()
                os.fsync(file.fileno())
                file.close()
            except OSError as error:
                raise ResourceError(f"cannot write the tokens: {error.strerror}", where=str(self._folder)) from error
        digest = hashlib.sha256("".join(item.hexdigest() for item in self._digests.values()).encode()).hexdigest()
        content = {
            "digest": digest,
            "max_id": self._max_id,
            "sizes": {name: (self._folder / name).stat().st_size for name in ARRAYS},
            "sums": {name: sums.finish() for name, sums in self._sums.items()},
            "report": report.to_json(),
            "notices": list(notices),
        }
        document = {"content": content, "checksum": _content_sum(content)}
        (self._folder / SHARD_NAME).write_text(json.dumps(document), encoding="utf-8")
        shard = _open(self._folder)  # mapped: it outlives the folder's name, and the folder
        if self._key is not None:
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

    def look(name: str, data: bytes) -> None:
        if name == IDS_NAME:
            ids = np.frombuffer(data, dtype=np.int32)
            if ids.min() < 0 or ids.max() >= vocabulary:
                raise DamageError(f"{name}: ids {ids.min()} to {ids.max()}, a vocabulary of {vocabulary}")

    try:
        verify_blocks(folder, _content(folder)["sums"], look, progress)
        shard = _open(folder)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, DamageError) as damage:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete shard would block its successor
        raise DamageError(str(damage)) from damage
    with suppress(OSError):
        os.utime(folder)  # mark it as used
    return shard


def _content_sum(content: dict[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())


def _content(folder: Path) -> dict[str, Any]:
    """
    Raises:
        OSError, ValueError, KeyError, TypeError: not there, or not as it was written.
    """
    document: dict[str, Any] = json.loads((folder / SHARD_NAME).read_bytes())
    content: dict[str, Any] = document["content"]
    if _content_sum(content) != document["checksum"]:
        raise ValueError(f"{SHARD_NAME} is not as it was written")
    for name in ARRAYS:
        if len(content["sums"][name]) != num_blocks(content["sizes"][name]):
            raise ValueError(f"{SHARD_NAME}: not a checksum for each block of {name}")
    return content


def _open(folder: Path) -> Shard:
    """
    Raises:
        OSError, ValueError, KeyError, TypeError: not there, or not whole.
    """
    document = _content(folder)
    arrays: dict[str, Any] = {}
    for name, dtype in ARRAYS.items():
        path = folder / name
        if path.stat().st_size != document["sizes"][name]:
            raise ValueError(f"{name} has another size than when it was written")
        # As a plain array: slices of numpy's memmap class are slow.
        mapped = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray) if path.stat().st_size else np.empty(0, dtype)
        mapped.flags.writeable = False
        arrays[name] = mapped
    lengths, rows = arrays["lengths.bin"], arrays["rows.bin"].reshape(-1, 2)
    num_tokens = len(arrays["input_ids.bin"])
    if len(lengths) != len(rows) or int(lengths.sum()) != num_tokens or len(arrays["trained.bin"]) != num_tokens:
        raise ValueError("arrays that do not fit each other")
    report = SourceReport.from_json(document["report"])
    notices = tuple(str(text) for text in document["notices"])
    return Shard(
        arrays["input_ids.bin"],
        arrays["trained.bin"],
        rows,
        np.array(lengths),
        int(document["max_id"]),
        str(document["digest"]),
        report,
        notices,
    )


def _new_folder(in_cache: bool) -> Path:
    folder = new_folder(FOLDER) if in_cache else None  # read-only, no home: without a cache, then
    return folder or Path(tempfile.mkdtemp(prefix="roundpipe-tokens-"))
