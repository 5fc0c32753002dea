"""Stages of schedules that bind them to workers, for deep models: fewer cuts are tried, and nothing is lost by it."""

from __future__ import annotations

import pytest

from roundpipe_cli.choices import ScheduleName
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.planning import choose as choosing
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import SimulationCase, StageCut, run_step_s
from roundpipe_cli.planning.search.stages import StageLimits


@pytest.mark.parametrize("name", ["looped_bfs", pytest.param("interleaved_1f1b", marks=pytest.mark.sweep)])
def test_a_deep_model_tries_fewer_numbers_of_stages(name: ScheduleName, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [LayerCost(f"block.{index}", 1.0, 2.2, True, param_bytes=100, boundary_bytes=5) for index in range(80)]
    layers = (LayerCost("embed", 0.0, 0.0, False), *blocks, LayerCost("head", 2.0, 4.0, False, param_bytes=300))
    costs = CostModel("deep", layers, hop_s=0.01, link_bytes_per_s=100.0)
    case = SimulationCase(costs, 4, 8, limits=StageLimits(10_000, 10_000, 10_000))
    tried: list[StageCut] = []
    published_s = choosing._published_s

    def noted(asked: str, cut: StageCut, question: SimulationCase) -> float:
        tried.append(cut)
        return published_s(asked, cut, question)

    monkeypatch.setattr(choosing, "_published_s", noted)
    quick = choose(name, case, effort="quick")
    few = len(tried)
    monkeypatch.setattr(choosing, "MAX_SEARCHED_LAYERS", 1000)
    tried.clear()
    thorough = choose(name, case, effort="quick")
    assert few < 0.6 * len(tried)
    assert run_step_s(name, quick, case) <= run_step_s(name, thorough, case) * 1.003
