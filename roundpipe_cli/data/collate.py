"""Rows of a microbatch end to end or side by side, as padded arrays of token ids and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.tokenized import Row


@dataclass(frozen=True, slots=True)
class CollatedBatch:
    """One forward unit of work. B sequences, T tokens of the longest of them; shorter ones are padded on the right."""

    input_ids: npt.NDArray[np.int64]
    """[B, T]"""
    labels: npt.NDArray[np.int64]
    """[B, T], not shifted, -100 where not trained and in the padding."""
    attention_mask: npt.NDArray[np.int64] | None
    """[B, T], 1 for tokens and 0 for padding; None where nothing is padded, and for packed rows."""
    position_ids: npt.NDArray[np.int64] | None
    """[B, T] for packed rows: from 0 in each row, and from 0 in the padding. None: counted from 0 in each sequence."""
    row_ids: tuple[int, ...]
    num_target_tokens: int
    """Labels that the shifted loss counts: those of `labels[:, 1:]` that are not -100."""
    weights: npt.NDArray[np.float32] | None = None
    """[B, T]: each label's factor in the loss; None: 1."""


def collate(sequences: Sequence[Sequence[Row]], pad_token_id: int, *, packed: bool) -> CollatedBatch:
    """Put the rows of each sequence end to end, one where they are not `packed`, and pad on the right to the longest.
    What `pad_token_id` is does not matter: it is masked and not trained.

    input_ids     a0 a1 a2 b0 b1  p  p
    position_ids   0  1  2  0  1  0  1
    labels         x a1 a2  x b1  x  x    a row's first token is never a label: the row before it must not predict it
    """
    lengths = np.array([sum(len(row.input_ids) for row in rows) for rows in sequences])
    shape = (len(sequences), int(lengths.max()))
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
    position_ids, weights = np.empty(shape, dtype=np.int64), np.ones(shape, dtype=np.float32)
    for index, rows in enumerate(sequences):
        end = 0
        for row in rows:
            start, end = end, end + len(row.input_ids)
            input_ids[index, start:end] = row.input_ids
            labels[index, start + packed : end] = row.labels[int(packed) :]
            position_ids[index, start:end] = np.arange(end - start)
            if row.weights is not None:
                weights[index, start:end] = row.weights
        position_ids[index, end:] = np.arange(shape[1] - end)
    is_token = np.arange(shape[1]) < lengths[:, None]
    return CollatedBatch(
        input_ids,
        labels,
        None if packed or is_token.all() else is_token.astype(np.int64),
        position_ids if packed else None,
        tuple(row.row_id for rows in sequences for row in rows),
        int(np.count_nonzero(labels[:, 1:] != IGNORED_LABEL)),
        weights if any(row.weights is not None for rows in sequences for row in rows) else None,
    )


def pad_token_id(tokenizer: object) -> int:
    """A token to pad with: the tokenizer's own, else its EOS, else 0. Its value never marks padding; places do."""
    for name in ("pad_token_id", "eos_token_id"):
        token_id = getattr(tokenizer, name, None)
        if isinstance(token_id, int):
            return token_id
    return 0
