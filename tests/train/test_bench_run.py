"""`roundpipe bench RECIPE --run`: the schedules through the engine, for real."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import yaml

from roundpipe_cli.choices import SCHEDULES
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.bench_run import Measured, check_losses
from tests.support.e2e import make_workspace, run, tree


def test_every_schedule_is_carried_out_and_gives_the_same_loss(two_blocks: Path, tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "w", two_blocks, gradient_accumulation_steps=4)
    before = tree(folder)
    outcome = run(folder, "bench", "recipe.yaml", "--run", "--repetitions", "1", "--json").expect(0)
    assert tree(folder) == before, "bench writes nothing"
    document = json.loads(outcome.out)
    assert [row["schedule"] for row in document["results"]] == list(SCHEDULES)
    assert (document["workers"], document["microbatches"]) == (2, 4)
    assert len({row["loss"] for row in document["results"]}) == 1
    for row in document["results"]:
        assert row["measured_makespan_s"] > 0 and row["makespan_s"] > 0 and row["tokens_per_s"] > 0
        assert 0 <= row["measured_bubble_ratio"] < 1 and row["device_peak_bytes"] > 10_000
    keep = document["keep"]["pipeline"]
    fastest = max(document["results"], key=lambda row: row["tokens_per_s"])
    assert keep["schedule"] == fastest["schedule"] and keep.get("forward_stages", []) == fastest["forward_stages"]


def test_the_lines_to_keep_are_a_recipe_s(two_blocks: Path, tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "w", two_blocks)
    outcome = run(folder, "bench", "recipe.yaml", "--run", "--repetitions", "1", "--schedule", "roundpipe").expect(0)
    table, _, lines = outcome.out.partition("To keep it:")
    assert "roundpipe" in table and "tokens/s" in table
    kept = yaml.safe_load(lines)["pipeline"]
    overrides = [f"pipeline.{key}={json.dumps(value)}" for key, value in kept.items()]
    assert load_recipe(folder / "recipe.yaml", overrides).recipe.pipeline.schedule == "roundpipe"


def test_different_losses_are_an_error() -> None:
    first, near, far = (cast(Measured, SimpleNamespace(name="schedule", loss=loss)) for loss in (1, 1 + 1e-6, 1 + 1e-5))
    check_losses([first, near], 1.1e-6)
    with pytest.raises(Exception, match="different losses"):
        check_losses([first, near, far], 1.1e-6)
