"""Stages of forwards alone: every layer once, no larger than a slot, of equal time; and a plan that counts them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from roundpipe_cli.cli.plan import plan_text
from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.planning.compare import SimulationCase
from roundpipe_cli.planning.cuts import forward_stages
from roundpipe_cli.planning.partition import QUICK, plan_partition
from roundpipe_cli.planning.predict import Plan, make_plan
from roundpipe_cli.planning.search.stages import limits_for
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.builders import Rounds, build_forward, build_schedule, every_stage
from roundpipe_cli.schedule.program import lower
from roundpipe_cli.schedule.simulate import simulate_program
from roundpipe_cli.schedule.timeline import makespan_s

RECIPE = (
    "model: Qwen/Qwen3-1.7B\ndatasets: [{path: rows.jsonl}]\nmax_seq_length: 2048\n"
    "packing: false\nmicro_batch_size: 1\ngradient_accumulation_steps: 8\n"
)


def drawn(draw: random.Random, blocks: int) -> CostModel:
    """A model of blocks of two kinds, with weights that take about as long to upload as to use."""
    kinds = [
        LayerCost(f"block.{kind}", forward, 3 * forward, True, param_bytes=draw.randint(50, 200), boundary_bytes=1)
        for kind, forward in ((kind, draw.uniform(1.0, 3.0)) for kind in range(2))
    ]
    embed = LayerCost("embed", 0.0, 0.0, False, boundary_bytes=1)
    head = LayerCost("head", 0.0, draw.uniform(2.0, 12.0), False, param_bytes=draw.randint(100, 400))
    return CostModel("drawn", (embed, *(kinds[i % 2] for i in range(blocks)), head), link_bytes_per_s=100.0)


def chosen(costs: CostModel, own: list[StageRange], others: list[StageRange]) -> tuple[StageRange, ...]:
    return forward_stages(costs, own, others, num_workers=2, num_microbatches=8)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(4, 8))])
def test_even_stages_hold_every_layer_once_and_are_no_slower(seed: int) -> None:
    draw = random.Random(seed)
    workers, blocks = draw.choice([1, 2, 3, 4, 8]), draw.randint(8, 40)
    costs = drawn(draw, blocks)
    limits = limits_for(costs, sum(layer.param_bytes for layer in costs.layers) * draw.randint(20, 60) // 100)
    plan = plan_partition(SimulationCase(costs, workers, 4 * workers, limits=limits), QUICK)
    step = build_schedule(
        "roundpipe",
        forward_stages=plan.forward_stages,
        backward_stages=plan.backward_stages,
        num_workers=workers,
        rounds=Rounds(4 * workers),
        costs=costs,
    )
    own = every_stage(step)
    stages = forward_stages(costs, own, step.backward_stages, num_workers=workers, num_microbatches=4 * workers)
    assert [layer for first, last in stages for layer in range(first, last + 1)] == list(range(blocks + 2))

    def weights(stage: StageRange) -> int:
        return sum(layer.param_bytes for layer in costs.layers[stage[0] : stage[1] + 1])

    assert max(map(weights, stages)) <= max(map(weights, (*own, *step.backward_stages)))
    assert stages == own or len(stages) == 1 or len(stages) % workers == 0

    def taken_s(tried: tuple[StageRange, ...]) -> float:
        schedule = build_forward(tried, num_workers=workers, num_microbatches=4 * workers)
        return makespan_s(simulate_program(lower(schedule, costs), costs))

    assert taken_s(stages) <= taken_s(own)


def test_two_stages_stay_together_on_a_worker() -> None:
    costs = drawn(random.Random(0), 8)
    assert chosen(costs, [(0, 3), (4, 9)], [(4, 9), (0, 3)]) == ((0, 3), (4, 9))
    rows = build_forward([(0, 3), (4, 9)], num_workers=2, num_microbatches=3).actions
    assert [[action.microbatch for action in row] for row in rows] == [[0, 0, 2, 2], [1, 1]]


def test_what_a_slot_holds_whole_is_one_stage() -> None:
    costs = drawn(random.Random(0), 8)
    assert chosen(costs, [(0, 2), (3, 5), (6, 9)], [(0, 9)]) == ((0, 9),)


def test_stages_that_are_too_large_to_be_even_are_made_more() -> None:
    """Two stages would be larger than a slot; four are not."""
    block = LayerCost("block", 1.0, 3.0, True, param_bytes=100)
    costs = CostModel("x", (LayerCost("embed", 0, 0, False), *[block] * 8, LayerCost("head", 0, 2.0, False)))
    own = [(0, 1), (2, 4), (5, 7), (8, 9)]
    stages = chosen(costs, own, [])
    assert len(stages) == 4 and all(sum(1 for at in range(a, b + 1) if 1 <= at <= 8) <= 3 for a, b in stages)


# --- DPO -------------------------------------------------------------------------------------------------------------


def planned(folder: Path, *words: str) -> Plan:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (folder / "recipe.yaml").write_text(RECIPE)
    return make_plan(load_recipe(folder / "recipe.yaml", [f"output_dir={folder / 'out'}", *words]), "2x4090")


def test_a_plan_for_pairs_counts_both_answers_and_the_reference(tmp_path: Path) -> None:
    pairs = planned(tmp_path, "objective=dpo", "pipeline.weight_cache=0")
    usual = planned(tmp_path, "micro_batch_size=2", "pipeline.weight_cache=0")
    assert pairs.question.settings.tokens_per_microbatch == usual.question.settings.tokens_per_microbatch == 4096
    assert pairs.verdict.device == usual.verdict.device
    said = [line for line in plan_text(pairs, None) if "the base model's forward" in line]
    assert len(said) == 1 and "of a step" in said[0]
    assert not any("the base model's forward" in line for line in plan_text(usual, None))
    without = planned(tmp_path, "objective=simpo", "pipeline.weight_cache=0")
    assert (without.verdict.device, without.step_s) == (usual.verdict.device, usual.step_s)
    forward_s = sum(layer.forward_s for layer in pairs.question.analytic.costs.layers) * 8 / 2
    assert forward_s <= pairs.step_s - usual.step_s <= 1.4 * forward_s
