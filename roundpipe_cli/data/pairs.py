"""Preference pairs: rows with `prompt`, `chosen` and `rejected`.

The rows are read twice, as prompts with the chosen and with the rejected completion, each under the rules of type
prompt_completion; a pair is kept if both were.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from roundpipe_cli.data.dataset import Tell, TokenizedDataset, TokenizedRows, build_dataset
from roundpipe_cli.data.hold_out import part_of
from roundpipe_cli.data.settings import DataSettings
from roundpipe_cli.errors import RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_pairs(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, tell: Tell
) -> tuple[TokenizedDataset, TokenizedRows]:
    """The chosen rows as a dataset, and the rejected rows beside them; row i of both is one pair.

    Raises:
        RefusedError: as `build_dataset`; or no pair is whole.
    """
    chosen, rejected = (
        build_dataset(_with_completion(settings, field), tokenizer, tell) for field in ("chosen", "rejected")
    )
    _, places, other_places = np.intersect1d(
        chosen.rows.row_ids, rejected.rows.row_ids, assume_unique=True, return_indices=True
    )
    if len(places) == 0:
        raise RefusedError("no row has both a chosen and a rejected completion that can be used", where="datasets")
    rows = rejected.rows.select(other_places.astype(np.int64))
    kept = part_of(chosen, places.astype(np.int64))
    both = hashlib.sha256(f"{kept.content_hash} {rows.content_hash()}".encode()).hexdigest()
    notices = (*chosen.notices, *(f"rejected: {text}" for text in rejected.notices))
    return replace(kept, content_hash=both, notices=tuple(dict.fromkeys(notices))), rows


def _with_completion(settings: DataSettings, field: str) -> DataSettings:
    specs = []
    for spec in settings.datasets:
        columns = {"prompt": spec.columns.get("prompt", "prompt"), "completion": spec.columns.get(field, field)}
        specs.append(replace(spec, type="prompt_completion", columns=columns))
    return replace(settings, datasets=tuple(specs))
