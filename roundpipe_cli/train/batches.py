"""From a prepared dataset to the microbatches of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roundpipe_cli.data.batching import BatchSampler, collate, pad_token_id
from roundpipe_cli.engine.engine import Microbatch
from roundpipe_cli.train.setup import Setup


def make_sampler(setup: Setup) -> BatchSampler:
    """Which rows each step has.

    Raises:
        RefusedError: fewer rows than one step takes.
    """
    recipe = setup.recipe
    return BatchSampler(
        len(setup.dataset.rows),
        recipe.micro_batch_size,
        recipe.gradient_accumulation_steps,
        recipe.seed,
        recipe.shuffle,
    )


def make_microbatches(setup: Setup, batches: Sequence[Sequence[int]]) -> tuple[list[Microbatch], int]:
    """Microbatches of the given rows, and the number of their tokens without padding."""
    pad = pad_token_id(setup.tokenizer)
    microbatches = []
    num_tokens = 0
    for indices in batches:
        rows = [setup.dataset.rows[index] for index in indices]
        batch = collate(rows, pad)
        num_tokens += sum(len(row.input_ids) for row in rows)
        microbatches.append(Microbatch(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)))
    return microbatches, num_tokens
