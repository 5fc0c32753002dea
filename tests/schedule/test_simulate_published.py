"""The published accounting against the published figures, and by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.schedule.builders import Options, Rounds, _dealer, build_schedule
from roundpipe_cli.schedule.published import simulate_published
from roundpipe_cli.schedule.timeline import bubble, compute_rows, makespan_s, utilization
from tests.support.schedules import dealt

FIGURES = Path(__file__).resolve().parents[1] / "facts" / "published_schedules.json"
CASES = [
    (model, schedule)
    for model in ("Llama3-8B", "Qwen3-32B")
    for schedule in ("gpipe", "1f1b", "looped-bfs", "interleaved-1f1b", "roundpipe")
]


def published_costs(model: dict[str, Any]) -> CostModel:
    block = LayerCost("block", model["block_forward_ms"] / 1e3, model["block_backward_ms"] / 1e3, recompute=True)
    head = LayerCost("head", model["head_forward_ms"] / 1e3, model["head_backward_ms"] / 1e3, recompute=False)
    return CostModel("published", (*[block] * model["blocks"], head), hop_s=model["hop_ms"] / 1e3)


def ranges(blocks_per_stage: list[int]) -> list[StageRange]:
    ends = list(accumulate(blocks_per_stage))
    return [(end - size, end - 1) for size, end in zip(blocks_per_stage, ends, strict=True)]


def published_stages(model: dict[str, Any], figures: dict[str, Any]) -> dict[str, list[StageRange]]:
    """The figures count blocks; the head joins the last stage, or the first backward stage of roundpipe."""
    head = model["blocks"]
    if "blocks_per_stage" in figures:
        stages = ranges(figures["blocks_per_stage"])
        return {"forward_stages": [*stages[:-1], (stages[-1][0], head)]}
    backward = ranges(figures["blocks_per_backward_stage"][::-1])[::-1]
    return {
        "forward_stages": ranges(figures["blocks_per_forward_stage"]),
        "backward_stages": [(backward[0][0], head), *backward[1:]],
    }


@pytest.mark.skipif(not FIGURES.exists(), reason="published figures are not at hand")
@pytest.mark.parametrize(("model_name", "name"), CASES)
def test_published_figures(model_name: str, name: str) -> None:
    data = json.loads(FIGURES.read_text())
    model = data["models"][model_name]
    figures = model["schedules"][name]
    costs = published_costs(model)
    schedule = build_schedule(
        name,
        **published_stages(model, figures),
        num_workers=data["workers"],
        rounds=Rounds(data["microbatches"]),
        costs=costs,
    )
    timeline = simulate_published(schedule, costs)
    parts = bubble(timeline)
    assert makespan_s(timeline) * 1e3 == pytest.approx(figures["makespan_ms"], rel=1e-6)
    for part in ("fill", "switch", "drain", "steady"):
        assert 100 * getattr(parts, part) == pytest.approx(figures[f"{part}_pct"], abs=1e-3)
    assert 100 * parts.ratio == pytest.approx(figures["bubble_pct"], abs=1e-3)


def layer(forward_s: float, backward_s: float, recompute: bool = True) -> LayerCost:
    return LayerCost("layer", forward_s, backward_s, recompute)


def test_roundpipe_by_hand() -> None:
    """Two blocks (1 forward, 2 backward) and a head (1, 1) on two workers, hop 0.5, one microbatch.

    worker 0   F 0-1        B 2-4 (its lead 2-3)              R 6-7, B 7-9      the lead ends when F1 arrives, at 3
    worker 1         F 1.5-2.5               R 3.5-4.5, B 4.5-6.5              the recompute when the gradient does
    """
    costs = CostModel("by hand", (layer(1, 2), layer(1, 2), layer(1, 1, recompute=False)), hop_s=0.5)
    schedule = dealt([(0, 0), (1, 1)], [(2, 2), (1, 1), (0, 0)], 2, 1, costs)
    timeline = simulate_published(schedule, costs)
    spans = [[(row.kind.value, row.start_s, row.end_s) for row in rows] for rows in compute_rows(timeline)]
    assert spans == [
        [("F", 0, 1), ("B", 2, 4), ("R", 6, 7), ("B", 7, 9)],
        [("F", 1.5, 2.5), ("R", 3.5, 4.5), ("B", 4.5, 6.5)],
    ]


def test_a_stage_without_layers_takes_no_time_but_its_hops_count() -> None:
    costs = CostModel("one block", (layer(1, 2), layer(1, 1, recompute=False)), hop_s=0.5)
    schedule = build_schedule(
        "gpipe", forward_stages=[(0, 0), (1, 0), (1, 1)], num_workers=3, rounds=Rounds(1), costs=costs
    )
    timeline = simulate_published(schedule, costs)
    # F0 0-1, hop, nothing, hop, F 2-3, B 3-4, hop, nothing, hop, R 5-6, B 6-8
    assert makespan_s(timeline) == 8
    assert utilization(timeline) == [0.5, 0, 0.25]
    assert bubble(timeline).fill == pytest.approx((0 + 8 + 2) / 24)


def test_staleness_0_chains_with_a_barrier_and_staleness_1_without() -> None:
    costs = CostModel("blocks", (*[layer(1, 2)] * 4, layer(1, 1, recompute=False)))
    spans = []
    for num_steps, staleness in ((1, 0), (2, 0), (2, 1)):
        stages = [(0, 3)], [(4, 4), (2, 3), (0, 1)]
        schedule = dealt(*stages, 3, 3, costs, num_steps=num_steps, staleness=staleness)
        spans.append(makespan_s(simulate_published(schedule, costs, staleness=staleness)))
    assert spans[1] == 2 * spans[0]
    assert spans[2] < spans[1]


def test_worker_speed_divides_times() -> None:
    costs = CostModel("two speeds", (layer(1, 2), layer(1, 1, recompute=False)), worker_speed=(2.0, 0.5))
    schedule = build_schedule("gpipe", forward_stages=[(0, 0), (1, 1)], num_workers=2, rounds=Rounds(1), costs=costs)
    timeline = simulate_published(schedule, costs)
    assert [interval.end_s - interval.start_s for interval in compute_rows(timeline)[1]] == [2, 2]
    assert makespan_s(timeline) == 0.5 + 2 + 2 + 0.5 + 1


@pytest.mark.parametrize(
    "options", [Options(), Options(head_workers=2), Options(earliest_free=True)], ids=["in turn", "head", "free"]
)
def test_the_dealers_clock_is_the_simulators(options: Options) -> None:
    """The dealer settles times while it deals, by its own recurrence: every worker ends when the simulator says."""
    draw = random.Random(6)
    for _ in range(40):
        num_workers, num_microbatches = draw.randint(1, 4), draw.randint(1, 9)
        blocks = [layer(draw.uniform(0.5, 2), draw.uniform(1, 3)) for _ in range(6)]
        costs = CostModel("random", (*blocks, layer(draw.random(), 1, recompute=False)), hop_s=draw.choice((0.0, 0.3)))
        costs = replace(costs, worker_speed=tuple(draw.choice((1.0, 0.6)) for _ in range(num_workers)))
        stages = ((0, 2), (3, 4), (5, 5)), ((6, 6), (4, 5), (2, 3), (0, 1))
        dealer = _dealer(num_workers, costs, *stages, options)
        per_round = draw.randint(1, num_microbatches)
        dealer.deal_step(range(num_microbatches), per_round)
        schedule = dealt(*stages, num_workers, num_microbatches, costs, per_round=per_round, options=options)
        rows = compute_rows(simulate_published(schedule, costs))
        assert dealer.free_s == pytest.approx([max((one.end_s for one in row), default=0.0) for row in rows])
