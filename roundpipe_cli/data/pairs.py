"""Preference pairs: rows with a chosen and a rejected answer to one prompt (`pair_rows.py` has their shapes).

The rows are read twice, once for each answer; a pair is kept if both were.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.hold_out import hold_out, part_of
from roundpipe_cli.data.report import DataReport, SourceReport, listed
from roundpipe_cli.data.settings import DataSettings, PairAnswer
from roundpipe_cli.data.tokenized import TokenizedDataset, TokenizedRows
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_pairs(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, tell: Say
) -> tuple[TokenizedDataset, TokenizedRows]:
    """The chosen rows as a dataset, and the rejected rows beside them; row i of both is one pair.

    The report counts a row once and the tokens of both answers.

    Raises:
        RefusedError: as `build_dataset`; or no pair is whole.
    """
    chosen = build_dataset(_with_answer(settings, "chosen"), tokenizer, tell)
    rejected = build_dataset(_with_answer(settings, "rejected"), tokenizer, tell)
    _, places, other_places = np.intersect1d(
        chosen.rows.row_ids, rejected.rows.row_ids, assume_unique=True, return_indices=True
    )
    if len(places) == 0:
        raise RefusedError("no row has both a chosen and a rejected completion that can be used", where="datasets")
    rows = rejected.rows.select(other_places.astype(np.int64))
    kept = part_of(chosen, places.astype(np.int64))
    told = set(chosen.notices)
    notices = [*chosen.notices, *(f"rejected: {text}" for text in rejected.notices if text not in told)]
    equal = [kept.where(kept.rows[index].row_id) for index in _equal_pairs(kept.rows, rows)]
    if equal:
        notices.append(
            f"{len(equal)} of {len(rows)} pairs have two equal answers, which prefer nothing (they are kept): "
            f"{listed(equal)}"
        )
    report = _joint_report(chosen.report, rejected.report, kept.rows, rows)
    return replace(_of_pairs(kept, rows), notices=tuple(notices), report=report), rows


def _equal_pairs(chosen: TokenizedRows, rejected: TokenizedRows) -> list[int]:
    """Pairs whose answers have the same tokens: as they stand in the file, or once they are cut."""
    candidates = np.flatnonzero(chosen.lengths == rejected.lengths).tolist()
    return [index for index in candidates if np.array_equal(chosen[index].input_ids, rejected[index].input_ids)]


def hold_out_pairs(
    chosen: TokenizedDataset, rejected: TokenizedRows, size: float, seed: int
) -> tuple[tuple[TokenizedDataset, TokenizedRows], tuple[TokenizedDataset, TokenizedRows]]:
    """Pairs to train on and pairs to evaluate on, each as of `build_pairs`; size and errors as of `hold_out`."""

    def with_rejected(part: TokenizedDataset) -> tuple[TokenizedDataset, TokenizedRows]:
        rows = rejected.select(np.flatnonzero(np.isin(rejected.row_ids, part.rows.row_ids)).astype(np.int64))
        return _of_pairs(part, rows), rows

    kept, held = hold_out(chosen, size, seed)
    return with_rejected(kept), with_rejected(held)


def _of_pairs(chosen: TokenizedDataset, rejected: TokenizedRows) -> TokenizedDataset:
    """The chosen rows with a hash of both sides."""
    both = hashlib.sha256(f"{chosen.content_hash} {rejected.content_hash()}".encode()).hexdigest()
    return replace(chosen, content_hash=both)


def _with_answer(settings: DataSettings, answer: PairAnswer) -> DataSettings:
    return replace(settings, datasets=tuple(replace(spec, answer=answer) for spec in settings.datasets))


def _joint_report(
    chosen: DataReport, rejected: DataReport, kept: TokenizedRows, rejected_kept: TokenizedRows
) -> DataReport:
    """Report on the pairs: a fault of either answer is one of the row."""
    sources = []
    first_id = 0
    for one, other in zip(chosen.sources, rejected.sources, strict=True):
        start, stop = np.searchsorted(kept.row_ids, [first_id, first_id + one.rows_read]).tolist()
        first_id += one.rows_read
        sources.append(_joint_source(one, other, range(start, stop), (kept, rejected_kept)))
    return DataReport(tuple(sources), chosen.long_rows)


def _joint_source(
    chosen: SourceReport, rejected: SourceReport, pairs: range, sides: tuple[TokenizedRows, TokenizedRows]
) -> SourceReport:
    labels = [rows[index].labels for index in pairs for rows in sides]
    counts = (chosen.unused_columns, rejected.unused_columns)
    unused = {name: max(side.get(name, 0) for side in counts) for name in (*counts[0], *counts[1])}
    return replace(
        chosen,
        rows_kept=len(pairs),
        bad_rows=sorted(({**dict(rejected.bad_rows), **dict(chosen.bad_rows)}).items()),
        too_long_rows=_either(chosen.too_long_rows, rejected.too_long_rows),
        untrained_rows=_either(chosen.untrained_rows, rejected.untrained_rows),
        control_token_rows=_either(chosen.control_token_rows, rejected.control_token_rows),
        placeholder_rows=_either(chosen.placeholder_rows, rejected.placeholder_rows),
        unused_columns=unused,
        trained_tokens=sum(_num_trained(row) for row in labels),
        total_tokens=sum(map(len, labels)),
        lost_tokens=chosen.lost_tokens + rejected.lost_tokens,
        longest_row_tokens=max(chosen.longest_row_tokens, rejected.longest_row_tokens),
    )


def _either(places: list[int], others: list[int]) -> list[int]:
    return sorted({*places, *others})


def _num_trained(labels: npt.NDArray[np.int32]) -> int:
    return int(np.count_nonzero(labels[1:] != IGNORED_LABEL))
