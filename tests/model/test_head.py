"""The head's loss by our kernel's operator, on the processor: the bits of torch's operators."""

from __future__ import annotations

import pytest
import torch

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
