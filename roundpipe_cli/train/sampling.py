"""The order in which a run's rows become batches."""

from __future__ import annotations

from roundpipe_cli.data.batching import BatchSampler
from roundpipe_cli.data.order import RowMix
from roundpipe_cli.data.packing import Packer
from roundpipe_cli.data.tokenized import TokenizedDataset
from roundpipe_cli.recipe.schema import Recipe


def rows_of_steps(recipe: Recipe, dataset: TokenizedDataset) -> BatchSampler:
    """The sampler of a recipe's rows.

    Raises:
        RefusedError: fewer rows than one step takes.
    """
    weights = [entry.weight for entry in recipe.datasets]
    mix = RowMix(dataset.rows_by_spec, weights, recipe.seed, recipe.shuffle)
    lengths = dataset.rows.lengths
    packer = Packer(lengths, recipe.max_seq_length, recipe.seed, recipe.shuffle) if recipe.packing else None
    return BatchSampler(mix, recipe.micro_batch_size, recipe.gradient_accumulation_steps, packer)
