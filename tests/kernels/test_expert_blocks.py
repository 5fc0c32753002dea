"""Whole blocks of experts by our kernels, in Triton's interpreter, against transformers' and PEFT's own modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_cli.model.expert_lora import isolate_expert_adapters, use_grouped_kernel
from tests.kernels.groups import error
from tests.support.tiny import Rig, make_rig

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, F32 = torch.bfloat16, torch.float32


def block_of(rig: Rig, dtype: torch.dtype) -> nn.Module:
    """Router and experts of the first block, with PEFT's wrappers; transformers' own loop over the experts."""
    mlp: Any = copy.deepcopy(rig.plain.get_submodule(f"{rig.split.blocks_path}.0.mlp"))
    experts_of(mlp).config._experts_implementation = "eager"
    block: nn.Module = mlp.to(dtype)
    return block


def experts_of(mlp: Any) -> Any:
    """The module that holds the experts, without PEFT's wrappers."""
    return next(module for module in mlp.modules() if hasattr(module, "_apply_gate"))


def run(mlp: nn.Module, hidden: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Result and gradients by name, and who was chosen."""
    chosen: list[torch.Tensor] = []
    experts: Any = mlp.experts
    handle = experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].sort(-1).values))
    hidden = hidden.detach().requires_grad_()
    result = mlp(hidden)
    result = result[0] if isinstance(result, tuple) else result
    generator = torch.Generator().manual_seed(5)
    result.backward(torch.randn(result.shape, generator=generator).to(BF16).to(result.dtype))
    handle.remove()
    found = {"result": result.detach(), "hidden": hidden.grad}
    found |= {name: p.grad for name, p in mlp.named_parameters() if p.requires_grad and p.grad is not None}
    return {name: value for name, value in found.items() if value is not None}, chosen[0]


def by_kernel(mlp: nn.Module) -> nn.Module:
    experts_of(mlp).config._experts_implementation = "grouped_mm"
    isolate_expert_adapters(mlp)
    assert use_grouped_kernel([mlp], lambda dtype, rank: True)
    return mlp


@pytest.mark.parametrize(("model_type", "method"), [("qwen3_moe", "lora"), ("gpt_oss", "full")])
def test_a_block_agrees_with_transformers_and_peft(model_type: str, method: str) -> None:
    """Float32 within 1e-5 of their own modules; bfloat16 within twice their error against float64. gpt-oss holds its
    experts the other way round, with biases."""
    rig = make_rig(model_type, method, dtype=BF16, lora_rank=3, num_hidden_layers=1)
    hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(2)).to(BF16)
    exact, chosen = run(block_of(rig, torch.float64), hidden.double())
    if method == "lora":
        own, _ = run(by_kernel(block_of(rig, F32)), hidden.float())
        assert own.keys() == exact.keys() and sum("lora_" in name for name in own) == 4, "of the experts alone"
        assert all(error(own[name], value) <= 1e-5 for name, value in exact.items())
    eager, chosen_eager = run(block_of(rig, BF16), hidden)
    low, chosen_low = run(by_kernel(block_of(rig, BF16)), hidden)
    assert torch.equal(chosen, chosen_eager) and torch.equal(chosen, chosen_low), "rounding has sent a token elsewhere"
    assert low.keys() == exact.keys()
    for name, value in exact.items():
        assert error(low[name], value) <= 2 * error(eager[name], value), name
