"""A model whose layers fetch their weights answers as the whole model does: the same greedy tokens."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from roundpipe_cli.costs.answering import DevicePlan, plan_devices
from roundpipe_cli.costs.cost import NUM_SLOTS
from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.streaming import StreamedModel
from tests.support.simulated_cases import backends_of, simulated
from tests.support.tiny import Rig, make_rig

PACKED = (("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8_blocks"), ("llama", "4bit"), ("llama", "8bit"), ("mistral", "fp8"))
PROMPTS = ([5, 80, 90, 11, 7, 33, 9], [17, 4], [100, 3, 64, 21])


def tokens_of(model: Any, prompts: Sequence[list[int]] = PROMPTS, num_tokens: int = 9) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    kept = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "use_cache": True}
    with torch.no_grad():
        found: list[list[int]] = (
            model.eval().generate(ids, attention_mask=mask, pad_token_id=0, **kept)[:, longest:].tolist()
        )
    return found


@contextmanager
def streaming(rig: Rig, backends: Sequence[Backend], budget_bytes: int) -> Iterator[tuple[Any, list[DevicePlan]]]:
    plans = plan_devices([one.num_bytes for one in rig.store.layouts], len(backends), budget_bytes)
    with StreamedModel(rig.skeleton, rig.split, rig.store, list(zip(backends, plans, strict=True))) as streamed:
        yield streamed.model, plans


def alone(model: Any) -> list[list[int]]:
    return [tokens_of(model, [one])[0] for one in PROMPTS]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *((name, {}) for name in ("qwen3", "gemma3_text", "qwen3_next", "gpt2")),
        *((name, {"packed_as": kind, "method": "lora"}) for name, kind in PACKED),
        ("llama", {"method": "lora"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_each_prompt_of_a_batch_gets_the_whole_models_tokens(model_type: str, options: dict[str, Any]) -> None:
    rig = make_rig(model_type, **options)
    expected = alone(rig.plain)
    assert len(set(itertools.chain(*expected))) > 1  # it does not repeat one token
    sizes = [layout.num_bytes for layout in rig.store.layouts[1:]]
    with streaming(rig, [CpuBackend(1, copy=True)], 3 * max(sizes[:-1]) + sizes[-1] + 512) as (model, (plan,)):
        assert plan.kept and len(plan.kept) < len(plan.sizes)
        assert tokens_of(model) == expected
        assert tokens_of(model, PROMPTS[1:2]) == expected[1:2]


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("layers_kept", [0, 1, 99])
def test_devices_and_what_they_keep_change_no_token(num_devices: int, layers_kept: int) -> None:
    rig = make_rig("llama", "lora", num_hidden_layers=12)
    expected = alone(rig.plain)
    largest = max(layout.num_bytes for layout in rig.store.layouts[1:]) + 512
    budget = (NUM_SLOTS + layers_kept) * largest if layers_kept else 0
    with streaming(rig, [CpuBackend(1, copy=True) for _ in range(num_devices)], budget) as (model, plans):
        assert sorted(itertools.chain(*(plan.sizes for plan in plans))) == list(range(1, 14))
        assert {bool(plan.kept) for plan in plans} == {layers_kept > 0}
        assert any(plan.passing_bytes for plan in plans) or layers_kept == 99
        assert tokens_of(model) == expected


@pytest.mark.parametrize(("model_type", "packed_as"), [("llama", None), ("gpt_oss", "mxfp4")])
@pytest.mark.parametrize("layers_kept", [0, 1])
def test_cards_answer_as_the_processor_does(model_type: str, packed_as: Any, layers_kept: int) -> None:
    rig = make_rig(model_type, "lora", num_hidden_layers=6, packed_as=packed_as)
    largest = max(layout.num_bytes for layout in rig.store.layouts[1:]) + 512
    expected = alone(rig.plain)
    budget = (NUM_SLOTS + 1) * largest * layers_kept
    with simulated(lazy=True), streaming(rig, backends_of((0, 1)), budget) as (model, _):
        assert tokens_of(model) == expected


def test_neither_threads_nor_device_memory_are_left() -> None:
    """Without the collector of cycles, which may not come before the next step of training."""
    rig, threads, made = make_rig("llama"), torch.get_num_threads(), list[Any]()

    class Counted(CpuBackend):
        def allocate(self, num_bytes: int) -> torch.Tensor:
            made.append(StorageWeakRef((tensor := super().allocate(num_bytes)).untyped_storage()))
            return tensor

    block = rig.store.layouts[1].num_bytes + 512
    gc.disable()
    try:
        with streaming(rig, [Counted(threads + 1, copy=True)], 3 * block) as (model, (plan,)):
            assert plan.kept and plan.passing_bytes and tokens_of(model)
            assert not any(one.expired() for one in made) and len(made) > NUM_SLOTS
        assert all(one.expired() for one in made) and torch.get_num_threads() == threads
    finally:
        gc.enable()


def test_layers_that_come_past_are_dealt_to_all_devices_in_turn() -> None:
    """So that each link brings the next of its own while the others compute; what stays lies in runs."""
    sizes = [0, *[512] * 11, 2048]
    whole, passing = (plan_devices(sizes, 3, budget) for budget in (1 << 20, 4 * 512))
    assert [list(plan.sizes) for plan in whole] == [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11, 12]]
    assert [list(plan.sizes) for plan in passing] == [[1, 4, 7, 10], [2, 5, 8, 11], [3, 6, 9, 12]]
    assert [plan.passing_bytes for plan in passing] == [2 * 512 + 0, 2 * 512, 3 * 512 + 2048]
    assert [plan.slots_bytes for plan in passing] == [1024, 1024, 4096]


def test_a_device_keeps_large_layers_first_and_others_evenly() -> None:
    rig = make_rig("llama", num_hidden_layers=9)
    block, head = (rig.store.layouts[layer].num_bytes for layer in (1, -1))
    block, head = (-(-size // 512) * 512 for size in (block, head))
    for blocks in range(8):
        (plan,) = plan_devices([one.num_bytes for one in rig.store.layouts], 1, head + (NUM_SLOTS + blocks) * block)
        if head > block:
            assert 10 in plan.kept
        kept = sorted(plan.kept - {10})
        room, used = head + (NUM_SLOTS + blocks) * block, sum(plan.sizes[one] for one in plan.kept)
        assert len(kept) >= blocks and used + NUM_SLOTS * block <= room
        gaps = [b - a for a, b in itertools.pairwise([0, *kept, 10])]
        assert max(gaps) <= 10 // (len(kept) + 1) * 2 + 2


def test_a_processor_reads_in_place_what_comes_past() -> None:
    """Story: slots took two of the largest layers of memory that was short, and a pass twice the time."""
    rig = make_rig("llama")
    with streaming(rig, [CpuBackend(1)], 0) as (model, (plan,)):
        assert tokens_of(model) == alone(model) and plan.passing_bytes
        here = {name: one.data_ptr() for name, one in model.named_parameters()}
    assert here == {name: rig.store.views[name].data_ptr() for name in here}
