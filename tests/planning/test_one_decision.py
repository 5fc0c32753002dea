"""`plan`, `bench` and a run ask one function which stages a step gets, and receive equal answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe_cli.choices import SCHEDULES
from roundpipe_cli.cli.bench import _question
from roundpipe_cli.cli.bench_options import CaseFlags
from roundpipe_cli.costs.memory import DEVICE_SHARE, fixed_device_need
from roundpipe_cli.planning.adaptive import AdaptivePlanner, RunConditions
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import SimulationCase
from roundpipe_cli.planning.predict import make_plan, stage_case
from roundpipe_cli.planning.question import PlanRequest, ask
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe

MODELS = ("qwen3-8b", "llama3.1-8b", "gpt-oss-20b")
MACHINES = ("8x4090", "2x3090", "4x5090,host_memory_gib=256")
WORDS = ["gradient_accumulation_steps=16", "pipeline.weight_cache=0"]


def planner_of(question: PlanRequest) -> AdaptivePlanner:
    """A run's planner before anything is measured, on devices described in words."""
    recipe, limits = question.loaded.recipe, stage_case(question).limits
    assert limits is not None
    memory = min(device.memory_bytes for device in question.hardware.devices)
    needs = question.analytic.costs, question.architecture, question.settings, question.hardware
    return AdaptivePlanner(
        replace(question.analytic.costs, device_memory_bytes=memory),
        question.num_workers,
        recipe.pipeline,
        conditions=RunConditions(
            chained=recipe.overlaps_steps(on_cpu=False),
            microbatches_per_round=limits.microbatches_per_round,
            shared_bytes=fixed_device_need(*needs).total_bytes,
        ),
    )


def asked_by_bench(name: str, words: list[str], machine: str) -> SimulationCase:
    return _question(f"recipes/{name}.yaml", words, None, machine, CaseFlags())


def loaded(name: str, schedule: str) -> LoadedRecipe:
    return load_recipe(f"recipes/{name}.yaml", [*WORDS, f"pipeline.schedule={schedule}"])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", MODELS)
def test_the_three_commands_ask_the_same(name: str, machine: str) -> None:
    """Earlier plan counted on 95 % of a GPU and finetune on 85, and bench knew no limits at all."""
    question = ask(loaded(name, "roundpipe"), machine)
    planned = stage_case(question)
    assert asked_by_bench(name, [*WORDS, "pipeline.schedule=roundpipe"], machine) == planned
    trained = planner_of(question).case(16)
    memory = trained.costs.device_memory_bytes
    assert replace(trained, costs=replace(trained.costs, device_memory_bytes=None)) == replace(
        planned, costs=replace(planned.costs, device_memory_bytes=None)
    )
    assert planned.costs.device_memory_bytes in (None, memory)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_three_commands_get_equal_stages(schedule: str) -> None:
    """Earlier looped bfs had 32 stages by plan and 24 by bench, interleaved 1f1b 32 and 16."""
    name, machine = "qwen3-8b", "8x4090"
    recipe = loaded(name, schedule)
    plan, question = make_plan(recipe, machine), ask(recipe, machine)
    case = asked_by_bench(name, [*WORDS, f"pipeline.schedule={schedule}"], machine)
    benched = choose(schedule, case, effort="quick")
    planner = planner_of(question)
    planner.measured = True  # as if these costs had been
    trained = planner.schedule(16)
    expected = plan.forward_stages, plan.backward_stages
    assert (benched.forward_stages, benched.backward_stages) == expected
    assert (trained.forward_stages, trained.backward_stages) == expected
    assert DEVICE_SHARE == 0.85
