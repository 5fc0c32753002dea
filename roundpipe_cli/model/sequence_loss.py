"""Losses of whole answers, such as preference pairs, on the log-probabilities of sequences.

    c, r         log-probability of the chosen and of the rejected answer, less that under the reference model where
                 the objective has one; the sum over the answer's tokens, or their mean (`choices.OBJECTIVES`)
    reward       beta * log-probability; with a reference of the sum, whatever the loss takes

    sigmoid      -log sigmoid(beta * (c - r) - simpo_gamma)             (DPO, arXiv 2305.18290; SimPO, arXiv 2405.14734)
                 label smoothing s: (1 - s) * that + s * -log sigmoid(of the negative)
    odds_ratio   -beta * log sigmoid(log odds(c) - log odds(r)), log odds(x) = x - log(1 - exp x)
                                                                                                (ORPO, arXiv 2403.07691)
    squared      (c - r - 1 / (2 * beta))^2                                                      (IPO, arXiv 2310.12036)
    kto          d * (1 - sigmoid(beta * (c - k))) of wanted answers, u * (1 - sigmoid(beta * (k - r))) of others, d and
                 u the weights of both, k >= 0 the step's estimate of the divergence          (KTO, arXiv 2402.01306)

Summed over rows. Some objectives add the chosen sequences' negative log-likelihood; its weights say what it is a mean
over.

In a microbatch the chosen sequences come first. Of P pairs 0 .. P-1 are the chosen ones, P .. 2P-1 the rejected ones,
in the same order. B sequences of T tokens; N target tokens.
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
    """float64 [B]: log-probability of each sequence under the reference model; None where there is none (yet)."""
    num_chosen: int | None = None
    """Sequences whose answers are chosen or wanted; None: half of them."""
    kl: torch.Tensor | None = None
    """float64 0-dim: mean of log-probability less that under the reference model, of answers to other prompts; 0 where
    that is below 0. None where the objective has none (yet)."""
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    nll_weights: torch.Tensor | None = None
    """float64 [B]: factor of each sequence's negative log-likelihood, which is summed over its target tokens; None: it
    has no part in the loss."""
    is_answer: torch.Tensor | None = None
    """bool [B, T]: tokens of the answers, which are compared; None: every target token is one."""

    @property
    def kind(self) -> ObjectiveKind:
        """The objective's entry in the table."""
        return OBJECTIVES[self.objective]

    def sides(self, num_sequences: int) -> tuple[int, int]:
        """Chosen and other ones of so many sequences."""
        chosen = num_sequences // 2 if self.num_chosen is None else self.num_chosen
        return chosen, num_sequences - chosen

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
    rewards = preference.beta * (gained if kind.needs_reference else gained / counts)
    chosen, rejected = rewards.split(preference.sides(len(rewards)))
    num_right = loss.new_zeros(()) if len(kind.rows.sides) == 1 else (chosen > rejected).sum().double()
    sums = [chosen.sum(), rejected.sum(), num_right]
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
    num_chosen, num_rejected = (sum(side) for side in zip(*(loss.sides(count) for loss, count in losses), strict=True))
    metrics = {"reward_accuracy": num_right / rows}
    metrics |= {"rewards_chosen": chosen / num_chosen} if num_chosen else {}
    metrics |= {"rewards_rejected": rejected / num_rejected} if num_rejected else {}
    if num_chosen and num_rejected:
        metrics["reward_margin"] = metrics["rewards_chosen"] - metrics["rewards_rejected"]
    metrics |= {} if first.nll_weights is None else {"nll_loss": nll / rows}
    metrics |= {} if first.kl is None else {"kl": float(first.kl)}
    return {name: metrics[name] for name in first.kind.rows.metrics if name in metrics}


# Losses: of log-probabilities of sequences, float64 [B], to the sum over the rows and its gradient with respect to
# them, float64 [B].

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


def _kto(scores: torch.Tensor, preference: Preference) -> tuple[torch.Tensor, torch.Tensor]:
    assert preference.kl is not None, "the divergence is estimated before the step"
    chosen, rejected = scores.split(preference.sides(len(scores)))
    values = torch.sigmoid(preference.beta * torch.cat([chosen - preference.kl, preference.kl - rejected]))
    factors = preference.desirable_weight, -preference.undesirable_weight
    signed = torch.cat([torch.full_like(side, one) for side, one in zip((chosen, rejected), factors, strict=True)])
    return (signed.abs() * (1 - values)).sum(), -preference.beta * signed * values * (1 - values)


SEQUENCE_LOSSES: Mapping[LossName, SequenceLoss] = {
    **{"sigmoid": _sigmoid, "odds_ratio": _odds_ratio, "squared": _squared, "kto": _kto}
}
"""All values of `ObjectiveKind.loss`."""
