"""Adapters on fused experts, applied as low-rank products beside the base product: they agree with PEFT's own."""

from __future__ import annotations

import copy

import pytest
import torch

from roundpipe_cli.model import expert_lora
from roundpipe_cli.model.expert_lora import isolate_expert_adapters
from tests.support.tiny import Rig, make_rig

TOKENS = 32


def outputs(rig: Rig, isolated: bool) -> dict[str, torch.Tensor]:
    """Block 0's experts on random tokens: their result, and the gradient of all that is trained and of the input."""
    experts = copy.deepcopy(rig.plain.get_submodule(f"{rig.split.blocks_path}.0.mlp.experts"))
    if isolated:
        isolate_expert_adapters(experts)
    generator = torch.Generator().manual_seed(1)
    config = rig.skeleton.config
    hidden = torch.randn(TOKENS, config.hidden_size, generator=generator, requires_grad=True)
    count, chosen = experts.get_base_layer().num_experts, config.num_experts_per_tok
    weights, indices = torch.randn(TOKENS, count, generator=generator).softmax(-1).topk(chosen)
    result = experts(hidden, indices, weights)
    result.backward(torch.randn(result.shape, generator=generator))
    found = {"result": result.detach(), "hidden": hidden.grad}
    found |= {name: p.grad for name, p in experts.named_parameters() if p.requires_grad}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("way", ["batched", "base in a loop", "all in loops"])
def test_agrees_with_peft(model_type: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways differ in which products loop over the experts."""
    monkeypatch.setattr(expert_lora, "MAX_WASTED_FLOPS", 0.0 if way == "base in a loop" else 1e12)
    monkeypatch.setattr(expert_lora, "MAX_PADDING", 0 if way == "all in loops" else 8)
    rig = make_rig(model_type, "lora")
    expected, got = outputs(rig, isolated=False), outputs(rig, isolated=True)
    assert got.keys() == expected.keys() and len(got) == 6
    for name, value in expected.items():
        assert float(value.norm()) > 0
        assert float((got[name] - value).norm()) <= 1e-5 * float(value.norm()), name


def test_two_models_at_once_do_not_see_each_other() -> None:
    """PEFT's parametrisation is one cache for the whole process; a call inside another one's found old weights."""
    rig = make_rig("qwen3_moe", "lora")
    mine, theirs = (copy.deepcopy(rig.plain.get_submodule(f"{rig.split.blocks_path}.0.mlp.experts")) for _ in "ab")
    for experts in (mine, theirs):
        isolate_expert_adapters(experts)
    with torch.no_grad():
        theirs.lora_B["default"].weight.zero_()
    hidden = torch.randn(4, rig.skeleton.config.hidden_size)
    indices, weights = torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1)
    alone = mine(hidden, indices, weights)
    inside: list[torch.Tensor] = []
    handle = theirs.get_base_layer().register_forward_pre_hook(lambda *_: inside.append(mine(hidden, indices, weights)))
    other = theirs(hidden, indices, weights)
    handle.remove()
    assert torch.equal(inside[0], alone) and not torch.equal(other, alone)
