"""`plan`, `bench` and a run ask one function which stages a step gets, and receive equal answers.

Models have the widths of real ones and few layers, so that a search takes a fraction of a second; machines are so small
for them that limits of device memory, or of host memory, bind.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.choices import SCHEDULES
from roundpipe_cli.cli.bench_schedules import CaseFlags, _question, as_planned, request_of
from roundpipe_cli.costs.memory import fixed_device_need
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import SimulationCase, StageCut, run
from roundpipe_cli.planning.partition import plan_partition
from roundpipe_cli.planning.predict import make_plan, stage_case
from roundpipe_cli.planning.question import PlanRequest, ask
from roundpipe_cli.planning.search.search import SearchEffort
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe

_LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 64},
    **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192, "tie_word_embeddings": False},
}
MODELS: dict[str, dict[str, Any]] = {  # widths of Llama 3.3 70B, Qwen3 8B and Qwen3 30B-A3B
    "llama": {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256, "num_hidden_layers": 7},
    "qwen3": {
        **{**_LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 32},
        **{"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936, "num_hidden_layers": 6},
    },
    "qwen3_moe": {
        **{**_LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_attention_heads": 32},
        **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128},
        **{"num_experts_per_tok": 8, "vocab_size": 151936, "num_hidden_layers": 6, "decoder_sparse_step": 1},
    },
}
MACHINES = ("4x4090", "2x3090,host_memory_gib=40", "3x5090,host_memory_gib=256")
WORDS = ["micro_batch_size=1", "gradient_accumulation_steps=8", "pipeline.weight_cache=0", "max_seq_length=4096"]
RecipeOf = Callable[[str, str], LoadedRecipe]  # by a model's name and a schedule
EVERY = [(name, machine, schedule) for name in MODELS for machine in MACHINES for schedule in SCHEDULES]


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory: pytest.TempPathFactory) -> RecipeOf:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        text = f"model: {folder / name}\ndatasets: [{{path: rows.jsonl}}]\noutput_dir: {folder}/out\n"
        (folder / f"{name}.yaml").write_text(text)

    @cache
    def recipe(name: str, schedule: str) -> LoadedRecipe:
        return load_recipe(folder / f"{name}.yaml", [*WORDS, f"pipeline.schedule={schedule}"])

    return recipe


@cache
def searched(case: SimulationCase, effort: SearchEffort | None) -> StageCut:
    return plan_partition(case, effort)


@pytest.fixture(autouse=True)
def each_case_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal cases get equal cuts; a run's costs also name the devices' memory, in place of which there are limits."""

    def search(case: SimulationCase, effort: SearchEffort | None) -> StageCut:
        assert case.limits is not None
        return searched(replace(case, costs=replace(case.costs, device_memory_bytes=None)), effort)

    monkeypatch.setattr("roundpipe_cli.planning.choose.plan_partition", search)


def planner_of(question: PlanRequest) -> AdaptivePlanner:
    """A run's planner on devices described in words, as if its first steps had measured the costs of the plan."""
    recipe, limits = question.loaded.recipe, stage_case(question).limits
    assert limits is not None
    memory = min(device.memory_bytes for device in question.hardware.devices)
    return AdaptivePlanner(
        replace(question.costs, device_memory_bytes=memory),
        question.num_workers,
        recipe.pipeline,
        microbatches_per_round=limits.microbatches_per_round,
        shared_bytes=fixed_device_need(question).total_bytes,
    )


def asked_by_bench(path: Path, words: list[str], machine: str) -> SimulationCase:
    return _question(str(path), words, None, machine, flags=CaseFlags())[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "machine", "schedule"), EVERY)
def test_three_commands_ask_and_get_the_same(recipe_of: RecipeOf, name: str, machine: str, schedule: Any) -> None:
    """Earlier looped bfs had 32 stages by plan and 24 by bench, and finetune counted on another share of a GPU."""
    loaded = recipe_of(name, schedule)
    question = ask(loaded, machine)
    planned = stage_case(question)
    assert planned.limits is not None and planned.limits.backward_bytes is not None
    benched = asked_by_bench(loaded.path, [*WORDS, f"pipeline.schedule={schedule}"], machine)
    assert benched == planned
    planner = planner_of(question)
    trained = planner.case(8)
    assert replace(trained, costs=replace(trained.costs, device_memory_bytes=None)) == planned
    planner.measured = True
    plan, run = make_plan(loaded, machine), planner.schedule(8)
    cut = choose(schedule, benched, effort="quick")
    expected = plan.cut.forward_stages, plan.cut.backward_stages
    assert (cut.forward_stages, cut.backward_stages) == expected
    assert (run.forward_stages, run.backward_stages) == expected


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["roundpipe", "interleaved_1f1b"])
@pytest.mark.parametrize("machine", [*MACHINES, "2x6000ada"])
@pytest.mark.parametrize("name", MODELS)
def test_plan_and_bench_keep_the_same_on_gpus(recipe_of: RecipeOf, name: str, machine: str, schedule: Any) -> None:
    """Earlier `bench` knew no weight cache: it passed microbatches on where `plan` kept each on one GPU."""
    words = [*WORDS, f"pipeline.schedule={schedule}"]
    words.remove("pipeline.weight_cache=0")
    path = recipe_of(name, schedule).path
    plan = make_plan(load_recipe(path, words), machine)
    ((_, cut, case),), _ = as_planned(request_of(str(path), words, machine), [schedule])
    assert (cut.forward_stages, cut.backward_stages) == (plan.cut.forward_stages, plan.cut.backward_stages)
    result = run(schedule, cut, case)
    assert result.step_s == pytest.approx(plan.step_s, rel=1e-9)
    assert result.parts.ratio == pytest.approx(plan.bubble_ratio, abs=1e-9)


def test_a_schedule_that_does_not_fit_is_told(recipe_of: RecipeOf, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["method=full", "pipeline.keep_activations=7", "gradient_accumulation_steps=32"]
    request = request_of(str(recipe_of("llama", "gpipe").path), words, "2x3090")
    as_planned(request, ["gpipe"])
    err = capsys.readouterr().err
    assert "note: gpipe does not fit: memory of rtx-3090: needs" in err and "Needed are" not in err
