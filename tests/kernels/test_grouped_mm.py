"""Grouped products as operators: the plain products of the processor, and the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roundpipe_cli.kernels.grouped_mm import AdaptedProduct, grouped_mm
from tests.kernels.groups import Product, doubled, ends_of, error, looped, looped_lora, random, with_gradients

COUNTS = [3, 0, 6]


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


# -- the kernels in Triton's interpreter, against products in float64 -----------------------------------------------

INTERPRETED = pytest.mark.usefixtures("interpreter")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNEVEN = [5, 0, 20, 1, 0]
"""Rows of each expert: fewer than a tile of 16, none, more than one tile, a single one, none at the end."""


def allowed(exact: torch.Tensor, dtype: torch.dtype, cancelled: float = 1.0) -> float:
    """Error of a product that is summed in float32 and rounded once, with room for the order of the sum.

    Args:
        cancelled: how many times larger the summed sizes of the terms are than the result.
    """
    return 1.2 * error(exact.to(dtype), exact) + 1e-6 * max(1.0, cancelled)


@INTERPRETED
@given(
    *(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 20), st.integers(1, 70), st.integers(1, 70)),
    *(st.sampled_from(DTYPES), st.booleans()),
)
@example(UNEVEN, 3, 40, 33, torch.float32, True)
@example(UNEVEN, 3, 64, 128, torch.float16, True)
@example(UNEVEN, 3, 40, 90, torch.bfloat16, False)
@settings(max_examples=8, deadline=None)
def test_product_and_both_gradients(
    counts: list[int], spare: int, width: int, columns: int, dtype: torch.dtype, is_transposed: bool
) -> None:
    """Tails, whole tiles and two of them; no rows, and rows of nobody; weights that are transposed views, and not."""
    ends, rows = ends_of(counts), sum(counts) + spare
    shape = (len(counts), columns, width) if is_transposed else (len(counts), width, columns)
    x, w = random(1, dtype, (rows, width), shape)

    def by(product: Product, inputs: Sequence[torch.Tensor], absolute: bool = False) -> list[torch.Tensor]:
        def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return product(x, w.transpose(1, 2) if is_transposed else w, ends, 0.5)

        return with_gradients(run, inputs, absolute=absolute)

    sizes = by(looped, [one.abs().requires_grad_() for one in doubled([x, w])], absolute=True)
    for found, expected, size in zip(by(grouped_mm, [x, w]), by(looped, doubled([x, w])), sizes, strict=True):
        cancelled = float(size.norm()) / (float(expected.norm()) or 1.0)
        assert found.dtype == dtype and error(found, expected) <= allowed(expected, dtype, cancelled)
        assert not found[expected == 0].any()  # nobody's rows, and weights of experts without any


@INTERPRETED
@pytest.mark.parametrize(
    ("dtype", "rank"),
    [
        *((torch.bfloat16, 33), (torch.float32, 3)),
        *(pytest.param(torch.bfloat16, rank, marks=pytest.mark.sweep) for rank in (1, 12, 64)),
        pytest.param(torch.float16, 40, marks=pytest.mark.sweep),
    ],
)
def test_adapters_of_any_rank(dtype: torch.dtype, rank: int) -> None:
    """Base and adapters: the same sums as one product after the other, with fewer roundings."""
    ends, rows = ends_of(UNEVEN), sum(UNEVEN)
    x, w, a, b = random(2, dtype, (rows, 24), (5, 24, 40), (5, rank, 24), (5, 40, rank))
    inputs = [x, w.requires_grad_(False), a, b]
    found = with_gradients(AdaptedProduct.apply, inputs, ends, 0.7)
    exact = with_gradients(looped_lora, doubled(inputs), ends, 0.7)
    eager = with_gradients(looped_lora, inputs, ends, 0.7)
    assert len(found) == 4
    for one, expected, theirs in zip(found, exact, eager, strict=True):
        assert error(one, expected) <= max(1e-6, 1.1 * error(theirs, expected))


@INTERPRETED
def test_a_rows_result_depends_on_no_other_row() -> None:
    """More rows mean larger tiles, but each sum is taken in the same order."""
    x, w = (one.detach() for one in random(4, torch.float32, (9, 70), (2, 70, 20)))
    few = grouped_mm(x, w, ends_of([4, 5]))
    more = torch.cat([x[:4], torch.randn(60, 70), x[4:], torch.randn(31, 70)])
    many = grouped_mm(more, w, ends_of([64, 36]))
    assert torch.equal(many[:4], few[:4]) and torch.equal(many[64:69], few[4:])
