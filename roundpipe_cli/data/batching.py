"""From an epoch's order to the microbatches of each step, from a position that is saved and restored as it is.

    epoch 0: |window 0: sequences ......|window 1: ......|  epoch 1: |window 0 ...
    step 0: [mb][mb][mb]  step 1: [mb][mb][mb]  step 2: [mb][m]    uneven last step, never across an epoch's border

A sequence is one row, or with packing as many rows of a window as fit. The position (epoch, window, offset) says where
the next step begins; it does not depend on workers, and the windows before it are never looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.tokenized import WINDOW_ROWS, Packer, RowMix, SequenceRows
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.units import counted

# Groups a step's sequences of similar length into microbatches, so that little is padded.
#
#     a step's rows    [ 40 300  90 310  50  80]          in the order of the epoch
#     microbatches     [310 300] [90 80] [50 40]          two sequences each; the longest first
#                      padded to 310      90      50
#
# or, with 400 tokens      [310] [300] [90 80 50 40]      as many as fit when padded; then evened out: no fewer
#                                                         microbatches would do, and none is longer than it must be
#
# The rows of a step stay the same, so its loss differs by rounding only. The grouping depends on
# nothing but the lengths of the step's rows. Where they are short, a step still has as many microbatches as a fixed
# number asks, so that several workers have work.

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
    least: int = 1
    """Microbatches that a step keeps where its sequences are so short that tokens would ask for fewer."""

    def group(self, sequences: Sequence[SequenceRows]) -> list[RowBatch]:
        """The microbatches of these sequences, the longest first; in their own order where each stands alone."""
        size = self.num_sequences
        if self.max_tokens is not None and sequences:
            ordered = self._longest_first(sequences)
            lengths = [self._tokens(sequence) for sequence in ordered]
            ranges = _halved(_filled(lengths, self.max_tokens), lengths, self.least)
            return [ordered[first:last] for first, last in ranges]
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
    """Ranges of sequences, each as full as it can be; all sequences of one are padded to its first."""
    ranges, first = [], 0
    while first < len(lengths):
        last = min(len(lengths), first + max(1, max_tokens // lengths[first]))
        ranges.append((first, last))
        first = last
    return ranges


def _halved(ranges: list[tuple[int, int]], lengths: Sequence[int], least: int) -> list[tuple[int, int]]:
    """The ranges, the largest of them halved until there are `least`, or each has one sequence."""
    while len(ranges) < min(least, len(lengths)):
        sizes = [lengths[first] * (last - first) if last - first > 1 else 0 for first, last in ranges]
        index = sizes.index(max(sizes))
        first, last = ranges[index]
        middle = (first + last + 1) // 2
        ranges[index : index + 1] = [(first, middle), (middle, last)]
    return ranges


@dataclass(frozen=True, slots=True)
class Position:
    """The place in the data at which the next step begins."""

    epoch: int = 0
    window: int = 0
    """Window of `WINDOW_ROWS` rows of the epoch's order."""
    offset: int = 0
    """Sequences of the window that were already trained."""

    @property
    def starts_epoch(self) -> bool:
        """Whether it is the first of an epoch."""
        return self.window == self.offset == 0

    def to_json(self) -> dict[str, int]:
        return {"epoch": self.epoch, "window": self.window, "offset": self.offset}


class BatchSampler:
    """Chooses the rows of each microbatch, step after step."""

    def __init__(
        self,
        mix: RowMix,
        micro_batch_size: int,
        microbatches_per_step: int,
        packer: Packer | None = None,
        *,
        grouping: Grouping | None = None,
    ) -> None:
        """
        Args:
            packer: packs the rows of a window; None: a sequence is one row.
            grouping: makes microbatches of a step's sequences; None: `micro_batch_size` at a time, in order.

        Raises:
            RefusedError: fewer rows than one step takes.
        """
        self.position = Position()
        self.mix = mix
        self._packer, self.grouping = packer, grouping
        self._micro_batch_size = micro_batch_size
        self._sequences_per_step = micro_batch_size * microbatches_per_step
        self._num_windows = -(-mix.rows_per_epoch // WINDOW_ROWS)
        self._sequences = lru_cache(maxsize=1)(self._made_sequences)
        self._refuse_too_few(microbatches_per_step)

    def seek(self, position: Position) -> None:
        """Continue from a saved position; if rows are missing and it no longer exists, at the end of its epoch."""
        self.position = self._existing(position)

    def _existing(self, position: Position) -> Position:
        """The position, or the end of its epoch where the epoch has no sequences from there on."""
        last = self._num_windows - 1
        is_beyond = position.window > last or (
            position.window == last and position.offset >= len(self._sequences(position.epoch, last))
        )
        return Position(position.epoch + 1) if is_beyond else position

    def position_after(self, num_epochs: float) -> Position:
        """The position after so many epochs, the inverse of `epochs_done` to the nearest sequence."""
        epoch, per_epoch = int(num_epochs), self.mix.rows_per_epoch
        rows = (num_epochs - epoch) * per_epoch
        window = min(int(rows / WINDOW_ROWS), self._num_windows - 1)
        first = window * WINDOW_ROWS
        count = len(self._sequences(epoch, window))
        offset = round((rows - first) / min(WINDOW_ROWS, per_epoch - first) * count)
        return self._existing(Position(epoch, window, offset) if offset < count else Position(epoch, window + 1))

    def next_step(self) -> list[RowBatch]:
        """The microbatches of the next step; the position moves on behind them.

        The last step of an epoch may have fewer sequences.
        """
        epoch, window, offset = self.position.epoch, self.position.window, self.position.offset
        taken: list[SequenceRows] = []
        while len(taken) < self._sequences_per_step and window < self._num_windows:
            sequences = self._sequences(epoch, window)
            part = sequences[offset : offset + self._sequences_per_step - len(taken)]
            taken += part
            offset += len(part)
            if offset >= len(sequences):
                window, offset = window + 1, 0
        self.position = Position(epoch + 1) if window == self._num_windows else Position(epoch, window, offset)
        if self.grouping is not None:
            return self.grouping.group(taken)
        size = self._micro_batch_size
        return [taken[first : first + size] for first in range(0, len(taken), size)]

    def steps_ahead(self, count: int) -> list[list[RowBatch]]:
        """The microbatches of the next steps, which stay the next."""
        position = self.position
        steps = [self.next_step() for _ in range(count)]
        self.position = position
        return steps

    @property
    def epochs_done(self) -> float:
        """Epochs up to the position, with the part of one that is done."""
        at, per_epoch = self.position, self.mix.rows_per_epoch
        rows = float(at.window * WINDOW_ROWS)
        if at.offset:
            rows += at.offset / len(self._sequences(at.epoch, at.window)) * min(WINDOW_ROWS, per_epoch - rows)
        return at.epoch + rows / per_epoch

    def num_steps(self, num_epochs: int, since: Position | None = None) -> int:
        """Steps from `since`, None being the start, to the end of so many epochs; below 0 where it is behind that end.

        With packing each epoch is packed to count its sequences.
        """
        at = self._existing(since or Position())
        if at.starts_epoch:
            return self._steps_of(range(at.epoch, num_epochs)) - self._steps_of(range(num_epochs, at.epoch))
        done = at.offset + self._sequences_before(at)
        if at.epoch >= num_epochs:
            return -self._steps_of(range(num_epochs, at.epoch)) - -(-done // self._sequences_per_step)
        rest = self.num_sequences(at.epoch) - done
        return -(-rest // self._sequences_per_step) + self._steps_of(range(at.epoch + 1, num_epochs))

    def _sequences_before(self, at: Position) -> int:
        """Sequences of the whole windows before a position in its epoch."""
        if self._packer is None:
            return at.window * WINDOW_ROWS
        return sum(len(self._sequences(at.epoch, window)) for window in range(at.window))

    def _steps_of(self, epochs: range) -> int:
        """Steps of whole epochs."""
        return sum(-(-self.num_sequences(epoch) // self._sequences_per_step) for epoch in epochs)

    def num_sequences(self, epoch: int) -> int:
        """Sequences of an epoch."""
        if self._packer is None:
            return self.mix.rows_per_epoch
        return sum(len(self._sequences(epoch, window)) for window in range(self._num_windows))

    def _made_sequences(self, epoch: int, window: int) -> list[SequenceRows]:
        rows = self.mix.order(epoch)[window * WINDOW_ROWS : (window + 1) * WINDOW_ROWS]
        if self._packer is None:
            return [(row,) for row in rows.tolist()]
        return self._packer.pack(rows, epoch, window)

    def _refuse_too_few(self, microbatches_per_step: int) -> None:
        needed, size, found = self._sequences_per_step, self._micro_batch_size, 0
        for window in range(self._num_windows):
            found += len(self._sequences(0, window)) if found < needed else 0
        if found < needed:
            rows, packed = self.mix.rows_per_epoch, self._packer is not None
            fewer = f"gradient_accumulation_steps={max(1, found // size)}"
            fewer += "" if found >= size else f" micro_batch_size={found}"
            raise RefusedError(
                "the datasets have fewer rows than one step takes",
                where="datasets",
                found=counted(rows, "row") + (f", packed into {counted(found, 'sequence')}" if packed else ""),
                expected=f"at least {needed}: micro_batch_size {size} x "
                f"gradient_accumulation_steps {microbatches_per_step}",
                hint=fewer + (" or packing=false" if packed and rows >= needed else ""),
            )
