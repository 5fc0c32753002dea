"""Adapters on fused experts, made safe for several workers in one process.

PEFT applies them through `torch.nn.utils.parametrize`, whose cache is one dictionary for the whole process: a worker
that leaves while another is inside finds last time's weights, whose graph is gone. Here the adapted weights are put in
the module's parameter slot for the time of the call: same operations, same numbers, no shared state.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def isolate_expert_adapters(model: nn.Module) -> None:
    """Make every wrapper of fused experts in `model` (one worker's own copy) independent of other workers."""
    from peft.tuners.lora.layer import ParamWrapper

    for module in model.modules():
        if isinstance(module, ParamWrapper):
            module.__dict__["_activate_lora"] = types.MethodType(_activate, module)


@contextmanager
def _activate(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
    """In place of `ParamWrapper._activate_lora`."""
    from peft.tuners.lora.layer import UPCAST_DTYPES, _LoraFactorsProxy, _LoraParameterProxy

    adapters = [name for name in active_adapters if name in wrapper.lora_A]
    if not adapters:
        yield
        return
    assert len(adapters) == 1, "the trainer has one adapter"
    layer, name = wrapper.get_base_layer(), wrapper.parameter_name
    weights = layer._parameters[name]
    low_precision = str(weights.dtype).removeprefix("torch.") in UPCAST_DTYPES
    proxy: nn.Module
    if wrapper.num_experts > 1 and not low_precision:
        proxy = _LoraFactorsProxy(*wrapper.get_delta_factors(adapters[0]))
    else:
        proxy = _LoraParameterProxy(wrapper.get_delta_weight(adapters[0]))
    layer._parameters[name] = proxy(weights)
    try:
        yield
    finally:
        layer._parameters[name] = weights
