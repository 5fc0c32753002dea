"""A frozen linear layer whose product is one of FP8 (e4m3): codes of the weight as they lie, rounded inputs.

    y = (X_8 W_8^T) * s_x s_w^T + bias        X_8 = x / s_x, rounded; s_x = max |row of x| / 448, of each token

    dx = dy W                                 in the type of y, by the whole weight

The gradient of the input sums over the outputs, each of which has a scale of its own in the weight: no product of codes
gives that, so the weight is unpacked for it. Kept for the backward: the weight by reference, nothing else.

N: rows of all sequences; in, out: features; x [N, in], W_8 [out, in], s_x [N], s_w [out].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

MIN_CAPABILITY = (8, 9)
"""Compute capability of the oldest cards with products of FP8: RTX 40, L4, H100 and newer."""
MULTIPLE = 16
"""Features in and out of such a product are multiples of this (torch/aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
LARGEST_E4M3 = 448.0
"""The largest number of e4m3."""


def takes_fp8(capability: tuple[int, int] | None) -> bool:
    """Whether a device multiplies in FP8; None: a processor, which computes the same numbers by ordinary products."""
    return capability is None or capability >= MIN_CAPABILITY


def fits_fp8(shape: Sequence[int]) -> bool:
    """Whether a weight of this shape can be multiplied so."""
    return len(shape) == 2 and all(size % MULTIPLE == 0 for size in shape)


@dataclass(frozen=True)
class Fp8Weight:
    """A frozen weight, both ways."""

    codes: torch.Tensor
    """float8_e4m3fn [out, in]"""
    scales: torch.Tensor
    """float32 [out]"""
    whole: Callable[[], torch.Tensor]
    """Gives the weight itself [out, in]."""


def fp8_linear(
    x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None, fill: float | None = None
) -> torch.Tensor:
    """y [..., out] of x [..., in].

    Args:
        x: bfloat16, in which y is too.
        fill: if set, nobody reads y: it holds this, and only the graph is made.
    """
    result: torch.Tensor = _Fp8Linear.apply(x, weight, bias, fill)  # type: ignore[no-untyped-call]
    return result


def scaled_product(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """rows W^T [N, out], in the type of `rows` [N, in]; the arguments of `Fp8Weight` else."""
    own_scales = (rows.abs().amax(1).float() / LARGEST_E4M3).clamp_(min=torch.finfo(torch.float32).tiny)
    own_codes = (rows / own_scales[:, None]).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    if rows.device.type == "cpu":  # torch's takes scales of rows from 2.13 on only, and is no quicker there
        product = torch.mm(own_codes.float(), codes.float().t())
        return product.mul_(own_scales[:, None]).mul_(scales).to(rows.dtype)
    by_row = functional.ScalingType.RowWise
    return functional.scaled_mm(
        own_codes, codes.t(), own_scales[:, None], by_row, scales[None], by_row, output_dtype=rows.dtype
    )


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None, fill: float | None
    ) -> torch.Tensor:
        ctx.weight = weight
        if fill is not None:
            return x.new_full((*x.shape[:-1], len(weight.scales)), fill)
        y = scaled_product(x.reshape(-1, x.shape[-1]), weight.codes, weight.scales)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        above = gradient.reshape(-1, gradient.shape[-1])
        return torch.mm(above, ctx.weight.whole()).view(*gradient.shape[:-1], -1), None, None, None
