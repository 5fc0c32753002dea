"""Layer times are measured once per machine and model, and again when they turn out wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from roundpipe_cli.cache import MAX_BYTES, unsealed
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.planning import adaptive
from roundpipe_cli.planning.adaptive import PROFILE_STEPS, AdaptivePlanner, ProfileCache
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.schedule.simulate import simulate
from tests.support.e2e import finetune, make_model, make_workspace

WORKERS, MICROBATCHES, BLOCKS = 2, 4, 6


def costs(block_s: float) -> CostModel:
    blocks = [
        LayerCost(f"block.{i}", block_s, 2 * block_s, True, boundary_bytes=64, recompute_s=block_s)
        for i in range(BLOCKS)
    ]
    embed, head = LayerCost("embed", 0, 0, False, boundary_bytes=64), LayerCost("head", 0, 3 * block_s, False)
    return CostModel("layers", (embed, *blocks, head), link_bytes_per_s=1e15)


def planner(cache: ProfileCache) -> AdaptivePlanner:
    return AdaptivePlanner(costs(1.0), WORKERS, PipelineConfig(), cache)


def step(chosen: AdaptivePlanner, machine: CostModel) -> int:
    """One step as this machine would time it; returns how many forward stages it had."""
    schedule = chosen.schedule(MICROBATCHES)
    timeline = simulate(schedule, machine)
    computed = tuple(interval for interval in timeline.intervals if interval.lane == "compute")
    chosen.observe(replace(timeline, intervals=computed))
    return len(schedule.forward_stages)


def test_the_second_run_plans_at_once_and_keeps_what_is_true() -> None:
    cache, machine = ProfileCache({"model": "a"}), costs(0.01)
    unequal = replace(machine, worker_speed=(1.0, 0.5))
    cache.save(unequal)
    loaded = cache.load(costs(1.0))
    assert loaded is not None and replace(loaded, name="") == replace(unequal, name="")
    cache.path.unlink()
    first = planner(cache)
    stages = [step(first, machine) for _ in range(PROFILE_STEPS + 1)]
    assert stages[:PROFILE_STEPS] == [BLOCKS] * PROFILE_STEPS and stages[-1] < BLOCKS
    second = planner(ProfileCache({"model": "a"}))
    assert second.measured and [step(second, machine) for _ in range(6)] == [stages[-1]] * 6
    backward_s = [layer.backward_s for layer in machine.layers]
    assert [layer.backward_s for layer in second.costs.layers] == pytest.approx(backward_s)
    assert not planner(ProfileCache({"model": "b"})).measured


def test_times_that_are_wrong_are_measured_again() -> None:
    cache = ProfileCache({"model": "a"})
    cache.save(costs(0.01))
    run, slow = planner(ProfileCache({"model": "a"})), costs(0.1)
    stages = [step(run, slow) for _ in range(2 * PROFILE_STEPS + 3)]
    assert BLOCKS in stages and stages[-1] < BLOCKS  # doubted, measured, planned anew
    assert unsealed(cache.path, MAX_BYTES)["layers"][1][0] == pytest.approx(0.1)


@pytest.mark.parametrize("text", ["", "{", '{"layers": 3}', "[" * 100_000, "0.02", "NaN"], ids=lambda text: text[:30])
def test_a_damaged_file_counts_as_none_and_is_named(text: str) -> None:
    """A NaN among the times was a bug of the planner."""
    cache = ProfileCache({"model": "a"})
    cache.save(costs(0.01))
    whole = cache.path.read_text()
    cache.path.write_text(whole.replace("0.01", text) if text in ("0.02", "NaN") else text)
    assert cache.load(costs(1.0)) is None and not planner(cache).measured
    assert str(cache.path) in str(cache.damage) and planner(cache).notice == cache.damage


def test_a_cache_that_cannot_be_written_is_no_error(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_cache / "file").write_text("")
    monkeypatch.delenv("ROUNDPIPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache / "file"))
    ProfileCache({"model": "a"}).save(costs(1.0))


def test_a_run_leaves_its_times(tmp_path: Path, own_cache: Path) -> None:
    folder = make_workspace(tmp_path / "w", make_model(tmp_path / "model", num_hidden_layers=2), num_train_epochs=1)
    finetune(folder).expect(0)
    (kept,) = (own_cache / "profiles").iterdir()
    rows = unsealed(kept, MAX_BYTES)["layers"]
    assert all(backward > 0 for _, _, backward in rows[2:])


def test_stages_are_looked_for_a_few_numbers_of_microbatches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "MAX_SEARCHES", 2)
    chosen, machine = planner(ProfileCache({"model": "many"})), costs(0.01)
    while not chosen.is_settled:
        step(chosen, machine)
    schedules = {count: chosen.schedule(count) for count in range(2, 9)}
    assert all(schedule.num_microbatches == count for count, schedule in schedules.items())
    stages = {count: (made.forward_stages, made.backward_stages) for count, made in schedules.items()}
    assert all(stages[count] == stages[3] for count in range(4, 9))
