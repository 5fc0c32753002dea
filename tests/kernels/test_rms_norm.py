"""The fused RMS norm against its definition in float64, and what it launches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from roundpipe_cli.kernels.fused import _ScaleByOnePlus, rms_norm
from tests.support.launches import LaunchCounter

EPS = 1e-6


def exact(x: torch.Tensor, weight: torch.Tensor, plus_one: bool) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (weight + plus_one)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 4e-3)], ids=str
)
def test_value_and_gradients(dtype: torch.dtype, allowed: float, plus_one: bool) -> None:
    """Rounded once: half a unit of 16-bit types, and a tenth of it more."""
    generator = torch.Generator().manual_seed(1)
    x, above = (torch.randn(2, 3, 5, 96, generator=generator).mul_(s).to(dtype) for s in (3.0, 0.1))
    weight = torch.randn(96, generator=generator).to(dtype)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    wide = [one.detach().double().requires_grad_() for one in leaves]
    y, wanted = rms_norm(x, weight, EPS, plus_one=plus_one), exact(wide[0], wide[1], plus_one)
    found = [y, *torch.autograd.grad(y, leaves, above)]
    for one, other in zip(found, [wanted, *torch.autograd.grad(wanted, wide, above.double())], strict=True):
        assert one.dtype == dtype and one.shape == other.shape and error(one, other) < allowed


def test_frozen_weights_and_inputs_have_no_gradient() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8)
    rms_norm(x, weight, EPS).sum().backward()
    assert x.grad is not None and weight.grad is None
    y = rms_norm(x.detach(), weight.requires_grad_(), EPS)
    assert torch.autograd.grad(y.sum(), weight)[0].shape == (8,)


def launched(norm: Callable[[torch.Tensor], torch.Tensor]) -> tuple[int, int]:
    """Operators of forward and backward, and the bytes that they read and write."""
    x, above = torch.randn(64, 256, requires_grad=True), torch.ones(64, 256)
    with LaunchCounter() as counter:
        torch.autograd.grad(norm(x), x, above)
    return counter.launches.num_launches, counter.launches.traffic_bytes


def test_launches_on_the_processor() -> None:
    """Less than of torch's function, which it takes apart there."""
    weight = torch.randn(256)
    own = launched(lambda x: rms_norm(x, weight, EPS))
    usual = launched(lambda x: functional.rms_norm(x, weight.shape, weight, EPS))
    assert own[0] <= usual[0] - 3 and own[1] < 0.75 * usual[1], (own, usual)


def test_the_factor_of_weights_around_zero_is_not_rounded_to_16_bit() -> None:
    """On a device: n + n w, with w whole; 1 + w in bfloat16 would drop what is below 1/256."""
    normed = torch.full((3, 4), 1.0, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((4,), 2.0**-7, dtype=torch.bfloat16, requires_grad=True)
    y = _ScaleByOnePlus.apply(normed, weight)  # type: ignore[no-untyped-call]
    grad_normed, grad_weight = torch.autograd.grad(y, (normed, weight), torch.ones_like(normed))
    assert y.unique().item() == grad_normed.unique().item() == 1 + 2.0**-7 and grad_weight.tolist() == [3.0] * 4


def test_what_it_returns_may_be_written_to() -> None:
    """A view made within an autograd function refuses."""
    x = torch.randn(2, 3, 8, requires_grad=True)
    result = rms_norm(x, torch.ones(8), 1e-6)
    result *= 2
    result.sum().backward()
    assert x.grad is not None
