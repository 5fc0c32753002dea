"""The rows that a recipe names, to train on and to evaluate on, and the order in which they become batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from roundpipe_cli.data.batching import BatchSampler, Grouping
from roundpipe_cli.data.dataset import build_dataset, build_pairs
from roundpipe_cli.data.settings import DatasetSpec, DataSettings, TrainRules
from roundpipe_cli.data.tokenized import (
    Packer,
    Row,
    RowMix,
    TokenizedDataset,
    TokenizedRows,
    hold_out,
    same_rows,
)
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice, Say, Tell, tell_notices
from roundpipe_cli.planning.token_budget import MIN_MICROBATCHES
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import DatasetConfig, Recipe
from roundpipe_cli.train.prepare.trainable import (
    same_named,
)


def mix_of(recipe: Recipe, dataset: TokenizedDataset) -> RowMix:
    """The rows of the recipe's epochs."""
    weights = [entry.weight for entry in recipe.datasets]
    return RowMix(dataset.rows_by_spec, weights, recipe.seed, recipe.shuffle)


NLL_NOTICE = "orpo: the chosen rows' prompts are trained too, by the likelihood alone (orpo.nll_on_prompt=false: not)"


def data_settings(loaded: LoadedRecipe, offline: bool) -> DataSettings:
    """The recipe's data keys in the data room's terms."""
    recipe = loaded.recipe
    own = {"datasets": tuple(map(_spec, recipe.datasets)), "folder": loaded.folder, "offline": offline}
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


def _spec(dataset: DatasetConfig) -> DatasetSpec:
    own = {
        "type": "auto" if dataset.type == "preference" else dataset.type,  # `build_pairs` handles pairs
        "columns": {str(key): value for key, value in dataset.columns.items()},
        "rules": TrainRules(**same_named(TrainRules, dataset)),
    }
    return DatasetSpec(**same_named(DatasetSpec, dataset) | own)


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
        settings = replace(data_settings(loaded, offline), datasets=tuple(map(_spec, recipe.eval_datasets)))
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


def grouping_of(recipe: Recipe, lengths: npt.NDArray[np.int64]) -> Grouping:
    """How sequences become microbatches; `lengths`: tokens of each row; of a pair, of its longer answer."""
    num_rows, least = recipe.rows_per_microbatch, min(MIN_MICROBATCHES, recipe.microbatches_per_step)
    tokens = None if recipe.token_budget is None else num_rows * recipe.max_seq_length
    return Grouping(lengths, num_rows, tokens, least)


def rows_of_steps(recipe: Recipe, dataset: TokenizedDataset, rejected: TokenizedRows | None = None) -> BatchSampler:
    """The sampler of a recipe's rows; of preference pairs, of those in `dataset` and the `rejected` ones beside them.

    Raises:
        RefusedError: fewer rows than one step takes.
    """
    mix, lengths = mix_of(recipe, dataset), dataset.rows.lengths
    packer = Packer(lengths, recipe.max_seq_length, recipe.seed, recipe.shuffle) if recipe.packs else None
    padded = lengths if rejected is None else np.maximum(lengths, rejected.lengths)
    grouping = grouping_of(recipe, padded)
    return BatchSampler(mix, recipe.micro_batch_size, recipe.gradient_accumulation_steps, packer, grouping=grouping)
