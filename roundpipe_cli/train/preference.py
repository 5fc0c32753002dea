"""Preference pairs: from rows with prompt, chosen and rejected answer to microbatches with their loss.

The reference model of an objective that has one is the base model, or the adapter that is trained further as it was:
the same engine with the adapters left out, or with their first weights, before each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.batching import RowBatch
from roundpipe_cli.data.collate import pad_token_id
from roundpipe_cli.data.tokenized import Row
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.model.head import map_tensors
from roundpipe_cli.model.pair_loss import Preference, Rewards, pair_loss
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.batches import collate_rows
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.steps import grouping_of
from roundpipe_cli.train.prepare.trainable import same_named
from roundpipe_cli.train.scoring import Scorer


def make_pairs(setup: Setup, batches: Sequence[RowBatch]) -> tuple[list[Microbatch], int]:
    """Microbatches of a step's pairs, chosen rows first, with their loss (but see `add_references`), and the number of
    their tokens without padding."""
    assert setup.rejected is not None
    parts = [[index for sequence in batch for index in sequence] for batch in batches]
    return _collated(
        setup,
        [[rows[index] for rows in (setup.dataset.rows, setup.rejected) for index in indices] for indices in parts],
    )


def _collated(setup: Setup, parts: Sequence[Sequence[Row]]) -> tuple[list[Microbatch], int]:
    """Microbatches with their loss, and the number of their tokens; `parts`: rows of each, the chosen ones first."""
    pad = pad_token_id(setup.tokenizer)
    loss, nll_factor = _loss(setup.recipe)
    microbatches, num_tokens = [], 0
    for rows in parts:
        num_tokens += sum(len(row.input_ids) for row in rows)
        microbatch = replace(collate_rows(rows, pad), preference=loss)
        if setup.recipe.nll_on_prompt:
            microbatch = with_prompts(microbatch, rows[: len(rows) // 2])
        microbatches.append(microbatch)
    if nll_factor:
        microbatches = with_nll(microbatches, nll_factor, by_answer=setup.recipe.nll_on_prompt is False)
    return microbatches, num_tokens


def _loss(recipe: Recipe) -> tuple[Preference, float]:
    """The recipe's loss, and the factor of the chosen answers' negative log-likelihood in it."""
    settings, factor = recipe.loss_settings, recipe.objective_kind.nll_factor
    loss = Preference(objective=recipe.objective, **same_named(Preference, settings))
    return loss, getattr(settings, factor) if isinstance(factor, str) else factor


def with_prompts(microbatch: Microbatch, chosen: Sequence[Row]) -> Microbatch:
    """The microbatch with every token of the chosen sequences as a target; which tokens are answers is noted."""
    assert microbatch.preference is not None
    is_answer = microbatch.labels != IGNORED_LABEL
    labels = microbatch.labels.clone()
    for index, row in enumerate(chosen):
        length = len(row.input_ids)
        labels[index, :length] = microbatch.input_ids[index, :length]
    return replace(microbatch, labels=labels, preference=replace(microbatch.preference, is_answer=is_answer))


def with_nll(microbatches: Sequence[Microbatch], factor: float, *, by_answer: bool) -> list[Microbatch]:
    """A step's microbatches whose loss, of which the engine takes the mean over pairs, has `factor` times the negative
    log-likelihood of the chosen sequences.

    Args:
        by_answer: the mean over pairs of each sequence's mean; otherwise the mean over all target tokens of the step,
            whatever the microbatches.
    """
    chosen = [microbatch.labels[: len(microbatch.labels) // 2, 1:] for microbatch in microbatches]
    counts = [(labels != IGNORED_LABEL).sum(dim=1).double().clamp(min=1) for labels in chosen]
    mean = torch.cat(counts).mean()
    result = []
    for microbatch, count in zip(microbatches, counts, strict=True):
        assert microbatch.preference is not None
        weights = torch.zeros(len(microbatch.labels), dtype=torch.float64)
        weights[: len(count)] = factor / (count if by_answer else mean)
        result.append(replace(microbatch, preference=replace(microbatch.preference, nll_weights=weights)))
    return result


def add_references(scorer: Scorer, microbatches: Sequence[Microbatch], step: int) -> list[Microbatch]:
    """The microbatches with the log-probabilities of their sequences under the reference model."""
    result = []
    scores = scorer.scores(microbatches, step=step, reference=True)
    for microbatch, scored in zip(microbatches, scores, strict=True):
        assert microbatch.preference is not None
        preference = replace(microbatch.preference, reference=scored.sequence_sums)
        result.append(replace(microbatch, preference=preference))
    return result


def score_pairs(setup: Setup, scorer: Scorer, step: int) -> tuple[float, int, dict[str, float]]:
    """The mean loss of the evaluation pairs, the number of their target tokens, and their rewards as `pair_metrics`."""
    half = len(setup.eval_rows) // 2
    chosen, rejected = setup.eval_rows[:half], setup.eval_rows[half:]
    longer = [max(len(one.input_ids), len(two.input_ids)) for one, two in zip(chosen, rejected, strict=True)]
    batches = grouping_of(setup.recipe, np.array(longer, dtype=np.int64)).group([(index,) for index in range(half)])
    parts = [[rows[index] for rows in (chosen, rejected) for (index,) in batch] for batch in batches]
    microbatches, _ = _collated(setup, parts)
    if setup.recipe.objective_kind.needs_reference:
        microbatches = add_references(scorer, microbatches, step)
    loss, tokens, rewards = 0.0, 0, []
    for microbatch, scored in zip(microbatches, scorer.scores(microbatches, step=step), strict=True):
        assert microbatch.preference is not None
        (targets,) = (microbatch.labels[:, 1:] != IGNORED_LABEL).flatten().nonzero(as_tuple=True)
        indices = targets + targets // (microbatch.labels.shape[1] - 1)  # of B * T, where each row has a last token
        preference = map_tensors(microbatch.preference, lambda tensor: tensor.cpu())
        rows, length = microbatch.labels.shape
        loss_sum, _, sums = pair_loss(scored.log_probabilities.cpu(), indices, (rows, length), preference)
        loss += float(loss_sum)
        tokens += len(targets)
        rewards.append(Rewards.of(sums))
    return loss / half, tokens, pair_metrics(rewards, microbatches)


def pair_metrics(rewards: Sequence[Rewards], microbatches: Sequence[Microbatch]) -> dict[str, float]:
    """Keys of metrics.jsonl beside those of every step; means over the pairs of the step."""
    pairs = sum(len(microbatch.labels) // 2 for microbatch in microbatches)
    chosen, rejected = sum(item.chosen for item in rewards), sum(item.rejected for item in rewards)
    metrics = {
        "rewards_chosen": chosen / pairs,
        "rewards_rejected": rejected / pairs,
        "reward_margin": (chosen - rejected) / pairs,
        "reward_accuracy": sum(item.num_right for item in rewards) / pairs,
    }
    first = microbatches[0].preference
    if first is not None and first.nll_weights is not None:
        metrics["nll_loss"] = sum(item.nll for item in rewards) / pairs
    return metrics
