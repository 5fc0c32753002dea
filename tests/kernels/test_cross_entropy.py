"""Cross entropy by one kernel: in the interpreter against float64, what it moves, and cards it compiles for."""

from __future__ import annotations

import pytest
import torch

from roundpipe_cli.kernels.fused import cross_entropy_
from roundpipe_cli.model.head import chunk_loss
from tests.support.launches import LaunchCounter

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of losses and its gradient, in float64."""
    wide = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(wide, targets, reduction="none", label_smoothing=smoothing)
    return loss.detach(), torch.autograd.grad(loss.sum(), wide)[0]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("dtype", "vocabulary", "smoothing"),
    [
        *((dtype, 32_000, 0.1) for dtype in DTYPES),
        *((torch.bfloat16, size, 0.0) for size in (2, 50, 4096, 4097, 128_256, 151_936, 262_144)),
        (torch.float32, 262_144, 0.0),
        (torch.float32, 151_935, 0.2),
    ],
)
def test_values_and_gradients(dtype: torch.dtype, vocabulary: int, smoothing: float) -> None:
    """float32 within 1e-6 of float64; 16 bit within twice the error of torch's operators."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(3, vocabulary, generator=generator).mul_(4).to(dtype)
    if vocabulary > 50:
        logits[1, 7] = 60.0  # one that outweighs all others
        logits[2, 9] = -float("inf")
    targets = torch.tensor([0, vocabulary - 1, vocabulary // 2])
    finite = logits.clamp(min=-1e4) if smoothing else logits
    losses, gradient = exact(finite, targets, smoothing)
    _, eager = chunk_loss(finite, targets, smoothing)
    factors = torch.tensor([0.5, -1.0, 2.0])
    found = finite.clone()
    parts = cross_entropy_(found, targets, factors, smoothing, 0.25)
    total = (1 - smoothing) * parts[0] + smoothing * parts[1]
    assert float((total - losses).abs().max()) <= 1e-6 * max(1.0, float(losses.abs().max()))
    scaled = gradient * factors[:, None] * 0.25
    theirs = (eager * factors[:, None] * 0.25).to(dtype)
    assert found.dtype == dtype and error(found, scaled) <= (
        1e-6 if dtype == torch.float32 else 2 * error(theirs, scaled) + 1e-7
    )


def test_it_moves_each_logit_in_and_out_once() -> None:
    """Five operators moved 36 bytes for each logit in 16 bit."""
    logits = torch.empty(64, 50_000, dtype=torch.bfloat16, device="meta")
    with LaunchCounter() as counter:
        cross_entropy_(logits, torch.empty(64, dtype=torch.long, device="meta"), None, 0.0, 1.0)
    assert counter.launches.num_launches == 1
    assert counter.launches.traffic_bytes == pytest.approx(4 * logits.numel(), rel=0.01)
    with LaunchCounter() as before:
        chunk_loss(logits, torch.empty(64, dtype=torch.long, device="meta"))[1].mul_(0.5).to(torch.bfloat16)
    assert counter.launches.traffic_bytes <= 0.25 * before.launches.traffic_bytes
