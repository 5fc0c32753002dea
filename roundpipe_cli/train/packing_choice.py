"""The choice of `packing: auto` for a run, from its rows and its model."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from roundpipe_cli.data.tokenized import RowMix, StepNeeds, TokenizedDataset, choose_packing
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice, Tell
from roundpipe_cli.model.chunks import check_packing
from roundpipe_cli.model.files.supported import check_mask_bytes
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.recipe.schema import Recipe


def with_packing(recipe: Recipe, model: nn.Module, split: ModelSplit, dataset: TokenizedDataset, tell: Tell) -> Recipe:
    """The recipe with `packing` decided; `tell` gets the reason."""
    if recipe.packing != "auto":
        return recipe
    weights = [entry.weight for entry in recipe.datasets]
    mix = RowMix(dataset.rows_by_spec, weights, recipe.seed, recipe.shuffle)
    choice = choose_packing(mix, dataset.rows.lengths, step_needs(recipe), _obstacle(recipe, model, split))
    tell(Notice(choice.describe()))
    return replace(recipe, packing=choice.packs)


def step_needs(recipe: Recipe) -> StepNeeds:
    """The recipe's values that decide."""
    length, epochs = recipe.max_seq_length, recipe.num_train_epochs
    return StepNeeds(length, recipe.rows_per_step, epochs, recipe.max_steps, recipe.seed, recipe.shuffle)


def _obstacle(recipe: Recipe, model: nn.Module, split: ModelSplit) -> str | None:
    if recipe.unpackable is not None:
        return recipe.unpackable
    shape = {"max_seq_length": recipe.max_seq_length, "micro_batch_size": recipe.rows_per_microbatch}
    try:
        check_packing(model, split, **shape)
        if recipe.kernels == "reference":  # whose masks are of all pairs of tokens
            check_mask_bytes(**shape)
    except RefusedError as error:
        return error.in_short
    return None
