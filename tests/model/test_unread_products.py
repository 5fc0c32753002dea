"""What a recompute leaves out, and feed-forward parts in chunks of tokens: plain PyTorch's losses and gradients, the
same bits on any cut, fewer products and fewer live bytes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.probe import Probe
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.schedule.actions import Schedule
from tests.engine.test_parity import check_gradients
from tests.support.covering import swept
from tests.support.tiny import Rig, make_rig, plain_copy, plain_step, random_microbatches, schedule_for

SIZES = [(2, 9), (1, 7)]


def coarse(rig: Rig, num_workers: int) -> Schedule:
    last = rig.num_layers - 1
    return schedule_for(rig, num_workers, len(SIZES), backward=[(last, last), (2, last - 1), (0, 1)])


def step_bits(rig: Rig, num_workers: int, **options: Any) -> tuple[object, ...]:
    """Everything that must not change."""
    with rig.engine(num_workers, seed=3, **options) as engine:
        result = engine.run_step(random_microbatches(SIZES), coarse(rig, num_workers), step=0)
    return result.loss.hex(), result.gradient_norm.hex(), tuple(g.numpy().tobytes() for g in rig.store.gradients)


# -- the last projection -------------------------------------------------------------------------------------------

DOWN, OUT = "mlp.down_proj", "self_attn.o_proj"
UNREAD = {
    **{"llama": [(DOWN,)], "gpt2": [("mlp.c_proj",)]},
    "phi": [("self_attn.dense", "mlp.fc2")],  # attention and MLP side by side
    **{"cohere2": [(OUT, DOWN)], "bloom": [("mlp.dense_4h_to_h",)]},
    "granite": [(DOWN,)],  # times a constant
    "glm4_moe": [(DOWN,), ("mlp.shared_experts.down_proj",)],  # of routed experts, routing weights read the product
    "qwen3_moe": [()],
    "gemma2": [()],  # norms after the projection read it
    "olmo2": [()],
}


def find(rig: Rig, *, in_chunks: bool = False) -> dict[int, tuple[str, ...]]:
    return Probe(rig.skeleton, rig.split, rig.store, rig.fused).find_unread_products(in_chunks=in_chunks)


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-lora-dropout": ("llama", "lora", {"attention_dropout": 0.1, "lora_dropout": 0.1}),
    "gpt2-full-dropout": ("gpt2", "full", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "phi-lora": ("phi", "lora", {}),
    "phi-lora-fused": ("phi", "lora", {"lora_dropout": 0.1, "kernels": "auto"}),
    **{"bloom-full": ("bloom", "full", {}), "glm4_moe-full": ("glm4_moe", "full", {})},
    "llama-full-bfloat16": ("llama", "full", {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("model_type", sorted(UNREAD))
def test_what_may_be_left_out(model_type: str) -> None:
    found = find(rig := make_rig(model_type, "full"))
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
    assert set(find(rig).values()) == {()}


@pytest.mark.parametrize(
    "name",
    [
        *("glm4_moe-full", "gpt2-full-dropout", "llama-lora-dropout", "phi-lora-fused"),
        *swept(["phi-lora", "bloom-full", "llama-full-bfloat16"]),
    ],
)
def test_no_bit_changes(name: str) -> None:
    model_type, method, options = CASES[name]
    rig = make_rig(model_type, method, **options)
    more: dict[str, Any] = {"unread": find(rig), "head_chunk_tokens": 8}
    assert any(more["unread"].values())
    expected = step_bits(rig, 1, head_chunk_tokens=8)
    assert step_bits(rig, 2, keep_inputs=True, copy=True, **more) == expected
    assert step_bits(rig, 2, recompute="layer", copy=True, **more) == expected


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
    """Of stages of one and of two blocks: at their ends, or in every block (`skip_last_projection: true`)."""
    rig = make_rig("llama", "lora")
    nums = []
    for names in ({}, find(rig)):
        backend, settings = _CountingBackend(), EngineOptions(unread=names, **options)
        with Engine(rig.skeleton, rig.split, rig.store, [backend], options=settings) as engine:
            engine.run_step(random_microbatches(SIZES), coarse(rig, 1), step=0)
        nums.append(backend.products.num)
    assert nums[0] - nums[1] == 2 * blocks_left_out * len(SIZES)


# -- feed-forward parts in chunks ----------------------------------------------------------------------------------

CHUNK = 5
CHUNKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{"llama-lora": ("llama", "lora", {}), "llama-4bit": ("llama", "lora", {"packed_as": "4bit"})},
    "qwen3_moe-lora": ("qwen3_moe", "lora", {}),
    "gpt_oss-lora": ("gpt_oss", "lora", {}),  # its experts return a tuple
    **{"mixtral-full": ("mixtral", "full", {}), "glm4_moe-lora": ("glm4_moe", "lora", {})},
    "gemma2-lora": ("gemma2", "lora", {}),  # a norm reads what the feed-forward part returns
    "phi-full": ("phi", "full", {}),  # attention and feed-forward part side by side
    "gpt2-full": ("gpt2", "full", {}),
}
WHOLLY_UNREAD = ("llama", "qwen3_moe", "gpt_oss", "mixtral", "glm4_moe", "phi", "gpt2")


ALIKE = {"llama-lora", "qwen3_moe-lora", "glm4_moe-lora"}
"""The first in 4 bit, gpt_oss and mixtral have all that these have."""


@pytest.mark.parametrize("name", [*sorted(CHUNKED.keys() - ALIKE), *swept(sorted(ALIKE))])
def test_chunks_agree_with_plain_pytorch(name: str) -> None:
    model_type, method, changes = CHUNKED[name]
    rig = make_rig(model_type, method, **changes)
    plain, microbatches, unread = (
        *(plain_copy(rig.skeleton, rig.store), random_microbatches(SIZES), find(rig, in_chunks=True)),
    )
    loss = plain_step(rig, microbatches, 0, None, plain)
    for options in ({"unread": unread, "keep_inputs": True}, {"unread": unread, "recompute": "layer"}):
        with rig.engine(2, copy=True, mlp_chunk_tokens=CHUNK, **options) as engine:
            result = engine.run_step(microbatches, coarse(rig, 2), step=0)
        assert abs(result.loss - loss) <= 1e-6 * abs(loss)
        check_gradients(plain, rig.store)


@pytest.mark.parametrize(
    "model_type", [*("gemma2", "llama", "gpt_oss", "phi"), *swept(["qwen3_moe", "mixtral", "glm4_moe", "gpt2"])]
)
def test_what_a_recompute_leaves_out_of_chunks(model_type: str) -> None:
    rig = make_rig(model_type, "lora")
    has_it = {index for index, names in find(rig, in_chunks=True).items() if "mlp" in names}
    assert has_it == (set(range(rig.split.num_blocks)) if model_type in WHOLLY_UNREAD else set())


def test_the_same_bits_whatever_is_recomputed_with_dropout() -> None:
    bits = partial(step_bits, mlp_chunk_tokens=CHUNK)
    rig = make_rig("llama", "lora", attention_dropout=0.1, lora_dropout=0.2)
    unread = find(rig, in_chunks=True)
    expected = bits(rig, 1)
    assert bits(rig, 2, unread=unread, keep_inputs=True, copy=True) == expected
    assert bits(rig, 2, recompute="layer", copy=True) == expected
    assert bits(rig, 1, keep_blocks=2, copy=True) == expected
    whole = make_rig("llama", "lora", attention_dropout=0.1)
    assert bits(whole, 1)[0] != expected[0], "the adapters' dropout should be on"


def test_live_bytes_fall() -> None:
    """Width 1,024 at hidden size 32: nearly all activations are the feed-forward part's."""
    rig = make_rig("llama", "lora", hidden_size=32, intermediate_size=1024, num_hidden_layers=2)
    microbatches, schedule, peaks = random_microbatches([(1, 64)]), schedule_for(rig, 1, 1), []
    for chunk in (None, 8):
        with rig.engine(1, copy=True, count_bytes=True, mlp_chunk_tokens=chunk) as engine:
            peaks.append(max(engine.run_step(microbatches, schedule, step=0).device_peak_bytes))
    saved = 2 * 64 * 1024 * 4  # gate and up alone, of all tokens
    assert peaks[1] < peaks[0] - saved


@pytest.mark.parametrize(("model_type", "words"), [("opt", "no feed-forward module"), ("bloom", "more than hidden")])
def test_a_model_without_such_a_part_is_refused(model_type: str, words: str) -> None:
    rig = make_rig(model_type, "lora")
    with pytest.raises(RefusedError, match="chunks of tokens") as caught:
        find(rig, in_chunks=True)
    problem = caught.value.problems[0]
    assert problem.where == "mlp_chunk_tokens" and words in (problem.found or "") and caught.value.exit_code == 2
    assert "remove mlp_chunk_tokens" in str(caught.value)


def test_a_part_that_mixes_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig("llama", "lora")
    kind = type(rig.skeleton.get_submodule(rig.split.blocks_path)[0].mlp)
    whole = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: whole(self, x) + x.mean(1, keepdim=True))
    with pytest.raises(RefusedError) as caught:
        find(rig, in_chunks=True)
    assert "another result for a part of the tokens" in (caught.value.problems[0].found or "")
