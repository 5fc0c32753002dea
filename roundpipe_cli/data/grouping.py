"""Which of a step's sequences meet in a microbatch: those of like length, so that little is padded.

    a step's rows    [ 40 300  90 310  50  80]          in the order of the epoch
    microbatches     [310 300] [90 80] [50 40]          two sequences each; the longest first
                     padded to 310      90      50

The rows of a step are chosen before and stay the same, so its loss differs by rounding only. The grouping depends on
nothing but the lengths of the step's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.packing import PackedRows

RowBatch = list[PackedRows]
"""Row indices of one microbatch: its sequences, each of one row or of several packed ones."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups the sequences of a step into microbatches of `num_sequences`."""

    lengths: npt.NDArray[np.int64]
    """Tokens of each row; of a preference pair, of its longer answer."""
    num_sequences: int

    def group(self, sequences: Sequence[PackedRows]) -> list[RowBatch]:
        """The microbatches of these sequences, the longest first; in their own order where each stands alone.

        The last one may have fewer sequences.
        """
        size = self.num_sequences
        ordered = list(sequences) if size == 1 else self._longest_first(sequences)
        return [ordered[first : first + size] for first in range(0, len(ordered), size)]

    def _longest_first(self, sequences: Sequence[PackedRows]) -> list[PackedRows]:
        """By length; equal ones in their order."""
        return sorted(sequences, key=lambda rows: -int(self.lengths[list(rows)].sum()))
