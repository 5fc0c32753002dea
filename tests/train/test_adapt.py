"""A device that is too small, and steps whose numbers are not finite: the run adapts, skips, or stops unspoilt."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from roundpipe_cli.data.batching import Grouping
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.errors import NotFiniteError
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train import step_runner
from roundpipe_cli.train.adapt import Fit, resumed_fit
from roundpipe_cli.train.auto_cache import AutoCache
from roundpipe_cli.train.finite import GROWTH_STEPS, FiniteGuard
from roundpipe_cli.train.step_runner import longest_batches
from tests.support.e2e import STAGES_OF_TWO, Outcome, finetune, launch, make_workspace, metrics, numbers

OUT_OF_MEMORY = "compute:raise=MemoryError:step=2:nth=1"
COMMON: dict[str, Any] = {
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "lora__dropout": 0.0,
    **STAGES_OF_TWO,
}


@pytest.fixture
def folder(tmp_path: Path, two_blocks: Path) -> Path:
    return make_workspace(tmp_path / "work", two_blocks, **COMMON)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, two_blocks: Path) -> Path:
    """An uninterrupted run: 10 rows in steps of 4, two epochs, 6 steps."""
    folder = make_workspace(tmp_path_factory.mktemp("whole") / "work", two_blocks, **COMMON)
    finetune(folder, environment={"ROUNDPIPE_ROW_LOG": "rows.log"}).expect(0)
    return folder


def test_by_recomputing_layer_by_layer_then_by_dividing_the_microbatches(folder: Path, whole: Path) -> None:
    """Three times too much: no bit changes at first, then 4 rows become 2, then 1; rows, loss and curve stay."""
    faults = f"{OUT_OF_MEMORY},compute:raise=MemoryError:step=3:nth=1,compute:raise=MemoryError:step=4:nth=2"
    done = finetune(folder, "on_oom=adapt", fault=faults).expect(0)
    assert "step 3: out of memory on a worker" in done.err and "write pipeline.recompute: layer" in done.err
    assert re.search(r"note: step 3: [^:]*microbatch 0, step 3, layer", done.err), "one number for a step"
    assert "write micro_batch_size: 2, gradient_accumulation_steps: 2" in done.err
    assert "write micro_batch_size: 1, gradient_accumulation_steps: 4" in done.err
    rows, expected = metrics(folder / "out"), metrics(whole / "out")
    segment = {"micro_batch_size": 4, "recompute": "layer", "first_step": 3, "sequence_chunks": 1}
    assert rows[2]["segment"] == segment
    assert [row["segment"]["micro_batch_size"] for row in rows if "segment" in row] == [4, 2, 1]
    assert [row["loss_hex"] for row in rows[:3]] == [row["loss_hex"] for row in expected[:3]]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-5)
    state = json.loads((folder / "out" / "step-00000004" / "state.json").read_text())["meta"]
    assert state["fit"] == {**segment, "micro_batch_size": 2, "first_step": 4}
    report = json.loads((folder / "out" / "report.json").read_text())
    assert report["fit"]["recompute"] == "layer" and report["skipped_steps"] == 0

    # The lines that the run said to write are no change of the run.
    (folder / "out" / "report.json").unlink()
    shutil.rmtree(folder / "out" / "step-00000006")
    resume = ("--resume", "pipeline.recompute=layer")
    other = ("micro_batch_size=1", "gradient_accumulation_steps=4")
    assert "micro_batch_size: changed" in finetune(folder, *resume, *other).expect(2).err
    finetune(folder, *resume, "micro_batch_size=2", "gradient_accumulation_steps=2").expect(0)
    assert len(metrics(folder / "out")) == 6


def say_when_attending_in_rows() -> None:
    """In a run's process."""
    really = Engine.attend_in_rows

    def and_say(engine: Engine) -> None:
        print("without masks", flush=True)
        really(engine)

    Engine.attend_in_rows = and_say  # type: ignore[method-assign]


def test_single_rows_go_on_in_chunks(folder: Path, whole: Path) -> None:
    """Twice as many each time; rows, steps and losses stay, and a run resumes so, or with the lines that it names."""
    faults = ",".join(f"compute:raise=MemoryError:step={step}:nth={nth}" for step, nth in ((1, 1), (1, 2), (3, 3)))
    words = ("on_oom=adapt", "micro_batch_size=1", "gradient_accumulation_steps=4", "save_steps=1")
    held = finetune(folder, *words, "max_steps=2", "output_dir=held", fault=faults).expect(5)
    assert "step 2: rows cannot go on in chunks: " in held.err and "the stage with the head" in held.err
    words += ("pipeline.forward_stages=auto", "pipeline.backward_stages=auto")
    done = finetune(folder, *words, fault=faults).expect(0)
    lines = "write micro_batch_size: 1, gradient_accumulation_steps: 4, pipeline.sequence_chunks: {}"
    assert "in chunks, sums differ in their last bits" in done.err and lines.format(2) in done.err
    assert "step 4: out of memory" in done.err and lines.format(4) in done.err
    (folder / "out" / "report.json").unlink()
    shutil.rmtree(folder / "out" / "step-00000006")
    command = ("finetune", "recipe.yaml", "--no-dashboard", *words, "--resume")
    resumed = launch(folder, *command, before=say_when_attending_in_rows).finish().expect(0)
    assert "computed again" not in resumed.err and "without masks" in resumed.out
    rows, expected = metrics(folder / "out"), metrics(whole / "out")
    assert [row["segment"]["sequence_chunks"] for row in rows if "segment" in row] == [2, 4]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-5)
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected] and len(rows) == 6
    finetune(folder, *words, "num_train_epochs=3", "--resume", "pipeline.sequence_chunks=4").expect(0)


def test_nothing_left_to_adapt_and_no_wish_to(folder: Path) -> None:
    for words in ([], ["on_oom=adapt", "micro_batch_size=1"]):
        done = finetune(folder, *words, fault="compute:raise=MemoryError:step=1")
        assert "out of memory on a worker" in done.expect(5).err and "micro_batch_size" in done.err
        assert "on_oom=adapt" in done.err
        assert ("computed again" in done.err) == bool(words)


def pretend_a_cache() -> None:
    """In a run's process: a weight cache that was granted, where no device has memory of its own."""
    made = step_runner.make_auto_cache

    def with_cache(*arguments: Any) -> AutoCache:
        cache = made(*arguments)
        cache.num_bytes = 1
        return cache

    step_runner.make_auto_cache = with_cache


def test_what_was_kept_of_our_own_accord_goes_first(folder: Path, whole: Path) -> None:
    """A weight cache that the recipe did not ask for must not end a run that would have fitted without."""

    def run_with_cache(faults: str, *words: str) -> Outcome:
        command, environment = ("finetune", "recipe.yaml", *words), {"ROUNDPIPE_FAULT": faults}
        return launch(folder, *command, environment=environment, before=pretend_a_cache).finish()

    again = f"{OUT_OF_MEMORY},compute:raise=MemoryError:step=4:nth=1"
    done = run_with_cache(again).expect(5)
    assert "step 3: out of memory on a worker" in done.err and "again without the weight cache" in done.err
    rows = metrics(folder / "out")
    assert [row["loss_hex"] for row in rows] == [row["loss_hex"] for row in metrics(whole / "out")[:4]]
    assert not any("segment" in row for row in rows)
    twice = f"{OUT_OF_MEMORY},compute:raise=MemoryError:step=2:nth=2"
    adapted = run_with_cache(twice, "output_dir=adapted", "on_oom=adapt", "max_steps=3").expect(0)
    assert "again without the weight cache" in adapted.err and "write pipeline.recompute: layer" in adapted.err
    early = run_with_cache(OUT_OF_MEMORY, "output_dir=early", "max_grad_norm=0")
    assert early.code == 5, "layers whose gradient was complete have been updated: the step cannot be run again"


def test_what_fits_is_exact_and_divides(folder: Path) -> None:
    for size in range(1, 13):
        words = [f"micro_batch_size={size}", "gradient_accumulation_steps=3"]
        recipe = load_recipe(str(folder / "recipe.yaml"), words).recipe
        fit, seen = Fit.of(recipe), []
        while (smaller := fit.smaller(step=5)) is not None:
            fit = smaller
            lines = fit.recipe_lines(recipe)
            assert lines["pipeline.recompute"] == "layer" and fit.first_step == 5
            steps = int(lines.get("gradient_accumulation_steps", 3))
            assert fit.micro_batch_size * steps == size * 3
            divided = fit.divide([[[row] for row in range(size)], [[row] for row in range(size - 1)]])
            rows = [[row] for count in (size, size - 1) for row in range(count)]
            assert [row for batch in divided for row in batch] == rows
            assert max(len(batch) for batch in divided) == fit.micro_batch_size
            assert resumed_fit(fit.to_json(recipe), recipe) == fit
            seen.append(fit.micro_batch_size)
        assert seen[-1] == 1 and seen == sorted(seen, reverse=True)


# --- numbers that are not finite --------------------------------------------------------------------------------------


def test_skipped_steps_change_no_weight_and_are_counted(folder: Path, whole: Path) -> None:
    fault = "compute:nan:step=1,optimizer:inf:step=2"
    done = finetune(folder, "on_nonfinite=skip", "max_steps=4", fault=fault).expect(0)
    assert "step 2: the loss is not finite (loss nan" in done.err and "rows.jsonl:" in done.err
    assert "step 3: the gradient is not finite" in done.err and "2 skipped so far" in done.err
    rows = metrics(folder / "out")
    assert [row.get("skipped") for row in rows] == [None, True, True, None]
    assert rows[1]["loss"] is None and rows[1]["loss_hex"] == "nan" and math.isfinite(rows[2]["loss"])
    assert json.loads((folder / "out" / "report.json").read_text())["skipped_steps"] == 2
    state = json.loads((folder / "out" / "step-00000004" / "state.json").read_text())["meta"]
    assert state["num_updates"] == 2 and state["skipped_steps"] == 2
    assert rows[0]["loss"] == metrics(whole / "out")[0]["loss"]


def test_a_loss_scale_is_halved_down_to_1_alone(folder: Path) -> None:
    """Below 1 it is not the cause: the run left steps out for ever. `GROWTH_STEPS` updates in a row double it."""
    overflow: Any = SimpleNamespace(loss=1.0, gradient_norm=math.inf)
    dataset: Any = None
    recipe = load_recipe(str(folder / "recipe.yaml"), ["dtype=float16"]).recipe
    guard, other = FiniteGuard(recipe, dataset), FiniteGuard(replace(recipe, dtype="bfloat16"), dataset)
    guard.loss_scale = 4.0
    for expected in (2.0, 1.0):
        guard.skip(1, [], overflow, lambda event: None)
        assert (guard.loss_scale, guard.num_updates) == (expected, 0)
    other.loss_scale = 4.0  # of a checkpoint in float16
    with pytest.raises(NotFiniteError):
        other.skip(1, [], overflow, lambda event: None)
    other.loss_scale = 1.0
    for one in (guard, other):
        with pytest.raises(NotFiniteError):
            one.skip(1, [], overflow, lambda event: None)
        for _ in range(GROWTH_STEPS - 1):
            one.updated()
        assert one.loss_scale == 1.0
        one.updated()
    assert (guard.loss_scale, other.loss_scale) == (2.0, 1.0)


def test_ten_bad_steps_in_a_row_stop_the_run(folder: Path) -> None:
    words = ["on_nonfinite=skip", "num_train_epochs=5"]
    done = finetune(folder, *words, fault="optimizer:nan").expect(4)
    assert "stopped before the update" in done.err and len(metrics(folder / "out")) == 9


FAULTS = (
    "optimizer:nan:step=3",
    "compute:inf:step=3:nth=1",  # a forward
    "compute:nan:step=3:nth=3",  # the first backward
)


def test_not_finite_stops_before_the_update(folder: Path, whole: Path) -> None:
    """Each time that the step is tried again, with other stages, and then it goes on to the same bits."""
    out, words = (
        folder / "out",
        ["pipeline.forward_stages=[[0,0],[1,1]]", "pipeline.backward_stages=[[2,3],[1,1],[0,0]]"],
    )
    rows = json.loads((whole / "rows.log").read_text().splitlines()[3])["rows"]
    for fault in FAULTS:
        done = finetune(folder, *words, fault=fault).expect(4)
        assert "error: step 4: the" in done.err and "is not finite: stopped before the update" in done.err, fault
        assert "--resume --allow-changed learning_rate" in done.err, "without it the lower one is refused"
        found = sorted(int(line) for line in re.findall(r"rows\.jsonl:(\d+)", done.err))
        assert found == sorted(row + 1 for row in rows) and len(rows) == 4, "those of step 4"
        assert "--resume" in done.err and numbers(out) == numbers(whole / "out")[:3]
        assert sorted(path.name for path in out.glob("step-*")) == ["step-00000002"]
        words = [*words[:2], "--resume"]
    for name in ("masters", "moments"):
        state = load_file(out / "step-00000002" / f"{name}.safetensors")
        assert state and all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
    assert "resuming after step 2" in finetune(folder, "--resume").expect(0).err
    assert numbers(out) == numbers(whole / "out")


def test_float16_overflow_skips_and_halves_the_scale(folder: Path) -> None:
    """A head so steep that the scaled gradient leaves float16: halved until it fits, and the loss falls."""
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] *= 10
    save_file(weights, path, metadata={"format": "pt"})
    done = finetune(folder, "dtype=float16", "optimizer=sgd").expect(0)
    skipped = done.err.count("gradient overflow, update skipped")
    rows = metrics(folder / "out")
    assert 0 < skipped < 4 and sum(row["grad_norm"] is None for row in rows) == skipped
    state = json.loads((folder / "out" / "step-00000006" / "state.json").read_text())["meta"]
    assert state["loss_scale"] == 2.0 ** (16 - skipped) and state["num_updates"] == 6 - skipped
    assert rows[-1]["loss"] < rows[0]["loss"]


# --- a step of the longest rows before the first one -----------------------------------------------------------------

FIRST = "compute:raise=MemoryError:step=0:nth=1"


def test_the_longest_rows_come_first() -> None:
    lengths = np.array([3, 9, 5, 9, 1, 7], dtype=np.int64)
    assert longest_batches(Grouping(lengths, 2), 4) == [[(1,), (3,)], [(5,), (2,)]]
    assert longest_batches(Grouping(lengths, 4), 8) == [[(1,), (3,), (5,), (2,)], [(0,), (4,)]]
    assert longest_batches(Grouping(lengths, 4), 4) == [[(1,), (3,), (5,), (2,)]]


@pytest.mark.parametrize(
    "words",
    [("max_grad_norm=0",), ("method=full", "neftune_noise_alpha=5", "pipeline.schedule=gpipe", "dtype=float16")],
    ids=["early", "full"],
)
def test_a_run_is_the_same_to_the_bit(tmp_path: Path, two_blocks: Path, words: tuple[str, ...]) -> None:
    """Dropout is on, and a layer is updated early where nothing needs the norm."""
    folder = make_workspace(tmp_path / "work", two_blocks, max_steps=2)
    plain = finetune(folder, *words, "output_dir=plain").expect(0)
    done = finetune(folder, *words, "check_longest_rows=true").expect(0)
    assert "longest rows" not in plain.err
    assert "the longest rows (48 tokens) fit" in done.err
    assert numbers(folder / "out") == numbers(folder / "plain")
    tensors = [(folder / name / "adapter_model.safetensors") for name in ("out", "plain")]
    if tensors[0].exists():
        assert tensors[0].read_bytes() == tensors[1].read_bytes()


def test_a_lack_of_memory_ends_the_run_before_its_first_step_or_adapts_it(tmp_path: Path, two_blocks: Path) -> None:
    folder = make_workspace(tmp_path / "work", two_blocks, check_longest_rows=True, **STAGES_OF_TWO)
    done = finetune(folder, fault=FIRST).expect(5)
    assert "computing a step of the longest rows" in done.err and "out of memory" in done.err
    assert "fit: a step" not in done.err and metrics(folder / "out") == []
    done = finetune(folder, "on_oom=adapt", "max_steps=1", fault=FIRST).expect(0)
    assert "write pipeline.recompute: layer" in done.err and "fit: a step" in done.err
    segment = {"micro_batch_size": 2, "recompute": "layer", "first_step": 1, "sequence_chunks": 1}
    assert metrics(folder / "out")[0]["segment"] == segment
