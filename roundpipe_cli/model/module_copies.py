"""Copies of a model's module objects, for workers and probes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

_CONTAINERS = {OrderedDict, dict, set, list}
_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device}


def copy_modules(model: nn.Module, memo: dict[int, Any] | None = None) -> tuple[nn.Module, dict[int, Any]]:
    """A deep copy of `model` that shares its configurations, and a table of copies: id of an object -> its copy.

    `memo` begins that table: what takes the place of the model's own.

    Configurations are read and never written while a model runs; they are half of a copy's time. The other half is the
    dozen of empty containers that every module has, mostly hooks that nobody registered, and the modules themselves,
    when `deepcopy` takes them one by one.
    """
    memo = {} if memo is None else memo
    modules = [module for module in model.modules() if not hasattr(type(module), "__deepcopy__")]
    for module in modules:
        memo[id(module)] = module.__class__.__new__(module.__class__)
        for value in vars(module).values():
            if isinstance(value, PretrainedConfig):
                memo[id(value)] = value
            elif type(value) in _CONTAINERS and not value:
                memo[id(value)] = type(value)()
    for module in modules:
        attributes = vars(memo[id(module)])
        for name, value in vars(module).items():
            attributes[name] = value if type(value) in _PLAIN else copy.deepcopy(value, memo)
    return copy.deepcopy(model, memo), memo


def materialised_copy(model: nn.Module, blocks_path: str) -> nn.Module:
    """A copy whose parameters outside the blocks are real. Large ones are zero pages that cost no memory."""
    real: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and id(parameter) not in real and not name.startswith(f"{blocks_path}."):
            data = torch.empty(parameter.shape, dtype=parameter.dtype)
            if data.numel() < 1_000_000:
                data.normal_()
            real[id(parameter)] = nn.Parameter(data, requires_grad=data.is_floating_point())
    return copy_modules(model, real)[0]
