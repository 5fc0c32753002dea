"""The order in which a run's rows become batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.batching import BatchSampler, Grouping
from roundpipe_cli.data.tokenized import Packer, RowMix, TokenizedDataset, TokenizedRows
from roundpipe_cli.recipe.schema import Recipe


def grouping_of(recipe: Recipe, lengths: npt.NDArray[np.int64], num_rows: int | None = None) -> Grouping:
    """How sequences become microbatches.

    Args:
        lengths: tokens of each row; of a pair, of its longer answer.
        num_rows: of `max_seq_length` tokens in a microbatch; None: as the recipe says.
    """
    num_rows = num_rows or recipe.rows_per_microbatch
    return Grouping(lengths, num_rows, None if recipe.token_budget is None else num_rows * recipe.max_seq_length)


def rows_of_steps(recipe: Recipe, dataset: TokenizedDataset, rejected: TokenizedRows | None = None) -> BatchSampler:
    """The sampler of a recipe's rows.

    Args:
        rejected: beside the rows of `dataset`, of preference pairs.

    Raises:
        RefusedError: fewer rows than one step takes.
    """
    weights = [entry.weight for entry in recipe.datasets]
    mix = RowMix(dataset.rows_by_spec, weights, recipe.seed, recipe.shuffle)
    lengths = dataset.rows.lengths
    packer = Packer(lengths, recipe.max_seq_length, recipe.seed, recipe.shuffle) if recipe.packs else None
    padded = lengths if rejected is None else np.maximum(lengths, rejected.lengths)
    grouping = grouping_of(recipe, padded)
    return BatchSampler(mix, recipe.micro_batch_size, recipe.gradient_accumulation_steps, packer, grouping)
