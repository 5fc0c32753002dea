"""The rows that a recipe names: to train on, and to evaluate on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from roundpipe_cli.data.dataset import build_dataset, build_pairs, hold_out_pairs
from roundpipe_cli.data.rows import DatasetSpec, DataSettings, TrainRules
from roundpipe_cli.data.tokenized import Row, TokenizedDataset, TokenizedRows, hold_out
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice, Say, Tell
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import DatasetConfig

NLL_NOTICE = "orpo: the chosen rows' prompts are trained too, by the likelihood alone (orpo.nll_on_prompt=false: not)"


def data_settings(loaded: LoadedRecipe, offline: bool) -> DataSettings:
    """The recipe's data keys in the data room's terms."""
    recipe = loaded.recipe
    return DataSettings(
        datasets=tuple(_spec(dataset) for dataset in recipe.datasets),
        max_seq_length=recipe.max_seq_length,
        train_on_inputs=recipe.train_on_inputs,
        long_rows=recipe.long_rows,
        long_rows_overlap=recipe.long_rows_overlap,
        on_bad_row=recipe.on_bad_row,
        shuffle=recipe.shuffle,
        seed=recipe.seed,
        folder=loaded.folder,
        offline=offline,
        chat_template=recipe.chat_template,
        chat_template_kwargs=recipe.chat_template_kwargs,
    )


def read_rows(
    loaded: LoadedRecipe, tokenizer: Any, offline: bool, tell: Say
) -> tuple[TokenizedDataset, TokenizedRows | None]:
    """The rows to train on; of preference pairs the chosen ones, and the rejected ones beside them.

    Raises:
        RefusedError: see `build_dataset` and `build_pairs`.
    """
    settings = data_settings(loaded, offline)
    if loaded.recipe.trains_pairs:
        chosen, rejected = build_pairs(settings, tokenizer, tell)
        if loaded.recipe.objective == "orpo" and loaded.recipe.orpo.nll_on_prompt:
            chosen = replace(chosen, notices=(*chosen.notices, NLL_NOTICE))
        return chosen, rejected
    return build_dataset(settings, tokenizer, tell), None


def _spec(dataset: DatasetConfig) -> DatasetSpec:
    return DatasetSpec(
        path=dataset.path,
        type="auto" if dataset.type == "preference" else dataset.type,  # `build_pairs` handles pairs
        split=dataset.split,
        name=dataset.name,
        columns={str(key): value for key, value in dataset.columns.items()},
        rules=TrainRules(
            roles_to_train=dataset.roles_to_train,
            turns_to_train=dataset.turns_to_train,
            train_on_eos=dataset.train_on_eos,
            thoughts=dataset.thoughts,
        ),
        as_chat=dataset.as_chat,
        alpaca_join=dataset.alpaca_join,
        txt_rows=dataset.txt_rows,
    )


def evaluation_rows(
    loaded: LoadedRecipe,
    training: tuple[TokenizedDataset, TokenizedRows | None],
    tokenizer: Any,
    offline: bool,
    tell: Tell,
) -> tuple[TokenizedDataset, TokenizedRows | None, list[Row]]:
    """The rows left to train on (as `read_rows`), and those to evaluate on: of pairs all chosen ones, then the rejected
    ones in the same order."""
    recipe, (dataset, rejected) = loaded.recipe, training
    rows: list[Row] = []
    rejected_rows: list[Row] = []
    if recipe.val_set_size and rejected is not None:
        (dataset, rejected), (held, held_rejected) = hold_out_pairs(dataset, rejected, recipe.val_set_size, recipe.seed)
        rows, rejected_rows = [*held.rows], [*held_rejected]
    elif recipe.val_set_size:
        dataset, held = hold_out(dataset, recipe.val_set_size, recipe.seed)
        rows += held.rows
    if recipe.eval_datasets:
        settings = replace(data_settings(loaded, offline), datasets=tuple(map(_spec, recipe.eval_datasets)))
        if rejected is not None:
            other, other_rejected = build_pairs(settings, tokenizer, lambda text: None)
            rejected_rows += other_rejected
        else:
            other = build_dataset(settings, tokenizer)
        for text in other.notices:
            tell(Notice(f"evaluation: {text}"))
        rows += other.rows
    if rows:
        what = "rows" if rejected is None else "pairs"
        tell(Notice(f"evaluation: {len(rows)} {what}, {len(dataset.rows)} to train on"))
    return dataset, rejected, rows + rejected_rows


def longest_row(dataset: TokenizedDataset, rejected: TokenizedRows | None, eval_rows: Sequence[Row]) -> int:
    """Tokens of the longest row."""
    lengths = [int(rows.lengths.max()) for rows in (dataset.rows, rejected) if rows is not None and len(rows)]
    return max([*lengths, *(len(row.input_ids) for row in eval_rows)])


def refuse_unknown_ids(
    model: nn.Module, tokenizer: Any, datasets: Sequence[TokenizedRows], eval_rows: Sequence[Row]
) -> None:
    """Refuse data with tokens that the model has no embedding for.

    Raises:
        RefusedError: the tokenizer is not the model's.
    """
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
