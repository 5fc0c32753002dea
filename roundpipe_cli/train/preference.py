"""Preference pairs: from rows with prompt, chosen and rejected to microbatches with reference log-probabilities.

The reference model is the base model: the same engine with the adapters left out, before each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roundpipe_cli.data.batching import RowBatch, pad_token_id
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.model.preference import Preference, Rewards
from roundpipe_cli.recipe.schema import DpoConfig
from roundpipe_cli.train.batches import collate_rows
from roundpipe_cli.train.evaluate import Scorer
from roundpipe_cli.train.setup import Setup


def make_pairs(setup: Setup, batches: Sequence[RowBatch]) -> tuple[list[Microbatch], int]:
    """Microbatches of the given pairs, chosen rows first, and the number of their tokens without padding."""
    assert setup.rejected is not None
    pad = pad_token_id(setup.tokenizer)
    microbatches, num_tokens = [], 0
    for batch in batches:
        indices = [index for sequence in batch for index in sequence]
        rows = [setup.dataset.rows[index] for index in indices] + [setup.rejected[index] for index in indices]
        num_tokens += sum(len(row.input_ids) for row in rows)
        microbatches.append(collate_rows(rows, pad))
    return microbatches, num_tokens


def add_references(
    options: DpoConfig, scorer: Scorer, microbatches: Sequence[Microbatch], step: int
) -> list[Microbatch]:
    """The microbatches with the log-probabilities of their sequences under the base model."""
    result = []
    scores = scorer.scores(microbatches, step=step, adapters=False)
    for microbatch, scored in zip(microbatches, scores, strict=True):
        preference = Preference(scored.sequence_sums, options.beta, options.label_smoothing)
        result.append(replace(microbatch, preference=preference))
    return result


def pair_metrics(rewards: Sequence[Rewards], microbatches: Sequence[Microbatch]) -> dict[str, float]:
    """Keys of metrics.jsonl beside those of every step; means over the pairs of the step."""
    pairs = sum(len(microbatch.labels) // 2 for microbatch in microbatches)
    chosen, rejected = sum(item.chosen for item in rewards), sum(item.rejected for item in rewards)
    return {
        "rewards_chosen": chosen / pairs,
        "rewards_rejected": rejected / pairs,
        "reward_margin": (chosen - rejected) / pairs,
        "reward_accuracy": sum(item.num_right for item in rewards) / pairs,
    }
