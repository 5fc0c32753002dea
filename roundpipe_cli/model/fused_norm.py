"""RMS norms of a model: recognised by what they compute, and replaced by the fused operator in a worker's modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_cli.kernels.rms_norm import rms_norm

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
    """Equal for modules that are tried once; None for what has not the form of a norm: one vector, nothing below."""
    parameters = {name: one for name, one in module._parameters.items() if one is not None}
    has_hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if len(parameters) != 1 or module._modules or any(b is not None for b in module._buffers.values()) or has_hooks:
        return None
    ((name, weight),) = parameters.items()
    if weight.ndim != 1 or "forward" in module.__dict__:
        return None
    return type(module), name, weight.shape, weight.dtype, tuple(_small_floats(module))


def _small_floats(module: nn.Module) -> list[float]:
    values = [value for value in vars(module).values() if isinstance(value, float) and 0 < value <= MAX_EPS]
    return list(dict.fromkeys(values))


def norm_form(module: nn.Module) -> NormForm | None:
    """The form of a module that computes an RMS norm in float32 and in its own type; None for any other.

    `module` has one vector as parameter, on any device.
    """
    ((name, weight),) = ((key, one) for key, one in module._parameters.items() if one is not None)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(weight.shape, generator=generator)
    rows = torch.randn((len(ROW_SCALES), *weight.shape), generator=generator) * torch.tensor(ROW_SCALES)[:, None]
    expected = _run(module, name, values, rows)
    if expected is None:
        return None
    for eps in _small_floats(module):
        for plus_one in (False, True):
            found = rms_norm(rows, values, eps, plus_one=plus_one)
            if _error(found, expected) <= MAX_ERROR and _is_close(module, NormForm(name, eps, plus_one), values, rows):
                return NormForm(name, eps, plus_one)
    return None


def _run(module: nn.Module, name: str, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """Result of a copy of `module` with the weight `values`; None where it is none of the same form."""
    shadow = type(module).__new__(type(module))
    shadow.__dict__ = {**module.__dict__, "_parameters": {name: nn.Parameter(values, requires_grad=False)}}
    try:
        with torch.no_grad():
            result = shadow.forward(rows)
    except Exception:  # whatever a module does that is no norm
        return None
    same = isinstance(result, torch.Tensor) and result.shape == rows.shape and result.dtype == rows.dtype
    return result if same else None


def _is_close(module: nn.Module, form: NormForm, values: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether the fused norm in the weight's type is as close to float64 as the module itself, within twice."""
    dtype = module._parameters[form.weight].dtype  # type: ignore[union-attr]
    values, rows = values.to(dtype), rows.to(dtype)
    own = _run(module, form.weight, values, rows)
    exact = rms_norm_in_float64(rows, values, form)
    fused = rms_norm(rows, values, form.eps, plus_one=form.plus_one)
    return own is not None and _error(fused, exact) <= 2 * _error(own, exact) + MAX_ERROR


def rms_norm_in_float64(rows: torch.Tensor, values: torch.Tensor, form: NormForm) -> torch.Tensor:
    """The norm by its definition."""
    wide, factor = rows.double(), values.double() + form.plus_one
    return wide * (wide.square().mean(-1, keepdim=True) + form.eps).rsqrt() * factor


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of a row, relative to its norm."""
    wanted = expected.double()
    return float(((found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


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
