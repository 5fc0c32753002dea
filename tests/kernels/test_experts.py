"""Experts by our grouped kernels: on simulated cards, which cards get them, and whole blocks in Triton's interpreter
against transformers' and PEFT's own modules."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_cli.engine.backends.cuda import CudaBackend
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.kernels.capability import describe_experts, takes_triton, why_no_triton
from roundpipe_cli.model.expert_lora import isolate_expert_adapters, use_grouped_kernel
from roundpipe_cli.model.stored.packed_weights import PackedParameter, packed_bytes, quantize, whole_weights
from tests.kernels.groups import error
from tests.support.covering import swept
from tests.support.simulated_cases import Case, is_equal, page_locked, simulated
from tests.support.simulated_cuda import GAMING_CARD
from tests.support.tiny import Rig, make_rig

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


CASES = {
    "adapters": Case("qwen3_moe", "lora", {"dtype": BF16, "lora_rank": 3}, bound=0.05),
    "4-bit": Case("qwen3_moe", "lora", {"dtype": BF16, "packed_as": "4bit"}, bound=0.05),
    "full": Case("gpt_oss", "full", {"dtype": BF16}, bound=0.05),
}


@pytest.mark.skipif(why_no_triton() is not None, reason=str(why_no_triton()))
@pytest.mark.parametrize("name", ["adapters", "full", *swept(["4-bit"])])
def test_no_thread_waits_for_a_card_without_a_kernel_of_torchs(name: str) -> None:
    """sm86: torch would read the counts of tokens on the host, once for each product. The run says what it does."""
    case = CASES[name]
    expected = case.on_processor()
    rig = case.rig()
    with simulated(cards=(GAMING_CARD, GAMING_CARD)) as simulation, page_locked(rig):
        backends = [CudaBackend(0), CudaBackend(1)]
        options = EngineOptions(seed=3, head_chunk_tokens=8, fused=rig.fused)
        with Engine(rig.skeleton, rig.split, rig.store, backends, options=options) as engine:
            found = case.steps(engine, rig, case)
            assert engine._told == {"the experts of a layer are multiplied by one Triton kernel (sm86)"}
    assert is_equal(found, expected, case.bound)
    waits = [count for (thread, *_), count in simulation.machine.host_waits.items() if thread != "MainThread"]
    assert max(waits, default=0) <= 1, simulation.machine.host_waits  # a constant table, uploaded once


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_graph_keeps_packed_experts_packed(method: str) -> None:
    """4-bit experts are whole while their products run; until backward a graph holds what they are made of."""
    pytest.importorskip("bitsandbytes")
    rig = make_rig("qwen3_moe", method, dtype=BF16)
    mlp: Any = copy.deepcopy(rig.plain.get_submodule(f"{rig.split.blocks_path}.0.mlp")).to(BF16)
    isolate_expert_adapters(mlp)
    use_grouped_kernel([mlp], lambda dtype, rank: True)
    places = []
    for name in ("gate_up_proj", "down_proj"):
        experts = next(module for module in mlp.modules() if name in module._parameters)
        values = experts._parameters[name].detach()
        packed = torch.empty(packed_bytes(values.shape, "4bit"), dtype=torch.uint8)
        quantize(values, packed, "4bit")
        places.append((experts, name, PackedParameter.of(packed, values.shape, BF16, "4bit")))
    hidden = torch.randn(1, 9, 64, dtype=BF16, requires_grad=True)
    with whole_weights(places):
        whole = [weakref.ref(module._parameters[name]) for module, name, _ in places]
        result = mlp(hidden)
    assert [one() for one in whole] == [None, None], "the graph holds whole weights"
    result.sum().backward()
    assert hidden.grad is not None and hidden.grad.any()


def test_torchs_own_kernel_is_left_where_it_is() -> None:
    """sm90 and sm100 in bfloat16; ours where torch loops; neither for float32, old cards or the processor."""
    for own in ((9, 0), (10, 0), (10, 3)):
        assert not takes_triton([own], BF16) and not takes_triton([own], BF16, rank=16)
        assert takes_triton([own], F16) and takes_triton([own], BF16, rank=12)
    for looping in ((8, 0), (8, 6), (8, 9), (12, 0), (12, 1)):
        assert takes_triton([looping], BF16) and takes_triton([looping], F16, rank=3)
        assert not takes_triton([looping], F32) and not takes_triton([looping], BF16, allowed=False)
    for never in ((7, 5), None):
        assert not takes_triton([never], F16) and not takes_triton([never, (8, 6)], F16)
    assert takes_triton([(9, 0), (8, 6)], BF16), "all workers of a run compute the same way"


def test_a_loop_is_named_with_its_reason() -> None:
    """Nothing to say of models without experts, of the processor, and of cards whose kernel is torch's own."""
    assert describe_experts([(8, 6)], [], None) is describe_experts([None], [BF16], None) is None
    assert describe_experts([(9, 0)], [BF16], "triton is not installed") is None
    text = describe_experts([(8, 6), (8, 9)], [BF16], "triton is not installed")
    assert text == (
        "experts are multiplied one after the other, and the host waits for each layer (sm86, sm89): "
        "triton is not installed"
    )
    assert str(describe_experts([(8, 6)], [F32], None)).endswith("our kernels take bfloat16 and float16, not float32")
    assert str(describe_experts([(8, 6), (7, 5)], [F16], None)).endswith("sm80 or newer on every GPU of a run")


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles a launcher for each kernel; a missing compiler would end the run in its first step."""
    pytest.importorskip("triton")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert why_no_triton() == "triton finds no C compiler (install gcc)"


# -- whole blocks in Triton's interpreter ---------------------------------------------------------------------------


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


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("model_type", "method"), [("qwen3_moe", "lora"), ("gpt_oss", "full")])
def test_a_block_agrees_with_transformers_and_peft(model_type: str, method: str) -> None:
    """Float32 within 1e-5; bfloat16 within twice their error. gpt-oss holds experts the other way, with biases."""
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
