"""Fused LoRA linear, RMS norm and rotary embedding against their definitions: values, gradients, launches, memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from roundpipe_cli.kernels.lora_linear import AdapterTerm, lora_linear
from roundpipe_cli.kernels.random_masks import Draw, keep_mask
from roundpipe_cli.kernels.rms_norm import _ScaleByOnePlus, rms_norm
from roundpipe_cli.kernels.rotary import rotate
from tests.kernels.groups import error
from tests.support.launches import LaunchCounter

Tensors = dict[str, torch.Tensor]
DRAW = Draw(7, 0.7)
EPS = 1e-6


# -- LoRA linear ---------------------------------------------------------------------------------------------------


def tensors(shape: tuple[int, ...], r: int, out: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator, width = torch.Generator().manual_seed(r + out), shape[-1]
    shapes = {"x": shape, "weight": (out, width), "bias": (out,), "a": (r, width), "b": (out, r)}
    shapes["dy"] = (*shape[:-1], out)
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


@pytest.mark.parametrize(("masked", "biased"), itertools.product((False, True), repeat=2))
@pytest.mark.parametrize(("shape", "r"), [((2, 9, 24), 4), ((13, 8), 1), ((1, 3, 5, 7), 64)])
def test_lora_in_float32_agrees_within_rounding(shape: tuple[int, ...], r: int, masked: bool, biased: bool) -> None:
    t = tensors(shape, r, out=11)
    exact = composed(in_float64(t), 0.7, masked=masked, biased=biased)
    for one, other in zip(fused(t, 0.7, masked=masked, biased=biased), exact, strict=True):
        assert one.shape == other.shape and error(one, other) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_lora_in_16_bit_is_no_further_from_float64_than_the_operators(dtype: torch.dtype, masked: bool) -> None:
    """Fewer results are rounded on the way; twice the error would do."""
    t = tensors((2, 40, 64), 16, out=48, dtype=dtype)
    exact = composed(in_float64(t), 2.0, masked=masked, biased=True)
    plain = composed(t, 2.0, masked=masked, biased=True)
    for one, other, reference in zip(fused(t, 2.0, masked=masked, biased=True), plain, exact, strict=True):
        assert one.dtype == dtype and error(one, reference) <= 2 * error(other, reference) + 1e-6


def test_an_input_without_a_gradient_has_none_and_other_strides_do() -> None:
    t = tensors((6, 5, 8), 4, out=3)
    exact = composed(t, 1.0, masked=False, biased=False)
    x, above = (one.detach().transpose(0, 1).contiguous().transpose(0, 1) for one in (t["x"], t["dy"]))
    y = lora_linear(x, t["weight"], None, t["a"], lora_b=t["b"], term=AdapterTerm(1.0))
    found = (y, *torch.autograd.grad(y, (t["a"], t["b"]), above))
    assert all(error(one, other) < 1e-6 for one, other in zip(found, (exact[0], *exact[2:]), strict=True))


@pytest.mark.parametrize("draw", [None, DRAW], ids=["whole", "dropped"])
def test_what_is_launched_and_kept(draw: Draw | None) -> None:
    """One launch more where inputs are dropped; kept are x, the product with A and the weights, and no mask."""
    more = 0 if draw is None else 1
    t = tensors((1, 16, 8), 4, out=6)
    kept: list[torch.Tensor] = []
    note = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)
    with note, LaunchCounter() as forward:
        y = lora_linear(t["x"], t["weight"], None, t["a"], lora_b=t["b"], term=AdapterTerm(2.0, draw))
    with LaunchCounter() as backward:
        torch.autograd.grad(y, (t["x"], t["a"], t["b"]), t["dy"])
    assert (forward.launches.num_launches, forward.launches.num_products) == (3 + more, 3), forward.launches
    assert (backward.launches.num_launches, backward.launches.num_products) == (5 + more, 5), backward.launches
    assert sorted(one.shape for one in kept) == sorted([(16, 8), (6, 8), (4, 8), (6, 4), (16, 4)])


@pytest.mark.parametrize(("with_graph", "context"), [(True, "_LoraLinearBackward"), (False, "NoneType")])
def test_a_call_dispatches_eight_operators_and_makes_a_graph_only_if_asked(with_graph: bool, context: str) -> None:
    """Three products, four views and one new shape; nine before. Models may write to the result."""
    t = tensors((2, 9, 24), 4, out=11)
    expected = fused(t, 0.7, masked=False, biased=False)[0].detach()
    names = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.set_grad_enabled(with_graph), Noting():  # type: ignore[no-untyped-call]
        y = lora_linear(t["x"], t["weight"], None, t["a"], lora_b=t["b"], term=AdapterTerm(0.7))
    assert len(names) == 8 and type(y.grad_fn).__name__ == context
    assert torch.equal(y.detach(), expected) and torch.equal(y.mul_(2.0).detach(), expected * 2)


def test_an_unread_result_costs_no_product_and_the_gradients_keep_their_bits() -> None:
    t = tensors((3, 5, 8), 4, out=6)
    whole, term = fused(t, 0.5, masked=True, biased=True), AdapterTerm(0.5, DRAW, fill=float("nan"))
    with LaunchCounter() as counter:
        y = lora_linear(t["x"], t["weight"], t["bias"], t["a"], lora_b=t["b"], term=term)
    assert counter.launches.num_products == 1 and bool(y.isnan().all())
    found = torch.autograd.grad(y, (t["x"], t["a"], t["b"]), t["dy"])
    assert all(torch.equal(one, other) for one, other in zip(found, whole[1:], strict=True))


# -- RMS norm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 4e-3)], ids=str
)
def test_norm_and_gradients(dtype: torch.dtype, allowed: float, plus_one: bool) -> None:
    """Rounded once: half a unit of 16-bit types, and a tenth of it more."""
    generator = torch.Generator().manual_seed(1)
    x, above = (torch.randn(2, 3, 5, 96, generator=generator).mul_(s).to(dtype) for s in (3.0, 0.1))
    weight = torch.randn(96, generator=generator).to(dtype)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    wide = [one.detach().double().requires_grad_() for one in leaves]
    y = rms_norm(x, weight, EPS, plus_one=plus_one)
    wanted = wide[0] * (wide[0].square().mean(-1, keepdim=True) + EPS).rsqrt() * (wide[1] + plus_one)
    found = [y, *torch.autograd.grad(y, leaves, above)]
    for one, other in zip(found, [wanted, *torch.autograd.grad(wanted, wide, above.double())], strict=True):
        assert one.dtype == dtype and one.shape == other.shape and error(one, other) < allowed


def test_the_factor_of_weights_around_zero_is_not_rounded_to_16_bit() -> None:
    """On a device: n + n w, with w whole; 1 + w in bfloat16 would drop what is below 1/256."""
    normed = torch.full((3, 4), 1.0, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((4,), 2.0**-7, dtype=torch.bfloat16, requires_grad=True)
    y = _ScaleByOnePlus.apply(normed, weight)  # type: ignore[no-untyped-call]
    grad_normed, grad_weight = torch.autograd.grad(y, (normed, weight), torch.ones_like(normed))
    assert y.unique().item() == grad_normed.unique().item() == 1 + 2.0**-7 and grad_weight.tolist() == [3.0] * 4


# -- rotary embedding ----------------------------------------------------------------------------------------------


def example(dtype: torch.dtype) -> list[torch.Tensor]:
    """Query and key as attention has them, transposed, with fewer keys than queries; cos and sin; both gradients."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, 7, 4, 16), (2, 7, 2, 16), (2, 7, 16), (2, 7, 16), (2, 7, 4, 16), (2, 7, 2, 16)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [one.transpose(1, 2) if one.ndim == 4 else one for one in made]


def both(turn: object, given: list[torch.Tensor]) -> list[torch.Tensor]:
    query, key, cos, sin, *above = given
    leaves = [query.detach().requires_grad_(), key.detach().requires_grad_()]
    turned = turn(*leaves, cos, sin)  # type: ignore[operator]
    return [*turned, *torch.autograd.grad(turned, leaves, above)]


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rotation_and_gradients(dtype: torch.dtype, is_half: bool) -> None:
    """No further from float64 than twice transformers' own; also with cos and sin of half a head, as gpt-oss has."""
    query, key, cos, sin, *above = example(dtype)
    given = [query, key, *(one[..., : 8 if is_half else 16] for one in (cos, sin)), *above]
    theirs = modeling_gpt_oss.apply_rotary_pos_emb if is_half else apply_rotary_pos_emb
    exact = both(theirs, [one.double() for one in given])
    ours = both(lambda query, key, cos, sin: rotate(query, key, cos[:, None], sin[:, None]), given)
    for one, own, wanted in zip(ours, both(theirs, given), exact, strict=True):
        errors = [float((found.detach().double() - wanted.detach()).norm()) for found in (one, own)]
        assert one.shape == own.shape and errors[0] <= 2 * errors[1]
