"""State that modules keep from call to call, and how it is reset.

Dynamic rotary scaling (`rope_type: dynamic`) keeps the frequencies of the longest sequence that it has met. A worker
meets other microbatches than its neighbour, so each call has to begin from the state that the model was built with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ModuleState:
    """A snapshot of the attributes and buffers of the modules below `root`.

    Only values that a module replaces are put back, not tensors that it writes into.
    """

    def __init__(self, root: nn.Module) -> None:
        self._found = [(module, _attributes(module), dict(module._buffers)) for module in root.modules()]

    def restore(self) -> None:
        """Restore the state of every module."""
        for module, attributes, buffers in self._found:
            module.__dict__.update(attributes)
            module._buffers.update(buffers)


_MODES = ("training", "_disable_adapters")
"""Attributes that the worker itself switches."""


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain values and tensors among a module's attributes."""
    kept = (bool, int, float, torch.Tensor, type(None))
    return {name: value for name, value in vars(module).items() if name not in _MODES and isinstance(value, kept)}
