"""Leaving a block's last projection out of the recompute: what may be left out, that it is, and that no bit changes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.probe import find_unread_products
from roundpipe_cli.model.worker_model import WorkerOptions
from tests.support.tiny import Rig, make_rig, random_microbatches, schedule_for

SIZES = [(2, 9), (1, 7), (2, 5)]
DOWN, OUT = "mlp.down_proj", "self_attn.o_proj"
UNREAD = {
    "llama": [(DOWN,)],
    "gpt2": [("mlp.c_proj",)],
    "phi": [("self_attn.dense", "mlp.fc2")],  # attention and MLP side by side
    "cohere2": [(OUT, DOWN)],
    "bloom": [("mlp.dense_4h_to_h",)],
    "granite": [(DOWN,)],  # times a constant
    "glm4_moe": [(DOWN,), ("mlp.shared_experts.down_proj",)],  # of routed experts, routing weights read the product
    "qwen3_moe": [()],
    "gemma2": [()],  # norms after the projection read it
    "olmo2": [()],
}


def find(rig: Rig) -> dict[int, tuple[str, ...]]:
    return find_unread_products(rig.skeleton, rig.split, rig.store, WorkerOptions(fused=rig.fused))


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-lora-dropout": ("llama", "lora", {"attention_dropout": 0.1, "lora_dropout": 0.1}),
    "gpt2-full-dropout": ("gpt2", "full", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "phi-lora": ("phi", "lora", {}),
    "phi-lora-fused": ("phi", "lora", {"lora_dropout": 0.1, "kernels": "auto"}),
    "bloom-full": ("bloom", "full", {}),
    "glm4_moe-full": ("glm4_moe", "full", {}),
    "llama-full-bfloat16": ("llama", "full", {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("model_type", sorted(UNREAD))
def test_what_may_be_left_out(model_type: str) -> None:
    rig = make_rig(model_type, "full")
    found = find_unread_products(rig.skeleton, rig.split, rig.store)
    assert list(found) == list(range(rig.split.num_blocks))
    assert sorted(set(found.values())) == UNREAD[model_type]


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [("reference", ("mlp.down_proj.base_layer", "mlp.down_proj.lora_B.default")), ("auto", ("mlp.down_proj",))],
)
def test_with_adapters_both_products_are_left_out(kernels: str, expected: tuple[str, ...]) -> None:
    """A fused linear leaves both out itself; its product with A is read by the gradient of B."""
    assert set(find(make_rig("llama", "lora", lora_dropout=0.1, kernels=kernels)).values()) == {expected}


def test_nothing_is_left_out_of_weights_that_are_not_finite() -> None:
    """The proof compares gradients bit by bit; NaN everywhere would prove anything."""
    rig = make_rig("llama", "full")
    rig.store.views["model.layers.0.mlp.up_proj.weight"].fill_(float("nan"))
    assert set(find_unread_products(rig.skeleton, rig.split, rig.store).values()) == {()}


def step_bits(rig: Rig, num_workers: int, unread: Any = None, **options: Any) -> tuple[object, ...]:
    """Everything that must not change."""
    last = rig.num_layers - 1
    backward = [(last, last), (2, last - 1), (0, 1)]
    schedule = schedule_for(rig, num_workers, len(SIZES), backward=backward)
    with rig.engine(num_workers, seed=3, head_chunk_tokens=8, unread=unread, **options) as engine:
        result = engine.run_step(random_microbatches(SIZES), schedule, step=0)
    gradients = tuple(gradient.numpy().tobytes() for gradient in rig.store.gradients)
    return result.loss.hex(), result.gradient_norm.hex(), gradients


WITHIN_OTHERS = ("phi-lora",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] if name in WITHIN_OTHERS else []) for name in sorted(CASES)]
)
def test_no_bit_changes(name: str) -> None:
    model_type, method, options = CASES[name]
    rig = make_rig(model_type, method, **options)
    unread = find(rig)
    assert any(unread.values())
    expected = step_bits(rig, 1)
    assert step_bits(rig, 1, unread) == expected
    assert step_bits(rig, 2, unread, keep_inputs=True, copy=True) == expected
    assert step_bits(rig, 2, unread, recompute="layer", copy=True) == expected


class _Products(TorchDispatchMode):
    """Counts the matrix products that are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


class _CountingBackend(CpuBackend):
    def __init__(self) -> None:
        super().__init__(1)
        self.products = _Products()

    def compute(self) -> AbstractContextManager[None]:
        return self.products  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("options", "blocks_left_out"), [({}, 2), ({"keep_inputs": True}, 3), ({"recompute": "layer"}, 3)]
)
def test_it_is_left_out(options: dict[str, Any], blocks_left_out: int) -> None:
    """Stages of one and of two blocks: their ends only, or every block where its input is read again."""
    rig = make_rig("llama", "lora")
    unread = find_unread_products(rig.skeleton, rig.split, rig.store)
    last = rig.num_layers - 1
    schedule = schedule_for(rig, 1, len(SIZES), backward=[(last, last), (2, last - 1), (0, 1)])
    nums = []
    for names in ({}, unread):
        backend = _CountingBackend()
        with Engine(
            rig.skeleton, rig.split, rig.store, [backend], options=EngineOptions(unread=names, **options)
        ) as engine:
            engine.run_step(random_microbatches(SIZES), schedule, step=0)
        nums.append(backend.products.num)
    assert nums[0] - nums[1] == 2 * blocks_left_out * len(SIZES)
