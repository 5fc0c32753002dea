"""Rotary embeddings of a model's attention: known by what they compute, and turned by the fused operator.

transformers' attention modules call a function of their own file, by a name that all share. A module of one worker gets
a copy of its forward in which that name stands for the fused one; nothing is changed for other modules. From 5.24 on
that forward is wrapped by a function that renames an old argument, which is left out of the copy.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roundpipe_cli.kernels.fused import rotate

NAME = "apply_rotary_pos_emb"
RENAMING = "transformers.utils.deprecation"
"""Module whose decorator accepts arguments by their old names."""
MAX_ERROR = 1e-6

Turn = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(query, key, cos, sin) -> both turned; cos and sin [B, T, D]."""


def can_rotate(module: nn.Module) -> bool:
    """Whether the module's forward turns queries and keys as the fused operator does."""
    forward = _own_forward(module)
    if not isinstance(forward, types.FunctionType) or NAME not in forward.__code__.co_names:
        return False
    return "forward" not in module.__dict__ and any(_turns_halves(forward.__globals__.get(NAME), n) for n in (1, 2))


def fuse_rotary(module: nn.Module) -> None:
    """Give `module`, one worker's own copy, the fused operator."""
    module.__dict__["forward"] = types.MethodType(_fused_forward(_own_forward(module)), module)


def _own_forward(module: nn.Module) -> Any:
    """The function that computes, below what accepts old names of its arguments for a while."""
    forward: Any = type(module).forward
    while isinstance(forward, types.FunctionType) and forward.__globals__.get("__name__") == RENAMING:
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward


@functools.cache
def _fused_forward(forward: types.FunctionType) -> types.FunctionType:
    names = {**forward.__globals__, NAME: _fused(forward.__globals__[NAME])}
    made = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _fused(plain: Turn) -> Turn:
    """Replaces `plain`, and calls it for arguments that the fused operator does not take."""
    share = 2 if _turns_halves(plain, 2) else 1

    def turn(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if len(args) != 4 or not kwargs.keys() <= {"unsqueeze_dim"}:  # queries alone, or something that is unknown here
            return plain(*args, **kwargs)
        query, key, cos, sin = args
        is_one_type = query.dtype == key.dtype == cos.dtype == sin.dtype
        is_whole = query.shape[-1] == key.shape[-1] == share * cos.shape[-1] == share * sin.shape[-1]
        if not (is_one_type and is_whole) or cos.requires_grad or sin.requires_grad or cos.ndim != 3:
            return plain(*args, **kwargs)
        dim = kwargs.get("unsqueeze_dim", 1)
        return rotate(query, key, cos.unsqueeze(dim), sin.unsqueeze(dim))

    return turn


@functools.cache
def _turns_halves(plain: Any, share: int) -> bool:
    """Try it on a few numbers, with cos and sin of 1 / `share` of a head's width."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8 // share), (2, 5, 8 // share))
    query, key, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
    try:
        found = plain(query, key, cos, sin, unsqueeze_dim=1)
        expected = rotate(query, key, cos[:, None], sin[:, None])
        return len(found) == 2 and all(
            one.shape == other.shape and float((one - other).abs().max()) <= MAX_ERROR * float(other.abs().max())
            for one, other in zip(found, expected, strict=True)
        )
    except Exception:  # another function of this name may raise anything
        return False
