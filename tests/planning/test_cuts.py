"""What a search of stages looks at, and cuts without one: bound stages of deep models, forwards alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest

from roundpipe_cli.choices import ScheduleName
from roundpipe_cli.cli.plan import plan_text
from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.costs.memory import HEAD_CHUNK
from roundpipe_cli.planning import choose as choosing
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import SimulationCase, StageCut, make_schedule, run_step_s
from roundpipe_cli.planning.forward_stages import forward_stages
from roundpipe_cli.planning.partition import QUICK, plan_partition
from roundpipe_cli.planning.predict import Plan, make_plan
from roundpipe_cli.planning.search import search
from roundpipe_cli.planning.search.batch import INFEASIBLE, BatchScorer, chain_of
from roundpipe_cli.planning.search.stages import StageLimits, StageSums, limits_for
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.builders import build_forward, every_stage
from roundpipe_cli.schedule.program import lower
from roundpipe_cli.schedule.simulate import simulate_program
from roundpipe_cli.schedule.timeline import makespan_s
from tests.support.covering import swept

BLOCKS = 9
LIMITS = StageLimits(forward_bytes=40, backward_bytes=30, head_bytes=35)
SUMS = StageSums(
    CostModel("blocks", (*[LayerCost("block", 1.0, 2.0, True, param_bytes=10, boundary_bytes=1)] * BLOCKS,
                         LayerCost("head", 1.0, 2.0, False, param_bytes=10, boundary_bytes=1)))
)  # fmt: skip


def scorer(limits: StageLimits | None, link_bytes_per_s: float = 1e9) -> BatchScorer:
    return BatchScorer(SUMS, speeds=[1.0] * 3, hop_s=0.0, link_bytes_per_s=link_bytes_per_s, limits=limits)


def bounds() -> list[int]:
    """Units of one layer each, as equal blocks have them."""
    found = search.unit_bounds(SUMS)
    assert found == list(range(BLOCKS + 1))
    return found


def test_cells_that_no_limit_allows_are_left_out() -> None:
    """All cells with a cut within the limits stay, and most of the others go before anything is computed for them."""
    chain = chain_of(6, 3, staleness=0, num_steps=1)
    all_cells, kept = (search.make_cells(scorer(limits), bounds(), chain) for limits in (None, LIMITS))
    assert len(kept) < len(all_cells) / 2
    left = set(zip(kept.forward.tolist(), kept.later.tolist(), kept.head.tolist(), strict=True))
    for pattern in [(forward, later) for forward in search.PATTERNS for later in search.PATTERNS]:
        batch, index = search.seeds(scorer(LIMITS), bounds(), all_cells, pattern)
        fits = scorer(LIMITS).works(batch)[1]
        good = all_cells.take(index[numpy.flatnonzero(fits)])
        assert set(zip(good.forward.tolist(), good.later.tolist(), good.head.tolist(), strict=True)) <= left


@pytest.mark.parametrize("link_bytes_per_s", [1e9, 2.0])
@pytest.mark.parametrize("per_round", [2, 6])
def test_no_cut_beats_the_bound_of_its_cell(per_round: int, link_bytes_per_s: float) -> None:
    """Where links bind the bound counts what they carry, so that short rounds are ruled out without a simulation."""
    chain = chain_of(6, per_round, staleness=0, num_steps=1)
    one = scorer(LIMITS, link_bytes_per_s)
    cells = search.make_cells(one, bounds(), chain)
    batch, index = search.seeds(one, bounds(), cells, ("smaller first", "larger first"))
    works, fits = one.works(batch)
    values = numpy.where(fits, one.step_s(works, chain), INFEASIBLE)
    assert (values >= cells.bound_s[index] * (1 - 1e-9)).all()
    if link_bytes_per_s == 2.0:
        assert cells.bound_s.min() > 6 * BLOCKS * 4 / 3, "more than arithmetic alone"


def deep(blocks: int) -> CostModel:
    """Blocks without memory limits, and a head of two blocks' time."""
    block = LayerCost("block", 1.0, 2.0, True, param_bytes=10, boundary_bytes=1)
    return CostModel("deep", (*[block] * blocks, LayerCost("head", 2.0, 4.0, False)), hop_s=0.01)


def test_memory_of_a_search_does_not_grow_with_the_cube_of_the_layers() -> None:
    """500 layers took 7 GB: 125 million cells, and a million neighbours of a thousand stages each."""
    costs, chain = deep(499), chain_of(16, 8, staleness=0, num_steps=1)
    one = BatchScorer(StageSums(costs), speeds=[1.0] * 8, hop_s=0.01)
    cells = search.make_cells(one, list(range(500)), chain)
    assert len(cells) < 1_000_000
    assert {int(cells.forward.max()), int(cells.later.max())} == {499}, "one layer a stage is always tried"
    sizes = 1 + numpy.arange(999) % 2
    near = search.neighbours(numpy, sizes, 499)
    assert 0 < near.size < 5_000_000
    for direction in (slice(0, 500), slice(499, 999)):
        assert (near[:, direction].sum(axis=1) == sizes[direction].sum()).all(), "every layer once"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_search_of_few_numbers_of_stages_loses_little(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep models are searched by samples; done so to a model that can be searched in full, it finds as good a cut."""
    chain = chain_of(8, 4, staleness=staleness, num_steps=4)
    one, units = BatchScorer(StageSums(deep(60)), speeds=[1.0] * 4, hop_s=0.01), list(range(61))
    effort = search.SearchEffort(cell_work=2e7, pattern_cells=50, local_work=1e7)
    whole = search.Search(one, units, chain, effort).run()[0]
    monkeypatch.setattr(search, "DENSE", 12)
    monkeypatch.setattr(search, "MOST_MOVED", 1500)
    assert search.Search(one, units, chain, effort).run()[0].value_s <= whole.value_s * 1.005


@pytest.mark.parametrize("name", ["looped_bfs", *swept(["interleaved_1f1b"])])
def test_a_deep_model_tries_fewer_numbers_of_stages(name: ScheduleName, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [LayerCost(f"block.{index}", 1.0, 2.2, True, param_bytes=100, boundary_bytes=5) for index in range(80)]
    layers = (LayerCost("embed", 0.0, 0.0, False), *blocks, LayerCost("head", 2.0, 4.0, False, param_bytes=300))
    costs = CostModel("deep", layers, hop_s=0.01, link_bytes_per_s=100.0)
    case = SimulationCase(costs, 4, 8, limits=StageLimits(10_000, 10_000, 10_000))
    tried: list[StageCut] = []

    def noted(asked: str, cut: StageCut, question: SimulationCase) -> float:
        tried.append(cut)
        return run_step_s(asked, cut, question)

    monkeypatch.setattr(choosing, "run_step_s", noted)
    quick = choose(name, case, effort="quick")
    few = len(tried)
    monkeypatch.setattr(choosing, "MAX_SEARCHED_LAYERS", 1000)
    tried.clear()
    thorough = choose(name, case, effort="quick")
    assert few < 0.6 * len(tried)
    assert run_step_s(name, quick, case) <= run_step_s(name, thorough, case) * 1.003


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


@pytest.mark.parametrize("seed", [*range(3), *swept(range(3, 8))])
def test_even_stages_hold_every_layer_once_and_are_no_slower(seed: int) -> None:
    draw = random.Random(seed)
    workers, blocks = draw.choice([1, 2, 3, 4, 8]), draw.randint(8, 40)
    costs = drawn(draw, blocks)
    limits = limits_for(costs, sum(layer.param_bytes for layer in costs.layers) * draw.randint(20, 60) // 100)
    case = SimulationCase(costs, workers, 4 * workers, limits=limits)
    plan = plan_partition(case, QUICK)
    step = make_schedule("roundpipe", StageCut(plan.forward_stages, plan.backward_stages), case)
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


def test_forward_stages_by_hand() -> None:
    """Two that stay together on a worker; one, where a slot holds all; four, where two would be larger than a slot."""
    costs = drawn(random.Random(0), 8)
    assert chosen(costs, [(0, 3), (4, 9)], [(4, 9), (0, 3)]) == ((0, 3), (4, 9))
    rows = build_forward([(0, 3), (4, 9)], num_workers=2, num_microbatches=3).actions
    assert [[action.microbatch for action in row] for row in rows] == [[0, 0, 2, 2], [1, 1]]
    assert chosen(costs, [(0, 2), (3, 5), (6, 9)], [(0, 9)]) == ((0, 9),)
    block = LayerCost("block", 1.0, 3.0, True, param_bytes=100)
    costs = CostModel("x", (LayerCost("embed", 0, 0, False), *[block] * 8, LayerCost("head", 0, 2.0, False)))
    stages = chosen(costs, [(0, 1), (2, 4), (5, 7), (8, 9)], [])
    assert len(stages) == 4 and all(sum(1 for at in range(a, b + 1) if 1 <= at <= 8) <= 3 for a, b in stages)


# --- DPO -------------------------------------------------------------------------------------------------------------
def planned(folder: Path, *words: str) -> Plan:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (folder / "recipe.yaml").write_text(RECIPE)
    return make_plan(load_recipe(folder / "recipe.yaml", [f"output_dir={folder / 'out'}", *words]), "2x4090")


def test_a_plan_for_pairs_counts_answers_and_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "MAX_SEARCHED_LAYERS", 0)  # any cut will do
    pairs = planned(tmp_path, "objective=dpo", "pipeline.weight_cache=0")
    usual = planned(tmp_path, "micro_batch_size=2", "pipeline.weight_cache=0")
    assert pairs.question.settings.tokens_per_microbatch == usual.question.settings.tokens_per_microbatch == 4096
    first, *others = [
        [part for part in plan.verdict.device.parts.items() if part[0] != HEAD_CHUNK] for plan in (pairs, usual)
    ]
    assert others == [first] and pairs.verdict.device.total_bytes > usual.verdict.device.total_bytes
    said = [line for line in plan_text(pairs, None) if "the base model's forward" in line]
    assert len(said) == 1 and "of a step" in said[0]
    assert not any("the base model's forward" in line for line in plan_text(usual, None))
    without = planned(tmp_path, "objective=simpo", "pipeline.weight_cache=0")
    assert (without.verdict.device, without.step_s) == (pairs.verdict.device, usual.step_s)
    forward_s = sum(layer.forward_s for layer in pairs.question.costs.layers) * 8 / 2
    assert forward_s <= pairs.step_s - usual.step_s <= 1.4 * forward_s
