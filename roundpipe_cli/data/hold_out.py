"""Rows set apart for evaluation: a pure function of the seed, never trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.order import permutation
from roundpipe_cli.data.tokenized import TokenizedDataset
from roundpipe_cli.errors import RefusedError


def held_out_positions(num_rows: int, size: float, seed: int) -> npt.NDArray[np.int64]:
    """Indices of the held-out rows among `num_rows`, ascending.

    Args:
        size: a number of rows, or a fraction below 1 of them, rounded up.
    """
    count = int(size) if size >= 1 else -int(-size * num_rows // 1)
    return np.sort(permutation(num_rows, f"roundpipe held out 1 {seed}")[:count])


def hold_out(dataset: TokenizedDataset, size: float, seed: int) -> tuple[TokenizedDataset, TokenizedDataset]:
    """Rows to train on and rows to evaluate on, both in the order of the files. Arguments as `held_out_positions`.

    All sequences of a row that was split are on one side.

    Raises:
        RefusedError: nothing is left to train on.
    """
    row_ids, row_of = np.unique(dataset.rows.row_ids, return_inverse=True)
    num_rows = len(row_ids)
    held = held_out_positions(num_rows, size, seed)
    if len(held) >= num_rows:
        raise RefusedError(
            "all rows are held out for evaluation, none is left to train on",
            where="val_set_size",
            found=f"{len(held)} of {num_rows} rows",
            expected=f"less than {num_rows}",
        )
    is_held = np.isin(row_of, held)
    return part_of(dataset, np.flatnonzero(~is_held)), part_of(dataset, np.flatnonzero(is_held))


def part_of(dataset: TokenizedDataset, positions: npt.NDArray[np.int64]) -> TokenizedDataset:
    """The rows of `dataset` at these ascending positions, as a dataset of their own."""
    rows = dataset.rows.select(positions)
    borders = np.cumsum([0, *dataset.rows_by_spec])
    by_spec = np.diff(np.searchsorted(positions, borders))
    return replace(
        dataset,
        rows=rows,
        content_hash=rows.content_hash(),
        rows_by_spec=tuple(int(count) for count in by_spec),
    )
