"""Layout of a boundary tensor between two blocks: the hidden states, and behind them what travels along.

Shapes: B sequences of T tokens; a tensor of n elements takes n / (B x T) columns of the last dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Name = tuple[object, int]
"""(key of a shared mapping, place in its value), or ("argument", number)."""


@dataclass(frozen=True)
class CarriedMark:
    """Stands for a carried tensor in a recorded argument."""

    name: Name


@dataclass(frozen=True)
class Carry:
    """Layout of one block's boundary tensors."""

    hidden_shape: tuple[int, ...]
    """[B, T, ...] of the hidden states."""
    shapes: Mapping[Name, tuple[int, ...]]
    """Of the tensors that come in, in their order."""
    kept: tuple[Name, ...]
    """Names of those that go out, in their order."""

    @property
    def num_columns(self) -> int:
        """Size of the last dimension of what comes in."""
        return sum(self._columns(shape) for shape in (self.hidden_shape, *self.shapes.values()))

    def unpack(self, boundary: torch.Tensor) -> tuple[torch.Tensor, dict[Name, torch.Tensor]]:
        """The hidden states and the carried tensors by name."""
        shapes = (self.hidden_shape, *self.shapes.values())
        hidden, *others = (
            part.reshape(shape)
            for part, shape in zip(boundary.split([self._columns(s) for s in shapes], dim=-1), shapes, strict=True)
        )
        return hidden, dict(zip(self.shapes, others, strict=True))

    def pack(self, hidden: torch.Tensor, tensors: Mapping[Name, torch.Tensor]) -> torch.Tensor:
        """Hidden states, and behind them what later blocks read."""
        return join(hidden, [tensors[name] for name in self.kept])

    def _columns(self, shape: Sequence[int]) -> int:
        return math.prod(shape) // math.prod(self.hidden_shape[:2])


def join(hidden: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """One boundary tensor [B, T, columns]; the hidden states as they are where nothing goes with them."""
    if not others:
        return hidden
    lead = hidden.shape[:2]
    return torch.cat([tensor.reshape(*lead, -1) for tensor in (hidden, *others)], dim=-1)
