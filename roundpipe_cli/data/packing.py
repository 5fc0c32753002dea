"""Several short rows in one sequence, by first-fit decreasing.

    rows of a window, longest first    7 6 5 4 3 3 2        sequences of 10 tokens: [7 3] [6 4] [5 3 2]

Rows of one sequence do not see each other: position ids restart with each row, and from that the model's own code makes
a block-diagonal mask (see `model/chunks.py`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.order import permutation

WINDOW_ROWS = 4096
"""Rows that are packed together: enough for full sequences, few enough to be packed again at once on resume."""

SequenceRows = tuple[int, ...]
"""Row indices of one sequence, in the order of the epoch."""


class Packer:
    """Packs windows of rows."""

    def __init__(self, lengths: npt.NDArray[np.int64], max_tokens: int, seed: int, shuffle: bool) -> None:
        """
        Args:
            lengths: tokens of each row, at most `max_tokens`.
            max_tokens: tokens of a sequence.
            shuffle: give a window's sequences a random order, since first-fit leaves the fullest in front.
        """
        self._lengths = lengths
        self._max_tokens = max_tokens
        self._label = f"roundpipe window 1 {seed}" if shuffle else ""

    def pack(self, rows: npt.NDArray[np.int64], epoch: int, window: int) -> list[SequenceRows]:
        """The sequences of the `window`-th window of an epoch; each row is in one of them."""
        bins = first_fit_decreasing(self._lengths[rows], self._max_tokens)
        sequences = [tuple(rows[sorted(places)].tolist()) for places in bins]
        if not self._label:
            return sequences
        return [sequences[index] for index in permutation(len(sequences), f"{self._label} {epoch} {window}")]


def first_fit_decreasing(lengths: npt.NDArray[np.int64], max_tokens: int) -> list[list[int]]:
    """Positions into `lengths`, bin by bin; each bin's lengths sum to at most `max_tokens`.

    Longest first (equal ones in order), each into the first bin with room. At most 11/9 of the fewest bins, + 1
    (D. S. Johnson, 1973).
    """
    room = np.full(len(lengths), max_tokens, dtype=np.int64)  # room of every bin that may be needed, open bins first
    bins: list[list[int]] = []
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        index = int(np.argmax(room[: len(bins) + 1] >= length))  # the bin behind the open ones has room for any row
        if index == len(bins):
            bins.append([])
        bins[index].append(place)
        room[index] -= length
    return bins
