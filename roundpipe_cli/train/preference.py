"""Preference pairs: from rows with prompt, chosen and rejected to microbatches that know their loss.

DPO's reference model is the base model: the same engine with the adapters left out, before each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roundpipe_cli.data.batching import RowBatch, pad_token_id
from roundpipe_cli.data.encode import IGNORED_LABEL
from roundpipe_cli.data.tokenized import Row
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.model.preference import Preference, Rewards
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.batches import collate_rows
from roundpipe_cli.train.evaluate import Scorer
from roundpipe_cli.train.setup import Setup


def make_pairs(setup: Setup, batches: Sequence[RowBatch]) -> tuple[list[Microbatch], int]:
    """Microbatches of a step's pairs, chosen rows first, and the number of their tokens without padding.

    They have their loss, but for DPO's reference: see `add_references`.
    """
    assert setup.rejected is not None
    pad = pad_token_id(setup.tokenizer)
    loss, nll_factor = _loss(setup.recipe)
    microbatches, num_tokens = [], 0
    for batch in batches:
        indices = [index for sequence in batch for index in sequence]
        rows = [setup.dataset.rows[index] for index in indices] + [setup.rejected[index] for index in indices]
        num_tokens += sum(len(row.input_ids) for row in rows)
        microbatch = replace(collate_rows(rows, pad), preference=loss)
        if setup.recipe.objective == "orpo" and setup.recipe.orpo.nll_on_prompt:
            microbatch = with_prompts(microbatch, rows[: len(indices)])
        microbatches.append(microbatch)
    return with_nll(microbatches, nll_factor) if nll_factor else microbatches, num_tokens


def _loss(recipe: Recipe) -> tuple[Preference, float]:
    """The recipe's loss, and the factor of the chosen answers' negative log-likelihood in it."""
    if recipe.objective == "orpo":
        return Preference(None, recipe.orpo.beta, objective="orpo"), 1.0
    if recipe.objective == "simpo":
        own = recipe.simpo
        loss = Preference(None, own.beta, own.label_smoothing, "simpo", simpo_gamma=own.simpo_gamma)
        return loss, own.cpo_alpha
    return Preference(None, recipe.dpo.beta, recipe.dpo.label_smoothing), 0.0


def with_prompts(microbatch: Microbatch, chosen: Sequence[Row]) -> Microbatch:
    """The same with every token of the chosen sequences as a target; which tokens are answers is noted."""
    assert microbatch.preference is not None
    is_answer = microbatch.labels != IGNORED_LABEL
    labels = microbatch.labels.clone()
    for index, row in enumerate(chosen):
        length = len(row.input_ids)
        labels[index, :length] = microbatch.input_ids[index, :length]
    return replace(microbatch, labels=labels, preference=replace(microbatch.preference, is_answer=is_answer))


def with_nll(microbatches: Sequence[Microbatch], factor: float) -> list[Microbatch]:
    """A step's microbatches whose loss has `factor` times the negative log-likelihood of the chosen sequences.

    That is the mean over all their target tokens in the step, whatever the microbatches. As the engine takes the mean
    over pairs of what each microbatch sums up, a token weighs pairs / tokens.
    """
    pairs = tokens = 0
    for microbatch in microbatches:
        chosen = microbatch.labels[: len(microbatch.labels) // 2, 1:]
        pairs, tokens = pairs + len(chosen), tokens + int((chosen != IGNORED_LABEL).sum())
    result = []
    for microbatch in microbatches:
        assert microbatch.preference is not None
        preference = replace(microbatch.preference, nll_weight=factor * pairs / tokens)
        result.append(replace(microbatch, preference=preference))
    return result


def add_references(scorer: Scorer, microbatches: Sequence[Microbatch], step: int) -> list[Microbatch]:
    """The microbatches with the log-probabilities of their sequences under the base model."""
    result = []
    scores = scorer.scores(microbatches, step=step, adapters=False)
    for microbatch, scored in zip(microbatches, scores, strict=True):
        assert microbatch.preference is not None
        preference = replace(microbatch.preference, reference=scored.sequence_sums)
        result.append(replace(microbatch, preference=preference))
    return result


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
    has_nll = any(microbatch.preference is not None and microbatch.preference.nll_weight for microbatch in microbatches)
    return {**metrics, "nll_loss": sum(item.nll for item in rewards) / pairs} if has_nll else metrics
