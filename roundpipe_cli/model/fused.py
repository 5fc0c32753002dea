"""Finds the modules of a model that can use the fused operators of `kernels/`, and makes a worker's modules use them.

Found once, when the model is prepared. Norms and rotary embeddings are known by what they compute, not by name: each is
tried on a few numbers and compared with the fused operator. What does not compute the same keeps its own forward. A
choice depends on the model, on shapes and types, never on time or on what ran before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from roundpipe_cli.kernels.fp8_linear import Fp8Weight, fits_fp8, fp8_linear
from roundpipe_cli.kernels.lora_linear import AdapterTerm, lora_linear
from roundpipe_cli.model.dropout import drawn_mask
from roundpipe_cli.model.fused_norm import FusedNorm, NormForm, norm_form, norm_kind
from roundpipe_cli.model.fused_rotary import can_rotate, fuse_rotary
from roundpipe_cli.model.packed_weights import MULTIPLIES_PACKED, PackedParameter, import_bitsandbytes, whole_weights
from roundpipe_cli.model.split import ModelSplit


@dataclass(frozen=True)
class FusedOps:
    """Modules that compute by fused operators, by path in the causal language model."""

    lora_linears: tuple[str, ...] = ()
    norms: tuple[tuple[str, NormForm], ...] = ()
    rotaries: tuple[str, ...] = ()
    """Attention modules, whose queries and keys are turned."""
    fp8_linears: tuple[str, ...] = ()
    """Members of `lora_linears` whose base layer is multiplied in FP8."""

    def counts(self) -> dict[str, int]:
        """Number of modules of each kind, where there are any."""
        kinds = {"lora_linear": self.lora_linears, "rms_norm": self.norms, "rotary": self.rotaries}
        kinds["fp8_linear"] = self.fp8_linears
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


def with_fp8_products(ops: FusedOps, model: nn.Module, packed: Collection[str]) -> FusedOps:
    """`ops` with products in FP8 wherever they can be: in adapted layers whose weights are `packed` in it."""
    found = [path for path in ops.lora_linears if f"{path}.base_layer.weight" in packed]
    fitting = (path for path in found if fits_fp8(model.get_parameter(f"{path}.base_layer.weight").shape))
    return replace(ops, fp8_linears=tuple(fitting))


def fused_counts(ops: FusedOps | None) -> dict[str, int]:
    """Number of fused modules of each kind, for reports and checkpoints."""
    return {} if ops is None else ops.counts()


def fuse(model: nn.Module, ops: FusedOps) -> None:
    """Give the modules of `model`, one worker's own copy, their fused forward."""
    for path in ops.lora_linears:
        FusedLora(model.get_submodule(path), in_fp8=path in ops.fp8_linears)
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

    def __init__(self, wrapper: Any, *, in_fp8: bool = False) -> None:
        self.fill: float | None = None
        """If set, nobody reads the result: it is filled with this value, and only the graph is made."""
        self._wrapper = wrapper
        self._plain = wrapper.forward
        (name,) = wrapper.active_adapters
        self._base, self._a, self._b = wrapper.get_base_layer(), wrapper.lora_A[name], wrapper.lora_B[name]
        self._dropout, self._scaling = wrapper.lora_dropout[name], float(wrapper.scaling[name])
        wrapper.__dict__["forward"] = self
        if in_fp8:
            self._base.__dict__[MULTIPLIES_PACKED] = True

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The adapted layer's result [..., out] for x [..., in]; by PEFT's own code where adapters are off or types
        differ."""
        weight, bias, a, b = self._base.weight, self._base.bias, self._a.weight, self._b.weight
        if type(weight) is PackedParameter:
            return self._in_fp8(x, weight, *args, **kwargs)
        if args or kwargs or self._wrapper._disable_adapters or not (x.dtype == weight.dtype == a.dtype == b.dtype):
            return self._plain(x, *args, **kwargs)  # type: ignore[no-any-return]
        p = self._p
        mask = drawn_mask(x, p) if p else None
        return lora_linear(x, weight, bias, a, b, AdapterTerm(self._scaling / (1 - p), mask, self.fill))

    @property
    def _p(self) -> float:
        """Share of the adapter's inputs that is dropped; 0 outside of training."""
        return float(self._dropout.p) if isinstance(self._dropout, nn.Dropout) and self._dropout.training else 0.0

    def _in_fp8(self, x: torch.Tensor, weight: PackedParameter, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The result with the base layer multiplied in FP8, also with adapters off; otherwise PEFT's own code."""
        a, b, p = self._a.weight, self._b.weight, self._p
        if args or kwargs or not (x.dtype == weight.whole_dtype == a.dtype == b.dtype):
            with whole_weights([(self._base, "weight", weight)], every=True):
                return self._plain(x, *args, **kwargs)  # type: ignore[no-any-return]
        both_ways = Fp8Weight(*weight.fp8_parts(), weight.dequantized)
        y = fp8_linear(x, both_ways, self._base.bias, self.fill)
        if self._wrapper._disable_adapters:
            return y
        seen = x * drawn_mask(x, p) if p else x
        low = functional.linear(functional.linear(seen, a), b)
        return torch.add(y, low, alpha=self._scaling / (1 - p))
