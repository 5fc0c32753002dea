"""The rows of an epoch and their order: a pure function of (sizes, weights, seed, epoch).

Weights all equal: every row once an epoch, whatever the sizes of the sources. Otherwise each source has its share of
the epoch's rows, weight / sum of weights, and is gone through pass after pass: a row comes again only when all rows of
its source have come equally often, also across the border of two epochs.

    sources a: 4 rows, weight 3; b: 4 rows, weight 1; an epoch has 8 rows, 6 of a and 2 of b
    epoch 0: a2 a0 a3 a1 | a1 a3   b3 b0
    epoch 1: a0 a2 | a3 a1 a0 a2   b1 b2 |      the bars are the borders of passes; then each epoch is shuffled
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


def permutation(num_rows: int, label: str) -> Rows:
    """A permutation of `range(num_rows)` that `label` decides.

    Sorted by raw Philox output rather than `Generator.permutation`, whose stream numpy may change between versions.
    """
    digest = hashlib.sha256(label.encode()).digest()
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    keys = generator.random_raw(num_rows)
    return np.argsort(np.asarray(keys, dtype=np.uint64), kind="stable").astype(np.int64)


def epoch_order(num_rows: int, epoch: int, seed: int, shuffle: bool) -> Rows:
    """The order of rows in an epoch: a permutation of `range(num_rows)`, shape [num_rows]."""
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    return permutation(num_rows, f"roundpipe order 1 {seed} {epoch}")


class RowMix:
    """The rows of each epoch, from sources that stand one behind the other."""

    def __init__(self, source_rows: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        """
        Args:
            source_rows: kept rows of each source; indices of rows count through all of them.
            weights: one for each source, above 0.
        """
        self.source_rows = tuple(source_rows)
        self.num_rows = sum(source_rows)
        self._seed = seed
        self._shuffle = shuffle
        weights = [weight if rows else 0.0 for rows, weight in zip(source_rows, weights, strict=True)]
        self._is_mixed = len(set(weights) - {0.0}) > 1
        self.epoch_rows = _shares(self.num_rows, weights) if self._is_mixed else self.source_rows
        """Rows that each source has in an epoch."""
        self._cached_epoch: int | None = None
        self._cached_order: Rows = np.empty(0, dtype=np.int64)

    @property
    def rows_per_epoch(self) -> int:
        return sum(self.epoch_rows)

    @property
    def is_mixed(self) -> bool:
        """Whether weights decide how often a row comes."""
        return self._is_mixed

    def order(self, epoch: int) -> Rows:
        """Row indices of an epoch in order, shape [rows_per_epoch]."""
        if epoch != self._cached_epoch:
            self._cached_order = (
                self._mixed_order(epoch)
                if self._is_mixed
                else epoch_order(self.num_rows, epoch, self._seed, self._shuffle)
            )
            self._cached_epoch = epoch
        return self._cached_order

    def _mixed_order(self, epoch: int) -> Rows:
        parts, places = [], []
        first_row = 0
        for source, (num_rows, count) in enumerate(zip(self.source_rows, self.epoch_rows, strict=True)):
            parts.append(first_row + self._passes(source, num_rows, epoch * count, count))
            places.append((np.arange(count) + 0.5) / max(count, 1))  # evenly spread through the epoch
            first_row += num_rows
        rows = np.concatenate(parts)
        if self._shuffle:
            return rows[permutation(len(rows), f"roundpipe order 1 {self._seed} {epoch}")]
        return rows[np.argsort(np.concatenate(places), kind="stable")]

    def _passes(self, source: int, num_rows: int, start: int, count: int) -> Rows:
        """Rows `start` to `start + count` of a source's passes put end to end."""
        parts = []
        while count > 0:
            number, offset = divmod(start, num_rows)
            label = f"roundpipe pass 1 {self._seed} {source} {number}"
            one_pass = permutation(num_rows, label) if self._shuffle else np.arange(num_rows, dtype=np.int64)
            parts.append(one_pass[offset : offset + count])
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _shares(num_rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`num_rows` dealt by weight, largest remainders first, at least one for each weight above 0."""
    exact = [num_rows * weight / sum(weights) for weight in weights]
    counts = [max(1, int(share)) if weight else 0 for share, weight in zip(exact, weights, strict=True)]
    filled = [index for index, weight in enumerate(weights) if weight]
    by_remainder = sorted(filled, key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: max(0, num_rows - sum(counts))]:
        counts[index] += 1
    return tuple(counts)
