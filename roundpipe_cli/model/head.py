"""The LM head and its losses, in token chunks: all logits of a microbatch never exist at once.

Only target tokens pass through the head. The loss is a sum over target tokens; its gradient is scaled by the caller
(1 / target tokens of the whole step), so neither microbatches nor chunks change what is optimised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeVar

import torch

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.kernels.cross_entropy import cross_entropy, cross_entropy_, log_softmax
from roundpipe_cli.model.distillation import TeacherScores, compare, distilled_loss
from roundpipe_cli.model.sequence_loss import Preference, sequence_loss, sequence_sums
from roundpipe_cli.model.taps import GradientTaps, before_views

Logits = Callable[[torch.Tensor, int], torch.Tensor]
TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Loss of a program's own: float32 logits [N, V], targets int64 [N] -> the sum of the targets' losses, 0-dim."""


@dataclass(frozen=True)
class HeadTargets:
    """The target tokens of one microbatch, and their positions."""

    indices: torch.Tensor
    """int64 [N]: positions of target tokens in [B * T], from `target_rows`."""
    ids: torch.Tensor
    """int64 [N]: the tokens."""
    preference: Preference | None = None
    """The sequences are scored as wholes, its tensors on the hidden states' device; None: the loss is the sum over
    target tokens."""
    weights: torch.Tensor | None = None
    """float32 [N]: factor of each target's loss; None: 1."""
    teacher: TeacherScores | None = None
    """Figures of the targets, to which the loss compares the model; None: it is cross entropy alone."""


@dataclass(frozen=True)
class HeadLoss:
    """Settings of the head's loss and its derivative."""

    gradient_scale: float
    """Factor of the loss sum before differentiation."""
    chunk_tokens: int
    """Target tokens per chunk."""
    label_smoothing: float = 0.0
    """Share of each target's probability that is spread evenly over the vocabulary."""
    in_place: bool = False
    """Write gradients over the logits, by one kernel (`kernels/cross_entropy.py`)."""
    own: TokenLoss | None = None
    """In place of cross entropy; neither smoothed nor in place."""


@dataclass
class HeadResult:
    """Loss and gradients of the head for one microbatch."""

    loss_sum: float | torch.Tensor
    """Sum of the target tokens' losses in nats, accumulated in float64; a 0-dim tensor, as nobody waits for it here."""
    grad_hidden: torch.Tensor | None
    """Gradient of the last block's output, [B, T, H]."""
    part_sums: torch.Tensor | None = None
    """Sums of which metrics are the means: of `reward_metrics`, float64 [4], where sequences are scored as wholes; of
    cross entropy and divergence, float64 [2], with a teacher."""


def target_rows(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [N] in B * T whose next token is a target, and these tokens [N].

    `labels` [B, T]: -100 where nothing is trained.
    """
    shifted = torch.full_like(labels, IGNORED_LABEL)
    shifted[:, :-1] = labels[:, 1:]
    flat = shifted.flatten()
    indices = (flat != IGNORED_LABEL).nonzero().flatten()
    return indices, flat[indices]


def loss_name(loss: TokenLoss | None) -> str | None:
    """The name by which a checkpoint knows a program's own loss; None for cross entropy."""
    return None if loss is None else f"{loss.__module__}.{loss.__qualname__}"


def own_loss(logits: torch.Tensor, targets: torch.Tensor, own: TokenLoss) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum that `own` makes of one chunk, 0-dim float64, and its float32 gradient, by autograd.

    Raises:
        RefusedError: it returns something else than a sum that depends on the logits.
    """
    values = logits.detach().float().requires_grad_()
    with torch.enable_grad():
        total: Any = own(values, targets)
    if not isinstance(total, torch.Tensor) or total.dim() or not total.requires_grad:
        is_tensor = isinstance(total, torch.Tensor)
        shape = f"a tensor {list(total.shape)}, requires_grad {total.requires_grad}" if is_tensor else repr(total)
        raise RefusedError(
            "the loss function does not return what can be differentiated",
            where=getattr(own, "__qualname__", None),
            found=shape,
            expected="the sum of the targets' losses, a tensor without dimensions that was computed from the logits",
        )
    (gradient,) = torch.autograd.grad(total, values)
    return total.detach().double(), gradient


def _scaled_loss(
    logits: torch.Tensor, targets: torch.Tensor, loss: HeadLoss, factors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of `logits` [N, V] with `factors` [N, 1] (None: 1): its sum, 0-dim float64, and that sum's gradient,
    scaled and of the logits' type. In place it lies over logits that no graph reads.
    """
    if loss.own is not None:
        if factors is not None:
            what, hint = "a loss of a program's own takes no weights of rows or turns", "delete them from the data"
            raise RefusedError(what, where=loss_name(loss.own), hint=hint)
        loss_sum, gradient = own_loss(logits, targets, loss.own)
        return loss_sum, (gradient * loss.gradient_scale).to(logits.dtype)  # which may be a view of one value
    smoothing, each = loss.label_smoothing, None if factors is None else factors[:, 0].contiguous()
    if loss.in_place:
        step = before_views(logits)
        values = logits.data  # with versions of its own: a view whose base was written gets a backward that copies all
        if step is None or step.name() not in _FORGETS_RESULT or not values.is_contiguous():
            values = values.clone(memory_format=torch.contiguous_format)
        parts = cross_entropy_(values, targets, each, smoothing, loss.gradient_scale)
    else:
        parts, gradient = cross_entropy(logits.detach(), targets, smoothing)
        gradient = gradient if factors is None else gradient.mul_(factors)
        values = gradient.mul_(loss.gradient_scale).to(logits.dtype)
    parts = parts if each is None else parts * each
    loss_sum = parts[0].sum()
    return (1 - smoothing) * loss_sum + smoothing * parts[1].sum() if smoothing else loss_sum, values


_FORGETS_RESULT = frozenset({"MmBackward0", "AddmmBackward0", "MulBackward0", "ToCopyBackward0", "IndexCopyBackward0"})
"""Operators whose backward does not read what they returned; a soft cap ends in a product."""


@dataclass
class HeadScores:
    """Scores of one microbatch from a pass without a backward; all tensors where the head computed, or copies of it."""

    loss_sum: float | torch.Tensor
    """As `HeadResult.loss_sum`, to the bit for equal hidden states."""
    log_probabilities: torch.Tensor
    """float32 [N]: of each target token."""
    sequence_sums: torch.Tensor
    """float64 [B]: of each sequence's target tokens."""
    top_ids: torch.Tensor | None = None
    """int32 [N, K]: the most probable tokens at each target's place, the first one first, if asked for."""
    top_log_probabilities: torch.Tensor | None = None
    """float32 [N, K]: of these tokens."""
    mass_left: torch.Tensor | None = None
    """float32 [N]: probability of all other tokens."""
    kl_sum: torch.Tensor | None = None
    """float64 0-dim: sum of divergences from a teacher, if there is one."""


Values = TypeVar("Values", Preference, HeadScores, TeacherScores)


def map_tensors(values: Values, move: Callable[[torch.Tensor], torch.Tensor]) -> Values:
    """A copy with every tensor moved."""
    moved: dict[str, Any] = {name: move(one) for name, one in vars(values).items() if isinstance(one, torch.Tensor)}
    return replace(values, **moved)


def score_head(
    logits_of: Logits, hidden: torch.Tensor, targets: HeadTargets, *, chunk_tokens: int, top_k: int = 0
) -> HeadScores:
    """Forward of the head alone, in the chunks of `run_head`; arguments as there. `top_k`: with so many of the most
    probable tokens."""
    rows = hidden.flatten(0, 1)[targets.indices]
    loss_sum = torch.zeros((), dtype=torch.float64, device=rows.device)
    every = torch.empty(rows.shape[0], device=rows.device)
    kl_sum = None if targets.teacher is None else torch.zeros_like(loss_sum)
    top = []
    for start in range(0, rows.shape[0], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        with torch.no_grad():
            log_probabilities = log_softmax(logits_of(rows[part], start))
            picked = log_probabilities.gather(1, targets.ids[part, None])
        factors = 1 if targets.weights is None else targets.weights[part, None]
        loss_sum += -(picked.double() * factors).sum()
        every[part] = picked[:, 0]
        if top_k:
            top.append(_take_top(log_probabilities, top_k))
        elif kl_sum is not None and targets.teacher is not None:
            kl = compare(log_probabilities, map_tensors(targets.teacher, itemgetter(part)))[0]
            kl_sum += (kl[:, None] * factors).sum()
    sums = sequence_sums(every, targets.indices, (hidden.shape[0], hidden.shape[1]))
    scores = HeadScores(loss_sum, every, sums, *map(torch.cat, zip(*top, strict=True)))
    scores.kl_sum = kl_sum
    return scores


def _take_top(log_probabilities: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `HeadScores` of a chunk's most probable tokens, of equal ones the first where one is asked for;
    `log_probabilities` [N, V] are written over."""
    if top_k == 1:
        values, ids = log_probabilities.max(dim=-1, keepdim=True)
    else:
        values, ids = log_probabilities.topk(min(top_k, log_probabilities.shape[1]), dim=-1)
    others = log_probabilities.scatter_(1, ids, -torch.inf).exp_()
    return ids.int(), values, others.sum(dim=-1)


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

    A loss of whole sequences needs their log-probabilities first: a forward of all chunks. It then
    differs from the sum of tokens' losses by one factor for each token.

    Args:
        logits_of: hidden states [N, H], index of their first row -> logits [N, V], with a graph.
        hidden: output of the last block, [B, T, H].
        taps: take the gradients of the head's trainable parameters, one at a time, chunk after chunk.
        needs_hidden_grad: whether anything below the head is trained.
    """
    indices, preference, shape = targets.indices, targets.preference, (hidden.shape[0], hidden.shape[1])
    flat = hidden.detach().flatten(0, 1)
    rows = flat[indices]
    result, token_factors = HeadResult(0.0, None), None if targets.weights is None else targets.weights[:, None]
    if preference is not None:
        scored = score_head(logits_of, hidden, targets, chunk_tokens=loss.chunk_tokens).log_probabilities
        whole_sum, token_factors, result.part_sums = sequence_loss(scored, indices, shape, preference)
    grad_rows = torch.zeros_like(rows) if needs_hidden_grad else None
    for start in range(0, rows.shape[0], loss.chunk_tokens):
        part = slice(start, start + loss.chunk_tokens)
        chunk = rows[part].detach().requires_grad_(needs_hidden_grad)
        with torch.enable_grad():
            logits = logits_of(chunk, start)
        factors = None if token_factors is None else token_factors[part]
        if targets.teacher is None:
            loss_sum, grad_logits = _scaled_loss(logits, targets.ids[part], loss, factors)
        else:
            own = map_tensors(targets.teacher, itemgetter(part))
            taught = distilled_loss(logits, targets.ids[part], own, factors, scale=loss.gradient_scale)
            loss_sum, grad_logits, sums = taught
            result.part_sums = sums if result.part_sums is None else result.part_sums + sums
        result.loss_sum += loss_sum
        if not logits.requires_grad:
            continue
        with taps:
            taps.differentiate(logits, grad_logits)
        del logits, grad_logits
        if grad_rows is not None:
            assert chunk.grad is not None
            grad_rows[part] = chunk.grad
    if preference is not None:
        result.loss_sum = whole_sum
    if grad_rows is not None:
        grad_flat = torch.zeros_like(flat)
        grad_flat[indices] = grad_rows
        result.grad_hidden = grad_flat.view(hidden.shape)
    return result
