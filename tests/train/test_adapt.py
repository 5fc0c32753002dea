"""`on_oom: adapt` and `on_nonfinite: skip`: what a run does about a device that is too small, and about bad steps."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli import faults
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train import loop
from roundpipe_cli.train.adapt import GROWTH_STEPS, Fit, LossScale, resumed_fit
from roundpipe_cli.train.auto_cache import AutoCache
from tests.support.e2e import Outcome, finetune, launch, make_model, make_workspace, metrics, numbers

OUT_OF_MEMORY = "compute:raise=MemoryError:step=2:nth=1"
COMMON = {"num_train_epochs": 2, "micro_batch_size": 4, "gradient_accumulation_steps": 1, "lora__dropout": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=2)


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    return make_workspace(tmp_path / "work", model, **COMMON)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """An uninterrupted run: 10 rows in steps of 4, two epochs, 6 steps."""
    folder = make_workspace(tmp_path_factory.mktemp("whole") / "work", model, **COMMON)
    finetune(folder).expect(0)
    return folder


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    yield
    faults._rules_of = None


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder / "out")]


def test_first_by_recomputing_layer_by_layer_without_changing_a_bit(folder: Path, whole: Path) -> None:
    done = finetune(folder, "on_oom=adapt", environment={"ROUNDPIPE_FAULT": OUT_OF_MEMORY}).expect(0)
    assert "step 3: out of memory on a worker" in done.err and "write pipeline.recompute: layer" in done.err
    assert re.search(r"note: step 3: [^:]*microbatch 0, step 3, layer", done.err), "one number for a step"
    rows = metrics(folder / "out")
    assert rows[2].pop("segment") == {"micro_batch_size": 4, "recompute": "layer", "first_step": 3}
    assert not any("segment" in row for row in rows)
    assert [row["loss_hex"] for row in rows] == [row["loss_hex"] for row in metrics(whole / "out")]
    report = json.loads((folder / "out" / "report.json").read_text())
    assert report["fit"]["recompute"] == "layer" and report["skipped_steps"] == 0


def test_then_by_dividing_the_microbatches(folder: Path, whole: Path) -> None:
    """Twice too much: 4 rows become 2, then 1; rows, loss and curve stay, and the run resumes as it was."""
    expected = [row["loss"] for row in metrics(whole / "out")]
    twice = {"ROUNDPIPE_FAULT": f"{OUT_OF_MEMORY},compute:raise=MemoryError:step=4:nth=2"}
    adapt = ["on_oom=adapt", "pipeline.recompute=layer"]
    done = finetune(folder, *adapt, environment=twice).expect(0)
    assert "write micro_batch_size: 2, gradient_accumulation_steps: 2" in done.err
    assert "write micro_batch_size: 1, gradient_accumulation_steps: 4" in done.err
    rows = metrics(folder / "out")
    assert [row["segment"]["micro_batch_size"] for row in rows if "segment" in row] == [2, 1]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-5)
    state = json.loads((folder / "out" / "step-00000004" / "state.json").read_text())["meta"]
    assert state["fit"] == {"micro_batch_size": 2, "recompute": "layer", "first_step": 3}

    again = {"ROUNDPIPE_FAULT": f"{twice['ROUNDPIPE_FAULT']},optimizer:kill:step=5"}
    assert finetune(folder, *adapt, "output_dir=killed", "save_steps=1", environment=again).code == -9
    shutil.copytree(folder / "killed", folder / "advised")
    later = {"ROUNDPIPE_FAULT": "compute:raise=MemoryError:step=4:nth=2"}
    finetune(folder, *adapt, "output_dir=killed", "--resume", environment=later).expect(0)
    assert numbers(folder / "killed") == numbers(folder / "out")

    # The line that the run said to write is no change of the run.
    resume = ("--resume", "output_dir=advised")
    other = ("micro_batch_size=2", "gradient_accumulation_steps=2")
    assert "micro_batch_size: changed" in finetune(folder, *resume, *other).expect(2).err
    finetune(folder, *resume, "micro_batch_size=1", "gradient_accumulation_steps=4").expect(0)
    assert len(metrics(folder / "advised")) == 6


def test_nothing_left_to_adapt_and_no_wish_to(folder: Path) -> None:
    for words in ([], ["on_oom=adapt", "micro_batch_size=1"]):
        done = finetune(folder, *words, environment={"ROUNDPIPE_FAULT": "compute:raise=MemoryError:step=1"})
        assert "out of memory on a worker" in done.expect(5).err and "on_oom=adapt" in done.err
        assert ("computing it again" in done.err) == bool(words)


def pretend_a_cache() -> None:
    """In a run's process: a weight cache that was granted, where no device has memory of its own."""
    made = loop.make_auto_cache

    def with_cache(*arguments: Any) -> AutoCache:
        cache = made(*arguments)
        cache.num_bytes = 1
        return cache

    loop.make_auto_cache = with_cache


def test_what_was_kept_of_our_own_accord_goes_first(folder: Path, whole: Path) -> None:
    """A weight cache that the recipe did not ask for must not end a run that would have fitted without."""

    def run_with_cache(faults: str, *words: str) -> Outcome:
        environment = {"ROUNDPIPE_FAULT": faults}
        return launch(
            folder, "finetune", "recipe.yaml", *words, environment=environment, before=pretend_a_cache
        ).finish()

    done = run_with_cache(OUT_OF_MEMORY).expect(0)
    assert "step 3: out of memory on a worker" in done.err and "again without the weight cache" in done.err
    assert [row["loss_hex"] for row in metrics(folder / "out")] == [row["loss_hex"] for row in metrics(whole / "out")]
    assert not any("segment" in row for row in metrics(folder / "out"))
    twice = f"{OUT_OF_MEMORY},compute:raise=MemoryError:step=2:nth=2"
    assert run_with_cache(twice, "output_dir=twice").code == 5
    adapted = run_with_cache(twice, "output_dir=adapted", "on_oom=adapt").expect(0)
    assert "again without the weight cache" in adapted.err and "write pipeline.recompute: layer" in adapted.err
    early = run_with_cache(OUT_OF_MEMORY, "output_dir=early", "max_grad_norm=0")
    assert early.code == 5, "layers whose gradient was complete have been updated: the step cannot be run again"


def test_what_fits_is_exact_and_divides(folder: Path) -> None:
    for size in range(1, 13):
        recipe = load_recipe(
            str(folder / "recipe.yaml"), [f"micro_batch_size={size}", "gradient_accumulation_steps=3"]
        ).recipe
        fit, seen = Fit.of(recipe), []
        while (smaller := fit.smaller(step=5)) is not None:
            fit = smaller
            lines = fit.recipe_lines(recipe)
            assert lines["pipeline.recompute"] == "layer" and fit.first_step == 5
            steps = int(lines.get("gradient_accumulation_steps", 3))
            assert fit.micro_batch_size * steps == size * 3
            divided = fit.divide([[[row] for row in range(size)], [[row] for row in range(size - 1)]])
            assert [row for batch in divided for row in batch] == [
                [row] for rows in (size, size - 1) for row in range(rows)
            ]
            assert max(len(batch) for batch in divided) == fit.micro_batch_size
            assert resumed_fit(fit.to_json(recipe), recipe) == fit
            seen.append(fit.micro_batch_size)
        assert seen[-1] == 1 and seen == sorted(seen, reverse=True)


# --- numbers that are not finite --------------------------------------------------------------------------------------


def test_skipped_steps_change_no_weight_and_are_counted(folder: Path, whole: Path) -> None:
    skip = ["on_nonfinite=skip"]
    fault = "compute:nan:step=2,optimizer:inf:step=4"
    done = finetune(folder, *skip, environment={"ROUNDPIPE_FAULT": fault}).expect(0)
    assert "step 3: the loss is not finite (loss nan" in done.err and "rows.jsonl:" in done.err
    assert "step 5: the gradient is not finite" in done.err and "2 skipped so far" in done.err
    rows = metrics(folder / "out")
    assert [row.get("skipped") for row in rows] == [None, None, True, None, True, None]
    assert rows[2]["loss"] is None and rows[2]["loss_hex"] == "nan" and math.isfinite(rows[4]["loss"])
    assert json.loads((folder / "out" / "report.json").read_text())["skipped_steps"] == 2
    state = json.loads((folder / "out" / "step-00000006" / "state.json").read_text())["meta"]
    assert state["num_updates"] == 4 and state["skipped_steps"] == 2
    assert losses(folder)[:2] == losses(whole)[:2]

    killed = {"ROUNDPIPE_FAULT": f"{fault},optimizer:kill:step=5"}
    assert finetune(folder, *skip, "output_dir=killed", "save_steps=1", environment=killed).code == -9
    finetune(
        folder, *skip, "output_dir=killed", "--resume", environment={"ROUNDPIPE_FAULT": "optimizer:inf:step=4"}
    ).expect(0)
    assert numbers(folder / "killed") == numbers(folder / "out")


def test_a_loss_scale_is_halved_down_to_1_alone() -> None:
    """Below 1 the scale is not the cause: the run left steps out for ever. It is doubled after `GROWTH_STEPS` updates
    in a row."""
    scale, others = LossScale(4.0, grows=True), LossScale.of("bfloat16")
    for expected in (2.0, 1.0):
        assert scale.may_be_too_large
        scale.overflowed()
        assert (scale.value, scale.num_updates) == (expected, 0)
    assert not scale.may_be_too_large and not others.may_be_too_large
    for one in (scale, others):
        for _ in range(GROWTH_STEPS - 1):
            one.updated()
        assert one.value == 1.0
        one.updated()
    assert (scale.value, others.value) == (2.0, 1.0)


def test_ten_bad_steps_in_a_row_stop_the_run(folder: Path) -> None:
    words = ["on_nonfinite=skip", "num_train_epochs=5"]
    done = finetune(folder, *words, environment={"ROUNDPIPE_FAULT": "optimizer:nan"}).expect(4)
    assert "stopped before the update" in done.err and len(metrics(folder / "out")) == 9
