"""The head's loss by our kernel's operator, on the processor: the bits of torch's operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from roundpipe_cli.kernels.fused import product_sum
from roundpipe_cli.model.head import GradientTaps, HeadLoss, HeadTargets, run_head


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_head_has_the_same_bits_either_way_on_the_processor(cap: float | None, smoothing: float) -> None:
    """Also with logits that are capped, and with logits that a backward reads, which are not written over."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 9, 16, generator=generator), torch.randn(50, 16, generator=generator)
    ids, indices = torch.randint(50, (11,), generator=generator), torch.randperm(18, generator=generator)[:11]

    def logits(rows: torch.Tensor, first: int) -> torch.Tensor:
        made = (rows @ weight.t())[None][0]
        if cap is None:
            return made
        return torch.tanh(made / cap) * cap if first else torch.tanh(made)

    found = []
    for in_place in (False, True):
        loss = HeadLoss(0.5, 4, smoothing, in_place)
        taps = GradientTaps([], lambda index, gradient: None)
        found.append(run_head(logits, hidden, HeadTargets(indices, ids), loss, taps=taps, needs_hidden_grad=True))
    one, other = found
    assert torch.equal(torch.as_tensor(one.loss_sum), torch.as_tensor(other.loss_sum))
    assert one.grad_hidden is not None and other.grad_hidden is not None
    assert torch.equal(one.grad_hidden, other.grad_hidden)


@pytest.fixture
def products_in_float32() -> Iterator[None]:
    """torch's products of 16 bit with a result in float32, which it has for CUDA alone."""
    library = torch.library.Library("aten", "IMPL")

    def add(
        total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, _: torch.dtype, *, out: torch.Tensor
    ) -> torch.Tensor:
        return out.copy_(total + a.float() @ b.float())

    library.impl("mm.dtype", lambda a, b, _: a.float() @ b.float(), "CPU")
    library.impl("addmm.dtype_out", add, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("products_in_float32")
@pytest.mark.parametrize("is_capped", [False, True])
def test_gradients_of_the_heads_matrix_are_added_up_unrounded(is_capped: bool) -> None:
    """Each chunk's was written in 16 bit, then added; logits that are capped keep that way."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 40, 16, generator=generator).bfloat16()
    weight = torch.nn.Parameter(torch.randn(50, 16, generator=generator).bfloat16())
    ids, indices = torch.randint(50, (64,), generator=generator), torch.randperm(80, generator=generator)[:64]

    def logits(rows: torch.Tensor, first: int) -> torch.Tensor:
        made = torch.nn.functional.linear((rows * 2)[None], weight)[0]
        return torch.tanh(made / 30) * 30 if is_capped else made

    def run(within: bool) -> tuple[torch.Tensor, torch.Tensor | None, list[str]]:
        sums: dict[str, torch.Tensor] = {}
        ways = []

        def take(_: int, gradient: torch.Tensor) -> None:
            ways.append("taken")
            sums["all"] = gradient.float() + sums.get("all", 0)

        def add_product(index: int, left: torch.Tensor, right: torch.Tensor) -> None:
            ways.append(f"added {index}")
            sums["all"] = product_sum(sums.get("all"), left, right)

        taps = GradientTaps([torch.nn.Parameter(torch.ones(1)), weight], take, add_product if within else None)
        loss = HeadLoss(0.5, 16)
        found = run_head(logits, hidden, HeadTargets(indices, ids), loss, taps=taps, needs_hidden_grad=True)
        return sums["all"], found.grad_hidden, ways

    (one, one_hidden, ways), (other, other_hidden, _) = run(True), run(False)
    assert one_hidden is not None and other_hidden is not None and torch.equal(one_hidden, other_hidden)
    assert ways == (["taken"] if is_capped else ["added 1"]) * 4
    if is_capped:
        assert torch.equal(one, other)
        return
    rows = (hidden.flatten(0, 1)[indices] * 2).double()
    products = (rows.bfloat16() @ weight.detach().t()).float().softmax(-1)
    products[torch.arange(64), ids] -= 1
    exact = (products * 0.5).bfloat16().double().t() @ rows
    errors = [float((found.double() - exact).norm() / exact.norm()) for found in (one, other)]
    assert errors[0] <= 1e-6 < 1e-4 < errors[1], errors
