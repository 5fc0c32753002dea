"""Layout of a boundary tensor between two blocks: the hidden states, and behind them carried tensors.

Shapes: B sequences of T tokens; a tensor of n elements takes n / (B x T) columns of the last dimension, whole numbers
and sums twice as many in 16 bit. Sums of routers are float32 [2E]: in 16 bit each is two columns' worth of bits, and
its gradient is a rounded value and what that left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

Name = tuple[object, int]
"""(key of a shared mapping, place in its value), ("argument", number), ("result", place in that of the block before) or
`SUMS`; a mark may also stand for ("hidden", 0) and ("cache", 0)."""
SUMS: Name = ("sums", 0)
"""The sums of the routers, which keep their bits."""


@dataclass(frozen=True)
class CarriedMark:
    """Stands in a recorded argument for what each call is given anew: the carried tensor of that name, say."""

    name: Name


@dataclass(frozen=True)
class Carried:
    """Form of a tensor that travels beside the hidden states."""

    shape: tuple[int, ...]
    """Shape that begins with sequences and tokens, or has as many elements as fit behind the hidden states."""
    dtype: torch.dtype
    is_open: bool = False
    """The last dimension may be another one than `shape` says: as many columns as the others leave."""


@dataclass(frozen=True)
class Carry:
    """Layout of one block's boundary tensors."""

    hidden_shape: tuple[int, ...]
    """[B, T, ...] of the hidden states."""
    dtype: torch.dtype
    """Dtype of the hidden states, and so of the boundary tensor."""
    tensors: Mapping[Name, Carried]
    """Tensors that come in, in order; at most one of them is open."""
    kept: tuple[Name, ...]
    """Names of the tensors that go out, in order."""

    @property
    def num_columns(self) -> int:
        """Size of the last dimension of the incoming boundary tensor."""
        return sum(self._columns())

    def most_columns(self, limit: int) -> int:
        """`num_columns` where the last dimension of what is open is `limit`, as many keys as an indexer chooses."""
        forms = {
            name: replace(form, shape=(*form.shape[:-1], limit)) if form.is_open else form
            for name, form in self.tensors.items()
        }
        return replace(self, tensors=forms).num_columns

    def unpack(self, boundary: torch.Tensor) -> tuple[torch.Tensor, dict[Name, torch.Tensor]]:
        """The hidden states and the carried tensors by name."""
        if not self.tensors:
            return boundary, {}
        columns = self._columns()
        excess = boundary.shape[-1] - sum(columns)
        for index, form in enumerate(self.tensors.values(), 1):
            columns[index] += excess if form.is_open else 0
        hidden, *others = boundary.split(columns, dim=-1)
        forms = zip(self.tensors.items(), others, strict=True)
        return hidden.reshape(self.hidden_shape), {name: _decoded(name, one, form) for (name, form), one in forms}

    def unpack_last(self, boundary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last block's hidden states, and the sums of the routers if they travel behind them."""
        hidden, carried = replace(self, tensors={name: self.tensors[name] for name in self.kept}).unpack(boundary)
        return hidden, carried.get(SUMS)

    def pack(self, hidden: torch.Tensor, tensors: Mapping[Name, torch.Tensor]) -> torch.Tensor:
        """The boundary tensor: hidden states, and behind them the tensors that later blocks read."""
        return join(hidden, {name: tensors[name] for name in self.kept})

    def sample(self, hidden: torch.Tensor) -> torch.Tensor:
        """An example of an incoming boundary tensor, for hidden states like `hidden`; zeros for whole numbers, sums."""
        if not self.tensors:
            return torch.randn(self.hidden_shape).to(hidden.device, hidden.dtype)
        width, *others = self._columns()
        samples = [torch.randn(*hidden.shape[:2], width)]
        for (name, form), columns in zip(self.tensors.items(), others, strict=True):
            make = torch.zeros if _keeps_bits(name, form.dtype) else torch.randn
            samples.append(make(*hidden.shape[:2], columns))
        return torch.cat(samples, dim=-1).to(hidden.device, hidden.dtype)

    def _columns(self) -> list[int]:
        """Widths of the hidden states and of each tensor that comes in."""
        widths, lead = [math.prod(self.hidden_shape[2:])], math.prod(self.hidden_shape[:2])
        for name, form in self.tensors.items():
            width = _width(self.dtype) if _keeps_bits(name, form.dtype) else 1
            widths.append(-(-math.prod(form.shape) * width // lead))
        return widths


def _keeps_bits(name: Name, dtype: torch.dtype) -> bool:
    return name == SUMS or not (dtype.is_floating_point or dtype == torch.bool)


def _width(dtype: torch.dtype) -> int:
    """Columns of a boundary tensor of `dtype` that 32 bits take."""
    return max(1, torch.float32.itemsize // dtype.itemsize)


def _encoded(name: Name, tensor: torch.Tensor, lead: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` as columns [B, T, columns] of `dtype`: sums, and whole numbers of up to 31 bits, keep their bits."""
    if name == SUMS:
        return _filled(_ToBits.apply(tensor, dtype), lead)  # type: ignore[no-untyped-call]
    if not _keeps_bits(name, tensor.dtype):
        return tensor.to(dtype).reshape(*lead, -1)
    return tensor.to(torch.int32).reshape(*lead, -1).contiguous().view(dtype)


def _filled(values: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """`values` [n] as columns [B, T, columns], zeros behind them."""
    columns = -(-values.numel() // lead.numel())
    return nn.functional.pad(values, (0, lead.numel() * columns - values.numel())).view(*lead, columns)


def _decoded(name: Name, part: torch.Tensor, form: Carried) -> torch.Tensor:
    if name == SUMS:
        sums: torch.Tensor = _OfBits.apply(part.flatten()[: math.prod(form.shape) * _width(part.dtype)])  # type: ignore[no-untyped-call]
        return sums
    shape = (*form.shape[:-1], -1) if form.is_open else form.shape
    if not _keeps_bits(name, form.dtype):
        return part.reshape(shape).to(form.dtype)
    return part.detach().contiguous().view(torch.int32).reshape(shape).to(form.dtype)


def join(hidden: torch.Tensor, others: Mapping[Name, torch.Tensor]) -> torch.Tensor:
    """One boundary tensor [B, T, columns]; the hidden states as they are where nothing goes with them."""
    if not others:
        return hidden
    lead, dtype = hidden.shape[:2], hidden.dtype
    return torch.cat([hidden.flatten(2), *(_encoded(name, one, lead, dtype) for name, one in others.items())], dim=-1)


def join_gradient(hidden: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Gradient [B, T, columns] of what `join` makes of hidden states and sums, from the gradients of both."""
    columns = _filled(_gradient_of_bits(sums, hidden.dtype), hidden.shape[:2])
    return torch.cat([hidden.flatten(2), columns], dim=-1)


class _ToBits(torch.autograd.Function):
    """float32 [n] -> its bits as values of another dtype; the gradient's columns are added up."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.clone() if dtype.itemsize >= torch.float32.itemsize else values.contiguous().view(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if gradient.dtype.itemsize >= torch.float32.itemsize:
            return gradient, None
        return gradient.float().view(-1, 2).sum(1), None


class _OfBits(torch.autograd.Function):
    """The inverse of `_ToBits`; the gradient becomes a rounded value and the remainder, in its columns."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.dtype = values.dtype
        wide = values.dtype.itemsize >= torch.float32.itemsize
        return values.clone() if wide else values.clone().contiguous().view(torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _gradient_of_bits(gradient, ctx.dtype)


def _gradient_of_bits(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize >= torch.float32.itemsize:
        return gradient
    rounded = gradient.to(dtype)
    return torch.stack([rounded, (gradient - rounded.float()).to(dtype)], dim=1).flatten()
