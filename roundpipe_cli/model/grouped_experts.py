"""Fused experts by our grouped kernels: the model's own forward runs, and its grouped products become our operators.

    y = x W^T + s (x A^T) B^T        per expert; two kernels, whatever the number of experts, and no host wait

transformers' `grouped_mm` implementation sorts tokens by expert on the device and asks torch for grouped products,
which are a loop on most cards (`kernels/grouped_mm.py`). While an expert module runs, a mode of its own answers
those questions. Adapters of the module are registered with that mode by `expert_lora.py`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from roundpipe_cli.kernels.grouped_mm import AdaptedProduct, grouped_mm

Takes = Callable[[torch.dtype, int], bool]
"""Whether our kernels multiply weights of such a type, with adapters of such a rank (0: without)."""
_MODE = "_grouped_kernel"
"""Attribute of an expert module."""


@dataclass(frozen=True)
class ExpertAdapter:
    """One adapter of the experts in a module's parameter."""

    a: torch.Tensor
    """[E, r, in]"""
    b: torch.Tensor
    """[E, out, r]"""
    scaling: float


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins, equal for its transpose; on the meta device all addresses are 0."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def is_grouped_product(func: Any, args: Any) -> bool:
    """Whether a call that a function mode sees is a grouped product (tokens, weights, ...)."""
    return len(args) >= 2 and "grouped_mm" in getattr(func, "__name__", str(func))


def ends_in(args: Any, kwargs: Any) -> torch.Tensor:
    """Where each expert's tokens end, int32 [E], of the arguments of a grouped product."""
    ends: torch.Tensor = kwargs["offs"] if "offs" in kwargs else args[2]
    return ends


def uses_grouped_products(module: nn.Module) -> bool:
    """Whether a module holds fused experts that transformers multiplies by grouped products."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return implementation == "grouped_mm" and hasattr(module, "_apply_gate")


class GroupedByKernel(TorchFunctionMode):
    """While active in a thread, grouped products are our kernels'."""

    def __init__(self, takes: Takes, *, forgets: bool) -> None:
        super().__init__()
        self.takes = takes
        self._forgets = forgets
        self._adapters: dict[tuple[int, int], ExpertAdapter] = {}
        """Place of adapted weights -> their adapter."""
        self._used: set[tuple[int, int]] = set()

    @contextmanager
    def adapted(self, weights: torch.Tensor, adapter: ExpertAdapter) -> Iterator[None]:
        """Add an adapter's product to each one with `weights`, within the block."""
        place = place_of(weights)
        self._adapters[place] = adapter
        try:
            yield
            assert place in self._used, "adapted experts were not multiplied by a grouped product"
        finally:
            del self._adapters[place]
            self._used.discard(place)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_grouped_product(func, args):
            return func(*args, **kwargs)
        tokens, weights = args[:2]
        place = place_of(weights)
        adapter = self._adapters.get(place)
        if adapter is not None:
            self._used.add(place)
            ends = ends_in(args, kwargs)
            return AdaptedProduct.apply(tokens, weights, adapter.a, adapter.b, ends, adapter.scaling)  # type: ignore[no-untyped-call]
        if self.takes(weights.dtype, 0):
            return grouped_mm(tokens, weights, ends_in(args, kwargs))
        return func(tokens, self.with_empty_groups(weights, ends_in(args, kwargs)), *args[2:], **kwargs)

    def with_empty_groups(self, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`weights` [E, in, out] for torch's own product, with gradients of zero for groups that have no rows.

        `ends` int32 [E]. The same tensor where the device's kernel sees to that itself.
        """
        if not self._forgets or not weights.requires_grad:
            return weights
        shown: torch.Tensor = _EmptyGroups.apply(weights, ends)  # type: ignore[no-untyped-call]
        return shown


class _EmptyGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ends)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (ends,) = ctx.saved_tensors
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return gradient.masked_fill_(is_empty[:, None, None], 0.0), None  # in place: nobody else holds this product


def use_grouped_kernel(blocks: Iterable[nn.Module], takes: Takes, *, forgets: bool = False) -> frozenset[torch.dtype]:
    """Have the fused experts in `blocks` (one worker's own) multiply by our kernels where `takes` says so.

    `forgets`: torch's own product writes no gradient for an expert without a token on this worker's device.

    Returns:
        types of their weights; empty: there are none.
    """
    found = set()
    for module in (module for block in blocks for module in block.modules()):
        if uses_grouped_products(module):
            module.__dict__[_MODE] = GroupedByKernel(takes, forgets=forgets)
            module.__dict__["forward"] = types.MethodType(_forward, module)
            found |= {p.dtype for p in module._parameters.values() if p is not None and p.ndim == 3}
    return frozenset(found)


def kernel_of(module: nn.Module) -> GroupedByKernel | None:
    """The mode that `use_grouped_kernel` has given a module; None: none."""
    found: GroupedByKernel | None = module.__dict__.get(_MODE)
    return found


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with module.__dict__[_MODE]:
        return type(module).forward(module, *args, **kwargs)
