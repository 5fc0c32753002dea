"""Grouped products as operators that dispatch modes see: each group of rows with a matrix of its own.

    grouped_mm        y = s x W                   x [S, K] sorted by group, W [E, K, N], y [S, N]
                      y = x W + s low B           low [S, R], B [E, R, N]
    grouped_outer     Z = s left^T right          left [S, M], right [S, N], Z [E, M, N]: the gradient of W

`ends` int32 [E], on the device, is where each group's rows end; rows behind the last group have a result of zero. Each
operator is one kernel, whatever E and however the rows are distributed. On a GPU the kernels are Triton's; tensors on
the processor are computed by plain products, or by the same kernels in Triton's interpreter (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

import os
from typing import Any

import torch


@torch.library.custom_op("roundpipe::grouped_mm", mutates_args=())
def grouped_mm(
    x: torch.Tensor,
    w: torch.Tensor,
    ends: torch.Tensor,
    scale: float = 1.0,
    low: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
) -> torch.Tensor:
    """scale x W for each group of rows: x [S, K], w [E, K, N] in any layout, ends [E] -> [S, N]. Differentiable.

    With low [S, R] and b [E, R, N] it is x W + scale low B, without a gradient.
    """
    beside = () if low is None or b is None else (low, b)
    assert x.shape[1] == w.shape[1] and ends.shape == w.shape[:1], (x.shape, w.shape, ends.shape)
    assert ends.is_contiguous()
    assert {one.dtype for one in (w, *beside)} == {x.dtype}, "one type for all"
    if _has_kernels(x):
        from roundpipe_cli.kernels.grouped_triton import launch_rows

        return launch_rows(x, w, ends, scale, beside=beside)
    out = x.new_zeros((x.shape[0], w.shape[2]))
    for group, (start, end) in enumerate(_borders(ends)):
        product = x[start:end].float() @ w[group].float()
        if low is None or b is None:
            out[start:end] = product * scale
        else:
            out[start:end] = product + (low[start:end].float() @ b[group].float()) * scale
    return out


@torch.library.custom_op("roundpipe::grouped_outer", mutates_args=())
def grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """scale left^T right for each group of rows: left [S, M], right [S, N], ends [E] -> [E, M, N]."""
    assert left.dtype == right.dtype and left.shape[0] == right.shape[0], (left.shape, right.shape)
    if _has_kernels(left):
        from roundpipe_cli.kernels.grouped_triton import launch_outer

        return launch_outer(left, right, ends, scale)
    out = left.new_zeros((ends.numel(), left.shape[1], right.shape[1]))
    for group, (start, end) in enumerate(_borders(ends)):
        out[group] = left[start:end].t().float() @ right[start:end].float() * scale
    return out


grouped_mm.register_fake(lambda x, w, *_: x.new_empty((x.shape[0], w.shape[2])))
grouped_outer.register_fake(lambda left, right, ends, *_: left.new_empty((len(ends), left.shape[1], right.shape[1])))


def _has_kernels(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"


def _borders(ends: torch.Tensor) -> list[tuple[int, int]]:
    """(first row, row behind the last) of each group."""
    found = ends.tolist()
    return list(zip([0, *found[:-1]], found, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, ends, ctx.scale, *beside = inputs
    assert all(one is None for one in beside), "a product of low rank beside it has no gradient here"
    of_x, of_w = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if of_w else None, w if of_x else None, ends)
    ctx.is_transposed = w.stride(1) == 1 != w.stride(2)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w, ends = ctx.saved_tensors
    grad_x = None if w is None else grouped_mm(gradient, w.transpose(1, 2), ends, ctx.scale)
    grad_w = None
    if x is not None and ctx.is_transposed:  # in the layout of the weight, so that nobody has to copy it
        grad_w = grouped_outer(gradient, x, ends, ctx.scale).transpose(1, 2)
    elif x is not None:
        grad_w = grouped_outer(x, gradient, ends, ctx.scale)
    return grad_x, grad_w, None, None, None, None


grouped_mm.register_autograd(_differentiate, setup_context=_save)


class AdaptedProduct(torch.autograd.Function):
    """y = x W + s (x A^T) B^T for each group of rows; W is frozen. Two kernels forward, two to four backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, s: float
    ) -> torch.Tensor:
        """x [S, K], w [E, K, N], a [E, R, K], b [E, N, R], ends [E] -> [S, N]."""
        low = grouped_mm(x, a.transpose(1, 2), ends)
        ctx.save_for_backward(x, w, a, b, ends, low)
        ctx.scaling = s
        result: torch.Tensor = grouped_mm(x, w, ends, s, low, b.transpose(1, 2))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, w, a, b, ends, low = ctx.saved_tensors
        of_x, _, of_a, of_b = ctx.needs_input_grad[:4]
        grad_low = grouped_mm(gradient, b, ends, ctx.scaling) if of_x or of_a else None
        grad_x = grad_a = grad_b = None
        if of_x:
            grad_x = grouped_mm(gradient, w.transpose(1, 2), ends, 1.0, grad_low, a)
        if of_a:
            grad_a = grouped_outer(grad_low, x, ends)
        if of_b:
            grad_b = grouped_outer(gradient, low, ends, ctx.scaling)
        return grad_x, None, grad_a, grad_b, None, None
