"""A model is built without memory for its weights, whatever its size; what cannot be built says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_cli.choices import check_sizes
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.limited import Limits, run_limited
from roundpipe_cli.model.load import MANY, build_skeleton, build_without_weights
from tests.support.tiny import tiny_config


def _default(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]()


def _built() -> tuple[int, bool]:
    model = build_skeleton(_default("longcat_flash"), torch.bfloat16)
    return sum(parameter.numel() for parameter in model.parameters()), all(p.is_meta for p in model.parameters())


def test_fused_experts_larger_than_memory_are_built() -> None:
    """Story: one tensor of fused experts has 38 GB, and was allocated before it became a parameter without memory."""
    limits = Limits("building the model", "longcat_flash", 60.0, 16 * 1024**3)
    assert run_limited(_built, limits) == (741_053_585_408, True)


def test_buffers_keep_their_values() -> None:
    """gpt2 makes its mask by `torch.ones`; a buffer by `torch.empty`, filled later, gets memory all the same."""

    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, MANY))
            self.register_buffer("filled", torch.empty(MANY).fill_(3.0))

    model: Any = build_without_weights(Filled)
    assert model.weight.is_meta and not model.filled.is_meta
    assert torch.equal(model.filled, torch.full((MANY,), 3.0))
    config = tiny_config("gpt2", n_positions=2048)
    assert not any(buffer.is_meta for buffer in build_skeleton(config, torch.float32).buffers())


def test_a_configuration_without_sizes_is_refused_with_their_names() -> None:
    """Story: dots1's own default has no number of experts, and all that was said was "empty() takes 1 argument"."""
    with pytest.raises(RefusedError, match="cannot build this model") as refused:
        build_skeleton(_default("dots1"), torch.float32)
    (problem,) = refused.value.problems
    assert problem.hint is not None
    assert all(name in problem.hint for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"))


def test_experts_that_are_no_modules_are_not_counted_as_such() -> None:
    """Story: doge's own default, 16,384 rows for experts in each of 32 layers, was "a size that no model has"."""
    config = {"model_type": "doge", "num_hidden_layers": 32, "num_experts": 16384}
    check_sizes(config, "config.json")
    with pytest.raises(RefusedError, match="a size that no model has"):
        check_sizes({**config, "model_type": "mixtral"}, "config.json")
