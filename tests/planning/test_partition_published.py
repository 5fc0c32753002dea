"""The planner under the published accounting: published figures, and the evaluators against the simulator."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.planning.compare import SimulationCase, StageCut, make_schedule, run
from roundpipe_cli.planning.partition import plan_partition
from roundpipe_cli.planning.search.batch import BatchScorer, RoundChain, chain_of, one_batch, worker_speeds
from roundpipe_cli.planning.search.ranges import backward_ranges, forward_ranges
from roundpipe_cli.planning.search.search import lower_bounds
from roundpipe_cli.planning.search.stages import StageSums
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import makespan_s
from tests.schedule.test_simulate import FIGURES, published_costs
from tests.support.covering import swept

ALONE, STEADY = {"staleness": 0, "num_steps": 1}, {"staleness": 1, "num_steps": 60}


def published_models() -> dict[str, Any]:
    return dict(json.loads(FIGURES.read_text())["models"])


def random_costs(rng: random.Random, num_blocks: int, num_workers: int) -> CostModel:
    layers = [LayerCost(f"block.{n}", rng.random(), rng.random(), rng.random() < 0.9) for n in range(num_blocks)]
    if rng.random() < 0.5:
        layers[0] = LayerCost("embed", 0.0, 0.0, False)
    layers.append(LayerCost("head", rng.random(), rng.random(), False))
    speed = None if rng.random() < 0.5 else tuple(rng.choice((0.5, 1.0, 1.7)) for _ in range(num_workers))
    return CostModel("random", tuple(layers), hop_s=rng.choice((0.0, 0.01, 0.3)), worker_speed=speed)


def random_sizes(rng: random.Random, total: int, parts: int) -> list[int]:
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


def scored(
    costs: CostModel, stages: tuple[Sequence[StageRange], Sequence[StageRange]], num_workers: int, chain: RoundChain
) -> tuple[float, float]:
    """Makespan of the first step and time per step, as the search scores them."""
    forward, backward = ([last - first + 1 for first, last in direction] for direction in stages)
    scorer = BatchScorer(StageSums(costs), speeds=worker_speeds(costs, num_workers), hop_s=costs.hop_s)
    works, _ = scorer.works(one_batch(scorer.numpy, [*forward, *backward], len(forward)))

    def until(num_rounds: int) -> float:
        rounds = replace(chain, round_sizes=chain.round_sizes[:num_rounds], from_round=0, measured_steps=1)
        return float(scorer.step_s(works, rounds)[0])

    before_s = until(chain.from_round) if chain.from_round else 0.0
    return until(chain.rounds_per_step), (until(len(chain.round_sizes)) - before_s) / chain.measured_steps


@pytest.mark.parametrize("name", ["Llama3-8B", "Qwen3-32B"])
def test_published_partition_has_its_published_makespan(name: str) -> None:
    model = published_models()[name]
    partition = model["schedules"]["roundpipe"]
    head, *later = partition["blocks_per_backward_stage"]
    forward = forward_ranges(partition["blocks_per_forward_stage"])
    stages = forward, backward_ranges([head + 1, *later], model["blocks"] + 1)
    makespan_s, step_s = scored(published_costs(model), stages, 8, chain_of(16, 8, staleness=0, num_steps=1))
    assert makespan_s * 1e3 == pytest.approx(partition["makespan_ms"], rel=1e-6)
    assert step_s == makespan_s


def test_updates_change_no_published_figure() -> None:
    model, speeds = published_models()["Llama3-8B"], (1.0, 0.7, 1.0, 1.0, 0.5)
    costs = replace(published_costs(model), worker_speed=speeds)
    updated = replace(costs, layers=tuple(replace(layer, optimizer_s=0.5) for layer in costs.layers))
    cut = StageCut(((0, 19),), ((20, len(costs.layers) - 1), (0, 19)))
    steps = [
        run("roundpipe", cut, SimulationCase(one, 5, 2, accounting="published", staleness=1, num_steps=6)).step_s
        for one in (costs, updated)
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("name", "most_ms", "microbatches", "way"),
    [
        *(("Llama3-8B", 5880.1, 16, ALONE), ("Llama3-8B", 2508.2, 8, STEADY)),
        pytest.param("Qwen3-32B", 23770.9, 16, ALONE, marks=pytest.mark.sweep),
        pytest.param("Qwen3-32B", 10553.9, 8, STEADY, marks=pytest.mark.sweep),
    ],
)
def test_a_plan_is_as_fast_as_the_best_known(name: str, most_ms: float, microbatches: int, way: Any) -> None:
    costs = published_costs(published_models()[name])
    plan = plan_partition(SimulationCase(costs, 8, microbatches, accounting="published", **way))
    _, step_s = scored(costs, (plan.forward_stages, plan.backward_stages), 8, chain_of(microbatches, 8, **way))
    assert step_s * 1e3 <= most_ms
    whole = sum(layer.forward_s + layer.backward_s for layer in costs.layers)
    recompute = sum(layer.forward_s for layer in costs.layers[: plan.backward_stages[0][0]])
    least_s = microbatches / 8 * (whole + recompute)
    assert step_s >= least_s * (1 - 1e-9), "the workers cannot do more than they have time for"


@pytest.mark.parametrize("num_blocks", [24, *swept([32, 48])])
def test_a_planned_steady_state_lasts(num_blocks: int) -> None:
    blocks = [LayerCost(f"block.{index}", 1.0, 2.2, True) for index in range(num_blocks)]
    costs = CostModel("m", (*blocks, LayerCost("head", 3.0, 6.0, False)))
    plan = plan_partition(SimulationCase(costs, 8, 16, accounting="published", staleness=1, num_steps=60))
    stages = plan.forward_stages, plan.backward_stages
    busy, _ = scored(costs, stages, 1, chain_of(1, 1, staleness=0, num_steps=1))
    for num_rounds in (60, 960):
        whole, half = (8,) * num_rounds, num_rounds // 2
        _, from_start = scored(costs, stages, 8, RoundChain(whole, 1, 0, num_rounds))
        _, later = scored(costs, stages, 8, RoundChain(whole, 1, half, num_rounds - half))
        assert from_start <= 1.06 * busy, "slow from the start"
        assert later <= 1.04 * busy, "slow later"


def test_the_search_agrees_with_the_simulator() -> None:
    rng = random.Random(11)
    for _ in range(60):
        num_workers, num_microbatches = rng.randint(1, 8), rng.randint(1, 17)
        costs = random_costs(rng, rng.randint(3, 16), num_workers)
        num_layers = len(costs.layers)
        head = rng.randint(1, num_layers - 2)
        forward = random_sizes(rng, num_layers - head, rng.randint(1, num_layers - head))
        later = random_sizes(rng, num_layers - head, rng.randint(1, num_layers - head))
        ranges = forward_ranges(forward), backward_ranges([head, *later], num_layers)
        chain = chain_of(num_microbatches, num_workers, staleness=0, num_steps=1)
        makespan, step = scored(costs, ranges, num_workers, chain)
        assert step == makespan
        schedule = make_schedule("roundpipe", StageCut(*ranges), SimulationCase(costs, num_workers, num_microbatches))
        simulated = makespan_s(simulate(schedule, costs, accounting="published"))
        assert makespan == pytest.approx(simulated, rel=1e-12)


def test_chained_steps_agree_with_the_simulator() -> None:
    rng = random.Random(5)
    for _ in range(10):
        costs = random_costs(rng, 6, 3)
        ranges = forward_ranges([3, 2]), backward_ranges([2, 2, 1, 2], 7)
        case, ends = SimulationCase(costs, 3, 5, staleness=1), []
        for num_steps in (1, 3, 6):
            schedule = make_schedule("roundpipe", StageCut(*ranges), case, num_steps)
            ends.append(makespan_s(simulate(schedule, costs, accounting="published", staleness=1)))
        chain = chain_of(5, 3, staleness=1, num_steps=6)
        makespan, step = scored(costs, ranges, 3, chain)
        assert (makespan, step) == pytest.approx((ends[0], (ends[2] - ends[1]) / 3), rel=1e-9)


def test_steps_that_wait_for_updates_agree_with_the_simulator() -> None:
    rng = random.Random(8)
    for _ in range(30):
        costs = random_costs(rng, 7, 4)
        costs = replace(costs, layers=tuple(replace(layer, optimizer_s=1e-9) for layer in costs.layers))
        sizes = (3, 2, *rng.choice(((3, 5), (3, 2, 3), (3, 1, 1, 3))))
        ranges = forward_ranges(sizes[:2]), backward_ranges(sizes[2:], 8)
        num_microbatches = rng.randint(2, 9)
        chain = chain_of(num_microbatches, 4, staleness=1, num_steps=8, waits=True)
        _, step = scored(costs, ranges, 4, chain)
        case, cut = SimulationCase(costs, 4, num_microbatches, staleness=1), StageCut(*ranges)
        ends = [
            makespan_s(simulate(make_schedule("roundpipe", cut, case, num_steps), costs, staleness=1))
            for num_steps in (4, 8)
        ]
        assert (ends[1] - ends[0]) / 4 == pytest.approx(step, rel=1e-6)


def test_no_partition_beats_its_lower_bound() -> None:
    rng = random.Random(3)
    for _ in range(100):
        num_workers, num_microbatches = rng.randint(1, 6), rng.randint(1, 14)
        costs = random_costs(rng, rng.randint(3, 20), num_workers)
        num_layers = len(costs.layers)
        head = rng.randint(1, num_layers - 2)
        sizes = [
            *random_sizes(rng, num_layers - head, 2),
            head,
            *random_sizes(rng, num_layers - head, rng.randint(1, num_layers - head)),
        ]
        scorer = BatchScorer(StageSums(costs), speeds=worker_speeds(costs, num_workers), hop_s=costs.hop_s)
        works, _ = scorer.works(one_batch(scorer.numpy, sizes, 2))
        chain = chain_of(num_microbatches, num_workers, staleness=0, num_steps=1)
        bound = float(lower_bounds(scorer, works, chain)[0])
        assert bound <= float(scorer.step_s(works, chain)[0]) * (1 + 1e-9)
