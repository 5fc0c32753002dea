"""Finds the modules of a model that can use the fused operators of `kernels/`, and makes a worker's modules use them.

Found once, when the model is prepared. Norms and rotary embeddings are known by what they compute, not by name: each is
tried on a few numbers and compared with the fused operator. What does not compute the same keeps its own forward. A
choice depends on the model, on shapes and types, never on time or on what ran before.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_cli.kernels.lora_linear import AdapterTerm, lora_linear
from roundpipe_cli.kernels.rms_norm import rms_norm
from roundpipe_cli.kernels.rotary import rotate
from roundpipe_cli.model.dropout import next_draw
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.model.stored.packed_weights import import_bitsandbytes

# RMS norms of a model: recognised by what they compute, and replaced by the fused operator in a worker's modules.

MAX_EPS = 1e-2
"""A float attribute of a module up to this size may be its eps."""
ROW_SCALES = (1e-4, 1e-2, 1.0, 30.0)
"""Magnitudes of the rows that a norm is tried on: in small rows eps decides."""
MAX_NORM_ERROR = 1e-5
"""Largest error of a module against the formula, both in float32, relative to the row's norm."""


@dataclass(frozen=True)
class NormForm:
    """The parameters of a module's norm."""

    weight: str
    """Attribute of its weight [H]."""
    eps: float
    plus_one: bool
    """Whether the factor is 1 + weight."""


def norm_kind(module: nn.Module) -> tuple[object, ...] | None:
    """Equal for modules that are tried once: same class and plain attributes; None for what has not the form of a norm:
    one vector, nothing below."""
    parameters = {name: one for name, one in module._parameters.items() if one is not None}
    has_more = module._modules or any(b is not None for b in module._buffers.values()) or _has_hooks(module)
    if len(parameters) != 1 or has_more:
        return None
    ((name, weight),) = parameters.items()
    if weight.ndim != 1 or "forward" in module.__dict__:
        return None
    plain = tuple((key, one) for key, one in vars(module).items() if isinstance(one, (bool, int, float, str)))
    return type(module), name, weight.shape, weight.dtype, plain


def norm_form(module: nn.Module) -> NormForm | None:
    """The form of a module that computes an RMS norm in float32 and in its own type; None for any other.

    `module` has one vector as parameter, on any device.
    """
    ((name, weight),) = ((key, one) for key, one in module._parameters.items() if one is not None)
    generator = torch.Generator().manual_seed(0)
    values = nn.Parameter(torch.randn(weight.shape, generator=generator))
    above = torch.randn((2, 2, *weight.shape), generator=generator)
    # more than one dimension of rows: a mean over the wrong one must show
    rows = torch.randn(above.shape, generator=generator) * torch.tensor(ROW_SCALES).view(2, 2, 1)
    expected = _run(module, name, values, rows, above=above)
    if expected is None:
        return None
    for eps in dict.fromkeys(one for one in vars(module).values() if isinstance(one, float) and 0 < one <= MAX_EPS):
        for plus_one in (False, True):
            form = NormForm(name, eps, plus_one)
            found = _with_gradients(functools.partial(_fused_norm, values=values, form=form), values, rows, above)
            if max(map(_error, found, expected)) <= MAX_NORM_ERROR and _is_close(module, form, values, rows):
                return form
    return None


def _fused_norm(x: torch.Tensor, values: torch.Tensor, form: NormForm) -> torch.Tensor:
    return rms_norm(x, values, form.eps, plus_one=form.plus_one)


def _with_gradients(
    norm: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, rows: torch.Tensor, above: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Result for `rows`, then the gradients of both below `above`."""
    with torch.enable_grad():
        x = rows.detach().requires_grad_()
        result = norm(x)
        return result.detach(), *torch.autograd.grad(result, (x, values), above.to(result.dtype))


def _run(
    module: nn.Module, name: str, values: torch.Tensor, rows: torch.Tensor, *, above: torch.Tensor
) -> tuple[torch.Tensor, ...] | None:
    """Result and gradients of a copy of `module` with the weight `values`; None where it is none of the same form."""
    shadow = type(module).__new__(type(module))
    shadow.__dict__ = {**module.__dict__, "_parameters": {name: values}}
    try:
        found = _with_gradients(shadow.forward, values, rows, above)
    except Exception:  # whatever a module does that is no norm
        return None
    same = found[0].shape == rows.shape and found[0].dtype == rows.dtype
    return found if same else None


def _is_close(module: nn.Module, form: NormForm, values: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether the fused norm in the weight's type is as close to float64 as the module itself, within twice."""
    dtype = module._parameters[form.weight].dtype  # type: ignore[union-attr]
    values, rows = nn.Parameter(values.detach().to(dtype)), rows.to(dtype)
    own = _run(module, form.weight, values, rows, above=rows)
    wide, factor = rows.double(), values.detach().double() + form.plus_one
    exact = wide * (wide.square().mean(-1, keepdim=True) + form.eps).rsqrt() * factor
    error = _error(_fused_norm(rows, values, form), exact)
    return own is not None and error <= 2 * _error(own[0], exact) + MAX_NORM_ERROR


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of a row, relative to its norm."""
    wanted = expected.double()
    return float(((found.detach().double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


class FusedNorm:
    """Replaces the forward of a norm, one worker's own copy."""

    def __init__(self, module: nn.Module, form: NormForm) -> None:
        self._module, self._form = module, form
        self._plain = module.forward
        module.__dict__["forward"] = self

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The norm of x [..., H]; by the module's own code where it is called with more, or types differ."""
        weight = self._module._parameters[self._form.weight]
        assert weight is not None
        if args or kwargs or x.dtype != weight.dtype:
            return self._plain(x, *args, **kwargs)
        return rms_norm(x, weight, self._form.eps, plus_one=self._form.plus_one)


# Rotary embeddings of a model's attention: known by what they compute, and turned by the fused operator.
#
# transformers' attention modules call a function of their own file, by a name that all share. A module of one worker
# gets a copy of its forward in which that name stands for the fused one; nothing is changed for other modules. From
# 5.24 on that forward is wrapped by a function that renames an old argument, which is left out of the copy.

NAME = "apply_rotary_pos_emb"
RENAMING = "transformers.utils.deprecation"
"""Module whose decorator accepts arguments by their old names."""
MAX_ROTARY_ERROR = 1e-6

Turn = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(query, key, cos, sin) -> both turned; cos and sin [B, T, D]."""


def can_rotate(module: nn.Module) -> bool:
    """Whether the module's forward turns queries and keys as the fused operator does."""
    forward = _own_forward(module)
    if not isinstance(forward, types.FunctionType) or NAME not in forward.__code__.co_names:
        return False
    return "forward" not in module.__dict__ and any(_turns_halves(forward.__globals__.get(NAME), n) for n in (1, 2))


def fuse_rotary(module: nn.Module) -> None:
    """Give `module`, one worker's own copy, the fused operator."""
    module.__dict__["forward"] = types.MethodType(_fused_forward(_own_forward(module)), module)


def _own_forward(module: nn.Module) -> Any:
    """The function that computes, below what accepts old names of its arguments for a while."""
    forward: Any = type(module).forward
    while isinstance(forward, types.FunctionType) and forward.__globals__.get("__name__") == RENAMING:
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward


@functools.cache
def _fused_forward(forward: types.FunctionType) -> types.FunctionType:
    names = {**forward.__globals__, NAME: _fused_turn(forward.__globals__[NAME])}
    made = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _fused_turn(plain: Turn) -> Turn:
    """Replaces `plain`, and calls it for arguments that the fused operator does not take."""
    share = 2 if _turns_halves(plain, 2) else 1

    def turn(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if len(args) != 4 or not kwargs.keys() <= {"unsqueeze_dim"}:  # queries alone, or something that is unknown here
            return plain(*args, **kwargs)
        query, key, cos, sin = args
        is_one_type = query.dtype == key.dtype == cos.dtype == sin.dtype
        is_whole = query.shape[-1] == key.shape[-1] == share * cos.shape[-1] == share * sin.shape[-1]
        if not (is_one_type and is_whole) or cos.requires_grad or sin.requires_grad or cos.ndim != 3:
            return plain(*args, **kwargs)
        dim = kwargs.get("unsqueeze_dim", 1)
        return rotate(query, key, cos.unsqueeze(dim), sin.unsqueeze(dim))

    return turn


@functools.cache
def _turns_halves(plain: Any, share: int) -> bool:
    """Try it on a few numbers, with cos and sin of 1 / `share` of a head's width."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8 // share), (2, 5, 8 // share))
    query, key, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
    try:
        found = plain(query, key, cos, sin, unsqueeze_dim=1)
        expected = rotate(query, key, cos[:, None], sin[:, None])
        return len(found) == 2 and all(
            one.shape == other.shape and float((one - other).abs().max()) <= MAX_ROTARY_ERROR * float(other.abs().max())
            for one, other in zip(found, expected, strict=True)
        )
    except Exception:  # another function of this name may raise anything
        return False


@dataclass(frozen=True)
class FusedOps:
    """Modules that compute by fused operators, by path in the causal language model."""

    lora_linears: tuple[str, ...] = ()
    norms: tuple[tuple[str, NormForm], ...] = ()
    rotaries: tuple[str, ...] = ()
    """Attention modules, whose queries and keys are turned."""


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
    """Number of fused modules of each kind, where there are any."""
    ops = ops or FusedOps()
    kinds = {"lora_linear": ops.lora_linears, "rms_norm": ops.norms, "rotary": ops.rotaries}
    return {name: len(modules) for name, modules in kinds.items() if modules}


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
        parts = wrapper.get_base_layer(), wrapper.lora_A[name], wrapper.lora_B[name]
        self._base, self._a, self._b = (part._parameters for part in parts)
        self._dropout, self._scaling = wrapper.lora_dropout[name], float(wrapper.scaling[name])
        wrapper.__dict__["forward"] = self

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The adapted layer's result [..., out] for x [..., in]; by PEFT's own code where adapters are off or types
        differ."""
        weight, bias, a, b = self._base["weight"], self._base["bias"], self._a["weight"], self._b["weight"]
        if args or kwargs or self._wrapper._disable_adapters or not (x.dtype == weight.dtype == a.dtype == b.dtype):
            return self._plain(x, *args, **kwargs)  # type: ignore[no-any-return]
        drops = isinstance(self._dropout, nn.Dropout) and self._dropout.training
        p = float(self._dropout.p) if drops else 0.0
        draw = next_draw(p) if p else None
        return lora_linear(x, weight, bias, a, lora_b=b, term=AdapterTerm(self._scaling / (1 - p), draw, self.fill))
