"""`pipeline.head_workers: auto`: the head's microbatches on all workers where that makes a step faster."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from roundpipe_cli.cli.plan import verdict_lines
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.planning.adaptive import AdaptivePlanner, ProfileCache
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import SimulationCase, run
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.search.stages import StageLimits
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.builders import Options

WORKERS, MICROBATCHES = 4, 8
searched = functools.partial(choose, "roundpipe", effort="quick")  # as `plan` and a run search
SPREAD = Options(head_workers=WORKERS)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even cuts, as for deeper models: searches of other ones take seconds, and share as these do."""
    monkeypatch.setattr("roundpipe_cli.planning.choose.MAX_SEARCHED_LAYERS", 0)


def costs(*, head_s: float = 2.0, trained_head: bool = False, adapters: bool = True) -> CostModel:
    """8 equal blocks, of adapters by default, and a head as long as several of them."""
    block = LayerCost("block", 1.0, 1.0, True, boundary_bytes=10**6, grad_bytes=10**6 if adapters else 0)
    head = LayerCost("head", head_s, head_s, False, grad_bytes=10**9 if trained_head else 0)
    blocks = tuple(replace(block, name=f"block.{index}") for index in range(8))
    return CostModel("blocks", (LayerCost("embed", 0.0, 0.0, False, boundary_bytes=10**6), *blocks, head))


def head_workers(schedule: Schedule) -> int:
    """On how many workers the head's backwards of one round are, at most."""
    heads = [a for row in schedule.actions for a in row if a.kind is Kind.BACKWARD and a.stage == 0]
    workers: dict[int, set[int]] = {}
    for action in heads:
        workers.setdefault(action.microbatch // schedule.microbatches_per_round, set()).add(action.worker)
    return max(map(len, workers.values()))


TRAINED = replace(costs(head_s=4.0, trained_head=True), host_bytes_per_s=100e9)
ROOM_BYTES = WORKERS * 10**9  # of the host, for a head's gradients of all workers that wait to be added up


@pytest.mark.parametrize(
    "changes",
    [{"costs": costs()}, {"costs": TRAINED, "limits": StageLimits(waiting_bytes=ROOM_BYTES)}],
    ids=["frozen", "trained"],
)
def test_a_long_head_is_shared_by_all_where_it_is_asked_for(changes: dict[str, Any]) -> None:
    question = SimulationCase(**changes, num_workers=WORKERS, num_microbatches=MICROBATCHES, auto_head=True)
    alone = replace(question, auto_head=False)
    chosen, planned = searched(question), searched(alone)
    assert chosen.dealing == SPREAD and planned.dealing is None
    assert run("roundpipe", chosen, question).step_s < 0.99 * run("roundpipe", planned, alone).step_s


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"costs": costs(trained_head=True)}, id="trained, the host unknown"),
        pytest.param({"costs": TRAINED, "limits": StageLimits(waiting_bytes=ROOM_BYTES - 1)}, id="trained, no room"),
        pytest.param({"costs": costs(adapters=False)}, id="nothing is known of gradients"),
        pytest.param({"costs": costs(head_s=0.01)}, id="short"),
        pytest.param({"staleness": 1, "num_steps": 2}, id="staleness 1", marks=pytest.mark.sweep),
        pytest.param({"accounting": "published"}, id="published", marks=pytest.mark.sweep),
        pytest.param({"num_workers": 1}, id="one worker"),
    ],
)
def test_otherwise_one_worker_has_it(changes: dict[str, Any]) -> None:
    question = SimulationCase(costs(), WORKERS, MICROBATCHES, auto_head=True)
    assert searched(replace(question, **changes)).dealing is None


def planner(**pipeline: Any) -> AdaptivePlanner:
    cache = ProfileCache({"test": "head"})
    cache.save(costs())
    return AdaptivePlanner(costs(), WORKERS, PipelineConfig(**pipeline), cache)


def test_a_run_shares_it_out_unless_its_recipe_says_otherwise() -> None:
    assert head_workers(planner().schedule(MICROBATCHES)) == WORKERS
    assert head_workers(planner(head_workers=2).schedule(MICROBATCHES)) == 2
    assert head_workers(planner(head_workers=1).schedule(MICROBATCHES)) == 1
    assert head_workers(planner(sequence_chunks=16).schedule(1)) == WORKERS


def test_plan_says_so() -> None:
    words = ["gradient_accumulation_steps=16", "pipeline.weight_cache=0"]
    spread = make_plan(load_recipe("recipes/llama3.1-8b.yaml", words), "8x4090")
    alone = make_plan(load_recipe("recipes/llama3.1-8b.yaml", [*words, "pipeline.head_workers=1"]), "8x4090")
    assert SPREAD.why in spread.explanation and SPREAD.why not in alone.explanation
    assert spread.step_s < 0.99 * alone.step_s
    few, many = (make_plan(spread.question.loaded, machine) for machine in ("1x4090", "8x4090"))
    assert ["launches bind" in "\n".join(verdict_lines(plan)) for plan in (few, many)] == [False, True]


def with_links(*, trained: bool = False, host_bytes_per_s: float | None = 100e9, whole_bytes: int = 0) -> CostModel:
    """The blocks with weights that a link carries in a hundredth of a block's time, frozen but for adapters."""
    own = costs(head_s=0.25)
    layers = tuple(
        replace(layer, param_bytes=10**7, grad_bytes=2 * 10**7 if trained else 10**5, whole_bytes=whole_bytes)
        if layer.name.startswith("block")
        else layer
        for layer in own.layers
    )
    return replace(own, layers=layers, link_bytes_per_s=1e9, host_bytes_per_s=host_bytes_per_s, leaving_bytes=2)


def test_equal_workers_share_stages_of_frozen_blocks_where_it_is_faster() -> None:
    question = SimulationCase(with_links(), WORKERS, MICROBATCHES, auto_head=True)
    chosen = searched(question)
    assert chosen.dealing is not None and chosen.dealing.splits_stages
    in_turn = searched(replace(question, auto_dealing=False))
    chosen_s, in_turn_s = (run("roundpipe", cut, question).step_s for cut in (chosen, in_turn))
    assert chosen_s < 0.98 * in_turn_s
    assert chosen.dealing.why in chosen.explanation


OTHERWISE: dict[str, dict[str, Any]] = {
    **{"trained blocks": {"trained": True}, "the host's memory is unknown": {"host_bytes_per_s": None}},
    "the links would take most of it": {"host_bytes_per_s": 1e7},
    "each worker would unpack the weights, which a run's measured times do not show": {"whole_bytes": 10**6},
}


@pytest.mark.parametrize("why", OTHERWISE)
def test_otherwise_no_stage_is_shared(why: str) -> None:
    question = SimulationCase(with_links(**OTHERWISE[why]), WORKERS, MICROBATCHES, auto_head=True)
    chosen = searched(question)
    assert chosen.dealing is None or not chosen.dealing.splits_stages


def test_earliest_free_with_trained_blocks_is_slow_and_plan_warns() -> None:
    words = ["method=full", "gradient_accumulation_steps=32"]
    usual, dealt = (
        make_plan(load_recipe("recipes/qwen3-8b.yaml", [*words, *more]), "8x4090,host_memory_gib=512")
        for more in ([], ["pipeline.dispatch=earliest_free"])
    )
    assert usual.warning is None and dealt.warning is not None
    assert dealt.step_s > 1.2 * usual.step_s
