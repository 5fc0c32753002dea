"""Answers that are scored as wholes, such as preference pairs: from rows to microbatches with their loss.

The reference model of an objective that has one is the base model, or the adapter that is trained further as it was:
the same engine with the adapters left out, or with their first weights, before each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.batching import RowBatch
from roundpipe_cli.data.collate import pad_token_id
from roundpipe_cli.data.tokenized import Row
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.model.head import map_tensors, target_rows
from roundpipe_cli.model.sequence_loss import Preference, reward_metrics, sequence_loss
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.batches import collate_rows
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.steps import grouping_of
from roundpipe_cli.train.prepare.trainable import same_named
from roundpipe_cli.train.scoring import Scorer


def make_scored(
    setup: Setup, batches: Sequence[RowBatch], sides: Sequence[Sequence[Row]] | None = None
) -> tuple[list[Microbatch], int]:
    """Microbatches of these rows, side by side, with their loss (but see `scored_before`), and the number of their
    tokens without padding; `sides`: of the rows, None for those to train on."""
    pad, sides = pad_token_id(setup.tokenizer), sides or setup.dataset.sides
    loss, nll_factor = _loss(setup.recipe)
    microbatches, num_tokens = [], 0
    for batch in batches:
        rows = [side[index] for side in sides for sequence in batch for index in sequence]
        num_tokens += sum(len(row.input_ids) for row in rows)
        if len(sides) == 1:  # by their labels
            rows = sorted(rows, key=lambda row: row.is_rejected)
            loss = replace(loss, num_chosen=sum(not row.is_rejected for row in rows))
        microbatch = replace(collate_rows(rows, pad), preference=loss, weights=None)
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


def scored_before(
    setup: Setup,
    scorer: Scorer,
    batches: Sequence[RowBatch],
    step: int,
    *,
    sides: Sequence[Sequence[Row]] | None = None,
) -> tuple[list[Microbatch], int]:
    """As `make_scored`, with what the recipe's objective compares the answers with."""
    microbatches, num_tokens = make_scored(setup, batches, sides)
    kind = setup.recipe.objective_kind
    if kind.needs_reference:
        microbatches = add_references(scorer, microbatches, step)
    if kind.estimates_kl:
        (rows,) = sides or setup.dataset.sides
        kl = estimated_kl(setup, scorer, [rows[index] for index in sorted(chain(*chain(*batches)))], step)
        losses = [replace(one.preference, kl=kl) for one in microbatches if one.preference is not None]
        microbatches = [replace(one, preference=loss) for one, loss in zip(microbatches, losses, strict=True)]
    return microbatches, num_tokens


def estimated_kl(setup: Setup, scorer: Scorer, rows: Sequence[Row], step: int) -> torch.Tensor:
    """Divergence of the model from the reference, float64 0-dim: the mean over the rows' prompts, each with the answer
    of the row before it, of the difference of log-probabilities; 0 where that is below 0, or there is one row only."""
    limit, pad = setup.recipe.row_tokens, pad_token_id(setup.tokenizer)
    mixed = [row for row in map(partial(with_answer, limit=limit), rows, [rows[-1], *rows]) if row is not None]
    if len(rows) < 2 or not mixed:  # as one at an epoch's end
        return torch.zeros((), dtype=torch.float64)
    lengths = np.array([len(row.input_ids) for row in mixed])
    batches = grouping_of(setup.recipe, lengths).group([(index,) for index in range(len(mixed))])
    microbatches = [collate_rows([mixed[index] for (index,) in batch], pad) for batch in batches]
    policy, reference = (
        torch.cat([one.sequence_sums.cpu() for one in scorer.scores(microbatches, step=step, reference=is_reference)])
        for is_reference in (False, True)
    )
    return (policy - reference).mean().clamp(min=0)


def with_answer(row: Row, other: Row, limit: int) -> Row | None:
    """The prompt of `row` with the answer of `other`, cut to `limit` tokens; None where nothing is left of that."""
    begins = [max(1, int((one.labels != IGNORED_LABEL).argmax())) for one in (row, other)]
    ids = np.concatenate([row.input_ids[: begins[0]], other.input_ids[begins[1] :]])[:limit]
    labels = np.concatenate([np.full(begins[0], IGNORED_LABEL, np.int32), other.labels[begins[1] :]])[:limit]
    return Row(row.row_id, ids, labels) if (labels != IGNORED_LABEL).any() else None


def add_references(scorer: Scorer, microbatches: Sequence[Microbatch], step: int) -> list[Microbatch]:
    """The microbatches with the log-probabilities of their sequences under the reference model."""
    result = []
    scores = scorer.scores(microbatches, step=step, reference=True)
    for microbatch, scored in zip(microbatches, scores, strict=True):
        assert microbatch.preference is not None
        preference = replace(microbatch.preference, reference=scored.sequence_sums)
        result.append(replace(microbatch, preference=preference))
    return result


def score_answers(setup: Setup, scorer: Scorer, step: int) -> tuple[float, int, dict[str, float]]:
    """The mean loss of the rows to evaluate on, the number of their target tokens, and their rewards."""
    num_rows = len(setup.eval_rows) // len(setup.dataset.sides)
    sides = [setup.eval_rows[start : start + num_rows] for start in range(0, len(setup.eval_rows), num_rows)]
    lengths = np.max([[len(row.input_ids) for row in side] for side in sides], axis=0)
    batches = grouping_of(setup.recipe, lengths).group([(index,) for index in range(num_rows)])
    microbatches, _ = scored_before(setup, scorer, batches, step, sides=sides)
    loss, tokens, rewards = 0.0, 0, []
    for microbatch, scored in zip(microbatches, scorer.scores(microbatches, step=step), strict=True):
        assert microbatch.preference is not None
        indices, _ = target_rows(microbatch.labels)
        preference = map_tensors(microbatch.preference, lambda tensor: tensor.cpu())
        rows, length = microbatch.labels.shape
        loss_sum, _, sums = sequence_loss(scored.log_probabilities.cpu(), indices, (rows, length), preference)
        loss += float(loss_sum)
        tokens += len(indices)
        rewards.append(sums.tolist())
    return loss / num_rows, tokens, metrics_of(rewards, microbatches)


def metrics_of(part_sums: Sequence[Sequence[float]], microbatches: Sequence[Microbatch]) -> dict[str, float]:
    """Keys of metrics.jsonl beside those of every step, from the sums of each microbatch's loss."""
    losses = [(one.preference, len(one.labels)) for one in microbatches if one.preference is not None]
    if not losses:  # tokens with a teacher
        units = sum(one.num_units for one in microbatches)
        return {name: sum(sums) / units for name, *sums in zip(("nll_loss", "kl"), *part_sums, strict=True)}
    return reward_metrics(part_sums, losses)
