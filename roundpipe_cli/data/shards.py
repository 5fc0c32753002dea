"""The tokens of one source on disk: written once, mapped into memory from then on.

    <cache>/tokens/<key>/
      input_ids.bin   int32, all kept rows end to end        rows.bin      int64 [rows, 2]: place in the source, number
      weights.bin     float32, as of `Encoded`               lengths.bin   int64 [rows]
      shard.json      written last: checksums, digests, the report on all rows

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from roundpipe_cli.cache import cache_folder, new_folder, prune_cache
from roundpipe_cli.data.row_chunks import ChunkResult
from roundpipe_cli.data.rows import SourceReport
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.files import digests_of, sync
from roundpipe_cli.regular_files import read_regular

FOLDER = "tokens"
SHARD_NAME = "shard.json"
MAX_SHARD_BYTES = 1 << 30
"""A thousand bytes for each of a million bad rows, which `shard.json` names."""
ARRAYS = {"input_ids.bin": np.int32, "weights.bin": np.float32, "rows.bin": np.int64, "lengths.bin": np.int64}


class DamageError(Exception):
    """A file differs from what was written."""


def file_sums(folder: Path) -> dict[str, str]:
    """Checksum of each array's file.

    Raises:
        OSError: a file cannot be read.
    """
    return _checked(digests_of([folder / name for name in ARRAYS], _new_sum))


def _new_sum() -> Any:
    """BLAKE2b: faster than SHA-256 on processors without instructions for that."""
    return hashlib.blake2b(digest_size=32)


def _checked(sums: Sequence[str | OSError]) -> dict[str, str]:
    for found in sums:
        if isinstance(found, OSError):
            raise found
    return dict(zip(ARRAYS, map(str, sums), strict=True))


@dataclass(frozen=True)
class Shard(ChunkResult):
    """The kept rows of one source, mapped."""

    digests: tuple[str, ...]
    """SHA-256 over lengths, ids and weights: equal exactly if every row is. Of pairs, whose answers stand in turn, two:
    of the chosen rows and of the rejected ones."""


class ShardWriter:
    """Takes chunks in order; `finish` makes a `Shard` of them. Use it inside `with`: unfinished, it leaves nothing.

    A full disk is a ResourceError.
    """

    def __init__(self, key: str, num_answers: int) -> None:
        """
        Args:
            key: name in the cache.
            num_answers: sequences that belong together, 2 of pairs.
        """
        self._key = key
        self._folder = new_folder(FOLDER) or Path(tempfile.mkdtemp(prefix="roundpipe-tokens-"))  # read-only, no home
        self._files: dict[str, IO[bytes]] = {name: (self._folder / name).open("wb") for name in ARRAYS}
        names = ("input_ids.bin", "trained.bin", "lengths.bin", "weights.bin")
        self._digests = [{name: hashlib.sha256(name.encode()) for name in names} for _ in range(num_answers)]
        self._weighs = False

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, chunk: ChunkResult, first_place: int) -> None:
        """Append a chunk whose first row has the place `first_place`."""
        arrays: dict[str, npt.NDArray[Any]] = {
            "input_ids.bin": chunk.input_ids,
            "weights.bin": chunk.weights,
            "rows.bin": chunk.places + [first_place, 0],
            "lengths.bin": chunk.lengths,
        }
        with self._writing():
            for name, array in arrays.items():
                self._files[name].write(array.astype(ARRAYS[name]).tobytes())
        answers = np.arange(len(chunk.lengths)) % len(self._digests)
        of_tokens = np.repeat(answers, chunk.lengths)
        trained = chunk.weights != 0
        arrays["trained.bin"], self._weighs = trained, self._weighs or bool((chunk.weights[trained] != 1).any())
        for index, digests in enumerate(self._digests):
            for name, digest in digests.items():
                own = (answers if name == "lengths.bin" else of_tokens) == index
                digest.update(arrays[name][own].astype(ARRAYS.get(name, np.bool_)).tobytes())

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

    def finish(self, report: SourceReport, *, to_cache: bool) -> Shard:
        """The shard; in the cache too, if it is to be and the cache can be written."""
        with self._writing():
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
        if not self._weighs:  # tokens are trained or not: the digest that checkpoints of earlier versions hold
            for of_answer in self._digests:
                del of_answer["weights.bin"]
        digests = ["".join(one.hexdigest() for one in of_answer.values()) for of_answer in self._digests]
        content = {
            "digests": [hashlib.sha256(text.encode()).hexdigest() for text in digests],
            "sums": file_sums(self._folder),
            "report": report.to_json(),
        }
        document = {"content": content, "checksum": _content_sum(content)}
        (self._folder / SHARD_NAME).write_text(json.dumps(document), encoding="utf-8")
        shard = _open(self._folder, content)  # mapped: it outlives the folder's name, and the folder
        if to_cache:
            with suppress(OSError):
                sync(self._folder / SHARD_NAME)
                self._folder.rename(cache_folder(FOLDER) / self._key)  # fails if another run was faster
                sync(cache_folder(FOLDER))
                prune_cache(cache_folder(FOLDER), SHARD_NAME)
        return shard


def load_shards(
    keys: Sequence[str], vocabulary: int, progress: Callable[[float], None] = lambda share: None
) -> list[Shard | DamageError | None]:
    """The shard of each key, every byte of it compared with its checksums; None where it is not there.

    One that is not as it was written is removed, and is an error in its place. Files are compared side by side.

    Args:
        vocabulary: ids are below it.
        progress: is told which share of all has been compared.
    """
    folders = [cache_folder(FOLDER) / key for key in keys]
    there = [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
    sums = digests_of([folder / name for folder in there for name in ARRAYS], _new_sum, progress) if there else []
    found: dict[Path, Shard | DamageError] = {}
    for index, folder in enumerate(there):
        try:
            found[folder] = _load(folder, _checked(sums[index * len(ARRAYS) : (index + 1) * len(ARRAYS)]), vocabulary)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, DamageError, RefusedError) as damage:
            shutil.rmtree(folder, ignore_errors=True)  # an incomplete shard would block its successor
            found[folder] = DamageError(str(damage))
    return [found.get(folder) for folder in folders]


def _load(folder: Path, sums: Mapping[str, str], vocabulary: int) -> Shard:
    document = json.loads(read_regular(folder / SHARD_NAME, MAX_SHARD_BYTES))
    content = document["content"]
    written = {SHARD_NAME: document["checksum"], **content["sums"]}
    for name, found in {SHARD_NAME: _content_sum(content), **sums}.items():
        if found != written[name]:
            raise DamageError(f"{name} is not as it was written")
    shard = _open(folder, content)
    if len(shard.input_ids) and int(shard.input_ids.view(np.uint32).max()) >= vocabulary:  # negative ids are large
        raise DamageError(f"input_ids.bin: ids outside of a vocabulary of {vocabulary}")
    with suppress(OSError):
        os.utime(folder)  # mark it as used
    return shard


def _content_sum(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).hexdigest()


def _open(folder: Path, content: dict[str, Any]) -> Shard:
    arrays: dict[str, Any] = {}
    for name, dtype in ARRAYS.items():
        path = folder / name
        # As a plain array: slices of numpy's memmap class are slow.
        mapped = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray) if path.stat().st_size else np.empty(0, dtype)
        mapped.flags.writeable = False
        arrays[name] = mapped
    rows, lengths = arrays["rows.bin"].reshape(-1, 2), np.array(arrays["lengths.bin"])
    digests, report = tuple(content["digests"]), SourceReport.from_json(content["report"])
    return Shard(rows, lengths, arrays["input_ids.bin"], arrays["weights.bin"], report, digests)
