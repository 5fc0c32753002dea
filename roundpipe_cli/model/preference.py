"""Direct preference optimisation (DPO, arXiv 2305.18290) on sequence log-probabilities.

    margin = beta * ((log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected)))
    loss   = -log sigmoid(margin), summed over pairs; with label smoothing s: (1 - s) * that + s * -log sigmoid(-margin)

P pairs in a microbatch: sequences 0 .. P-1 are the chosen ones, P .. 2P-1 the rejected ones, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Preference:
    """Inputs of the loss beside the model's own log-probabilities."""

    reference: torch.Tensor
    """float64 [2P], on the host: of each sequence under the reference model."""
    beta: float
    label_smoothing: float = 0.0


@dataclass(frozen=True)
class Rewards:
    """Sums over pairs; a reward is beta times the log-probability gained over the reference model."""

    chosen: float
    rejected: float
    num_right: int
    """Pairs whose chosen sequence has the higher reward."""


def sequence_sums(log_probabilities: torch.Tensor, sequences: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Sum over the target tokens of each sequence, float64 [num_sequences], on the host.

    Args:
        log_probabilities: [N], of target tokens.
        sequences: [N], the sequence of each.
    """
    sums = torch.zeros(num_sequences, dtype=torch.float64)
    return sums.index_add_(0, sequences.cpu(), log_probabilities.cpu().double())


def preference_loss(policy: torch.Tensor, preference: Preference) -> tuple[float, torch.Tensor, Rewards]:
    """Loss of one microbatch.

    Args:
        policy: float64 [2P], log-probability of each sequence.

    Returns:
        the sum of the pairs' losses, its gradient with respect to `policy` (float64 [2P]), and the rewards.
    """
    rewards = preference.beta * (policy - preference.reference)
    chosen, rejected = rewards.chunk(2)
    margin, smoothing = chosen - rejected, preference.label_smoothing
    loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    slope = preference.beta * (smoothing * torch.sigmoid(margin) - (1 - smoothing) * torch.sigmoid(-margin))
    told = Rewards(float(chosen.sum()), float(rejected.sum()), int((margin > 0).sum()))
    return float(loss.sum()), torch.cat([slope, -slope]), told
