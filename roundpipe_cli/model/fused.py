"""Finds the modules of a model that can use the fused operators of `kernels/`, and makes a worker's modules use them.

Found once, when the model is prepared. Norms and rotary embeddings are known by what they compute, not by name: each is
tried on a few numbers and compared with the fused operator. What does not compute the same keeps its own forward. A
choice depends on the model, on shapes and types, never on time or on what ran before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_cli.kernels.fused import AdapterTerm, lora_linear
from roundpipe_cli.model.dropout import drawn_mask
from roundpipe_cli.model.fused_norm import FusedNorm, NormForm, norm_form, norm_kind
from roundpipe_cli.model.fused_rotary import can_rotate, fuse_rotary
from roundpipe_cli.model.packed_weights import import_bitsandbytes
from roundpipe_cli.model.split import ModelSplit


@dataclass(frozen=True)
class FusedOps:
    """Modules that compute by fused operators, by path in the causal language model."""

    lora_linears: tuple[str, ...] = ()
    norms: tuple[tuple[str, NormForm], ...] = ()
    rotaries: tuple[str, ...] = ()
    """Attention modules, whose queries and keys are turned."""

    def counts(self) -> dict[str, int]:
        """Number of modules of each kind, where there are any."""
        kinds = {"lora_linear": self.lora_linears, "rms_norm": self.norms, "rotary": self.rotaries}
        found = {name: len(modules) for name, modules in kinds.items()}
        return {name: count for name, count in found.items() if count}


def find_fused_ops(model: nn.Module, split: ModelSplit) -> FusedOps:
    """Find the modules of `model` that can be fused (parameters on the meta device, adapters included)."""
    modules = [
        (f"{root}.{path}" if path else root, module)
        for root in (split.blocks_path, *split.tail_paths)
        for path, module in model.get_submodule(root).named_modules()
    ]
    linears = tuple(path for path, module in modules if _is_plain_lora(module))
    norms, forms = [], dict[object, NormForm | None]()
    for path, module in modules:
        kind = norm_kind(module)
        if kind is not None and kind not in forms:
            forms[kind] = norm_form(module)
        if kind is not None and (form := forms[kind]) is not None:
            norms.append((path, form))
    rotaries = tuple(path for path, module in modules if can_rotate(module))
    return FusedOps(linears, tuple(norms), rotaries)


def fused_counts(ops: FusedOps | None) -> dict[str, int]:
    """Number of fused modules of each kind, for reports and checkpoints."""
    return {} if ops is None else ops.counts()


def fuse(model: nn.Module, ops: FusedOps) -> None:
    """Give the modules of `model`, one worker's own copy, their fused forward."""
    for path in ops.lora_linears:
        FusedLora(model.get_submodule(path))
    for path, form in ops.norms:
        FusedNorm(model.get_submodule(path), form)
    for path in ops.rotaries:
        fuse_rotary(model.get_submodule(path))


def _is_plain_lora(module: Any) -> bool:
    """Whether it is PEFT's wrapper of a frozen `nn.Linear` with one ordinary adapter."""
    import_bitsandbytes()
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear or module.fan_in_fan_out or module.merged or module.lora_variant:
        return False
    base, adapters = module.get_base_layer(), list(module.lora_A)
    if type(base) is not nn.Linear or adapters != list(module.active_adapters) or len(adapters) != 1:
        return False
    parts = [base, module.lora_A[adapters[0]], module.lora_B[adapters[0]]]
    if any(type(part) is not nn.Linear or _has_hooks(part) for part in parts) or parts[1].bias is not None:
        return False
    frozen = not any(parameter.requires_grad for parameter in base.parameters())
    return frozen and parts[2].bias is None and type(module.lora_dropout[adapters[0]]) in (nn.Identity, nn.Dropout)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


class FusedLora:
    """Replaces the forward of PEFT's wrapper of a linear layer, one worker's own copy. Belongs to one thread."""

    def __init__(self, wrapper: Any) -> None:
        self.fill: float | None = None
        """If set, nobody reads the result: it is filled with this value, and only the graph is made."""
        self._wrapper = wrapper
        self._plain = wrapper.forward
        (name,) = wrapper.active_adapters
        self._base, self._a, self._b = wrapper.get_base_layer(), wrapper.lora_A[name], wrapper.lora_B[name]
        self._dropout, self._scaling = wrapper.lora_dropout[name], float(wrapper.scaling[name])
        wrapper.__dict__["forward"] = self

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The adapted layer's result [..., out] for x [..., in]; by PEFT's own code where adapters are off or types
        differ."""
        weight, bias, a, b = self._base.weight, self._base.bias, self._a.weight, self._b.weight
        if args or kwargs or self._wrapper._disable_adapters or not (x.dtype == weight.dtype == a.dtype == b.dtype):
            return self._plain(x, *args, **kwargs)  # type: ignore[no-any-return]
        drops = isinstance(self._dropout, nn.Dropout) and self._dropout.training
        p = float(self._dropout.p) if drops else 0.0
        mask = drawn_mask(x, p) if p else None
        return lora_linear(x, weight, bias, a, b, AdapterTerm(self._scaling / (1 - p), mask, self.fill))
