"""Layout of a boundary tensor between two blocks: the hidden states, and behind them carried tensors.

Shapes: B sequences of T tokens; a tensor of n elements takes n / (B x T) columns of the last dimension, whole numbers
twice as many in 16 bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

Name = tuple[object, int]
"""(key of a shared mapping, place in its value), ("argument", number), or ("result", its place)."""


@dataclass(frozen=True)
class CarriedMark:
    """Stands for a carried tensor in a recorded argument."""

    name: Name


@dataclass(frozen=True)
class Carried:
    """Form of a tensor that travels beside the hidden states."""

    shape: tuple[int, ...]
    """It begins with sequences and tokens, or has as many elements as fit behind them."""
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
        return self._hidden_columns + sum(map(self._columns, self.tensors.values()))

    def most_columns(self, limit: int) -> int:
        """`num_columns` where the last dimension of what is open is `limit`, as many keys as an indexer chooses."""
        forms = (
            replace(form, shape=(*form.shape[:-1], limit)) if form.is_open else form for form in self.tensors.values()
        )
        return self._hidden_columns + sum(map(self._columns, forms))

    def unpack(self, boundary: torch.Tensor) -> tuple[torch.Tensor, dict[Name, torch.Tensor]]:
        """The hidden states and the carried tensors by name."""
        if not self.tensors:
            return boundary, {}
        columns = [self._hidden_columns, *map(self._columns, self.tensors.values())]
        excess = boundary.shape[-1] - sum(columns)
        columns = [
            count + (excess if form is not None and form.is_open else 0)
            for count, form in zip(columns, (None, *self.tensors.values()), strict=True)
        ]
        hidden, *others = boundary.split(columns, dim=-1)
        parts = zip(self.tensors.items(), others, strict=True)
        return hidden.reshape(self.hidden_shape), {name: _decoded(part, form) for (name, form), part in parts}

    def pack(self, hidden: torch.Tensor, tensors: Mapping[Name, torch.Tensor]) -> torch.Tensor:
        """The boundary tensor: hidden states, and behind them the tensors that later blocks read."""
        return join(hidden, [tensors[name] for name in self.kept])

    def sample(self, hidden: torch.Tensor) -> torch.Tensor:
        """An example of an incoming boundary tensor, for hidden states like `hidden`; whole numbers are zeros."""
        rows = hidden.shape[:2]
        if not self.tensors:
            return torch.randn(self.hidden_shape).to(hidden.device, hidden.dtype)
        parts = [torch.randn(*rows, self._hidden_columns)]
        for form in self.tensors.values():
            make = torch.randn if form.dtype.is_floating_point else torch.zeros
            parts.append(make(*rows, self._columns(form)))
        return torch.cat(parts, dim=-1).to(hidden.device, hidden.dtype)

    @property
    def _hidden_columns(self) -> int:
        return math.prod(self.hidden_shape[2:])

    def _columns(self, form: Carried) -> int:
        return math.prod(form.shape) // math.prod(self.hidden_shape[:2]) * _width(form.dtype, self.dtype)


def _width(dtype: torch.dtype, boundary: torch.dtype) -> int:
    """Columns that one element of `dtype` takes."""
    return 1 if dtype.is_floating_point or dtype == torch.bool else torch.int32.itemsize // boundary.itemsize


def _encoded(tensor: torch.Tensor, lead: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`tensor` as columns [B, T, columns] of `dtype`: whole numbers of up to 31 bits keep their bits."""
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        return tensor.to(dtype).reshape(*lead, -1)
    return tensor.to(torch.int32).reshape(*lead, -1).contiguous().view(dtype)


def _decoded(part: torch.Tensor, form: Carried) -> torch.Tensor:
    """The inverse of `_encoded`."""
    shape = (*form.shape[:-1], -1) if form.is_open else form.shape
    if form.dtype.is_floating_point or form.dtype == torch.bool:
        return part.reshape(shape).to(form.dtype)
    return part.detach().contiguous().view(torch.int32).reshape(shape).to(form.dtype)


def join(hidden: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """One boundary tensor [B, T, columns]; the hidden states as they are where nothing goes with them."""
    if not others:
        return hidden
    lead = hidden.shape[:2]
    return torch.cat([_encoded(tensor, lead, hidden.dtype) for tensor in (hidden, *others)], dim=-1)
