"""Which modules compute by fused operators, and that a step by them is the same within rounding; adapters on fused
experts, as low-rank products beside the base product, agree with PEFT's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_cli.model import expert_lora, fused
from roundpipe_cli.model.expert_lora import isolate_expert_adapters
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import LoraSettings, add_lora
from roundpipe_cli.model.split import split_model
from tests.engine.test_parity import check_gradients
from tests.support.tiny import Rig, make_rig, plain_step, random_microbatches, schedule_for, tiny_config

SIZES = [(2, 9), (1, 7)]
NORMS = {"rms_norm": 7, "rotary": 3}


@pytest.mark.parametrize(
    ("model_type", "adapters", "expected"),
    [
        ("llama", None, NORMS),
        ("gemma3_text", None, {"rms_norm": 19, "rotary": 3}),  # 1 + weight
        ("gpt_oss", None, NORMS),  # cos and sin of half a head
        ("glm4", None, {"rms_norm": 13}),  # pairs are neighbours, not halves
        ("cohere2", None, {}),  # the mean is taken off, pairs are neighbours
        ("phi", None, {"rotary": 3}),
        ("qwen3_next", None, {"rms_norm": 11, "rotary": 1}),  # not the gated norms
        ("llama", {"dropout": 0.1}, {"lora_linear": 21, **NORMS}),
        ("llama", {"use_rslora": True, "target_modules": ("q_proj", "v_proj")}, {"lora_linear": 6, **NORMS}),
        ("llama", {"use_dora": True}, NORMS),
        ("gpt2", {}, {}),  # Conv1D holds its weight transposed
        ("qwen3_moe", {}, {"lora_linear": 12, "rms_norm": 13, "rotary": 3}),  # fused experts: adapters of another kind
    ],
)
def test_modules_are_known_by_what_they_compute(model_type: str, adapters: Any, expected: dict[str, int]) -> None:
    """Plain adapters on plain linear layers, norms and rotary embeddings, of models of three blocks."""
    model = build_skeleton(tiny_config(model_type), torch.bfloat16)
    split = split_model(model)
    if adapters is not None:
        add_lora(model, LoraSettings(r=4, alpha=8, **adapters), dtype=torch.bfloat16, base_name="tiny")
    assert fused.fused_counts(fused.find_fused_ops(model, split)) == expected


class _Norm(nn.Module):
    """Looks like a norm; `kind` says what it computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps, self.kind, self.momentum = 1e-5, kind, 1e-3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if self.kind == "centred":
            wide = wide - wide.mean(-1, keepdim=True)
        root = wide.square().mean(1 if self.kind == "over rows" else -1, keepdim=True)
        if self.kind == "eps behind the root":
            return (wide / (root.sqrt() + self.eps)).to(x.dtype) * self.weight
        normed = wide * (root + (0 if self.kind == "without eps" else self.eps)).rsqrt()
        if self.kind == "constant root":
            normed = wide * (normed.detach() / wide.detach())
        factor = {"squared": self.weight.square(), "plus one": 1 + self.weight}.get(self.kind, self.weight)
        return (normed * factor.float()).to(x.dtype) if self.kind != "wider" else normed.double() * factor


def test_a_norm_is_tried_not_recognised_by_its_name() -> None:
    """Those over rows and with a constant root are not told by two dimensions, or without a gradient."""
    forms = {"plain": fused.NormForm("weight", 1e-5, False), "plus one": fused.NormForm("weight", 1e-5, True)}
    others = ("centred", "eps behind the root", "without eps", "squared", "wider", "over rows", "constant root")
    for kind, form in {**forms, **dict.fromkeys(others)}.items():
        assert fused.norm_form(_Norm(kind)) == form and fused.norm_form(_Norm(kind).bfloat16()) == form
        is_tried_once = fused.norm_kind(_Norm(kind)) == fused.norm_kind(_Norm("plain"))
        assert is_tried_once == (kind == "plain"), "other settings are tried each"


def test_a_norm_of_another_type_than_its_input_computes_by_its_own_code() -> None:
    module, x = _Norm("plain"), torch.randn(2, 8).bfloat16()
    expected = module(x)
    fused.FusedNorm(module, fused.NormForm("weight", 1e-5, False))
    assert torch.equal(module(x), expected) and torch.allclose(module(x.float()), expected.float(), atol=0.05)


def apply_rotary_pos_emb(q: Any, k: Any = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = 1) -> Any:
    """Rotates halves, of queries alone where no keys are given."""
    halves = [one if one is None else one.chunk(2, -1) for one in (q, k)]
    turned = [one and torch.cat((-one[1], one[0]), -1) for one in halves]
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    found = [None if by is None else one * cos + by * sin for one, by in zip((q, k), turned, strict=True)]
    return found[0] if k is None else tuple(found)


class _Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        alone = apply_rotary_pos_emb(q, cos=cos, sin=sin)
        return [alone, *apply_rotary_pos_emb(q, k, cos, sin), *apply_rotary_pos_emb(q=q, k=k, cos=cos, sin=sin)]


def test_a_rotation_that_is_called_otherwise_computes_by_its_own_code() -> None:
    """Of queries alone, as Qwen4's index of blocks does, and with its arguments by name."""
    given = [torch.randn(shape) for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))]
    module = _Attention()
    expected = module(*given)
    assert fused.can_rotate(module)
    fused.fuse_rotary(module)
    found = module(*given)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[3], expected[3])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", [{"keep_blocks": 2}, {"recompute": "layer"}, {"mlp_chunk_tokens": 5}], ids=str)
def test_every_way_to_compute_agrees_with_plain_pytorch(options: dict[str, Any]) -> None:
    rig = make_rig("qwen3", "lora", kernels="auto")
    with rig.engine(1, copy=True, **options) as engine:
        engine.run_step(random_microbatches(SIZES), schedule_for(rig, 1, len(SIZES)), step=0)
    plain_step(rig, random_microbatches(SIZES))
    check_gradients(rig.plain, rig.store)


def test_an_adapter_that_is_switched_off_or_of_another_type_is_left_to_peft() -> None:
    """The reference of preference training is the base model alone; adapters of another type than the base cast."""
    wrapper: Any = make_rig("llama", "lora").plain.get_submodule("model.layers.0.mlp.up_proj")
    x = torch.randn(2, 3, 64)
    expected, base = wrapper(x), wrapper.base_layer(x)
    fused.FusedLora(wrapper)
    assert torch.allclose(wrapper(x), expected, atol=1e-5) and not torch.allclose(wrapper(x), base, atol=1e-2)
    wrapper.__dict__["_disable_adapters"] = True
    assert torch.equal(wrapper(x), base)
    wrapper.__dict__["_disable_adapters"] = False
    wrapper.lora_A.bfloat16(), wrapper.lora_B.bfloat16()
    assert torch.equal(wrapper(x), type(wrapper).forward(wrapper, x))


# -- adapters on fused experts --------------------------------------------------------------------------------------

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


@pytest.mark.covering(1)
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
