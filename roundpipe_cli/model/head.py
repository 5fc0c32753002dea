"""The LM head and its loss, in token chunks: all logits of a microbatch never exist at once.

Only target tokens pass through the head. The loss is a sum over target tokens; its gradient is scaled by the caller
(1 / target tokens of the whole step), so neither microbatches nor chunks change what is optimised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.model.gradient_taps import GradientTaps
from roundpipe_cli.model.preference import Preference, pair_loss, sequence_sums

Logits = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class HeadTargets:
    """The target tokens of one microbatch, and their positions."""

    indices: torch.Tensor
    """int64 [N]: positions of target tokens in [B * T], from `target_rows`."""
    ids: torch.Tensor
    """int64 [N]: the tokens."""
    preference: Preference | None = None
    """The sequences are preference pairs, its tensors on the hidden states' device; None: the loss is the sum over
    target tokens."""


@dataclass(frozen=True)
class HeadLoss:
    """Settings of the head's loss and its derivative."""

    gradient_scale: float
    """Factor of the loss sum before differentiation."""
    chunk_tokens: int
    """Target tokens per chunk."""
    label_smoothing: float = 0.0
    """Label smoothing, see `chunk_loss`."""


@dataclass
class HeadResult:
    """Loss and gradients of the head for one microbatch."""

    loss_sum: float | torch.Tensor
    """Sum of the target tokens' losses in nats, accumulated in float64; a 0-dim tensor, as nobody waits for it here."""
    grad_hidden: torch.Tensor | None
    """Gradient of the last block's output, [B, T, H]."""
    reward_sums: torch.Tensor | None = None
    """Sums of which `Rewards` are the means, float64 [4]; set for preference pairs."""


def target_rows(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions whose next token is a target, and that token. `labels` [B, T], -100 where nothing is trained.

    Returns:
        indices [N] into the flattened [B * T] hidden states, and target ids [N].
    """
    shifted = torch.full_like(labels, IGNORED_LABEL)
    shifted[:, :-1] = labels[:, 1:]
    flat = shifted.flatten()
    indices = (flat != IGNORED_LABEL).nonzero().flatten()
    return indices, flat[indices]


def chunk_loss(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of `logits` [N, V] against `targets` [N], in float32.

    Args:
        label_smoothing: share of each target's probability that is spread evenly over the vocabulary.

    Returns:
        the sum of losses, a 0-dim float64 tensor, and the gradient of that sum with respect to the logits, float32.
    """
    log_probabilities = torch.log_softmax(logits.detach().float(), dim=-1)
    picked = log_probabilities.gather(1, targets[:, None])
    loss_sum = -picked.double().sum()
    if label_smoothing:
        spread = -log_probabilities.double().mean(dim=-1).sum()
        loss_sum = (1 - label_smoothing) * loss_sum + label_smoothing * spread
    gradient = log_probabilities.exp_()  # softmax, in place
    gradient.scatter_add_(1, targets[:, None], torch.full_like(picked, label_smoothing - 1.0))
    if label_smoothing:
        gradient.sub_(label_smoothing / gradient.shape[1])
    return loss_sum, gradient


@dataclass
class HeadScores:
    """Scores of one microbatch from a pass without a backward; all tensors where the head computed, or copies of it."""

    loss_sum: float | torch.Tensor
    """As `HeadResult.loss_sum`, to the bit for equal hidden states."""
    log_probabilities: torch.Tensor
    """float32 [N]: of each target token."""
    sequence_sums: torch.Tensor
    """float64 [B]: of each sequence's target tokens."""
    best_ids: torch.Tensor | None
    """int64 [N]: the most probable token at each target's place, if asked for."""

    def map_tensors(self, move: Callable[[torch.Tensor], torch.Tensor]) -> HeadScores:
        """The same with every tensor moved."""
        best_ids = None if self.best_ids is None else move(self.best_ids)
        loss_sum = move(self.loss_sum) if isinstance(self.loss_sum, torch.Tensor) else self.loss_sum
        return HeadScores(loss_sum, move(self.log_probabilities), move(self.sequence_sums), best_ids)


def score_head(
    logits_of: Logits,
    hidden: torch.Tensor,
    targets: HeadTargets,
    *,
    chunk_tokens: int,
    greedy: bool,
) -> HeadScores:
    """Forward of the head alone, in the chunks of `run_head`; arguments as there.

    Args:
        greedy: also tell the most probable tokens.
    """
    rows = hidden.flatten(0, 1)[targets.indices]
    loss_sum = torch.zeros((), dtype=torch.float64, device=rows.device)
    every = torch.empty(rows.shape[0], device=rows.device)
    best_ids = torch.empty_like(targets.ids) if greedy else None
    for start in range(0, rows.shape[0], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        with torch.no_grad():
            log_probabilities = torch.log_softmax(logits_of(rows[part], start).float(), dim=-1)
            picked = log_probabilities.gather(1, targets.ids[part, None])
        loss_sum += -picked.double().sum()
        every[part] = picked[:, 0]
        if best_ids is not None:
            best_ids[part] = log_probabilities.argmax(dim=-1)
    return HeadScores(
        loss_sum, every, sequence_sums(every, targets.indices, (hidden.shape[0], hidden.shape[1])), best_ids
    )


def run_head(
    logits_of: Logits,
    hidden: torch.Tensor,
    targets: HeadTargets,
    loss: HeadLoss,
    *,
    taps: GradientTaps,
    needs_hidden_grad: bool,
) -> HeadResult:
    """Forward and backward of the head for one microbatch.

    The loss of preference pairs needs the log-probabilities of whole sequences first: a forward of all chunks. It then
    differs from the sum of tokens' losses by one factor for each token.

    Args:
        logits_of: hidden states [N, H], index of their first row -> logits [N, V], with a graph.
        hidden: output of the last block, [B, T, H].
        targets: the target tokens.
        loss: settings of the loss.
        taps: take the gradients of the head's trainable parameters, one at a time, chunk after chunk.
        needs_hidden_grad: whether anything below the head is trained.
    """
    indices, preference = targets.indices, targets.preference
    flat = hidden.detach().flatten(0, 1)
    rows = flat[indices]
    result = HeadResult(0.0, None)
    pairs = None
    if preference is not None:
        scores = score_head(logits_of, hidden, targets, chunk_tokens=loss.chunk_tokens, greedy=False)
        pairs = pair_loss(scores.log_probabilities, indices, (hidden.shape[0], hidden.shape[1]), preference)
    grad_rows = torch.zeros_like(rows) if needs_hidden_grad else None
    for start in range(0, rows.shape[0], loss.chunk_tokens):
        part = slice(start, start + loss.chunk_tokens)
        chunk = rows[part].detach().requires_grad_(needs_hidden_grad)
        with torch.enable_grad():
            logits = logits_of(chunk, start)
        loss_sum, grad_logits = chunk_loss(logits, targets.ids[part], loss.label_smoothing)
        result.loss_sum += loss_sum
        if not logits.requires_grad:
            continue
        if pairs is not None:
            grad_logits.mul_(pairs.factors[part])
        grad_logits = grad_logits.mul_(loss.gradient_scale).to(logits.dtype)
        with taps:
            torch.autograd.backward(logits, grad_logits)
        del logits, grad_logits
        if grad_rows is not None:
            assert chunk.grad is not None
            grad_rows[part] = chunk.grad
    if pairs is not None:
        result.loss_sum, result.reward_sums = pairs.loss_sum, pairs.reward_sums
    if grad_rows is not None:
        grad_flat = torch.zeros_like(flat)
        grad_flat[indices] = grad_rows
        result.grad_hidden = grad_flat.view(hidden.shape)
    return result
