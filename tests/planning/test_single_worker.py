"""Stages for one worker: the bound by which cuts are left out holds, and what is left out is never the fastest."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.planning import cuts as single_worker
from roundpipe_cli.planning.compare import SimulationCase, StageCut, run_step_s
from roundpipe_cli.planning.cuts import ROUNDING, single_cut, single_worker_bound_s
from roundpipe_cli.planning.search.stages import StageLimits


def random_case(seed: int) -> SimulationCase:
    """One worker whose link or arithmetic may bind, with and without gradients, and stages of a few blocks."""
    rng = random.Random(seed)
    block = LayerCost(
        "block",
        rng.uniform(0.5, 2),
        rng.uniform(1, 4),
        True,
        param_bytes=rng.choice((0, 50, 200, 2000)),
        grad_bytes=rng.choice((0, 0, 20, 200)),
        boundary_bytes=rng.choice((0, 3)),
        optimizer_s=rng.choice((0.0, 0.5)),
    )
    num_blocks = rng.randint(1, 9)
    blocks = [replace(block, name=f"block.{index}") for index in range(num_blocks)]
    embed = LayerCost("embed", 0.0, 0.0, False, boundary_bytes=block.boundary_bytes)
    head = LayerCost("head", rng.uniform(0.5, 4), rng.uniform(1, 8), False, param_bytes=300)
    costs = CostModel("m", (embed, *blocks, head), link_bytes_per_s=100.0, slots=rng.choice((2, 3)))
    most = block.param_bytes * rng.randint(1, 4) + 300
    whole = most + (block.grad_bytes or 0) * 4
    return SimulationCase(costs, 1, rng.randint(1, 9), limits=StageLimits(most, whole, whole))


def candidates(case: SimulationCase) -> list[StageCut]:
    assert case.limits is not None
    return single_worker._candidates(case.costs, case.limits, case.num_microbatches)


@pytest.mark.parametrize("seed", range(60))
def test_no_step_is_faster_than_its_bound(seed: int) -> None:
    case = random_case(seed)
    for cut in candidates(case):
        assert single_worker_bound_s(cut, case) <= run_step_s("roundpipe", cut, case) * (1 + ROUNDING)


def test_the_bound_is_the_time_where_only_weights_move() -> None:
    """So it leaves out nearly all: a link that binds, one that hides, and stages that stay in their slots."""
    for param_bytes, per_round in ((2000, 1), (2000, 4), (10, 4), (0, 2)):
        layers = [LayerCost(f"block.{index}", 1.0, 2.0, True, param_bytes=param_bytes) for index in range(6)]
        costs = CostModel("m", (*layers, LayerCost("head", 1.0, 2.0, False)), link_bytes_per_s=100.0)
        case = SimulationCase(costs, 1, 4)
        for cut in (
            StageCut(((0, 2), (3, 4)), ((5, 6), (3, 4), (0, 2)), per_round),
            StageCut((), ((0, 6),), per_round),
        ):
            assert single_worker_bound_s(cut, case) == pytest.approx(run_step_s("roundpipe", cut, case))


@pytest.mark.parametrize("seed", range(60, 80))
def test_the_fastest_of_all_is_found_with_fewer_simulations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(seed)
    simulated = []

    def noted(name: str, cut: StageCut, asked: SimulationCase) -> float:
        simulated.append(run_step_s(name, cut, asked))
        return simulated[-1]

    monkeypatch.setattr(single_worker, "run_step_s", noted)
    chosen = single_cut(case, lambda cut: True)
    cuts = candidates(case)
    num_microbatches = min(case.num_microbatches, max(8, *(cut.microbatches_per_round or 1 for cut in cuts)))
    short = replace(case, num_microbatches=num_microbatches)
    times = [run_step_s("roundpipe", cut, short) for cut in cuts]
    assert chosen is not None and run_step_s("roundpipe", chosen, short) == min(times)
    assert len(simulated) <= len(cuts)
