"""Fused operators of single modules: a linear layer with its adapter, RMS norm, rotary embedding, cross entropy.

    y = x / sqrt(mean(x^2) + eps) * w         w = weight, or 1 + weight where weights are stored around zero

computed in float32 and rounded once. torch's function is one kernel forward and one backward on CUDA; on the processor
torch takes it apart into nine operators and more for its gradient. With r = 1 / sqrt(mean(x^2) + eps):

    dx = r (g w) - x r^3 / H sum(g w x)       dw = sum over rows of g x r

N: rows; H: features; x, g [N, H], r [N, 1], w [H].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from roundpipe_cli.kernels.random_masks import Draw, drop, has_kernel

# A frozen linear layer with a low-rank adapter as one autograd function, which launches matrix products alone.
#
#     y = x W^T + bias + s (m * x) A^T B^T
#
#     forward     low = (m * x) A^T        y = x W^T + bias           y += s low B^T
#     backward    g = dy B                 dx = dy W                  dx += s g A * m
#                 dA = s g^T (m * x)       dB = s dy^T low
#
# Scaling and sums are part of the products (alpha and beta of BLAS). Kept for the backward: x and low; the weight by
# reference; of the mask the numbers that it is drawn from. Dropout is one launch more each way.
#
# N: rows of all sequences; in, out: features; r: rank; x [N, in], W [out, in], A [r, in], B [out, r], m: mask of the
# dropout [N, in], 1 without; s: scaling.


@dataclass(frozen=True)
class AdapterTerm:
    """Settings of the adapter in a call, apart from its matrices."""

    scaling: float
    """s; where inputs are dropped also what makes up for them, 1 / (1 - p)."""
    draw: Draw | None = None
    """m; None: nothing is dropped."""
    fill: float | None = None
    """If set, nobody reads y: it is filled with this value, and only what the backward needs is computed."""


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: torch.Tensor,
    *,
    lora_b: torch.Tensor,
    term: AdapterTerm,
) -> torch.Tensor:
    """y [..., out] of x [..., in]; all of one dtype, weight and bias frozen."""
    result: torch.Tensor = _LoraLinear.apply(x, weight, bias, lora_a, lora_b, term)  # type: ignore[no-untyped-call]
    return result


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        term: AdapterTerm,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if term.draw is not None:
            rows = rows.contiguous()
        low = torch.mm(rows if term.draw is None else drop(rows, term.draw), lora_a.t())
        ctx.save_for_backward(rows, weight, lora_a, lora_b, low)
        ctx.scaling, ctx.draw, ctx.shape = term.scaling, term.draw, x.shape
        if term.fill is not None:
            return x.new_full((*x.shape[:-1], weight.shape[0]), term.fill)
        y = x.new_empty((*x.shape[:-1], weight.shape[0]))  # no view is returned: models may write to what they get
        flat = y.view(-1, weight.shape[0])
        if bias is None:
            torch.mm(rows, weight.t(), out=flat)
        else:
            torch.addmm(bias, rows, weight.t(), out=flat)
        flat.addmm_(low, lora_b.t(), alpha=term.scaling)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, lora_a, lora_b, low = ctx.saved_tensors
        s, draw = ctx.scaling, ctx.draw
        above = gradient.reshape(-1, gradient.shape[-1])
        grad_low = torch.mm(above, lora_b)
        grad_x = torch.mm(above, weight) if ctx.needs_input_grad[0] else None
        if draw is None:
            seen = rows
            if grad_x is not None:
                grad_x.addmm_(grad_low, lora_a, alpha=s)
        elif grad_x is None:
            seen = drop(rows, draw)
        else:
            seen = drop(rows, draw, grad_x, torch.mm(grad_low, lora_a), scale=s)
        # with beta 0 the first argument gives the shape alone
        grad_a = torch.addmm(lora_a, grad_low.t(), seen, beta=0, alpha=s)
        grad_b = torch.addmm(lora_b, above.t(), low, beta=0, alpha=s)
        return None if grad_x is None else grad_x.view(ctx.shape), None, None, grad_a, grad_b, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
    """The norm of x [..., H] over its last dimension; x and weight [H] of one dtype. `plus_one`: times 1 + weight."""
    if takes_own_formula(x.device):
        composed: torch.Tensor = _RmsNorm.apply(x, weight, eps, plus_one)  # type: ignore[no-untyped-call]
        return composed
    if not plus_one:
        return functional.rms_norm(x, weight.shape, weight, eps)
    # 1 + weight in 16 bit would lose most of the weight, so the two are not added first
    scaled: torch.Tensor = _ScaleByOnePlus.apply(functional.rms_norm(x, weight.shape, None, eps), weight)  # type: ignore[no-untyped-call]
    return scaled


def takes_own_formula(device: torch.device) -> bool:
    """Whether norms there are composed here rather than computed by torch's function."""
    return device.type == "cpu"


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
        exact = x.float()
        squares = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_()
        rstd = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd.view(-1, 1))
        ctx.plus_one = plus_one
        return torch.mul(exact, rstd).mul_(_factor(weight, plus_one)).to(x.dtype)  # no view: models may write to it

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        rows, above = (one.reshape(-1, x.shape[-1]).float() for one in (x, gradient))
        factor = _factor(weight, ctx.plus_one)
        products = above * rows
        grad_weight = torch.mv(products.t(), rstd[:, 0]).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None, None
        share = torch.mv(products, factor)[:, None].mul_(rstd.pow(3)).div_(-rows.shape[-1])
        grad = torch.mul(above, factor, out=products).mul_(rstd).addcmul_(rows, share)
        return grad.to(x.dtype).view(x.shape), grad_weight, None, None


def _factor(weight: torch.Tensor, plus_one: bool) -> torch.Tensor:
    return weight.float() + 1 if plus_one else weight.float()


class _ScaleByOnePlus(torch.autograd.Function):
    """n (1 + weight), one operator each way."""

    @staticmethod
    def forward(ctx: Any, normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, normed if ctx.needs_input_grad[1] else None)
        return torch.addcmul(normed, normed, weight)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, normed = ctx.saved_tensors
        grad_weight = None
        if normed is not None:
            products = gradient * normed
            grad_weight = products.sum_to_size(weight.shape)
        return torch.addcmul(gradient, gradient, weight), grad_weight


# Rotary position embedding (arXiv 2104.09864) of queries and keys whose pairs are halves of a head.
#
#     y1 = x1 cos1 - x2 sin1            dx1 = g1 cos1 + g2 sin2
#     y2 = x2 cos2 + x1 sin2            dx2 = g2 cos2 - g1 sin1
#
# where 1 and 2 are the halves of the last dimension: one product and two sums of products in place, without the turned
# copy that the usual code makes.
#
# x [B, heads, T, D]; cos, sin [B, 1, T, D], or D / 2 where both halves have the same.


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key, turned; all of one dtype, cos and sin without a gradient."""
    turned: tuple[torch.Tensor, torch.Tensor] = _Rotate.apply(query, key, cos, sin)  # type: ignore[no-untyped-call]
    return turned


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        sin1, sin2 = _halves(sin, query.shape[-1])
        return _turned(query, cos, -1, sin1, sin2=sin2), _turned(key, cos, -1, sin1, sin2=sin2)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        sin1, sin2 = _halves(sin, gradients[0].shape[-1])
        return *(_turned(one, cos, 1, sin2, sin2=sin1) for one in gradients), None, None


def _halves(sin: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of the halves of a head of `width`."""
    first, second = (sin, sin) if sin.shape[-1] < width else sin.chunk(2, -1)
    return first, second


def _turned(x: torch.Tensor, cos: torch.Tensor, sign: int, sin1: torch.Tensor, *, sin2: torch.Tensor) -> torch.Tensor:
    """x cos, plus sign x2 sin1 in the first half and -sign x1 sin2 in the second."""
    is_half = cos.shape[-1] < x.shape[-1]
    y: torch.Tensor = (x.unflatten(-1, (2, -1)) * cos.unsqueeze(-2)).flatten(-2) if is_half else x * cos
    (x1, x2), (y1, y2) = x.chunk(2, -1), y.chunk(2, -1)
    y1.addcmul_(x2, sin1, value=sign)
    y2.addcmul_(x1, sin2, value=-sign)
    return y


# Cross entropy and its gradient in one kernel, which writes the gradient over the logits.
#
#     p = softmax(x)        parts = -log p of the target, and the mean of -log p over the vocabulary
#     x becomes  f (p - (1 - s) [target] - s / V)        s: label smoothing, f: factor of the row times a scale
#
# x [N, V], of any floating type; what is computed is float32, rounded once. Where Triton compiles for no card, torch's
# operators compute the same in pieces.


def adds_products(like: torch.Tensor) -> bool:
    """Whether torch adds products of `like`'s type to a sum in float32, unrounded: NVIDIA's cards in 16 bit, but for
    float16 while its products add up in float16. Torch refuses those, and the switch is the whole process's: off for
    one product it would be off for what other threads issue meanwhile."""
    if like.device.type != "cuda" or torch.version.cuda is None or "dtype_out" not in torch.ops.aten.addmm.overloads():
        return False
    is_narrow = like.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation
    return like.dtype in (torch.float16, torch.bfloat16) and not is_narrow


def product_sum(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`total` in float32 with the product of two matrices added to it; the product alone where there is none."""
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    found: torch.Tensor = torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    return found


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`parts` of `cross_entropy_`, and the gradients with factors of 1, float32 [N, V], by torch's operators."""
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    picked = log_probabilities.gather(1, targets[:, None])
    parts = logits.new_zeros((2, logits.shape[0]), dtype=torch.float64)
    parts[0] = -picked[:, 0].double()
    if smoothing:
        parts[1] = -log_probabilities.double().mean(dim=-1)
    gradient = log_probabilities.exp_()  # softmax, in place
    gradient.scatter_add_(1, targets[:, None], torch.full_like(picked, smoothing - 1.0))
    return parts, gradient.sub_(smoothing / gradient.shape[1]) if smoothing else gradient


@torch.library.custom_op("roundpipe::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(
    logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor | None, smoothing: float, scale: float
) -> torch.Tensor:
    """Write the gradients over `logits` [N, V], contiguous; targets int64 [N], factors float32 [N] or None.

    Returns `parts`, float64 [2, N]; the second row is zero without smoothing.
    """
    assert logits.is_contiguous()
    if has_kernel(logits):
        from roundpipe_cli.kernels.pointwise_triton import launch_cross_entropy

        return launch_cross_entropy(logits, targets, factors, smoothing=smoothing, scale=scale)
    parts, gradient = cross_entropy(logits, targets, smoothing)
    if factors is not None:
        gradient.mul_(factors[:, None])
    logits.copy_(gradient.mul_(scale))
    return parts


cross_entropy_.register_fake(lambda logits, *_: logits.new_empty((2, len(logits)), dtype=torch.float64))
