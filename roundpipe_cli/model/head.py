"""The LM head and its losses, in token chunks: all logits of a microbatch never exist at once.

Only target tokens pass through the head. The loss is a sum over target tokens; its gradient is scaled by the caller
(1 / target tokens of the whole step), so neither microbatches nor chunks change what is optimised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.functional import logsigmoid
from torch.utils.hooks import RemovableHandle

from roundpipe_cli.choices import IGNORED_LABEL, PairObjective
from roundpipe_cli.kernels.fused import cross_entropy, cross_entropy_

Take = Callable[[int, torch.Tensor], None]
"""Called with the index of a parameter and its gradient; not called for parameters without one."""
AddProduct = Callable[[int, torch.Tensor, torch.Tensor], None]
"""The same with two matrices whose product is the gradient."""


class GradientTaps:
    """While entered, backward passes on the gradients of `parameters` instead of storing them in `.grad`: each as soon
    as it is there, so that a layer's gradients never all exist at once.

    May be entered again after it was left.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], take: Take, add_product: AddProduct | None = None) -> None:
        """`add_product` takes the gradient of the matrix that logits are a product of; None: `take` does."""
        self._parameters = parameters
        self._take = take
        self._add_product = add_product
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for index, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._hand_over, index)))

    def _hand_over(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        self._take(index, gradient)

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def differentiate(self, logits: torch.Tensor, gradient: torch.Tensor) -> None:
        """Backward of the head. Where the logits are a product of a trained matrix, its gradient goes to `add_product`
        as two factors: autograd would round their product to 16 bit."""
        step = _before_views(logits)
        found = None if self._add_product is None or step is None else _weight_of(step)
        index = next((i for i, one in enumerate(self._parameters) if one is found), None)
        if self._add_product is None or index is None or step._saved_self.shape[0] != len(logits):
            torch.autograd.backward(logits, gradient)
            return
        rows: torch.Tensor = step._saved_self
        self._add_product(index, gradient.t(), rows.detach())
        if rows.requires_grad:
            torch.autograd.backward(rows, gradient @ self._parameters[index].detach())


def _before_views(tensor: torch.Tensor) -> Any:
    """The operator that computed a tensor, which later ones only looked at in other shapes."""
    step = tensor.grad_fn
    while step is not None and step.name() in _VIEWS:
        step = step.next_functions[0][0]
    return step


def _weight_of(step: Any) -> torch.Tensor | None:
    """The parameter W of a product x W^T; None: it is another operator, or of no parameter."""
    if step.name() != "MmBackward0" or step.next_functions[1][0] is None:
        return None
    turned = step.next_functions[1][0]
    leaf = turned.next_functions[0][0] if turned.name() == "TBackward0" else None
    found: torch.Tensor | None = getattr(leaf, "variable", None)
    return found


# Losses of preference pairs, on the log-probabilities of whole sequences.
#
#     c, r       log-probability of the chosen and of the rejected answer: its sum over tokens (DPO), or their mean
#     reward     beta * (log-probability - that of the reference model, DPO only)
#     margin     reward of the chosen - reward of the rejected answer
#
#     dpo        -log sigmoid(margin)                                                            (arXiv 2305.18290)
#     simpo      -log sigmoid(margin - simpo_gamma)                                              (arXiv 2405.14734)
#                label smoothing s: (1 - s) * that + s * -log sigmoid(of the negative)
#     orpo       -beta * log sigmoid(log odds(c) - log odds(r)), log odds(x) = x - log(1 - exp x)   (arXiv 2403.07691)
#
# Summed over pairs. ORPO, and SimPO with `cpo_alpha`, add the chosen sequences' negative log-likelihood; its weights
# say what it is a mean over.
#
# P pairs in a microbatch: sequences 0 .. P-1 are the chosen ones, P .. 2P-1 the rejected ones, in the same order. B =
# 2P sequences of T tokens; N target tokens.

SURE = -1.0e-7
"""Highest mean log-probability that has odds: a higher one is float32's rounding."""


@dataclass(frozen=True)
class Preference:
    """Inputs of the loss beside the model's own log-probabilities."""

    reference: torch.Tensor | None
    """float64 [2P]: log-probability of each sequence under the reference model; None where there is none (yet)."""
    beta: float
    label_smoothing: float = 0.0
    objective: PairObjective = "dpo"
    simpo_gamma: float = 0.0
    nll_weights: torch.Tensor | None = None
    """float64 [2P]: factor of each sequence's negative log-likelihood, which is summed over its target tokens; None: it
    has no part in the loss."""
    is_answer: torch.Tensor | None = None
    """bool [B, T]: tokens of the answers, which are compared; None: every target token is one."""


@dataclass(frozen=True)
class Rewards:
    """Sums over the pairs of a microbatch."""

    @staticmethod
    def of(sums: torch.Tensor) -> Rewards:
        """The rewards from the sums of `pair_loss`; waits for the device."""
        chosen, rejected, num_right, nll = sums.tolist()
        return Rewards(chosen, rejected, int(num_right), nll)

    chosen: float
    rejected: float
    num_right: int
    """Pairs whose chosen sequence has the higher reward."""
    nll: float
    """Part of the loss that is the chosen sequences' negative log-likelihood."""


def sequence_sums(log_probabilities: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Sum over the target tokens of each sequence, float64 [B]; row by row, so that a device's bits stay the same.

    `log_probabilities` [N] are of target tokens, `indices` [N] their positions in `shape`, B * T.
    """
    rows = torch.zeros(shape, dtype=torch.float64, device=log_probabilities.device)
    rows.view(-1)[indices] = log_probabilities.double()
    return rows.sum(dim=1)


def pair_loss(
    log_probabilities: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int], preference: Preference
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of one microbatch and each token's weight in its gradient; the preference's tensors are on the device.

    Returns:
        the sum of losses, float64, 0-dim; float32 [N, 1], weight of each target token's cross entropy in its gradient;
        sums of which `Rewards` are the means, float64 [4]. All on the device; the host does not wait for it.
    """
    sequences = indices // shape[1]
    is_answer = torch.ones_like(log_probabilities)
    if preference.is_answer is not None:  # of the token at an index, the target is the next one
        is_answer = preference.is_answer.flatten()[indices + 1].to(is_answer.dtype)
    policy = sequence_sums(log_probabilities * is_answer, indices, shape)
    counts = torch.ones_like(policy)
    if preference.objective != "dpo":  # a sequence's log-probability is the mean over its tokens, not their sum
        counts = sequence_sums(is_answer, indices, shape).clamp(min=1.0)
    loss, slopes, sums = preference_loss(policy / counts, preference)
    factors = -(slopes / counts).float()[sequences] * is_answer
    nll = torch.zeros_like(loss)
    if preference.nll_weights is not None:
        nll = -(preference.nll_weights * sequence_sums(log_probabilities, indices, shape)).sum()
        factors += preference.nll_weights.float()[sequences]
    return loss + nll, factors[:, None], torch.cat([sums, nll[None]])


def preference_loss(policy: torch.Tensor, preference: Preference) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of the pairs alone, without the negative log-likelihood: its sum, its gradient with respect to `policy`, and
    the first sums of `Rewards` (float64 [3]). `policy`: float64 [2P], log-probability of each sequence.
    """
    gained = policy if preference.reference is None else policy - preference.reference
    chosen, rejected = (preference.beta * gained).chunk(2)
    sums = torch.stack([chosen.sum(), rejected.sum(), (chosen > rejected).sum().double()])
    if preference.objective == "orpo":
        return *_odds_ratio_loss(policy, preference.beta), sums
    margin, smoothing = chosen - rejected - preference.simpo_gamma, preference.label_smoothing
    loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    slope = preference.beta * (smoothing * torch.sigmoid(margin) - (1 - smoothing) * torch.sigmoid(-margin))
    return loss.sum(), torch.cat([slope, -slope]), sums


def _odds_ratio_loss(policy: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    sure = policy.clamp(max=SURE)
    rest = -torch.expm1(sure)  # 1 - p; the slope of log(p / (1 - p)) with respect to log p is 1 / (1 - p)
    chosen, rejected = (sure - rest.log()).chunk(2)
    ratio = chosen - rejected
    slope = -beta * torch.sigmoid(-ratio)
    return -beta * logsigmoid(ratio).sum(), torch.cat([slope, -slope]) / rest


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
    in_place: bool = False
    """Write gradients over the logits, by one kernel (`kernels/fused.py`)."""


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
    """Positions [N] in B * T whose next token is a target, and these tokens [N].

    `labels` [B, T]: -100 where nothing is trained.
    """
    shifted = torch.full_like(labels, IGNORED_LABEL)
    shifted[:, :-1] = labels[:, 1:]
    flat = shifted.flatten()
    indices = (flat != IGNORED_LABEL).nonzero().flatten()
    return indices, flat[indices]


def chunk_loss(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of `logits` [N, V] against `targets` [N]: its sum, 0-dim float64, and that sum's float32 gradient.

    `label_smoothing`: share of each target's probability that is spread evenly over the vocabulary.
    """
    parts, gradient = cross_entropy(logits.detach(), targets, label_smoothing)
    return _loss_of(parts, label_smoothing), gradient


def _loss_of(parts: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The sum of losses, from the parts of `cross_entropy_`."""
    loss_sum = parts[0].sum()
    return (1 - smoothing) * loss_sum + smoothing * parts[1].sum() if smoothing else loss_sum


def _scaled_loss(
    logits: torch.Tensor, targets: torch.Tensor, loss: HeadLoss, factors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `chunk_loss`; the gradient is scaled, also by `factors` [N, 1], and of the logits' type.

    In place it lies over logits that no graph reads.
    """
    if not loss.in_place:
        loss_sum, gradient = chunk_loss(logits, targets, loss.label_smoothing)
        gradient = gradient if factors is None else gradient.mul_(factors)
        return loss_sum, gradient.mul_(loss.gradient_scale).to(logits.dtype)
    step = _before_views(logits)
    values = logits.detach()
    if step is None or step.name() not in _FORGETS_RESULT or not values.is_contiguous():
        values = values.clone(memory_format=torch.contiguous_format)
    each = None if factors is None else factors[:, 0].contiguous()
    parts = cross_entropy_(values, targets, each, loss.label_smoothing, loss.gradient_scale)
    return _loss_of(parts, loss.label_smoothing), values


_VIEWS = frozenset({"SelectBackward0", "SliceBackward0", "ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward0"})
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
    best_ids: torch.Tensor | None
    """int64 [N]: the most probable token at each target's place, if asked for."""


Values = TypeVar("Values", Preference, HeadScores)


def map_tensors(values: Values, move: Callable[[torch.Tensor], torch.Tensor]) -> Values:
    """A copy with every tensor moved."""
    moved: dict[str, Any] = {name: move(one) for name, one in vars(values).items() if isinstance(one, torch.Tensor)}
    return replace(values, **moved)


def score_head(
    logits_of: Logits, hidden: torch.Tensor, targets: HeadTargets, *, chunk_tokens: int, greedy: bool
) -> HeadScores:
    """Forward of the head alone, in the chunks of `run_head`; arguments as there. `greedy`: with the most probable
    tokens."""
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
        taps: take the gradients of the head's trainable parameters, one at a time, chunk after chunk.
        needs_hidden_grad: whether anything below the head is trained.
    """
    indices, preference = targets.indices, targets.preference
    flat = hidden.detach().flatten(0, 1)
    rows = flat[indices]
    result, token_factors = HeadResult(0.0, None), None
    if preference is not None:
        scores = score_head(logits_of, hidden, targets, chunk_tokens=loss.chunk_tokens, greedy=False)
        shape = hidden.shape[0], hidden.shape[1]
        pair_sum, token_factors, result.reward_sums = pair_loss(scores.log_probabilities, indices, shape, preference)
    grad_rows = torch.zeros_like(rows) if needs_hidden_grad else None
    for start in range(0, rows.shape[0], loss.chunk_tokens):
        part = slice(start, start + loss.chunk_tokens)
        chunk = rows[part].detach().requires_grad_(needs_hidden_grad)
        with torch.enable_grad():
            logits = logits_of(chunk, start)
        factors = None if token_factors is None else token_factors[part]
        loss_sum, grad_logits = _scaled_loss(logits, targets.ids[part], loss, factors)
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
        result.loss_sum = pair_sum
    if grad_rows is not None:
        grad_flat = torch.zeros_like(flat)
        grad_flat[indices] = grad_rows
        result.grad_hidden = grad_flat.view(hidden.shape)
    return result
