"""Grouped products by plain PyTorch, one group after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

Product = Callable[..., torch.Tensor]


def ends_of(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def looped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """scale x W per group, in the type of `x`; zero behind the last group."""
    borders = [0, *ends.tolist()]
    parts = [x[start:end] @ w[group] * scale for group, (start, end) in enumerate(pairwise(borders))]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - borders[-1], w.shape[2])])


def looped_lora(
    x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, scale: float
) -> torch.Tensor:
    """As `AdaptedProduct`."""
    low = looped(x, a.transpose(1, 2), ends)
    return looped(x, w, ends) + looped(low, b.transpose(1, 2), ends, scale)


def with_gradients(
    product: Product, inputs: Sequence[torch.Tensor], *rest: object, absolute: bool = False
) -> list[torch.Tensor]:
    """The result, and the gradient of each of `inputs` that wants one, of a random one or of its sizes alone."""
    leaves = [one.detach().clone(memory_format=torch.preserve_format) for one in inputs]
    for leaf, one in zip(leaves, inputs, strict=True):
        leaf.requires_grad_(one.requires_grad)
    result = product(*leaves, *rest)
    generator = torch.Generator().manual_seed(7)
    gradient = torch.randn(result.shape, generator=generator).to(torch.bfloat16)  # which every type holds exactly
    result.backward((gradient.abs() if absolute else gradient).to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def doubled(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [one.detach().double().requires_grad_(one.requires_grad) for one in inputs]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, by norms; 0 where both are zero."""
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm()) / (float(exact.norm()) or 1.0)


def random(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
