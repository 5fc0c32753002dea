"""Rotary position embedding (arXiv 2104.09864) of queries and keys whose pairs are halves of a head.

    y1 = x1 cos1 - x2 sin1            dx1 = g1 cos1 + g2 sin2
    y2 = x2 cos2 + x1 sin2            dx2 = g2 cos2 - g1 sin1

where 1 and 2 are the halves of the last dimension: one product and two sums of products in place, without the turned
copy that the usual code makes.

x [B, heads, T, D]; cos, sin [B, 1, T, D], or D / 2 where both halves have the same.
"""

from __future__ import annotations

from typing import Any

import torch

from roundpipe_cli.kernels.own_function import OwnFunction


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key, turned; all of one dtype, cos and sin without a gradient."""
    turned: tuple[torch.Tensor, torch.Tensor] = _Rotate.apply(query, key, cos, sin)
    return turned


class _Rotate(OwnFunction):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        sin1, sin2 = _halves(sin, query.shape[-1])
        return _turned(query, cos, -1, sin1, sin2=sin2), _turned(key, cos, -1, sin1, sin2=sin2)

    @staticmethod
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
