"""Groups a step's sequences of similar length into microbatches, so that little is padded.

    a step's rows    [ 40 300  90 310  50  80]          in the order of the epoch
    microbatches     [310 300] [90 80] [50 40]          two sequences each; the longest first
                     padded to 310      90      50

or, with 400 tokens      [310] [300] [90 80 50 40]      as many as fit when padded; then evened out: no fewer
                                                        microbatches would do, and none is longer than it must be

The rows of a step stay the same, so its loss differs by rounding only. The grouping depends on
nothing but the lengths of the step's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.packing import SequenceRows

RowBatch = list[SequenceRows]
"""Row indices of one microbatch: its sequences, each of one row or of several packed ones."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups the sequences of a step into microbatches of `num_sequences`, or of as many as `max_tokens` hold."""

    lengths: npt.NDArray[np.int64]
    """Tokens of each row; of a preference pair, of its longer answer."""
    num_sequences: int
    max_tokens: int | None = None
    """Tokens of a microbatch, padding included; of pairs, of one of the two answers. A longer sequence stands alone.
    None: microbatches have `num_sequences`."""

    def group(self, sequences: Sequence[SequenceRows]) -> list[RowBatch]:
        """The microbatches of these sequences, the longest first; in their own order where each stands alone."""
        size = self.num_sequences
        if self.max_tokens is not None and sequences:
            ordered = self._longest_first(sequences)
            return [ordered[first:last] for first, last in _filled([self._tokens(s) for s in ordered], self.max_tokens)]
        ordered = list(sequences) if size == 1 else self._longest_first(sequences)
        return [ordered[first : first + size] for first in range(0, len(ordered), size)]

    def resized(self, num_sequences: int) -> Grouping:
        """The microbatches of so many full sequences."""
        tokens = None if self.max_tokens is None else self.max_tokens // self.num_sequences * num_sequences
        return Grouping(self.lengths, num_sequences, tokens)

    def _longest_first(self, sequences: Sequence[SequenceRows]) -> list[SequenceRows]:
        """By length; equal ones in their order."""
        return sorted(sequences, key=lambda rows: -self._tokens(rows))

    def _tokens(self, rows: SequenceRows) -> int:
        return int(self.lengths[list(rows)].sum())


def _filled(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """(first, behind the last) of as few microbatches as hold these sequences, of about equal size.

    Args:
        lengths: the longest first.
    """
    fewest = len(_ranges(lengths, max_tokens))
    low, high = lengths[0], max(max_tokens, lengths[0])
    while low < high:  # the fewer tokens, the more microbatches
        middle = (low + high) // 2
        low, high = (low, middle) if len(_ranges(lengths, middle)) <= fewest else (middle + 1, high)
    return _ranges(lengths, low)


def _ranges(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """The same, each as full as it can be; all sequences of one are padded to its first."""
    ranges, first = [], 0
    while first < len(lengths):
        last = min(len(lengths), first + max(1, max_tokens // lengths[first]))
        ranges.append((first, last))
        first = last
    return ranges
