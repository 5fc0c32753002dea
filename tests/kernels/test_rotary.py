"""The fused rotary embedding against its definition, and what it launches."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from roundpipe_cli.kernels.fused import rotate
from tests.support.launches import LaunchCounter


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


def fused(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> object:
    return rotate(query, key, cos[:, None], sin[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_value_and_gradients(dtype: torch.dtype) -> None:
    """In float32 within rounding; in 16 bit no further from float64 than twice transformers' own."""
    given = example(dtype)
    exact = both(apply_rotary_pos_emb, [one.double() for one in given])
    for one, own, wanted in zip(both(fused, given), both(apply_rotary_pos_emb, given), exact, strict=True):
        errors = [float((found.detach().double() - wanted.detach()).norm()) for found in (one, own)]
        assert one.shape == own.shape and errors[0] <= 2 * errors[1]


def test_cos_and_sin_of_half_a_heads_width() -> None:
    """As gpt-oss has them; three operators here too."""
    query, key, cos, sin, *above = example(torch.float32)
    given = [query, key, cos[..., :8], sin[..., :8], *above]
    with LaunchCounter() as counter:
        found = both(fused, given)
    for one, own in zip(found, both(modeling_gpt_oss.apply_rotary_pos_emb, given), strict=True):
        assert torch.allclose(one, own, atol=1e-6)
    assert counter.launches.num_launches == 12, counter.launches.operators


def test_three_operators_a_tensor_each_way() -> None:
    given = example(torch.float32)
    with LaunchCounter() as counter:
        both(fused, given)
    assert counter.launches.num_launches == 12, counter.launches.operators
