"""Recognises linear layers: one matrix, one tensor in, one tensor out."""

from __future__ import annotations

import torch
from torch import nn


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is torch's Linear or transformers' Conv1D, or made of one, and returns one tensor.

    Some routers (llama4, phimoe) are made of Linear and return tuples; what is done to linear layers would break them.
    """
    if not isinstance(module, nn.Linear):
        return type(module).__name__ == "Conv1D"
    return type(module).forward is nn.Linear.forward or _returns_a_tensor(module)


def _returns_a_tensor(module: nn.Linear) -> bool:
    """Try it on two rows on the meta device."""
    shadow = type(module).__new__(type(module))
    shadow.__dict__ = {**module.__dict__, "_forward_hooks": {}, "_forward_pre_hooks": {}}
    shadow.__dict__.pop("forward", None)
    shadow._parameters = {
        name: None if value is None else nn.Parameter(value.detach().to("meta"), requires_grad=False)
        for name, value in module._parameters.items()
    }
    try:
        with torch.no_grad():
            result = shadow.forward(torch.empty(2, module.in_features, device="meta", dtype=shadow.weight.dtype))
    except Exception:  # a module that is no linear layer may raise anything
        return False
    return isinstance(result, torch.Tensor) and result.shape == (2, module.out_features)
