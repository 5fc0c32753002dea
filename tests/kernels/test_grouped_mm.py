"""Grouped products as operators: what dispatch modes see, and the plain products of the processor."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from roundpipe_cli.kernels.grouped_mm import AdaptedProduct, grouped_mm, grouped_mm_lora, grouped_outer
from tests.kernels.groups import doubled, ends_of, error, looped_lora, random, with_gradients

COUNTS = [3, 0, 6]


def arguments(name: str) -> tuple[object, ...]:
    x, w, low, b, right = random(1, torch.bfloat16, (10, 8), (3, 8, 5), (10, 2), (3, 2, 5), (10, 7))
    ends = ends_of(COUNTS)
    return {
        "grouped_mm": (x, w, ends, 0.5),
        "grouped_mm_lora": (x.detach(), w.detach(), low.detach(), b.detach(), ends, 2.0),
        "grouped_outer": (x.detach(), right.detach(), ends, 0.5),
    }[name]


@pytest.mark.sweep
@pytest.mark.parametrize("operator", [grouped_mm, grouped_mm_lora, grouped_outer], ids=lambda one: one._name)
def test_operators_keep_torchs_rules(operator: torch.library.CustomOpDef) -> None:
    """Schema, no mutation, fake results like real ones, autograd registered."""
    given = arguments(operator._name)
    torch.library.opcheck(operator, given, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_shapes_are_known_without_the_counts() -> None:
    """Fake tensors have no values, so nothing may ask how many rows an expert has; both passes run on them."""
    with FakeTensorMode():
        x, a, b = (torch.empty(shape, requires_grad=True) for shape in ((10, 8), (3, 4, 8), (3, 6, 4)))
        w, ends = torch.empty(3, 6, 8), torch.empty(3, dtype=torch.int32)
        AdaptedProduct.apply(x, w.transpose(1, 2), a, b, ends, 1.0).sum().backward()
        assert x.grad is not None and a.grad is not None and b.grad is not None
        assert (x.grad.shape, a.grad.shape, b.grad.shape) == (x.shape, a.shape, b.shape)


def test_the_processors_products() -> None:
    """Outside the interpreter tensors of the processor need no triton: simulated GPUs compute so."""
    inputs = random(2, torch.float32, (10, 8), (3, 8, 5), (3, 2, 8), (3, 5, 2))
    inputs[1].requires_grad_(False)
    found = with_gradients(AdaptedProduct.apply, inputs, ends_of(COUNTS), 0.5)
    exact = with_gradients(looped_lora, doubled(inputs), ends_of(COUNTS), 0.5)
    assert all(error(one, expected) <= 1e-6 for one, expected in zip(found, exact, strict=True))


def test_gradients_come_in_the_layout_of_the_weights() -> None:
    """Experts hold [E, out, in] and multiply by its transpose; a gradient in the other layout would be copied whole."""
    x, stored = random(3, torch.float32, (9, 8), (3, 5, 8))
    grouped_mm(x, stored.transpose(1, 2), ends_of(COUNTS)).sum().backward()
    assert stored.grad is not None and stored.grad.is_contiguous()


def test_nothing_is_saved_that_no_gradient_needs() -> None:
    """Frozen experts keep no rows, and rows that need no gradient keep no experts."""
    kept: list[torch.Tensor] = []
    x, w = random(4, torch.float32, (9, 8), (3, 8, 5))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        grouped_mm(x, w.detach(), ends_of(COUNTS))
        assert [tuple(one.shape) for one in kept] == [(3, 8, 5), (3,)]
        kept.clear()
        grouped_mm(x.detach(), w, ends_of(COUNTS))
        assert [tuple(one.shape) for one in kept] == [(9, 8), (3,)]
