"""Activations that stay on the device from forward to backward: the same bits, fewer products, bounded memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from roundpipe_cli.engine.program import lower_for_engine
from roundpipe_cli.engine.trained import kept_activations, weights_found_again
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from tests.support.tiny import Rig, make_rig, random_microbatches

SIZES = [(2, 9), (1, 7), (2, 5)]
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-lora-dropout": ("llama", "lora", {"attention_dropout": 0.1, "lora_dropout": 0.1}),
    "gpt2-full-dropout": ("gpt2", "full", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "qwen3_moe-lora": ("qwen3_moe", "lora", {}),
    "llama-full-bfloat16": ("llama", "full", {"dtype": torch.bfloat16}),
}
HEAD = 4


def roundpipe(num_workers: int) -> Schedule:
    return build_schedule(
        "roundpipe",
        forward_stages=[(0, 0), (1, 1), (2, 2), (3, 3)],
        backward_stages=[(HEAD, HEAD), (3, 3), (1, 2), (0, 0)],
        num_workers=num_workers,
        rounds=Rounds(len(SIZES)),
    )


def one_f_one_b(num_workers: int) -> Schedule:
    stages = {1: [(0, 4)], 2: [(0, 1), (2, 4)], 3: [(0, 1), (2, 3), (4, 4)]}[num_workers]
    return build_schedule("1f1b", forward_stages=stages, num_workers=num_workers, rounds=Rounds(len(SIZES)))


def bits(rig: Rig, schedule: Schedule, **options: Any) -> tuple[object, ...]:
    """Everything that must not change."""
    with rig.engine(schedule.num_workers, seed=3, head_chunk_tokens=8, **options) as engine:
        result = engine.run_step(random_microbatches(SIZES), schedule, step=0)
    gradients = tuple(gradient.numpy().tobytes() for gradient in rig.store.gradients)
    return result.loss.hex(), result.gradient_norm.hex(), gradients


def num_kept(rig: Rig, schedule: Schedule, layers: set[int]) -> int:
    return len(kept_activations(lower_for_engine(schedule, rig.store.layouts, 2), layers))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_no_bit_changes(name: str) -> None:
    """With copying workers, slots hold other weights between a block's forward and its backward."""
    model_type, method, changes = MODELS[name]
    rig = make_rig(model_type, method, **changes)
    expected = bits(rig, roundpipe(1))
    assert num_kept(rig, roundpipe(1), {1, 2, 3}) == 3 * len(SIZES)
    assert bits(rig, roundpipe(1), copy=True, keep_blocks=3) == expected
    assert bits(rig, roundpipe(1), copy=True, keep_blocks=1, recompute="layer") == expected
    assert 0 < num_kept(rig, roundpipe(2), {1, 2, 3}) < 3 * len(SIZES)
    for num_workers in (2, 3):
        assert num_kept(rig, one_f_one_b(num_workers), {1, 2, 3}) == 3 * len(SIZES)
        assert bits(rig, one_f_one_b(num_workers), copy=True, keep_blocks=3) == expected
        assert bits(rig, roundpipe(num_workers), copy=num_workers == 2, keep_blocks=2) == expected


def test_kept_blocks_are_not_computed_again() -> None:
    """Their forward runs once: the calls of each block are counted."""
    rig = make_rig("llama", "lora")
    calls = []
    for keep_blocks in (0, 1, 3):
        with rig.engine(1, keep_blocks=keep_blocks) as engine:
            called: list[int] = []
            for index, block in enumerate(engine._workers[0].runner.layers.model.blocks):
                block.register_forward_hook(lambda *_, index=index, called=called: called.append(index))
            engine.run_step(random_microbatches(SIZES), roundpipe(1), step=0)
        calls.append([called.count(index) for index in range(3)])
    twice, once = 2 * len(SIZES), len(SIZES)
    assert calls == [[twice] * 3, [twice, twice, once], [once] * 3]


def test_memory_of_what_is_kept() -> None:
    """Each kept block costs its activations of every microbatch of the round, and no weights."""
    rig = make_rig("llama", "full", hidden_size=128, intermediate_size=512)
    microbatches = random_microbatches([(2, 16)] * 3)
    schedule = build_schedule(
        "roundpipe",
        forward_stages=[(0, 1), (2, 3)],
        backward_stages=[(HEAD, HEAD), (2, 3), (0, 1)],
        num_workers=1,
        rounds=Rounds(3, per_round=3),
    )
    peaks = []
    for keep_blocks in (0, 1, 2):
        with rig.engine(1, copy=True, count_bytes=True, keep_blocks=keep_blocks) as engine:
            peaks.append(engine.run_step(microbatches, schedule, step=0).device_peak_bytes[0])
    weights = rig.store.layouts[2].num_bytes
    second, third = peaks[1] - peaks[0], peaks[2] - peaks[1]
    assert 0 < third < 1.2 * max(second, 1) + weights / 2
    # tokens x 4 bytes x (hidden states, attention, three of the intermediate size and their products), three times
    assert third <= 3 * 2 * 16 * 4 * (14 * 128 + 5 * 512)


def test_a_graph_without_a_backward_is_freed() -> None:
    """What a step that ran out of memory had kept stayed on the GPU."""
    weight = torch.randn(64, 64)
    with weights_found_again(True, lambda: weight, weight.nbytes):
        output = (torch.randn(2, 64, requires_grad=True) @ weight).exp()  # whose backward reads the output itself
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None
