"""The LoRA linear as one function: values, gradients, masks and launches against the composed operators."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from roundpipe_cli.kernels.fused import AdapterTerm, lora_linear
from roundpipe_cli.kernels.random_masks import Draw, keep_mask
from tests.support.launches import LaunchCounter

Tensors = dict[str, torch.Tensor]
DRAW = Draw(7, 0.7)


def tensors(shape: tuple[int, ...], r: int, out: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(r + out)
    width = shape[-1]
    shapes = {
        "x": shape,
        "weight": (out, width),
        "bias": (out,),
        "a": (r, width),
        "b": (out, r),
        "dy": (*shape[:-1], out),
    }
    made = {name: torch.randn(one, generator=generator).mul_(0.3).to(dtype) for name, one in shapes.items()}
    for name in ("x", "a", "b"):
        made[name].requires_grad_()
    return made | {"mask": keep_mask(shape, DRAW.keep, DRAW.key, torch.device("cpu"))}


def in_float64(t: Tensors) -> Tensors:
    return {name: one.double() if one.is_floating_point() else one for name, one in t.items()}


def composed(t: Tensors, scaling: float, *, masked: bool, biased: bool) -> list[torch.Tensor]:
    """y, dx, dA and dB by PEFT's order of operations."""
    seen = t["x"] * t["mask"] if masked else t["x"]
    y = functional.linear(t["x"], t["weight"], t["bias"] if biased else None)
    y = y + functional.linear(functional.linear(seen, t["a"]), t["b"]) * scaling
    return [y, *torch.autograd.grad(y, (t["x"], t["a"], t["b"]), t["dy"])]


def fused(t: Tensors, scaling: float, *, masked: bool, biased: bool) -> list[torch.Tensor]:
    term = AdapterTerm(scaling, DRAW if masked else None)
    y = lora_linear(t["x"], t["weight"], t["bias"] if biased else None, t["a"], lora_b=t["b"], term=term)
    return [y, *torch.autograd.grad(y, (t["x"], t["a"], t["b"]), t["dy"])]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize(("masked", "biased"), itertools.product((False, True), repeat=2))
@pytest.mark.parametrize(("shape", "r"), [((2, 9, 24), 4), ((13, 8), 1), ((1, 3, 5, 7), 64)])
def test_float32_agrees_within_rounding(shape: tuple[int, ...], r: int, masked: bool, biased: bool) -> None:
    t = tensors(shape, r, out=11)
    exact = composed(in_float64(t), 0.7, masked=masked, biased=biased)
    for one, other in zip(fused(t, 0.7, masked=masked, biased=biased), exact, strict=True):
        assert one.shape == other.shape and error(one, other) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_16_bit_is_no_further_from_float64_than_the_composed_operators(dtype: torch.dtype, masked: bool) -> None:
    """Fewer results are rounded on the way; twice the error would do."""
    t = tensors((2, 40, 64), 16, out=48, dtype=dtype)
    exact = composed(in_float64(t), 2.0, masked=masked, biased=True)
    plain = composed(t, 2.0, masked=masked, biased=True)
    for one, other, reference in zip(fused(t, 2.0, masked=masked, biased=True), plain, exact, strict=True):
        assert one.dtype == dtype and error(one, reference) <= 2 * error(other, reference) + 1e-6


def test_an_input_without_a_gradient_has_none_and_other_strides_do() -> None:
    t = tensors((6, 5, 8), 4, out=3)
    exact = composed(t, 1.0, masked=False, biased=False)
    turned = {**t, "x": t["x"].detach().transpose(0, 1).contiguous().transpose(0, 1)}
    y = lora_linear(turned["x"], t["weight"], None, t["a"], lora_b=t["b"], term=AdapterTerm(1.0))
    found = torch.autograd.grad(y, (t["a"], t["b"]), t["dy"].transpose(0, 1).contiguous().transpose(0, 1))
    assert all(
        error(one, other.double()) < 1e-6 for one, other in zip((y, *found), (exact[0], *exact[2:]), strict=True)
    )


@pytest.mark.parametrize("draw", [None, DRAW], ids=["whole", "dropped"])
def test_what_is_launched_and_kept(draw: Draw | None) -> None:
    """Three products forward and five backward, one launch more where inputs are dropped; kept are x, the product with
    A and the weights, and no mask. Dropping took 58 launches forward and two more backward."""
    more = 0 if draw is None else 1
    t = tensors((1, 16, 8), 4, out=6)
    kept: list[torch.Size] = []

    def note(one: torch.Tensor) -> torch.Tensor:
        kept.append(one.shape)
        return one

    with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one), LaunchCounter() as forward:
        y = lora_linear(t["x"], t["weight"], None, t["a"], lora_b=t["b"], term=AdapterTerm(2.0, draw))
    with LaunchCounter() as backward:
        torch.autograd.grad(y, (t["x"], t["a"], t["b"]), t["dy"])
    assert (forward.launches.num_launches, forward.launches.num_products) == (3 + more, 3), forward.launches
    assert (backward.launches.num_launches, backward.launches.num_products) == (5 + more, 5), backward.launches
    assert sorted(kept) == sorted([(16, 8), (6, 8), (4, 8), (6, 4), (16, 4)])


def test_an_unread_result_costs_no_product_and_the_gradients_keep_their_bits() -> None:
    t = tensors((3, 5, 8), 4, out=6)
    whole = fused(t, 0.5, masked=True, biased=True)
    with LaunchCounter() as counter:
        y = lora_linear(
            t["x"], t["weight"], t["bias"], t["a"], lora_b=t["b"], term=AdapterTerm(0.5, DRAW, fill=float("nan"))
        )
    assert counter.launches.num_products == 1 and bool(y.isnan().all())
    found = torch.autograd.grad(y, (t["x"], t["a"], t["b"]), t["dy"])
    assert all(torch.equal(one, other) for one, other in zip(found, whole[1:], strict=True))


def test_what_it_returns_may_be_written_to() -> None:
    """As llama4's attention does; a view made within an autograd function refuses."""
    t = tensors((2, 3, 8), 2, 6)
    result = lora_linear(t["x"], t["weight"], None, t["a"], lora_b=t["b"], term=AdapterTerm(0.5))
    expected = result.detach() * 2
    result *= 2
    result.backward(t["dy"])
    assert torch.equal(result, expected) and t["x"].grad is not None
