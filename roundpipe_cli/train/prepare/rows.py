"""The rows that a recipe names, to train on and to evaluate on, and the order in which they become batches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.rows import DataReport
from roundpipe_cli.data.settings import DataSettings, errors_of, spec_of
from roundpipe_cli.data.teacher import Teacher, find_teacher, open_teacher, template_hash, vocabulary_hash
from roundpipe_cli.data.tokenized import Row, TokenizedDataset, TokenizedRows, hold_out, same_rows
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice, Phase, Say, Tell, tell_notices
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.new_tokens import load_with_tokens
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import LENGTH_KEY, Recipe
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.train.prepare.trainable import same_named
from roundpipe_cli.units import counted

UNCUT = sys.maxsize
"""`max_seq_length` where rows are as long as they are."""
NLL_NOTICE = "orpo: the chosen rows' prompts are trained too, by the likelihood alone (orpo.nll_on_prompt=false: not)"


def data_settings(loaded: LoadedRecipe, offline: bool, key: str) -> DataSettings:
    """The recipe's data keys in the data room's terms; `key`: `datasets`, or `eval_datasets`, those to evaluate on."""
    recipe = loaded.recipe
    specs = tuple(spec_of(entry, recipe.objective_kind.example) for entry in getattr(recipe, key))
    is_whole = recipe.max_seq_length == "auto" or loaded.length_note is not None  # the same tokens in the cache
    own: dict[str, Any] = {"datasets": specs, "folder": loaded.folder, "offline": offline}
    own[LENGTH_KEY] = UNCUT if is_whole else recipe.row_tokens
    return DataSettings(**same_named(DataSettings, recipe) | own)


def _build(
    loaded: LoadedRecipe, key: str, tokenizer: Any, *, offline: bool, tell: Say | None = None
) -> TokenizedDataset:
    with errors_of(key):
        return build_dataset(data_settings(loaded, offline, key), tokenizer, tell)


def with_row_length(loaded: LoadedRecipe, source: ModelSource, *, offline: bool, tell: Tell) -> LoadedRecipe:
    """The recipe with `max_seq_length: auto` decided by its rows, which are read: before anything is planned.

    Raises:
        RefusedError: see `build_dataset`.
        ContradictionError: keys that do not go with rows of this length.
    """
    recipe = loaded.recipe
    if recipe.max_seq_length != "auto":
        return loaded
    tell(Phase("tokenising the data, for its longest row"))
    tokenizer, _ = load_with_tokens(source, recipe.add_tokens)
    keys = ("datasets", "eval_datasets") if recipe.eval_datasets else ("datasets",)
    found = [_build(loaded, key, tokenizer, offline=offline) for key in keys]
    longest = max(found, key=lambda one: int(one.lengths.max()))
    row, tokens = int(longest.lengths.argmax()), int(longest.lengths.max())
    loaded = loaded.with_row_tokens(tokens, f"the longest row, {longest.where(longest.rows.row_ids[row])}")
    tell_notices(tell, loaded.length_note)
    return loaded


def read_rows(loaded: LoadedRecipe, tokenizer: Any, offline: bool, tell: Say) -> TokenizedDataset:
    """The rows to train on."""
    dataset = _build(loaded, "datasets", tokenizer, offline=offline, tell=tell)
    more = [NLL_NOTICE] if loaded.recipe.nll_on_prompt else []
    if loaded.recipe.objective_kind.rows.figure == "label":
        more = [describe_labels(loaded.recipe, dataset.report)]
    return replace(dataset, notices=(*dataset.notices, *more))


def read_teacher(
    loaded: LoadedRecipe, dataset: TokenizedDataset, tokenizer: Any, num_tokens: int | None = None
) -> Teacher | None:
    """The teacher's figures, of all rows to train on; None: the objective has no teacher.

    Args:
        num_tokens: of the student's vocabulary; None: the figures are only checked.

    Raises:
        RefusedError: they are not whole, or of other rows, or another tokenizer's.
    """
    recipe = loaded.recipe
    if not recipe.objective_kind.needs_teacher:
        return None
    copy_to = None if num_tokens is None else named_path(recipe.output_dir)
    folder, header = find_teacher(recipe.distill.teacher, loaded.folder)
    own: dict[str, Any] = {"vocabulary_hash": vocabulary_hash(tokenizer)}
    own["template_hash"] = template_hash(dataset.chat_template)
    own[LENGTH_KEY] = recipe.row_tokens
    others = [key for key, value in own.items() if header.get(key) != value]
    teacher = open_teacher(folder, header, num_tokens=num_tokens or sys.maxsize, copy_to=copy_to)
    lacking = teacher.lacking(dataset.rows)
    if not lacking and "vocabulary_hash" not in others:
        return teacher
    such = f", such as {dataset.where(lacking[0].row_id)}" if lacking else ""
    found = f"{counted(len(lacking), 'row')} without scores{such}; what differs: {', '.join(others) or 'the tokens'}"
    what, hint = "the teacher's scores are not of these rows", "score them by this recipe, model=TEACHER"
    expected = "the same vocabulary, tokens and trained places"
    raise RefusedError(what, where=str(folder), found=found, expected=expected, hint=hint)


def describe_labels(recipe: Recipe, report: DataReport) -> str:
    """The numbers of wanted and unwanted answers, with what balances them where they do not by the rule of KTO's
    authors: the factors times the numbers are as 1 to 4/3 to 1."""
    unwanted, settings = report.unwanted_rows, recipe.loss_settings
    wanted = report.rows_kept - unwanted
    text = f"{recipe.objective}: {wanted} wanted and {unwanted} unwanted answers"
    factors = [getattr(settings, f"{name}_weight", 1.0) for name in ("desirable", "undesirable")]
    if not wanted or not unwanted:
        return f"warning: {text}: the model only moves {'to' if wanted else 'away from'} them, as nothing is compared"
    if 1 <= factors[0] * wanted / max(factors[1] * unwanted, 1e-9) <= 4 / 3:
        return text
    rarer, share = ("desirable", unwanted / wanted) if wanted < unwanted else ("undesirable", wanted / unwanted)
    return f"{text}; {recipe.objective}.{rarer}_weight={share:.3g} balances them"


def evaluation_rows(
    loaded: LoadedRecipe, dataset: TokenizedDataset, tokenizer: Any, offline: bool, *, tell: Tell
) -> tuple[TokenizedDataset, list[Row]]:
    """The rows left to train on, and those to evaluate on: of pairs all chosen ones, then the rejected ones in the same
    order."""
    recipe, parts = loaded.recipe, list[TokenizedDataset]()
    if recipe.val_set_size:
        dataset, held = hold_out(dataset, recipe.val_set_size, recipe.seed)
        parts.append(held)
    if recipe.eval_datasets:
        other = _build(loaded, "eval_datasets", tokenizer, offline=offline)
        parts.append(other)
        trained = [f"{text}: trained, too" for text in same_rows(other.numbered_sources, dataset.numbered_sources)]
        tell_notices(tell, *(f"evaluation: {text}" for text in (*other.notices, *trained)))
    if parts:
        count = counted(sum(len(part.rows) for part in parts), recipe.objective_kind.rows.noun.removesuffix("s"))
        tell(Notice(f"evaluation: {count}, {len(dataset.rows)} to train on", is_detail=True))
    return dataset, [row for side in range(len(dataset.sides)) for part in parts for row in part.sides[side]]


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
