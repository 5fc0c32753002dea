"""RMS norms of a model: recognised by what they compute, and replaced by the fused operator in a worker's modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_cli.kernels.fused import rms_norm

MAX_EPS = 1e-2
"""A float attribute of a module up to this size may be its eps."""
ROW_SCALES = (1e-4, 1e-2, 1.0, 30.0)
"""Magnitudes of the rows that a norm is tried on: in small rows eps decides."""
MAX_ERROR = 1e-5
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
    has_hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if len(parameters) != 1 or module._modules or any(b is not None for b in module._buffers.values()) or has_hooks:
        return None
    ((name, weight),) = parameters.items()
    if weight.ndim != 1 or "forward" in module.__dict__:
        return None
    plain = tuple((key, one) for key, one in vars(module).items() if isinstance(one, (bool, int, float, str)))
    return type(module), name, weight.shape, weight.dtype, plain


def _small_floats(module: nn.Module) -> list[float]:
    values = [value for value in vars(module).values() if isinstance(value, float) and 0 < value <= MAX_EPS]
    return list(dict.fromkeys(values))


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
    expected = _run(module, name, values, rows, above)
    if expected is None:
        return None
    for eps in _small_floats(module):
        for plus_one in (False, True):
            form = NormForm(name, eps, plus_one)
            found = _with_gradients(functools.partial(_fused, values=values, form=form), values, rows, above)
            if max(map(_error, found, expected)) <= MAX_ERROR and _is_close(module, form, values, rows):
                return form
    return None


def _fused(x: torch.Tensor, values: torch.Tensor, form: NormForm) -> torch.Tensor:
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
    module: nn.Module, name: str, values: torch.Tensor, rows: torch.Tensor, above: torch.Tensor
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
    own = _run(module, form.weight, values, rows, rows)
    exact = rms_norm_in_float64(rows, values, form)
    return own is not None and _error(_fused(rows, values, form), exact) <= 2 * _error(own[0], exact) + MAX_ERROR


def rms_norm_in_float64(rows: torch.Tensor, values: torch.Tensor, form: NormForm) -> torch.Tensor:
    """The norm by its definition."""
    wide, factor = rows.double(), values.detach().double() + form.plus_one
    return wide * (wide.square().mean(-1, keepdim=True) + form.eps).rsqrt() * factor


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
