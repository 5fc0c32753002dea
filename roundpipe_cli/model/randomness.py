"""Noise that depends only on (seed, step, microbatch, layer), as dropout does.

Some models multiply the input of their routers by noise in training (`router_jitter_noise`), or draw their experts.
A recompute must draw what the forward drew, so these draws come from the generator of `SeededDropout` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roundpipe_cli.model.dropout import SeededDropout, has_dropout

IN_PLACE = ("uniform_", "normal_", "exponential_", "bernoulli_", "random_", "cauchy_", "geometric_", "log_normal_")
FUNCTIONS = ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal")
_DRAWING = frozenset(
    [getattr(torch.Tensor, name) for name in (*IN_PLACE, "bernoulli", "multinomial")]
    + [getattr(torch, name) for name in FUNCTIONS]
)
_LIKE = {torch.rand_like: torch.Tensor.uniform_, torch.randn_like: torch.Tensor.normal_}


def is_random(model: torch.nn.Module) -> bool:
    """Whether anything in `model` is random in training: dropout, or the noise of routers."""
    return has_dropout(model) or any(
        "jitter" in name and isinstance(value, float) and value > 0
        for module in model.modules()
        for name, value in vars(module).items()
    )


class SeededNoise(SeededDropout):
    """While active in a thread, dropout and every other draw come from one generator seeded with `seed`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LIKE:
            empty = torch.empty_like(*args, **kwargs)
            return _LIKE[func](empty, generator=self._generator)
        if func in _DRAWING and kwargs.get("generator") is None:
            return func(*args, **{**kwargs, "generator": self._generator})
        return super().__torch_function__(func, types, args, kwargs)
