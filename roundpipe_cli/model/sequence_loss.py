"""Losses of whole answers, such as preference pairs, on the log-probabilities of sequences.

    c, r         log-probability of the chosen and of the rejected answer, less that under the reference model where
                 the objective has one; the sum over the answer's tokens, or their mean (`choices.OBJECTIVES`)
    reward       beta * log-probability; with a reference of the sum, whatever the loss takes

    sigmoid      -log sigmoid(beta * (c - r) - simpo_gamma)             (DPO, arXiv 2305.18290; SimPO, arXiv 2405.14734)
                 label smoothing s: (1 - s) * that + s * -log sigmoid(of the negative)
    odds_ratio   -beta * log sigmoid(log odds(c) - log odds(r)), log odds(x) = x - log(1 - exp x)
                                                                                                (ORPO, arXiv 2403.07691)
    squared      (c - r - 1 / (2 * beta))^2                                                      (IPO, arXiv 2310.12036)

Summed over pairs. Some objectives add the chosen sequences' negative log-likelihood; its weights say what it is a mean
over.

P pairs in a microbatch: sequences 0 .. P-1 are the chosen ones, P .. 2P-1 the rejected ones, in the same order. B =
2P sequences of T tokens; N target tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from roundpipe_cli.choices import OBJECTIVES, LossName, Objective, ObjectiveKind

SURE = -1.0e-7
"""Highest mean log-probability that has odds: a higher one is float32's rounding."""


@dataclass(frozen=True)
class Preference:
    """Inputs of the loss beside the model's own log-probabilities."""

    objective: Objective
    beta: float
    reference: torch.Tensor | None = None
    """float64 [2P]: log-probability of each sequence under the reference model; None where there is none (yet)."""
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    nll_weights: torch.Tensor | None = None
    """float64 [2P]: factor of each sequence's negative log-likelihood, which is summed over its target tokens; None: it
    has no part in the loss."""
    is_answer: torch.Tensor | None = None
    """bool [B, T]: tokens of the answers, which are compared; None: every target token is one."""

    @property
    def kind(self) -> ObjectiveKind:
        """The objective's entry in the table."""
        return OBJECTIVES[self.objective]

    def num_rows(self, num_sequences: int) -> int:
        """Rows of so many sequences: the loss is a mean over them."""
        return num_sequences // len(self.kind.rows.sides)


def sequence_sums(log_probabilities: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Sum over the target tokens of each sequence, float64 [B]; row by row, so that a device's bits stay the same.

    `log_probabilities` [N] are of target tokens, `indices` [N] their positions in `shape`, B * T.
    """
    rows = torch.zeros(shape, dtype=torch.float64, device=log_probabilities.device)
    rows.view(-1)[indices] = log_probabilities.double()
    return rows.sum(dim=1)


def sequence_loss(
    log_probabilities: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int], preference: Preference
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of one microbatch and each token's weight in its gradient; the preference's tensors are on the device.

    Returns:
        the sum of losses, float64, 0-dim; float32 [N, 1], weight of each target token's cross entropy in its gradient;
        sums of which `reward_metrics` takes the means, float64 [4]. All on the device; the host does not wait for it.
    """
    sequences = indices // shape[1]
    is_answer = torch.ones_like(log_probabilities)
    if preference.is_answer is not None:  # of the token at an index, the target is the next one
        is_answer = preference.is_answer.flatten()[indices + 1].to(is_answer.dtype)
    policy = sequence_sums(log_probabilities * is_answer, indices, shape)
    counts = torch.ones_like(policy)
    kind = preference.kind
    assert kind.loss is not None, f"objective {preference.objective} compares no answers"
    if kind.averages:
        counts = sequence_sums(is_answer, indices, shape).clamp(min=1.0)
    gained = policy if preference.reference is None else policy - preference.reference
    loss, slopes = SEQUENCE_LOSSES[kind.loss](gained / counts, preference)
    chosen, rejected = (preference.beta * (gained if kind.needs_reference else gained / counts)).chunk(2)
    sums = [chosen.sum(), rejected.sum(), (chosen > rejected).sum().double()]
    factors = -(slopes / counts).float()[sequences] * is_answer
    nll = torch.zeros_like(loss)
    if preference.nll_weights is not None:
        nll = -(preference.nll_weights * sequence_sums(log_probabilities, indices, shape)).sum()
        factors += preference.nll_weights.float()[sequences]
    return loss + nll, factors[:, None], torch.stack([*sums, nll])


def reward_metrics(sums: Sequence[Sequence[float]], losses: Sequence[tuple[Preference, int]]) -> dict[str, float]:
    """Keys of metrics.jsonl beside those of every step, means over the rows of all microbatches.

    Args:
        sums: of each microbatch, from `sequence_loss`.
        losses: each one's, and the number of its sequences.
    """
    chosen, rejected, num_right, nll = (sum(column) for column in zip(*sums, strict=True))
    rows, (first, _) = sum(loss.num_rows(count) for loss, count in losses), losses[0]
    metrics = {
        "rewards_chosen": chosen / rows,
        "rewards_rejected": rejected / rows,
        "reward_margin": (chosen - rejected) / rows,
        "reward_accuracy": num_right / rows,
        **({} if first.nll_weights is None else {"nll_loss": nll / rows}),
    }
    return {name: metrics[name] for name in first.kind.rows.metrics if name in metrics}


# Losses: of log-probabilities of sequences, float64 [2P], to the sum over the pairs and its gradient with respect to
# them, float64 [2P].

SequenceLoss = Callable[[torch.Tensor, Preference], tuple[torch.Tensor, torch.Tensor]]


def _sigmoid(scores: torch.Tensor, preference: Preference) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, rejected = (preference.beta * scores).chunk(2)
    margin, smoothing = chosen - rejected - preference.simpo_gamma, preference.label_smoothing
    loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    slope = preference.beta * (smoothing * torch.sigmoid(margin) - (1 - smoothing) * torch.sigmoid(-margin))
    return loss.sum(), torch.cat([slope, -slope])


def _odds_ratio(scores: torch.Tensor, preference: Preference) -> tuple[torch.Tensor, torch.Tensor]:
    sure = scores.clamp(max=SURE)
    rest = -torch.expm1(sure)  # 1 - p; the slope of log(p / (1 - p)) with respect to log p is 1 / (1 - p)
    chosen, rejected = (sure - rest.log()).chunk(2)
    ratio, beta = chosen - rejected, preference.beta
    slope = -beta * torch.sigmoid(-ratio)
    return -beta * logsigmoid(ratio).sum(), torch.cat([slope, -slope]) / rest


def _squared(scores: torch.Tensor, preference: Preference) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, rejected = scores.chunk(2)
    distance = chosen - rejected - 1 / (2 * preference.beta)
    return (distance**2).sum(), torch.cat([2 * distance, -2 * distance])


SEQUENCE_LOSSES: Mapping[LossName, SequenceLoss] = {"sigmoid": _sigmoid, "odds_ratio": _odds_ratio, "squared": _squared}
"""All values of `ObjectiveKind.loss`."""
