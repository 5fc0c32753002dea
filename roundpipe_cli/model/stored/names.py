"""Names of a model's weights: without what adapters put around them, and with those that share one tensor."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn


def base_name(name: str) -> str:
    """The name of a base weight before adapters were put around it."""
    return name.replace(".base_layer", "").replace(".original_module", "")


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's: low-rank factors, magnitudes, or a module that is saved whole."""
    return ".lora_" in name or ".modules_to_save." in name


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Parameter name -> other names of the same parameter."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(base_name(name))
    return {name: [n for n in group if n != name] for group in groups.values() for name in group if len(group) > 1}


def conv1d_names(model: nn.Module) -> set[str]:
    """Weights of transformers' Conv1D, [inputs, outputs], with and without the backbone's prefix."""
    kinds = ((path, type(module).__name__) for path, module in model.named_modules())
    names = {base_name(f"{path}.weight") for path, kind in kinds if kind == "Conv1D"}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return names | {name.removeprefix(prefix) for name in names}


def own_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Base weights under all their names, and buffers that a checkpoint holds."""
    state = model.state_dict(keep_vars=True)
    return {base_name(name): tensor.shape for name, tensor in state.items() if not is_adapter(name)}
