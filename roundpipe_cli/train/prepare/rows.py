"""The rows that a recipe names, to train on and to evaluate on, and the order in which they become batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from roundpipe_cli.data.dataset import build_dataset, build_pairs
from roundpipe_cli.data.settings import DataSettings, spec_of
from roundpipe_cli.data.tokenized import (
    Row,
    TokenizedDataset,
    TokenizedRows,
    hold_out,
    same_rows,
)
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice, Say, Tell, tell_notices
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.train.prepare.trainable import (
    same_named,
)

NLL_NOTICE = "orpo: the chosen rows' prompts are trained too, by the likelihood alone (orpo.nll_on_prompt=false: not)"


def data_settings(loaded: LoadedRecipe, offline: bool) -> DataSettings:
    """The recipe's data keys in the data room's terms."""
    recipe = loaded.recipe
    own = {"datasets": tuple(map(spec_of, recipe.datasets)), "folder": loaded.folder, "offline": offline}
    return DataSettings(**same_named(DataSettings, recipe) | own)


def read_rows(
    loaded: LoadedRecipe, tokenizer: Any, offline: bool, tell: Say
) -> tuple[TokenizedDataset, TokenizedRows | None]:
    """The rows to train on; of preference pairs the chosen ones, and the rejected ones beside them."""
    settings = data_settings(loaded, offline)
    if loaded.recipe.trains_pairs:
        chosen = build_pairs(settings, tokenizer, tell)
        if loaded.recipe.nll_on_prompt:
            chosen = replace(chosen, notices=(*chosen.notices, NLL_NOTICE))
        return chosen, chosen.rejected
    return build_dataset(settings, tokenizer, tell), None


def evaluation_rows(
    loaded: LoadedRecipe,
    training: tuple[TokenizedDataset, TokenizedRows | None],
    tokenizer: Any,
    offline: bool,
    *,
    tell: Tell,
) -> tuple[TokenizedDataset, TokenizedRows | None, list[Row]]:
    """The rows left to train on (as `read_rows`), and those to evaluate on: of pairs all chosen ones, then the rejected
    ones in the same order."""
    recipe, (dataset, rejected) = loaded.recipe, training
    rows, rejected_rows = list[Row](), list[Row]()
    if recipe.val_set_size:
        dataset, held = hold_out(dataset, recipe.val_set_size, recipe.seed)
        rejected = dataset.rejected
        rows += held.rows
        rejected_rows += held.rejected or ()
    if recipe.eval_datasets:
        settings = replace(data_settings(loaded, offline), datasets=tuple(map(spec_of, recipe.eval_datasets)))
        if rejected is not None:
            other = build_pairs(settings, tokenizer, lambda text: None)
            rejected_rows += other.rejected or ()
        else:
            other = build_dataset(settings, tokenizer)
        trained = [f"{text}: trained, too" for text in same_rows(other.numbered_sources, dataset.numbered_sources)]
        tell_notices(tell, *(f"evaluation: {text}" for text in (*other.notices, *trained)))
        rows += other.rows
    if rows:
        what = "rows" if rejected is None else "pairs"
        tell(Notice(f"evaluation: {len(rows)} {what}, {len(dataset.rows)} to train on", is_detail=True))
    return dataset, rejected, rows + rejected_rows


def refuse_unknown_ids(
    model: nn.Module, tokenizer: Any, datasets: Sequence[TokenizedRows], eval_rows: Sequence[Row]
) -> None:
    """Raise a RefusedError for data with tokens that the model has no embedding for."""
    found = max([rows.max_id for rows in datasets] + [int(row.input_ids.max()) for row in eval_rows])
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    num_rows = int(table.weight.shape[0])
    if found >= num_rows:
        raise RefusedError(
            "the data has tokens that the model has no embedding for",
            where="datasets",
            found=f"token {found}, {tokenizer.convert_ids_to_tokens(found)!r}",
            expected=f"ids below {num_rows}, the rows of the model's embedding",
            hint="use the tokenizer that the model was made with, or a model whose embedding has a row for each token",
        )


def describe_padded_to_chunks(lengths: npt.NDArray[np.int64], num_chunks: int) -> str | None:
    """Words about rows that are padded because they have fewer tokens than chunks; `lengths`: tokens of each."""
    num_short = int((lengths < num_chunks).sum())
    if not num_short:
        return None
    what = f"{num_short} of {len(lengths)} rows have fewer tokens than pipeline.sequence_chunks: {num_chunks}"
    return f"{what}; each is padded to one token a chunk, which takes as long as longer chunks: use fewer of them"
