"""GPUs that hold all frozen weights: other stages, less recompute, the same bits, and a way back."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli.cli.plan import plan_text
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.costs.memory import DEVICE_SHARE, whole_cache_bytes, with_cached_weights
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.layer import LayerRunner
from roundpipe_cli.errors import OutOfDeviceMemoryError
from roundpipe_cli.events import Event, Notice
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.planning.compare import SimulationCase, StageCut, make_schedule
from roundpipe_cli.planning.predict import Plan, make_plan
from roundpipe_cli.planning.question import ask
from roundpipe_cli.planning.resident import DEALING, resident_cut
from roundpipe_cli.planning.run_plan import planned_bytes
from roundpipe_cli.recipe.load import load_recipe, load_text
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.schedule.builders import Rounds, build_forward, build_schedule, every_stage
from roundpipe_cli.train.auto_cache import AutoCache
from tests.support.covering import swept
from tests.support.tiny import Rig, gpu_costs, make_rig, random_microbatches, schedule_for

SIZES = [(2, 9), (1, 7), (2, 5), (1, 11), (2, 6), (1, 9)]


def planned(folder: Path, hardware: str, *overrides: str) -> Plan:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    (folder / "recipe.yaml").write_text(
        "datasets: [{path: rows.jsonl}]\nmax_seq_length: 2048\npacking: false\n"
        "micro_batch_size: 1\ngradient_accumulation_steps: 16\ndtype: bfloat16\n"
    )
    usual = ("model=meta-llama/Llama-3.1-8B", "load_in_4bit=true", f"output_dir={folder / 'out'}")
    return make_plan(load_recipe(folder / "recipe.yaml", [*usual, *overrides]), hardware)


@pytest.mark.parametrize(("num_gpus", "gain"), [(1, 1.05), pytest.param(8, 1.15, marks=pytest.mark.sweep)])
def test_a_model_that_fits_is_not_recomputed(tmp_path: Path, num_gpus: int, gain: float) -> None:
    """8B in 4 bit on 24 GB: weights 5 GB, activations of one microbatch 12 GB."""
    plan, streamed = (planned(tmp_path, f"{num_gpus}x4090", *also) for also in ((), ("pipeline.dispatch=round_robin",)))
    assert plan.cut.backward_stages == ((0, 33),) and plan.verdict.fits
    assert plan.verdict.device.total_bytes <= DEVICE_SHARE * 24 * 2**30
    assert plan.verdict.host.total_bytes <= streamed.verdict.host.total_bytes
    assert streamed.step_s > gain * plan.step_s
    assert plan.links.weights_up < 0.1 * streamed.links.weights_up + num_gpus * 2**27
    text = "\n".join(plan_text(plan, None))
    assert "of weights stay on each GPU" in text and " GiB  weight cache" in text


def test_what_does_not_fit_is_recomputed_on_the_same_worker(tmp_path: Path) -> None:
    plan = planned(tmp_path, "2x4090", "load_in_4bit=false")
    (first, last), *others = plan.cut.backward_stages
    assert last == 33 and 1 < first < 30 and plan.verdict.device.total_bytes <= DEVICE_SHARE * 24 * 2**30
    assert all(end - start < last - first for start, end in others)


def test_not_where_the_recipe_says_otherwise() -> None:
    text = "model: Qwen/Qwen3-1.7B\ndatasets: [{path: a}]\n"
    assert load_text(text, "recipe.yaml").recipe.may_hold_all_weights
    for override in (
        *("method=full", "lora.modules_to_save=[lm_head]", "objective=orpo"),
        *(f"pipeline.{key}" for key in ("weight_cache=0", "dispatch=round_robin", "head_workers=2", "recompute=layer")),
        *(f"pipeline.{key}" for key in ("keep_activations=1", "sequence_chunks=2", "schedule=1f1b")),
    ):
        assert not load_text(text, "recipe.yaml", [override]).recipe.may_hold_all_weights, override


def test_no_stage_is_larger_than_what_is_kept() -> None:
    draw = random.Random(5)
    for _ in range(50):
        blocks, workers, limit = draw.randint(1, 40), draw.randint(1, 8), draw.randint(0, 40)
        block = LayerCost("block", 1.0, 2.0, recompute=True, param_bytes=100, grad_bytes=8, activation_bytes=1)
        embed, head = LayerCost("embed", 0, 0, recompute=True), LayerCost("head", 1.0, 2.0, recompute=False)
        streamed = CostModel("blocks", (embed, *[block] * blocks, head))
        costs = with_cached_weights(streamed, whole_cache_bytes(streamed.layers), 2)
        assert {layer.param_bytes for layer in costs.layers[1:-1]} == {4}
        asked = []

        def keeps(partition: StageCut, limit: int = limit, asked: list[int] = asked, count: int = blocks) -> bool:
            most = max(min(last, count) - max(first, 1) + 1 for first, last in partition.backward_stages)
            asked.append(most)
            return most <= limit

        found = resident_cut(costs, workers, keeps)
        assert (found is None) == (limit == 0) and len(asked) <= 7
        if found is None:
            continue
        first, last = found.backward_stages[0]
        assert last - max(first, 1) == min(limit, blocks) and found.dealing == DEALING
        whole = replace(found, microbatches_per_round=None)
        schedule, on = make_schedule("roundpipe", whole, SimulationCase(costs, workers, 2 * workers)), {}
        for row in schedule.actions:
            for action in row:
                on.setdefault(action.microbatch, set()).add(action.worker)
        if len(found.backward_stages) == 1:
            assert all(len(workers_of) == 1 for workers_of in on.values())


@pytest.fixture(scope="module")
def rig() -> Rig:
    return make_rig("llama", "lora", num_hidden_layers=6)


class Run:
    """Steps as a training run makes them; devices that copy weights and count their bytes stand for GPUs."""

    def __init__(self, rig: Rig, memory_bytes: int, num_workers: int = 2) -> None:
        self.told: list[Event] = []
        self.planner = AdaptivePlanner(gpu_costs(rig, memory_bytes), num_workers, PipelineConfig())
        names = [f"gpu {index}" for index in range(num_workers)]
        self.cache = AutoCache(self.planner, names, self.told.append, is_open=True, trained_bytes=4)
        self.rig, self.peak, self.upload_bytes = rig, 0, 0

    def step(self, engine: Engine, sizes: list[tuple[int, int]] = SIZES) -> str:
        """Loss and gradients, which must not change."""
        result = engine.run_step(random_microbatches(sizes), self.planner.schedule(len(sizes)), step=0)
        self.cache.observe(engine, result)
        self.planner.observe(result.timeline)
        self.peak, self.upload_bytes = max(result.device_peak_bytes), result.upload_bytes
        return result.loss.hex() + b"".join(gradient.numpy().tobytes() for gradient in self.rig.store.gradients).hex()

    def settle(self, engine: Engine) -> None:
        for _ in range(9):
            self.step(engine)
            if not self.cache.is_open:
                return
        raise AssertionError("the stages never settled")


@pytest.mark.parametrize("num_workers", [2, *swept([3])])
def test_a_run_changes_to_them_and_back_without_a_bit(rig: Rig, num_workers: int) -> None:
    run = Run(rig, 10**9, num_workers)
    head = rig.num_layers - 1
    with rig.engine(num_workers, copy=True, seed=3) as engine:
        expected, short = run.step(engine), run.step(engine, SIZES[:1])
        run.settle(engine)
        assert run.cache.holds_all and run.cache.num_bytes > 0
        assert run.planner.schedule(len(SIZES)).backward_stages == ((0, head),)
        assert run.step(engine) == expected  # which uploads the weights
        assert run.step(engine) == expected
        trained = sum(layout.trainable_num_bytes for layout in rig.store.layouts[1:])
        hidden = len(SIZES) * 18 * 64 * 4
        assert run.upload_bytes <= num_workers * trained + hidden
        assert run.step(engine, SIZES[:1]) == short
        assert all(worker.slots.slots[0].weights.nbytes == 0 for worker in engine._workers)
        assert run.planner.predicted(len(SIZES)) is not None
        run.cache.give_up(engine)
        assert not run.cache.holds_all and run.planner.schedule(len(SIZES)).backward_stages != ((0, head),)
        assert all(worker.slots.arena is None for worker in engine._workers) and not run.cache.num_bytes
        assert run.step(engine) == expected and run.step(engine, SIZES[:1]) == short
        assert run.cache.num_bytes > 0 and not run.cache.holds_all, "a cache beside the usual stages may come yet"
        run.cache.give_up(engine)
        assert run.step(engine) == expected and not run.cache.num_bytes
    texts = [told.text for told in run.told if isinstance(told, Notice)]
    assert len(texts) == 2 and "each microbatch on one" in texts[0] and "each microbatch on one" not in texts[1]


def test_an_evaluation_that_comes_first_needs_no_slots_either(rig: Rig) -> None:
    run = Run(rig, 10**9)
    with rig.engine(2, copy=True, seed=3) as engine:
        run.settle(engine)
        schedule = build_forward(every_stage(run.planner.schedule(4)), num_workers=2, num_microbatches=4)
        engine.score(random_microbatches(SIZES[:4]), schedule, step=0)
        assert all(slot.weights.nbytes == 0 for worker in engine._workers for slot in worker.slots.slots)
    assert [len(row) for row in schedule.actions] == [2, 2], "each worker has its microbatches"


def test_what_a_failed_step_computed_is_free_when_it_is_run_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that ran out of memory would run out of it again."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def fail(layers: LayerRunner, context: object, graph: Any, *rest: object) -> None:
        waiting = engine._workers[layers.worker].runner._graphs
        alive.extend(weakref.ref(one.output) for graphs in waiting.values() for one in graphs if one.output is not None)
        alive.append(weakref.ref(graph.output))
        raise MemoryError("as asked")

    schedule = schedule_for(rig, 2, len(SIZES))
    with rig.engine(2, copy=True) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(LayerRunner, "backward", fail)
            with pytest.raises(OutOfDeviceMemoryError) as caught:
                engine.run_step(random_microbatches(SIZES), schedule, step=0)
        caught.value.__cause__ = None
        gc.collect()
        assert alive and not any(one() is not None for one in alive)
        engine.run_step(random_microbatches(SIZES), schedule, step=0)


def test_the_report_compares_with_the_stages_that_were_used(tmp_path: Path) -> None:
    assert planned(tmp_path, "1x4090").question.settings.weight_cache_bytes
    loaded = load_recipe(tmp_path / "recipe.yaml", ["model=HuggingFaceTB/SmolLM2-135M", f"output_dir={tmp_path}"])
    stages = {"forward_stages": (), "backward_stages": ((0, 31),)}
    schedule = build_schedule("roundpipe", **stages, num_workers=2, rounds=Rounds(2))
    asked = ask(loaded, here=True)
    found, same = planned_bytes(asked, replace(loaded.recipe, max_seq_length=64), [schedule, schedule], True)
    assert found == same and [found] == planned_bytes(
        asked, replace(loaded.recipe, max_seq_length=64), [schedule], False
    ), "a CPU keeps nothing"
    (longer,) = planned_bytes(asked, replace(loaded.recipe, max_seq_length=128), [schedule], True)
    assert longer["host_bytes"] > found["host_bytes"], "activations of the longest row that there was"
