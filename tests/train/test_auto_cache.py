"""`weight_cache: auto`: spare device memory holds frozen weights, within what the memory model leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from roundpipe_cli.cli.plan import plan_document, plan_text
from roundpipe_cli.costs.memory import DEVICE_SHARE
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.events import Event, Notice
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.planning.predict import Plan, make_plan
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.train.auto_cache import AutoCache
from tests.support.tiny import Rig, gpu_costs, make_rig, random_microbatches

RECIPE = """
datasets: [{path: rows.jsonl}]
max_seq_length: 2048
gradient_accumulation_steps: 4
pipeline: {forward_stages: [[0, 9], [10, 19], [20, 28]], backward_stages: [[29, 29], [20, 28], [10, 19], [0, 9]]}
"""
SIZES = [(2, 9), (1, 7), (2, 5), (1, 11)]
STEPS = 4
GIVEN = PipelineConfig(forward_stages=((0, 2), (3, 4), (5, 6)), backward_stages=((7, 7), (5, 6), (3, 4), (0, 2)))
"""Those that a planner chooses hang on how busy the machine is."""


def planned(folder: Path, hardware: str, *overrides: str) -> Plan:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    (folder / "recipe.yaml").write_text(RECIPE)
    usual = ("model=Qwen/Qwen3-1.7B", f"output_dir={folder / 'out'}")
    return make_plan(load_recipe(folder / "recipe.yaml", [*usual, *overrides]), hardware)


def test_a_small_model_is_kept_whole_on_24_gb(tmp_path: Path) -> None:
    auto, none = (planned(tmp_path, "2x4090", *also) for also in ((), ("pipeline.weight_cache=0",)))
    whole = sum(layer.param_bytes for layer in auto.question.costs.layers)
    cache = auto.question.settings.weight_cache_bytes
    assert whole <= cache <= whole * 1.001
    assert auto.verdict.device.total_bytes == none.verdict.device.total_bytes + cache <= DEVICE_SHARE * 24 * 2**30
    stages = [(plan.cut.forward_stages, plan.cut.backward_stages) for plan in (auto, none)]
    assert stages[0] == stages[1]
    assert auto.links.weights_up < 0.1 * none.links.weights_up and auto.step_s <= none.step_s
    assert plan_document(auto, None)["predicted"]["device_peak_bytes"] == auto.verdict.device.total_bytes
    text = "\n".join(plan_text(auto, None))
    assert "weight cache (auto): all of" in text and " GiB  weight cache" in text
    assert "weight cache" not in "\n".join(plan_text(none, None))


def test_only_clear_room_is_taken(tmp_path: Path) -> None:
    usual = planned(tmp_path, "2x4090", "pipeline.weight_cache=0").verdict.device.total_bytes / 2**30
    some = planned(tmp_path, f"2x4090:memory_gib={(usual + 1) / DEVICE_SHARE:.3f}")
    assert 0.9 * 2**30 < some.question.settings.weight_cache_bytes <= 2**30 * 1.001
    assert "weight cache (auto): 1" in "\n".join(plan_text(some, None)) and some.verdict.fits
    tight = planned(tmp_path, f"2x4090:memory_gib={(usual + 0.005) / DEVICE_SHARE:.4f}")
    assert tight.verdict.fits and tight.question.settings.weight_cache_bytes == 0
    full = planned(tmp_path, "2x4090", "method=full")
    assert full.question.settings.weight_cache_bytes == 0


def run(
    rig: Rig, memory_bytes: int, *, steps: int = STEPS, is_open: bool = True, count: bool = False
) -> tuple[list[str], list[StepResult], AutoCache]:
    """Steps as a training run makes them; devices that copy weights and count their bytes stand for GPUs."""
    told: list[Event] = []
    planner = AdaptivePlanner(gpu_costs(rig, memory_bytes), 2, GIVEN)
    cache = AutoCache(planner, ("gpu 0", "gpu 1"), told.append, is_open=is_open)
    bits, results = [], []
    with rig.engine(2, copy=True, count_bytes=count, seed=3) as engine:
        for step in range(steps):
            sizes = SIZES[:2] if count else SIZES  # counting takes half a second for each
            sizes = SIZES[:1] if step == STEPS - 1 else sizes  # the last step of an epoch is short
            result = engine.run_step(random_microbatches(sizes), planner.schedule(len(sizes)), step=step)
            cache.observe(engine, result)
            planner.observe(result.timeline)
            gradients = b"".join(gradient.numpy().tobytes() for gradient in rig.store.gradients)
            bits.append(result.loss.hex() + gradients.hex())
            results.append(result)
    assert len(told) == (cache.num_bytes > 0) and all(isinstance(event, Notice) for event in told)
    return bits, results, cache


@pytest.fixture(scope="module")
def rig() -> Rig:
    return make_rig("llama", "lora", num_hidden_layers=6)


def test_a_run_takes_it_once_its_stages_are_settled(rig: Rig) -> None:
    plenty = 10**9
    expected, without, _ = run(rig, plenty, is_open=False)
    bits, results, cache = run(rig, plenty)
    assert bits == expected
    whole = sum(layout.num_bytes for layout in rig.store.layouts[1:])
    assert cache.num_bytes >= whole
    uploads = [(kept.upload_bytes, usual.upload_bytes) for kept, usual in zip(results, without, strict=True)]
    assert uploads[0][0] == uploads[0][1], "the first step shows what there is room for"
    assert all(kept < usual for kept, usual in uploads[2:]), "only what is trained, and hidden states"


def test_it_waits_for_the_stages_that_stay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the profile's steps, nor after a short step; from then on a short step has the same stages."""
    planner = AdaptivePlanner(gpu_costs(rig, 10**9), 2, PipelineConfig())
    cache = AutoCache(planner, ("gpu 0", "gpu 1"), lambda event: None, is_open=True)
    schedule, asked = planner.schedule, set[int]()
    monkeypatch.setattr(planner, "schedule", lambda count: (asked.add(count), schedule(count))[1])

    def step(engine: Engine, sizes: list[tuple[int, int]]) -> None:
        result = engine.run_step(random_microbatches(sizes), planner.schedule(len(sizes)), step=0)
        cache.observe(engine, result)
        planner.observe(result.timeline)

    with rig.engine(2, copy=True) as engine:
        while not planner.is_settled:
            step(engine, SIZES)
            assert cache.num_bytes == 0
        step(engine, SIZES[:1])
        assert cache.num_bytes == 0
        step(engine, SIZES)
        assert cache.num_bytes > 0
        usual, short = planner.schedule(len(SIZES)), planner.schedule(1)
        assert (short.forward_stages, short.backward_stages) == (usual.forward_stages, usual.backward_stages)
        step(engine, SIZES[:1])
    assert asked == {1, len(SIZES)}, "what stays is planned for as many microbatches as the step has"


def test_what_the_allocator_holds_is_not_spare(rig: Rig) -> None:
    """Gaps between blocks of microbatches of many lengths were taken for free memory."""
    granted = []
    for reserved_bytes in (0, 10**9):
        planner = AdaptivePlanner(gpu_costs(rig, 10**9), 2, GIVEN)
        cache = AutoCache(planner, ("gpu 0", "gpu 1"), lambda event: None, is_open=True)
        with rig.engine(2, copy=True) as engine:
            result = engine.run_step(random_microbatches(SIZES), planner.schedule(len(SIZES)), step=0)
            cache.observe(engine, replace(result, device_reserved_bytes=(0, reserved_bytes)))
        assert not cache.is_open
        granted.append(cache.num_bytes > 0)
    assert granted == [True, False]


def test_what_a_device_holds_stays_within_its_memory(rig: Rig) -> None:
    _, without, _ = run(rig, 10**9, steps=1, is_open=False, count=True)
    peak = max(max(result.device_peak_bytes) for result in without)
    layer = rig.store.layouts[1].num_bytes
    memory = int((3 * peak + 2 * layer) / DEVICE_SHARE)
    _, results, cache = run(rig, memory, steps=2, count=True)
    assert cache.num_bytes > 0
    assert max(max(result.device_peak_bytes) for result in results) <= DEVICE_SHARE * memory
