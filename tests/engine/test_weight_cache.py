"""Weights that stay on the device: the same bits, fewer bytes, no more memory than was granted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from roundpipe_cli.engine.program import layer_range, lower_for_engine
from roundpipe_cli.engine.slots import layers_to_keep, stage_bytes
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.errors import InternalError
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.builders import Rounds, build_forward, build_schedule
from roundpipe_cli.schedule.program import WEIGHTS
from roundpipe_cli.schedule.timeline import UP
from tests.support.tiny import Rig, make_rig, random_microbatches, schedule_for, write_new_weights

SIZES = [(2, 5), (1, 7), (2, 4)]
EVERYTHING = 10**9
Bits = list[tuple[str, str, bytes]]


def train(rig: Rig, schedule: Schedule, cache: int, steps: int = 2, **options: Any) -> tuple[Bits, list[StepResult]]:
    """A few steps with updates in between; what must not change, and the results."""
    bits, results = [], []
    with rig.engine(schedule.num_workers, copy=True, seed=3, weight_cache_bytes=cache, **options) as engine:
        for step in range(steps):
            result = engine.run_step(random_microbatches(SIZES), schedule, step=step, version=step)
            gradients = b"".join(gradient.numpy().tobytes() for gradient in rig.store.gradients)
            bits.append((result.loss.hex(), result.gradient_norm.hex(), gradients))
            results.append(result)
            write_new_weights(rig)
    return bits, results


def one_f_one_b(rig: Rig) -> Schedule:
    stages = [(0, 2), (3, rig.num_layers - 1)]
    return build_schedule("1f1b", forward_stages=stages, num_workers=2, rounds=Rounds(len(SIZES)))


def weight_bytes(result: StepResult) -> int:
    return result.moved_bytes[UP, WEIGHTS]


@pytest.mark.parametrize(
    ("model_type", "method", "dtype"),
    [
        *(("llama", "lora", torch.bfloat16), ("gpt2", "full", torch.float32)),
        pytest.param("qwen3_moe", "lora", torch.float32, marks=pytest.mark.sweep),
    ],
)
def test_no_bit_changes(model_type: str, method: str, dtype: torch.dtype) -> None:
    def fresh() -> Rig:
        return make_rig(model_type, method, dtype=dtype, lora_dropout=0.1 * (model_type == "llama"))

    rig = fresh()
    expected, without = train(rig, schedule_for(rig, 2, len(SIZES)), 0)
    largest = max(layout.num_bytes for layout in rig.store.layouts[1:])
    bits, results = train(fresh(), schedule_for(rig, 2, len(SIZES)), EVERYTHING)
    assert bits == expected
    assert all(weight_bytes(new) < weight_bytes(old) for new, old in zip(results, without, strict=True))
    for schedule, cache, options in (
        (one_f_one_b(rig), EVERYTHING, {"keep_blocks": 2}),
        (schedule_for(rig, 3, len(SIZES)), 2 * largest + 512, {"recompute": "layer"}),
    ):
        assert train(fresh(), schedule, cache, **options)[0] == expected


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_uploads_fall_to_what_does_not_fit(share: float) -> None:
    """Per worker and step: every visit of a layer that is not kept, and the adapters once of each that is."""
    rig = make_rig("llama", "lora", num_hidden_layers=4)
    layouts = rig.store.layouts
    budget = int(share * sum(layout.num_bytes + 256 for layout in layouts[1:]))
    schedule = schedule_for(rig, 2, len(SIZES))
    results = train(rig, schedule, budget)[1]
    program = lower_for_engine(schedule, layouts, 2)
    wanted = [0, 0]
    for worker in range(2):
        kept = set(layers_to_keep(program, worker, layouts, budget))
        assert sum(layouts[layer].num_bytes for layer in kept) <= budget
        assert kept
        met = set()
        for visit in program.visits:
            for layer in layer_range(visit.layers) if visit.worker == worker else ():
                if layer > 0:
                    first = later = layouts[layer].num_bytes
                    if layer in kept:
                        first, later = (0, 0) if layer in met else (first, layouts[layer].trainable_num_bytes)
                    wanted[0] += first
                    wanted[1] += later
                    met.add(layer)
        if share == 1:
            assert kept == met
    assert [weight_bytes(result) for result in results] == wanted


def test_memory_grows_by_the_budget_at_most() -> None:
    rigs = [make_rig("llama", "lora") for _ in range(3)]
    layouts, schedule = rigs[0].store.layouts, schedule_for(rigs[0], 2, len(SIZES))
    whole = sum(layout.num_bytes + 256 for layout in layouts[1:])
    without, some, full = (
        max(train(rig, schedule, cache, steps=1, count_bytes=True)[1][0].device_peak_bytes)
        for rig, cache in zip(rigs, (0, whole // 3, EVERYTHING), strict=True)
    )
    turns = 4 * max(rows * tokens for rows, tokens in SIZES) * rigs[0].skeleton.config.hidden_size * 2
    assert turns < whole // 50
    assert without < some <= without + whole // 3 + turns
    # With all weights in the cache, slots hold none of them: the largest stage is not there twice more.
    held = [layer_range(visit.layers) for visit in lower_for_engine(schedule, layouts, 2).visits]
    slots = 2 * max(stage_bytes(layouts, layers) for layers in held)
    assert slots > 4 * turns
    assert full <= without + whole - slots + turns


def test_other_schedules_in_between() -> None:
    rig = make_rig("llama", "lora", num_hidden_layers=4)
    microbatches = random_microbatches(SIZES)
    head = rig.num_layers - 1
    scoring = build_forward([(0, 2), (3, head)], num_workers=2, num_microbatches=len(SIZES))
    coarse = schedule_for(rig, 2, len(SIZES), [(0, 2), (3, head - 1)], [(head, head), (3, head - 1), (0, 2)])
    budget = 3 * (rig.store.layouts[1].num_bytes + 256)

    def losses(cache: int) -> list[str]:
        found = []
        with rig.engine(2, copy=True, weight_cache_bytes=cache) as engine:
            for step, schedule in enumerate((schedule_for(rig, 2, len(SIZES)), coarse, coarse)):
                scores = engine.score(microbatches, scoring, step=step)
                found.append(engine.run_step(microbatches, schedule, step=step).loss.hex())
                found += [score.loss_sum.hex() for score in scores]
        return found

    assert losses(budget) == losses(0)


def test_a_failed_step_is_no_reason_to_trust_the_cache(ask: Callable[[str], None]) -> None:
    rig = make_rig("llama", "lora")
    schedule, microbatches = schedule_for(rig, 2, len(SIZES)), random_microbatches(SIZES)
    with rig.engine(2, copy=True) as engine:
        expected = engine.run_step(microbatches, schedule, step=0).loss.hex()
    for nth in (1, 4):
        with rig.engine(2, copy=True, weight_cache_bytes=EVERYTHING) as engine:
            ask(f"prefetch:raise:nth={nth}")
            with pytest.raises(InternalError):
                engine.run_step(microbatches, schedule, step=0)
            ask("")
            for _ in range(2):
                assert engine.run_step(microbatches, schedule, step=0).loss.hex() == expected
