"""RMS norm: torch's function on GPUs, composed of few operators on the processor.

    y = x / sqrt(mean(x^2) + eps) * w         w = weight, or 1 + weight where weights are stored around zero

computed in float32 and rounded once. torch's function is one kernel forward and one backward on CUDA; on the processor
torch takes it apart into nine operators and more for its gradient. With r = 1 / sqrt(mean(x^2) + eps):

    dx = r (g w) - x r^3 / H sum(g w x)       dw = sum over rows of g x r

N: rows; H: features; x, g [N, H], r [N, 1], w [H].
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from roundpipe_cli.kernels.own_function import OwnFunction


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
    """The norm of x [..., H] over its last dimension; x and weight [H] of one dtype. `plus_one`: times 1 + weight."""
    if takes_own_formula(x.device):
        composed: torch.Tensor = _RmsNorm.apply(x, weight, eps, plus_one)
        return composed
    if not plus_one:
        return functional.rms_norm(x, weight.shape, weight, eps)
    # 1 + weight in 16 bit would lose most of the weight, so the two are not added first
    scaled: torch.Tensor = _ScaleByOnePlus.apply(functional.rms_norm(x, weight.shape, None, eps), weight)
    return scaled


def takes_own_formula(device: torch.device) -> bool:
    """Whether norms there are composed here rather than computed by torch's function."""
    return device.type == "cpu"


class _RmsNorm(OwnFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
        exact = x.float()
        squares = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_()
        rstd = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd.view(-1, 1))
        ctx.plus_one = plus_one
        return torch.mul(exact, rstd).mul_(_factor(weight, plus_one)).to(x.dtype)  # no view: models may write to it

    @staticmethod
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


class _ScaleByOnePlus(OwnFunction):
    """n (1 + weight), one operator each way."""

    @staticmethod
    def forward(ctx: Any, normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, normed if ctx.needs_input_grad[1] else None)
        return torch.addcmul(normed, normed, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, normed = ctx.saved_tensors
        grad_weight = None
        if normed is not None:
            products = gradient * normed
            grad_weight = products.sum_to_size(weight.shape)
        return torch.addcmul(gradient, gradient, weight), grad_weight
