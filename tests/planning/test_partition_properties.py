"""What every plan must hold: cover, limits, determinism, no loss by more workers; and what is refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.errors import ResourceError
from roundpipe_cli.planning.choose import in_long_rounds
from roundpipe_cli.planning.compare import SimulationCase, StageCut, make_schedule, run_step_s
from roundpipe_cli.planning.partition import LIGHT, _round_sizes, _Task, plan_partition
from roundpipe_cli.planning.search.batch import one_batch
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.planning.search.search import SearchEffort
from roundpipe_cli.planning.search.stages import StageLimits, StageSums
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import makespan_s

SMALL = SearchEffort(cell_work=3e6, pattern_cells=30, local_work=1e6)


def model(num_blocks: int, *, head: float = 2.0, hop: float = 0.1, embed: float | None = None) -> CostModel:
    layers = [LayerCost(f"block.{index}", 1.0, 2.2, True) for index in range(num_blocks)]
    if embed is not None:
        layers.insert(0, LayerCost("embed", embed, embed, False))
    return CostModel("m", (*layers, LayerCost("head", head, 2 * head, False)), hop_s=hop)


def with_bytes(costs: CostModel, *, boundary: int = 0) -> CostModel:
    layers = tuple(
        replace(layer, param_bytes=100 + 10 * (index % 3), grad_bytes=7, activation_bytes=40, boundary_bytes=boundary)
        for index, layer in enumerate(costs.layers)
    )
    return replace(costs, layers=layers, link_bytes_per_s=100.0)


def check_cover(plan: StageCut, num_layers: int) -> None:
    forward = [layer for first, last in plan.forward_stages for layer in range(first, last + 1)]
    backward = [layer for first, last in reversed(plan.backward_stages) for layer in range(first, last + 1)]
    assert backward == list(range(num_layers))
    assert forward == list(range(plan.backward_stages[0][0]))
    assert all(first <= last for first, last in (*plan.forward_stages, *plan.backward_stages))


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_microbatches", [1, 7, 16])
@pytest.mark.parametrize("accounting", ["default", "published"])
def test_every_layer_once_in_both_directions(num_workers: int, num_microbatches: int, accounting: Any) -> None:
    for costs in (model(11), model(1), model(9, embed=0.0), model(0), model(0, embed=0.1)):
        case = SimulationCase(costs, num_workers, num_microbatches, accounting=accounting)
        plan = plan_partition(case, SMALL)
        check_cover(plan, len(costs.layers))
        assert plan.explanation and not re.search(r"\b1 \w+ ?stages|\b(?<!to )1 layers", plan.explanation[0])
        if accounting == "published":
            assert plan.microbatches_per_round == len(plan.workers)
        busy = num_microbatches * sum(layer.forward_s + layer.backward_s for layer in costs.layers)
        assert run_step_s("roundpipe", plan, case) >= busy / num_workers * (1 - 1e-9)


def test_more_workers_are_never_slower() -> None:
    rng = random.Random(4)
    for _ in range(2):
        costs = model(rng.randint(2, 12), head=rng.uniform(0.2, 5), hop=rng.choice((0.01, 0.3, 3.0)))
        num_microbatches = rng.randint(1, 12)
        for accounting in ("published", "default"):
            cases = (SimulationCase(costs, count, num_microbatches, accounting=accounting) for count in range(1, 7))
            times = [run_step_s("roundpipe", plan_partition(case, SMALL), case) for case in cases]
            assert all(more <= fewer * (1 + 1e-9) for fewer, more in zip(times, times[1:], strict=False)), times


def test_no_step_is_faster_than_all_workers_at_work() -> None:
    """One microbatch a step on four workers took no time: the second and fourth step ended at the same time."""
    rng = random.Random(7)
    cases = [(model(2, head=0.6, hop=0.0), 4, 1, 4)]
    cases += [
        (model(rng.randint(1, 5), head=rng.uniform(0.2, 5), hop=0.01), rng.randint(2, 4), rng.randint(1, 5), 2)
        for _ in range(5)
    ]
    for costs, num_workers, num_microbatches, num_steps in cases:
        case = SimulationCase(costs, num_workers, num_microbatches, staleness=1, num_steps=num_steps)
        plan = plan_partition(case, SMALL)
        again = plan.backward_stages[0][0]  # layers that are recomputed
        once = sum(layer.forward_s + layer.backward_s for layer in costs.layers)
        once += sum(layer.forward_s for layer in costs.layers[:again] if layer.recompute)
        least = num_microbatches * once / num_workers * (1 - 1e-9)
        assert run_step_s("roundpipe", plan, case) >= least


def test_a_slow_worker_is_left_idle() -> None:
    costs = replace(model(8), worker_speed=(1.0, 0.01, 1.0))
    case = SimulationCase(costs, 3, 6, accounting="published")
    two = SimulationCase(model(8), 2, 6, accounting="published")
    plan = plan_partition(case, SMALL)
    assert plan.workers == (0, 2)
    two_s = run_step_s("roundpipe", plan_partition(two, SMALL), two)
    assert run_step_s("roundpipe", plan, case) == pytest.approx(two_s)


def test_same_costs_same_plan() -> None:
    costs = with_bytes(model(13, embed=0.2))
    plans = [plan_partition(SimulationCase(costs, 4, 9), SMALL) for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("limit", [260, 520])
def test_no_stage_over_its_limit(limit: int) -> None:
    costs = with_bytes(model(12))
    sums = StageSums(costs)
    limits = StageLimits(forward_bytes=limit, backward_bytes=limit + 60)
    plan = plan_partition(SimulationCase(costs, 4, 8, limits=limits), SMALL)
    check_cover(plan, 13)
    assert all(sums.param_bytes[first][last + 1] <= limit for first, last in plan.forward_stages)
    assert all(sums.backward_bytes(first, last + 1) <= limit + 60 for first, last in plan.backward_stages)


def test_rounds_are_no_longer_than_their_limit() -> None:
    slow = replace(with_bytes(model(12)), link_bytes_per_s=100.0)
    cases = [SimulationCase(slow, 2, 8, limits=StageLimits(microbatches_per_round=most)) for most in (None, 4, 3, 1)]
    sizes = [plan_partition(case, SMALL).microbatches_per_round for case in cases]
    assert sizes == [8, 4, 3, 2], "where weights take long to come; but at least a microbatch a worker"


def test_device_memory_holds_slots_and_activations() -> None:
    costs = replace(with_bytes(model(12)), device_memory_bytes=900)
    plan = plan_partition(SimulationCase(costs, 4, 8), SMALL)
    sums = StageSums(costs)
    held = [sums.param_bytes[first][last + 1] for first, last in plan.forward_stages]
    held += [sums.param_bytes[a][b + 1] + sums.grad_bytes[a][b + 1] for a, b in plan.backward_stages]
    kept = max(sums.visit_bytes[first][last + 1] for first, last in plan.backward_stages)
    assert 2 * max(held) + kept <= 900


def test_what_cannot_fit_is_named() -> None:
    costs = replace(with_bytes(model(4)), device_memory_bytes=100)
    with pytest.raises(ResourceError) as caught:
        plan_partition(SimulationCase(costs, 2, 4))
    assert "layer 2 (block.2)" in str(caught.value)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(("boundary", "tolerance"), [(0, 1e-9), (2, 0.05)])
def test_default_time_is_that_of_the_simulator(boundary: int, tolerance: float) -> None:
    """Exact for weights and gradients; boundaries that share a link with them are estimated."""
    for num_workers, num_microbatches in ((1, 4), (2, 4), (4, 8), (3, 7)):
        costs = with_bytes(model(12), boundary=boundary)
        case = SimulationCase(costs, num_workers, num_microbatches)
        plan = plan_partition(case, SMALL)
        task = _Task(case, StageSums(costs), plan.workers, SMALL, plan.microbatches_per_round)
        scorer, stages = task.scorer(), (*plan.forward_stages, *plan.backward_stages)
        batch = one_batch(scorer.numpy, [last - first + 1 for first, last in stages], len(plan.forward_stages))
        scored_s = float(scorer.step_s(scorer.works(batch)[0], task.chain())[0])
        simulated = makespan_s(simulate(make_schedule("roundpipe", plan, case), costs))
        assert scored_s == pytest.approx(simulated, rel=tolerance), (num_workers, num_microbatches)


def test_even_cut() -> None:
    forward, backward = even_cut(9, 3, 2, beside_head=1)
    assert forward == ((0, 3), (4, 6))
    assert backward == ((7, 8), (5, 6), (3, 4), (0, 2))
    assert even_cut(9, 4, 4, num_free=0) == (((0, 3), (4, 7)), ((8, 8), (4, 7), (0, 3)))
    assert even_cut(3, 1, 1, beside_head=1) == ((), ((0, 2),))


@pytest.mark.parametrize(
    ("workers", "room", "chunks", "expected"),
    [(8, None, 1, 20), (8, 32, 1, 20), (8, 12, 1, 10), (8, 8, 1, 7), (8, 2, 1, 7), (2, 11, 4, 8)],
)
def test_given_stages_get_few_equal_rounds(workers: int, room: int | None, chunks: int, expected: int) -> None:
    """20 microbatches on 8 workers were run as 8 + 8 + 4, however much memory the host had. Sequences stay whole."""
    limits = StageLimits(microbatches_per_round=room)
    case = SimulationCase(model(6), workers, 20, sequence_chunks=chunks, limits=limits)
    shortest = StageCut(*even_cut(6, 1, 1), max(workers, chunks))
    assert in_long_rounds(shortest, case).microbatches_per_round == expected


@pytest.mark.parametrize(("layers", "expected"), [(30, [20, 10, 7, 5, 4]), (60, [20, 10, 7])])
def test_searched_rounds_are_equal(layers: int, expected: list[int]) -> None:
    costs = model(layers)
    task = _Task(SimulationCase(costs, 8, 20), StageSums(costs), tuple(range(8)), LIGHT)
    assert _round_sizes(task) == expected
