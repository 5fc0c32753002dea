"""A frozen linear layer with a low-rank adapter as one autograd function, which launches matrix products alone.

    y = x W^T + bias + s (m * x) A^T B^T

    forward     low = (m * x) A^T        y = x W^T + bias           y += s low B^T
    backward    g = dy B                 dx = dy W                  dx += s g A * m
                dA = s g^T (m * x)       dB = s dy^T low

Scaling and sums are part of the products (alpha and beta of BLAS). Kept for the backward: x and low; the weight by
reference; of the mask the numbers that it is drawn from. Dropout is one launch more each way.

N: rows of all sequences; in, out: features; r: rank; x [N, in], W [out, in], A [r, in], B [out, r], m: mask of the
dropout [N, in], 1 without; s: scaling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from roundpipe_cli.kernels.own_function import OwnFunction
from roundpipe_cli.kernels.random_masks import Draw, drop


class AdapterTerm(NamedTuple):
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
    result: torch.Tensor = _LoraLinear.apply(x, weight, bias, lora_a, lora_b, term)
    return result


class _LoraLinear(OwnFunction):
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
        low = functional.linear(rows if term.draw is None else drop(rows, term.draw), lora_a)
        ctx.save_for_backward(rows, weight, lora_a, lora_b, low)
        ctx.scaling, ctx.draw, ctx.shape = term.scaling, term.draw, x.shape
        if term.fill is not None:
            return x.new_full((*x.shape[:-1], weight.shape[0]), term.fill)
        y = functional.linear(rows, weight, bias).addmm_(low, lora_b.t(), alpha=term.scaling)
        return y.resize_((*x.shape[:-1], weight.shape[0]))  # no view is returned: models may write to what they get

    @staticmethod
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
