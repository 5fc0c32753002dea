"""Tokenized rows, mapped from shards on disk and shared by all readers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.report import DataReport
from roundpipe_cli.data.shards import Shard
from roundpipe_cli.data.sources import Source


@dataclass(frozen=True, slots=True)
class Row:
    """One training row. Tokens are read from shared arrays: do not write to them."""

    row_id: int
    """Position among all rows read, from 0, dropped rows counted: the same whatever is dropped before it."""
    input_ids: npt.NDArray[np.int32]
    """Shape [tokens]."""
    labels: npt.NDArray[np.int32]
    """Shape [tokens], not shifted: the token itself where it is trained, -100 elsewhere."""


class TokenizedRows(Sequence[Row]):
    """The kept rows of all sources, read from their mapped shards."""

    def __init__(self, shards: Sequence[Shard], positions: npt.NDArray[np.int64] | None = None) -> None:
        """
        Args:
            positions: of the rows that there are, ascending; None: all rows of the shards.
        """
        self._shards = tuple(shards)
        self._positions = positions
        lengths: npt.NDArray[np.int64] = np.concatenate([shard.lengths for shard in shards])
        self.lengths = lengths if positions is None else lengths[positions]
        """Tokens of each row."""
        self._first_rows = np.cumsum([0, *(len(shard.lengths) for shard in shards)])
        self._first_ids = np.cumsum([0, *(shard.report.rows_read for shard in shards)])
        self._starts = [np.cumsum(shard.lengths) - shard.lengths for shard in shards]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        source, place = self._find(index)
        shard = self._shards[source]
        start = int(self._starts[source][place])
        stop = start + int(shard.lengths[place])
        input_ids = shard.input_ids[start:stop]
        labels = np.where(shard.trained[start:stop], input_ids, np.int32(IGNORED_LABEL))
        labels.flags.writeable = False
        return Row(int(self._first_ids[source] + shard.places[place, 0]), input_ids, labels)

    @property
    def row_ids(self) -> npt.NDArray[np.int64]:
        """Identifiers of the rows, ascending, shape [rows]."""
        firsts = zip(self._first_ids, self._shards, strict=False)
        ids: npt.NDArray[np.int64] = np.concatenate([first + shard.places[:, 0] for first, shard in firsts])
        return ids if self._positions is None else ids[self._positions]

    def select(self, positions: npt.NDArray[np.int64]) -> TokenizedRows:
        """The rows at these ascending positions, as rows of their own."""
        return TokenizedRows(self._shards, positions if self._positions is None else self._positions[positions])

    @property
    def max_id(self) -> int:
        """Largest token id of the sources."""
        return max(shard.max_id for shard in self._shards)

    def content_hash(self) -> str:
        """SHA-256 over the tokens and labels of every row: equal exactly if every batch would be."""
        digest = hashlib.sha256("".join(shard.digest for shard in self._shards).encode())
        if self._positions is not None:
            digest.update(self._positions.astype("<i8").tobytes())
        return digest.hexdigest()

    def origin(self, row_id: int) -> tuple[int, int]:
        """(source, number in there) of a kept row.

        Raises:
            KeyError: no kept row has this id.
        """
        source = int(np.searchsorted(self._first_ids, row_id, side="right")) - 1
        if 0 <= source < len(self._shards):
            places = self._shards[source].places
            place = int(np.searchsorted(places[:, 0], row_id - self._first_ids[source]))
            if place < len(places) and places[place, 0] == row_id - self._first_ids[source]:
                return source, int(places[place, 1])
        raise KeyError(row_id)

    def _find(self, index: int) -> tuple[int, int]:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if self._positions is not None:
            position = int(self._positions[position])
        source = int(np.searchsorted(self._first_rows, position, side="right")) - 1
        return source, position - int(self._first_rows[source])


@dataclass(frozen=True)
class TokenizedDataset:
    """The data as training needs it."""

    rows: TokenizedRows
    report: DataReport
    content_hash: str
    """Over the tokens and labels of every row: the same exactly if every batch would be."""
    notices: tuple[str, ...]
    """Decisions and lost rows, a line each for the user."""
    chat_template: str | None
    """The template in force, to be saved beside the adapter."""
    sources: tuple[Source, ...]
    rows_by_spec: tuple[int, ...]
    """Kept rows of each entry of the recipe's `datasets`; a glob is several sources and one entry."""
    num_cached: int
    """Sources whose tokens were taken from the cache."""

    def where(self, row_id: int) -> str:
        """`data/train.jsonl:17` of a kept row.

        Raises:
            KeyError: no kept row has this id.
        """
        source, number = self.rows.origin(row_id)
        return self.sources[source].where(number)
