"""Building a model without its weights: parameters on the meta device, buffers real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

MANY = 1 << 20
"""`torch.empty` of at least this many elements gives a tensor without memory."""


def build_without_weights(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` returns, with parameters on the meta device and real buffers.

    Large tensors without values have no memory from the start: a layer of fused experts may be larger than all memory,
    before it would be moved to the meta device as a parameter. Where a buffer turns out to be one of them, the model
    is built again with memory for everything.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        with _EmptyOnMeta():
            model = make()
        if any(buffer.is_meta for buffer in model.buffers()):
            model = make()
    return model


class _EmptyOnMeta(TorchFunctionMode):
    """While active, `torch.empty` of many elements makes tensors on the meta device, if no other one is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and _count(args, kwargs) >= MANY:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Elements that a call of `torch.empty` asks for; 0 where it does not say so in whole numbers."""
    sizes = kwargs.get("size", args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args)
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            return 0
        count *= size
    return count
