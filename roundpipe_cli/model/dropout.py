"""Dropout that depends only on (seed, step, microbatch, layer), never on threads or on the global generator.

A layer's forward and its recompute must draw the same mask, on any worker, in any order. Each call of a layer runs
under a function mode of its own thread that gives every dropout a generator seeded by a hash of where it is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """A 63-bit seed, a hash of its arguments."""
    digest = hashlib.sha256(f"{seed}/{step}/{microbatch}/{layer}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


NOISE_ATTRIBUTE = "neftune_noise_alpha"
"""Of the input embedding; transformers' own name for it."""


def embedding_noise(embedded: torch.Tensor, alpha: float, seed: int) -> torch.Tensor:
    """Uniform noise for `embedded` [B, T, H], at most alpha / sqrt(T * H) (NEFTune, arXiv 2310.05914)."""
    generator = torch.Generator().manual_seed(layer_seed(seed, -1, -1, -1))
    limit = alpha / math.sqrt(embedded.shape[1] * embedded.shape[2])
    noise = torch.empty(embedded.shape, dtype=torch.float32).uniform_(-limit, limit, generator=generator)
    return noise.to(embedded)


def has_dropout(model: torch.nn.Module) -> bool:
    """Whether anything in `model` is random in training (so that models without pay nothing)."""
    for module in model.modules():
        if getattr(module, NOISE_ATTRIBUTE, 0.0):
            return True
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return True
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
    return False


class SeededDropout(TorchFunctionMode):
    """While active in a thread, every dropout draws from one generator seeded with `seed`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self._generator = torch.Generator(device=device)
        self._generator.manual_seed(seed)

    def _drop(self, tensor: torch.Tensor, p: float, inplace: bool = False) -> torch.Tensor:
        keep = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        keep.bernoulli_(1.0 - p, generator=self._generator)
        mask = keep.div_(1.0 - p).to(tensor.dtype) if p < 1.0 else keep.to(tensor.dtype)
        return tensor.mul_(mask) if inplace else tensor * mask

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        # The definition of scaled_dot_product_attention in torch's documentation, with our mask.
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        scores = query @ key.transpose(-2, -1) * factor
        if is_causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(visible.logical_not(), float("-inf"))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
            else:
                scores = scores + attn_mask
        return self._drop(torch.softmax(scores, dim=-1), dropout_p) @ value

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (functional.dropout, torch.dropout, torch.dropout_):
            return self._dropout_call(func, args, kwargs)
        if func is functional.scaled_dot_product_attention:
            p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if p > 0.0:
                return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout_call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
        training = values.get("training", values.get("train", True))
        p = float(values.get("p", 0.5))
        if not training or p == 0.0:
            return values["input"]
        return self._drop(values["input"], p, bool(values.get("inplace", False)) or func is torch.dropout_)
