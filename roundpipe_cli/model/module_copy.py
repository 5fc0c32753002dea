"""Copies of a model's module objects, made once for every worker and probe."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import nn
from transformers import PretrainedConfig

_CONTAINERS = {OrderedDict, dict, set, list}


def copy_modules(model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """A deep copy of `model` that shares its configurations, and a table of copies: id of an object -> its copy.

    Configurations are read and never written while a model runs; they are half of a copy's time. So are the dozen of
    empty containers that every module has, mostly hooks that nobody registered, when they are copied one by one.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, PretrainedConfig):
                memo[id(value)] = value
            elif type(value) in _CONTAINERS and not value:
                memo[id(value)] = type(value)()
    return copy.deepcopy(model, memo), memo
