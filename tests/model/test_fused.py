"""Which modules compute by fused operators, and that a step by them is the same within rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roundpipe_cli.model.fused import FusedLora, find_fused_ops
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import LoraSettings, add_lora
from roundpipe_cli.model.split import split_model
from tests.engine.test_parity import check_gradients
from tests.support.tiny import Rig, make_rig, plain_step, random_microbatches, schedule_for, tiny_config

SIZES = [(2, 9), (1, 7)]


def counts(model_type: str, **settings: Any) -> dict[str, int]:
    """Fused modules of a model of three blocks with adapters."""
    model = build_skeleton(tiny_config(model_type), torch.float32)
    split = split_model(model)
    add_lora(model, LoraSettings(r=4, alpha=8, **settings), dtype=torch.float32, base_name="tiny")
    return find_fused_ops(model, split).counts()


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama", {"dropout": 0.1}, 21),
        ("llama", {"use_rslora": True, "target_modules": ("q_proj", "v_proj")}, 6),
        ("llama", {"use_dora": True}, None),
        ("gpt2", {}, None),  # Conv1D holds its weight transposed
        ("qwen3_moe", {}, 12),  # attention; fused experts have adapters of another kind
    ],
    ids=["llama", "rslora", "dora", "conv1d", "experts"],
)
def test_only_plain_adapters_on_plain_linears_are_fused(
    model_type: str, settings: dict[str, Any], expected: int | None
) -> None:
    assert counts(model_type, **settings).get("lora_linear") == expected


def test_nothing_is_fused_below_adapters_in_full_training() -> None:
    rig = make_rig("llama", "full", kernels="auto")
    assert rig.fused is not None and not rig.fused.lora_linears


def gradients(rig: Rig, kernels: str, **options: Any) -> dict[str, torch.Tensor]:
    """Of a step on one copying worker, by name."""
    rig.kernels = kernels
    with rig.engine(1, copy=True, seed=3, **options) as engine:
        engine.run_step(random_microbatches(SIZES), schedule_for(rig, 1, len(SIZES)), step=0)
    return {name: rig.store.gradient(name).clone() for name in rig.store.trainable_names}


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_base_weights_stay_packed_in_the_graph(bits: int) -> None:
    """The fused linear keeps its weight by reference, so a graph keeps packed weights packed, as by PEFT's code."""
    rig = make_rig("llama", "lora", bits=bits, lora_dropout=0.1)
    reference, fused = gradients(rig, "reference"), gradients(rig, "auto")
    for name, expected in reference.items():
        assert float((fused[name] - expected).norm()) <= 1e-5 * float(expected.norm()), name


@pytest.mark.parametrize("options", [{"keep_blocks": 2}, {"recompute": "layer"}, {"mlp_chunk_tokens": 5}], ids=str)
def test_every_way_to_compute_agrees_with_plain_pytorch(options: dict[str, Any]) -> None:
    rig = make_rig("qwen3", "lora", kernels="auto")
    gradients(rig, "auto", **options)
    plain_step(rig, random_microbatches(SIZES))
    check_gradients(rig.plain, rig.store)


def test_an_adapter_that_is_switched_off_or_of_another_type_is_left_to_peft() -> None:
    """The reference of preference training is the base model alone; adapters of another type than the base cast."""
    wrapper: Any = make_rig("llama", "lora").plain.get_submodule("model.layers.0.mlp.up_proj")
    x = torch.randn(2, 3, 64)
    expected, base = wrapper(x), wrapper.base_layer(x)
    FusedLora(wrapper)
    assert torch.allclose(wrapper(x), expected, atol=1e-5) and not torch.allclose(wrapper(x), base, atol=1e-2)
    wrapper.__dict__["_disable_adapters"] = True
    assert torch.equal(wrapper(x), base)
    wrapper.__dict__["_disable_adapters"] = False
    wrapper.lora_A.bfloat16(), wrapper.lora_B.bfloat16()
    assert torch.equal(wrapper(x), type(wrapper).forward(wrapper, x))
