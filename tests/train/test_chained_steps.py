"""Steps that follow each other without a barrier, at staleness 1: the same bits, all workers busy, clean ends.

A worker takes up step k + 1 while others are at step k. Its weights are those after update k - 1, so nothing has to be
waited for but that update.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli import faults
from roundpipe_cli.costs.cost import CostModel, LayerCost, with_updates
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.errors import InternalError, StoppedError
from roundpipe_cli.events import Event, Paused, StepFinished
from roundpipe_cli.planning.adaptive import AdaptivePlanner, RunConditions
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import DatasetConfig, PipelineConfig, Recipe
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.builders import Rounds, StepChain, build_schedule
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import makespan_s
from roundpipe_cli.train.finetune import run_finetune as finetune_here
from roundpipe_cli.train.signals import Reporting, Start, StopSignals
from tests.support.e2e import finetune, launch, make_model, make_workspace, metrics, numbers
from tests.support.tiny import Rig, make_rig, random_microbatches, schedule_for

STALE = "pipeline.optimizer_staleness=1"
SIZES = [(1, 6), (2, 9), (1, 4), (2, 5), (1, 8)]
Ask = Callable[[str], None]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    def set_faults(text: str) -> None:
        monkeypatch.setenv(faults.ENVIRONMENT_VARIABLE, text)
        faults._rules_of = None

    yield set_faults
    monkeypatch.delenv(faults.ENVIRONMENT_VARIABLE, raising=False)
    faults._rules_of = None


def costs_of(num_blocks: int = 6, head_s: float = 2.0, **changes: Any) -> CostModel:
    blocks = [LayerCost(f"block.{index}", 1.0, 2.1, True) for index in range(num_blocks)]
    return replace(CostModel("m", (*blocks, LayerCost("head", head_s, 2 * head_s, False)), hop_s=0.05), **changes)


@pytest.mark.parametrize("num_microbatches", [4, 7])
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_a_chain_deals_as_chained_steps_do(num_workers: int, num_microbatches: int) -> None:
    """One schedule a step, or one for all of them: the same actions on the same workers."""
    costs, num_steps = costs_of(), 9
    stages = {"forward_stages": ((0, 1), (2, 3)), "backward_stages": ((4, 6), (2, 3), (0, 1))}

    def build(steps: int) -> Schedule:
        return build_schedule(
            "roundpipe",
            **stages,
            num_workers=num_workers,
            rounds=Rounds(num_microbatches, num_steps=steps, staleness=1),
            costs=costs,
        )

    whole, chain = build(num_steps), StepChain(build(1), costs)
    schedules = [chain.next() for _ in range(num_steps)]
    joined: list[list[tuple[Any, ...]]] = [[] for _ in range(num_workers)]
    for step, schedule in enumerate(schedules):
        for row, actions in zip(joined, schedule.actions, strict=True):
            row += [(x.kind, x.stage, x.microbatch + step * num_microbatches, x.worker) for x in actions]
    assert joined == [[(x.kind, x.stage, x.microbatch, x.worker) for x in row] for row in whole.actions]
    assert len({id(schedule) for schedule in schedules}) == len(set(schedules)) <= num_steps, "programs are made once"


def test_a_chain_comes_round() -> None:
    """Schedules come again, so that a long run lowers few of them, and work is shared out evenly over steps."""
    chain = StepChain(
        build_schedule(
            "roundpipe",
            forward_stages=((0, 2), (3, 3)),
            backward_stages=((4, 6), (2, 3), (0, 1)),
            num_workers=4,
            rounds=Rounds(4),
            costs=costs_of(),
        ),
        costs_of(),
    )
    schedules = [chain.next() for _ in range(400)]
    assert len({id(schedule) for schedule in schedules[200:]}) <= 64
    seconds = {Kind.FORWARD: (3.0, 1.0), Kind.RECOMPUTE: (0.0, 2.0, 2.0), Kind.BACKWARD: (15.3, 4.2, 4.2)}
    rows = [[x for schedule in schedules for x in schedule.actions[worker]] for worker in range(4)]
    work = [sum(seconds[x.kind][x.stage] for x in row) for row in rows]
    assert max(work) <= 1.05 * min(work), "no worker gets the long stages every time"


def in_turn(rig: Rig, engine: Engine, num_steps: int) -> list[Any]:
    """Step after step, each behind the one before."""
    microbatches = random_microbatches(SIZES)
    schedule = schedule_for(rig, engine.num_workers, len(SIZES))
    found = []
    for step in range(num_steps):
        result = engine.run_step(microbatches, schedule, step=step, version=0)
        found.append((result.loss.hex(), result.gradient_norm, [g.clone() for g in rig.store.gradients_of(step)]))
    return found


def overlapped(rig: Rig, engine: Engine, num_steps: int) -> tuple[list[Any], list[StepResult]]:
    """Each step given to the workers before the one before has ended."""
    microbatches = random_microbatches(SIZES)
    chain = StepChain(schedule_for(rig, engine.num_workers, len(SIZES)), equal(rig))
    found, results = [], []
    under_way = [engine.start_step(microbatches, chain.next(), step=0, version=0)]
    for step in range(num_steps):
        if step + 1 < num_steps:
            under_way.append(engine.start_step(microbatches, chain.next(), step=step + 1, version=0))
        result = engine.finish_step(under_way.pop(0))
        results.append(result)
        found.append((result.loss.hex(), result.gradient_norm, [g.clone() for g in rig.store.gradients_of(step)]))
    return found, results


def equal(rig: Rig) -> CostModel:
    return CostModel("equal", tuple(LayerCost(f"{index}", 1.0, 1.0, True) for index in range(rig.num_layers)))


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_overlapping_steps_change_no_bit(method: str, copy: bool, ask: Ask) -> None:
    rig = make_rig("gemma3_text" if copy else "llama", method, lora_dropout=0.1, staleness=1, num_hidden_layers=4)
    with rig.engine(1, copy=copy, seed=5) as engine:
        expected = in_turn(rig, engine, 4)
    ask("work:slow=0.01")
    with rig.engine(3, copy=copy, seed=5) as engine:
        found, results = overlapped(rig, engine, 4)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[:2] == theirs[:2]
        assert all(torch.equal(a, b) for a, b in zip(mine[2], theirs[2], strict=True))
    overlaps_s = []
    for before, after in pairwise(results):
        first_s = after.started_s + min(item.start_s for item in after.actions)
        overlaps_s.append(before.started_s + max(item.end_s for item in before.actions) - first_s)
        for worker in range(3):
            own = [x for x in after.actions if x.action.worker == worker]
            earlier = [x for x in before.actions if x.action.worker == worker]
            if own and earlier:
                begin_s = after.started_s + min(x.start_s for x in own)
                assert begin_s >= before.started_s + max(x.end_s for x in earlier) - 1e-3
    # Of three pairs, so that a busy machine may hold one step's workers up.
    assert max(overlaps_s) > 0, "no barrier: a worker was at the next step before the last one had ended this"


@pytest.mark.parametrize(("step", "copy"), [(0, False), (1, False), (0, True), (1, True)])
def test_a_failure_in_either_of_two_steps_is_one_error(step: int, copy: bool, ask: Ask) -> None:
    rig = make_rig("llama", "lora", staleness=1, num_hidden_layers=4)
    before = set(threading.enumerate())
    ask(f"work:slow=0.005,compute:raise:step={step}:nth=4")
    started_s = time.monotonic()
    with pytest.raises(InternalError) as caught, rig.engine(3, copy=copy) as engine:
        overlapped(rig, engine, 3)
    assert f"step {step}" in str(caught.value)
    assert time.monotonic() - started_s < 120.0, "far from the watchdog's ten minutes"
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]


def test_an_engine_left_with_steps_under_way_ends(ask: Ask) -> None:
    rig = make_rig("llama", "lora", staleness=1, num_hidden_layers=4)
    before = set(threading.enumerate())
    ask("work:slow=0.02")
    with rig.engine(2) as engine:
        schedule = schedule_for(rig, 2, len(SIZES))
        for step in range(2):
            engine.start_step(random_microbatches(SIZES), schedule, step=step, version=0)
        assert not engine.may_follow(schedule), "two steps at most"
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]


def test_who_chains() -> None:
    def chain(costs: CostModel, *, chained: bool = True, workers: int = 3, **pipeline: Any) -> StepChain | None:
        given = {"forward_stages": ((0, 2),), "backward_stages": ((3, 6), (0, 2))}
        planner = AdaptivePlanner(
            costs, workers, PipelineConfig(**{**given, **pipeline}), conditions=RunConditions(chained=chained)
        )
        return planner.chain(6)

    assert chain(costs_of()) is not None
    assert chain(costs_of(), chained=False) is None
    assert chain(costs_of(), workers=1) is None
    assert chain(costs_of(), dispatch="earliest_free") is None
    assert chain(costs_of(), head_workers=2) is None
    assert chain(costs_of(worker_speed=(1.0, 1.0, 0.5))) is None


def test_which_recipes_overlap_steps() -> None:
    base = Recipe(model="m", datasets=(DatasetConfig(path="rows.jsonl"),), method="full", output_dir="out")

    def overlaps(*, on_cpu: bool = False, pipeline: Mapping[str, Any] | None = None, **changes: Any) -> bool:
        section = PipelineConfig(**{"optimizer_staleness": 1, **(pipeline or {})})
        return replace(base, pipeline=section, **changes).overlaps_steps(on_cpu=on_cpu)

    assert overlaps() and overlaps(method="lora", on_cpu=True)
    assert overlaps(method="lora", pipeline={"weight_cache": 0}), "nothing stays on the GPUs"
    assert not overlaps(method="lora") and not overlaps(pipeline={"weight_cache": 10**9})
    assert not overlaps(pipeline={"optimizer_staleness": 0})
    assert not any(overlaps(**{key: value}) for key, value in (("dtype", "float16"), ("on_oom", "adapt")))
    assert not overlaps(objective="dpo", method="lora", on_cpu=True)
    for key, value in (
        *(("schedule", "gpipe"), ("dispatch", "earliest_free"), ("head_workers", 2)),
        ("sequence_chunks", 4),
    ):
        assert not overlaps(pipeline={key: value}), key


def test_stages_are_planned_for_steps_that_overlap() -> None:
    """Faster than with a barrier, from the first steps on and for ever; few long stages alone would need more steps."""
    blocks = [LayerCost(f"block.{index}", 0.041, 0.036, True, recompute_s=0.042) for index in range(24)]
    costs = CostModel("m", (LayerCost("embed", 0.0, 0.0, True), *blocks, LayerCost("head", 0.0, 0.032, False)))
    predicted = {}
    for chained in (False, True):
        planner = AdaptivePlanner(costs, 8, PipelineConfig(), conditions=RunConditions(chained=chained))
        planner.measured = True
        predicted[chained] = planner.predicted(16)
        assert (planner.chain(16) is not None) == chained
    assert predicted[False] is not None and predicted[True] is not None
    assert predicted[True]["step_s"] < 0.9 * predicted[False]["step_s"]
    assert predicted[True]["bubble_ratio"] < 0.06
    chain = planner.chain(16)
    assert chain is not None
    step = chain.first
    many = build_schedule(
        "roundpipe",
        forward_stages=step.forward_stages,
        backward_stages=step.backward_stages,
        num_workers=8,
        rounds=Rounds(16, per_round=step.microbatches_per_round, num_steps=40, staleness=1),
        costs=with_updates(costs),
    )
    taken_s = makespan_s(simulate(many, with_updates(costs), staleness=1))
    assert taken_s <= 1.06 * 40 * predicted[True]["step_s"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=4)


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    return make_workspace(tmp_path / "work", model, num_train_epochs=3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The results of a run on one worker that nothing disturbed."""
    folder = make_workspace(tmp_path_factory.mktemp("whole") / "work", model, num_train_epochs=3)
    finetune(folder, STALE, "pipeline.devices=[cpu]").expect(0)
    return folder / "out"


def test_a_run_saved_at_every_step_and_killed_goes_on_with_the_same_rows(folder: Path, whole: Path) -> None:
    """A checkpoint beside which the next step is already under way holds the position of the data behind its own."""
    words = (STALE, "save_steps=1", "pipeline.devices=[cpu,cpu,cpu]")
    died = finetune(folder, *words, environment={"ROUNDPIPE_FAULT": "work:slow=0.005,optimizer:kill:step=7"})
    assert died.code == -signal.SIGKILL
    finetune(folder, *words, "--resume").expect(0)
    assert numbers(folder / "out") == numbers(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.sweep)])
def test_a_stop_waits_for_the_step_under_way(folder: Path, whole: Path, number: signal.Signals) -> None:
    words = (STALE, "pipeline.devices=[cpu,cpu]")
    running = launch(folder, "finetune", "recipe.yaml", *words, environment={"ROUNDPIPE_FAULT": "work:slow=0.02"})
    running.wait_for_steps(6)
    running.kill(number)
    stopped = running.finish().expect(128 + number)
    rows = metrics(folder / "out")
    assert f"after step {rows[-1]['step']} of" in stopped.err and len(rows) < len(metrics(whole))
    finetune(folder, *words, "--resume").expect(0)
    assert numbers(folder / "out") == numbers(whole)


def test_a_stop_ends_a_pause_beside_a_step_under_way(folder: Path) -> None:
    """The next step has begun when the user pauses: a signal lets it end, and then stops."""
    signals, paused_at = StopSignals(), []

    def tell(event: Event) -> None:
        if isinstance(event, StepFinished) and event.step == 7:
            signals.paused = True
        if isinstance(event, Paused) and event.paused:
            paused_at.append(event.step)
            signals._requested = signal.SIGTERM

    words = [f"output_dir={folder / 'out'}", STALE, "pipeline.devices=[cpu,cpu]"]
    loaded = load_recipe(str(folder / "recipe.yaml"), words)
    with pytest.raises(StoppedError, match="after step 8 of"):
        finetune_here(loaded, Start(offline=True), Reporting(tell), signals)
    assert paused_at == [7] and len(metrics(folder / "out")) == 8


def test_a_loss_that_is_not_finite_stops_the_step_behind_it_too(folder: Path) -> None:
    fault = {"ROUNDPIPE_FAULT": "compute:nan:step=7:nth=2"}
    done = finetune(folder, STALE, "pipeline.devices=[cpu,cpu]", environment=fault).expect(4)
    assert "step 8" in done.err and len(metrics(folder / "out")) <= 8


def test_shares_and_times_of_overlapping_steps_add_up(folder: Path) -> None:
    words = (STALE, "pipeline.devices=[cpu,cpu,cpu]", "max_steps=16", "num_train_epochs=20")
    done = finetune(folder, *words, "--trace", environment={"ROUNDPIPE_FAULT": "work:slow=0.01"}).expect(0)
    events = json.loads((folder / "out" / "trace.json").read_text())["traceEvents"]
    for worker in range(3):
        spans = sorted((x["ts"], x["ts"] + x["dur"]) for x in events if x["ph"] == "X" and x["pid"] == worker + 1)
        assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(spans)), "a worker does one thing at a time"
    rows = metrics(folder / "out")[6:]
    assert all(0 <= row["bubble_ratio"] <= 1 and max(row["utilization"]) <= 1 for row in rows)
    for row in rows:
        assert row["bubble_ratio"] == pytest.approx(1 - sum(row["utilization"]) / 3, abs=0.02)
    assert "predicted" in done.err or "predicted" in done.out
