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
    """float64 [2P]: of each sequence under the reference model."""
    beta: float
    label_smoothing: float = 0.0


@dataclass(frozen=True)
class Rewards:
    """Sums over pairs; a reward is beta times the log-probability gained over the reference model."""

    @staticmethod
    def of(sums: torch.Tensor) -> Rewards:
        """The rewards that `preference_loss` found; waits for them."""
        chosen, rejected, num_right = sums.tolist()
        return Rewards(chosen, rejected, int(num_right))

    chosen: float
    rejected: float
    num_right: int
    """Pairs whose chosen sequence has the higher reward."""


def sequence_sums(log_probabilities: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Sum over the target tokens of each sequence, float64 [B]; row by row, so that a device's bits stay the same.

    Args:
        log_probabilities: [N], of target tokens.
        indices: [N], their positions in B * T.
        shape: B, T.
    """
    rows = torch.zeros(shape, dtype=torch.float64, device=log_probabilities.device)
    rows.view(-1)[indices] = log_probabilities.double()
    return rows.sum(dim=1)


def preference_loss(policy: torch.Tensor, preference: Preference) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of one microbatch, on the device of `policy`, where the reference is too; nobody waits for it.

    Args:
        policy: float64 [2P], log-probability of each sequence.

    Returns:
        the sum of the pairs' losses, its gradient with respect to `policy` (float64 [2P]), and the sums of `Rewards`
        (float64 [3]).
    """
    rewards = preference.beta * (policy - preference.reference)
    chosen, rejected = rewards.chunk(2)
    margin, smoothing = chosen - rejected, preference.label_smoothing
    loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    slope = preference.beta * (smoothing * torch.sigmoid(margin) - (1 - smoothing) * torch.sigmoid(-margin))
    sums = torch.stack([chosen.sum(), rejected.sum(), (margin > 0).sum().double()])
    return loss.sum(), torch.cat([slope, -slope]), sums
