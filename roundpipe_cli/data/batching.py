"""The order of rows and their grouping into microbatches, each a pure function of (seed, step).

    epoch 0: permutation of all rows ............|  epoch 1: another permutation ...
    step 0: [mb][mb][mb]  step 1: [mb][mb][mb]  step 2: [mb][m]    uneven last step, never across the border

A resumed run needs no saved position: the step number says it all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.dataset import Row
from roundpipe_cli.data.encode import IGNORED_LABEL
from roundpipe_cli.errors import RefusedError


def epoch_order(num_rows: int, epoch: int, seed: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """Which row comes when in an epoch: a permutation of `range(num_rows)`, shape [num_rows].

    Sorted by raw Philox output rather than `Generator.permutation`, whose stream numpy may change between versions.
    """
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    digest = hashlib.sha256(f"roundpipe order 1 {seed} {epoch}".encode()).digest()
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    keys = generator.random_raw(num_rows)
    return np.argsort(np.asarray(keys, dtype=np.uint64), kind="stable").astype(np.int64)


class BatchSampler:
    """Which rows make up each microbatch of each step."""

    def __init__(
        self, num_rows: int, micro_batch_size: int, microbatches_per_step: int, seed: int, shuffle: bool
    ) -> None:
        """
        Raises:
            RefusedError: fewer rows than one step takes.
        """
        self.num_rows = num_rows
        self.micro_batch_size = micro_batch_size
        self.rows_per_step = micro_batch_size * microbatches_per_step
        if num_rows < self.rows_per_step:
            raise RefusedError(
                "the datasets have fewer rows than one step takes",
                where="datasets",
                found=f"{num_rows} rows",
                expected=f"at least {self.rows_per_step}: micro_batch_size {micro_batch_size} x "
                f"gradient_accumulation_steps {microbatches_per_step}",
                hint=f"gradient_accumulation_steps={max(1, num_rows // micro_batch_size)}",
            )
        self.steps_per_epoch = -(-num_rows // self.rows_per_step)
        self._seed = seed
        self._shuffle = shuffle
        self._cached_epoch: int | None = None
        self._cached_order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def step_rows(self, step: int) -> list[list[int]]:
        """The microbatches of step `step` (from 0), each a list of row indices.

        The last step of an epoch may have fewer microbatches, and its last microbatch fewer rows.
        """
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.rows_per_step
        rows = self._order(epoch)[start : start + self.rows_per_step].tolist()
        return [rows[first : first + self.micro_batch_size] for first in range(0, len(rows), self.micro_batch_size)]

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch != self._cached_epoch:
            self._cached_order = epoch_order(self.num_rows, epoch, self._seed, self._shuffle)
            self._cached_epoch = epoch
        return self._cached_order


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward unit of work. B rows, T tokens of the longest of them; shorter ones are padded on the right."""

    input_ids: npt.NDArray[np.int64]
    """[B, T]"""
    labels: npt.NDArray[np.int64]
    """[B, T], not shifted, -100 where not trained and in the padding."""
    attention_mask: npt.NDArray[np.int64] | None
    """[B, T], 1 for tokens and 0 for padding; None where nothing is padded."""
    position_ids: npt.NDArray[np.int64] | None
    """[B, T] for packed rows; None: counted from 0 in each row."""
    row_ids: tuple[int, ...]
    num_target_tokens: int
    """Labels that the shifted loss counts: those of `labels[:, 1:]` that are not -100."""


def collate(rows: Sequence[Row], pad_token_id: int) -> Microbatch:
    """Pad `rows` on the right to the longest. What `pad_token_id` is does not matter: it is masked and not trained."""
    lengths = [len(row.input_ids) for row in rows]
    shape = (len(rows), max(lengths))
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        input_ids[index, :length] = row.input_ids
        labels[index, :length] = row.labels
        attention_mask[index, :length] = 1
    return Microbatch(
        input_ids,
        labels,
        None if min(lengths) == max(lengths) else attention_mask,
        None,
        tuple(row.row_id for row in rows),
        int(np.count_nonzero(labels[:, 1:] != IGNORED_LABEL)),
    )


def pad_token_id(tokenizer: object) -> int:
    """A token to pad with: the tokenizer's own, else its EOS, else 0. Padding is told by position, never by value."""
    for name in ("pad_token_id", "eos_token_id"):
        token_id = getattr(tokenizer, name, None)
        if isinstance(token_id, int):
            return token_id
    return 0
