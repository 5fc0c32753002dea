"""How a step's rows are put into microbatches, and how long they may be: the loss is that of the rows one by one."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundpipe_cli.cli.plan import plan_with_remedies
from roundpipe_cli.costs import machine
from roundpipe_cli.recipe.load import load_recipe
from tests.support.e2e import STAGES_OF_TWO, finetune, launch, make_workspace, metrics, run, write_recipe

TOLERANCE = 1e-5
"""Relative, of a loss in float32 without dropout."""
STEP_ROWS = 8
PLAIN = {"num_train_epochs": 1, "lora__dropout": 0.0, "save_steps": 1}


def write_uneven_rows(path: Path, num_rows: int = 20) -> None:
    """Rows of 20 to 120 tokens, in no order of length."""
    lengths = [7 * index % num_rows * 5 + 1 for index in range(num_rows)]
    rows = [{"prompt": f"Say {index}: ", "completion": "x" * length} for index, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def workspace(folder: Path, two_blocks: Path, **changes: Any) -> Path:
    make_workspace(folder, two_blocks, **{"max_seq_length": 128, **PLAIN, **changes})
    write_uneven_rows(folder / "rows.jsonl")
    return folder


def trained(folder: Path) -> tuple[list[float], list[list[int]]]:
    """Losses and rows of a run's steps."""
    stages = (f"{key.replace('__', '.')}={value}" for key, value in STAGES_OF_TWO.items())
    finetune(folder, *stages, environment={"ROUNDPIPE_ROW_LOG": "rows.log"}).expect(0)
    rows = [sorted(json.loads(line)["rows"]) for line in (folder / "rows.log").read_text().splitlines()]
    return [row["loss"] for row in metrics(folder / "out")], rows


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory, two_blocks: Path) -> tuple[list[float], list[list[int]]]:
    folder = workspace(
        tmp_path_factory.mktemp("one"), two_blocks, micro_batch_size=1, gradient_accumulation_steps=STEP_ROWS
    )
    return trained(folder)


BY_TOKENS = {"micro_batch_size": 1, "gradient_accumulation_steps": STEP_ROWS}


def test_any_microbatches_keep_rows_and_loss(
    tmp_path: Path, two_blocks: Path, one_by_one: tuple[list[float], list[list[int]]]
) -> None:
    """Of rows of like length, or packed ones filled by tokens; those that run out of memory do the same, see below."""
    packed = {"packing": True, "micro_batch_size": 1, "gradient_accumulation_steps": 4}
    packed_alone = trained(workspace(tmp_path / "alone", two_blocks, **packed))
    for name, (expected, expected_rows), shape in (
        ("like", one_by_one, {"micro_batch_size": 8, "gradient_accumulation_steps": 1}),
        ("packed", packed_alone, {**packed, "micro_batch_tokens": 1024}),
    ):
        losses, rows = trained(workspace(tmp_path / name, two_blocks, **shape))
        assert rows == expected_rows, "the rows of each step are those that they were"
        assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_auto_is_resolved_once_whatever_the_number_of_workers(tmp_path: Path, two_blocks: Path) -> None:
    shape = {**BY_TOKENS, "micro_batch_tokens": "auto"}
    found = []
    for count in (1, 3):
        folder = workspace(tmp_path / str(count), two_blocks, pipeline__devices=["cpu"] * count, max_steps=1, **shape)
        done = finetune(folder).expect(0)
        assert "micro_batch_tokens=256: 2 rows of 128, for processors, whatever the number of workers" in done.err
        found.append((resolved(folder)["micro_batch_tokens"], [row["loss_hex"] for row in metrics(folder / "out")]))
    assert found[0] == found[1] and found[0][0] == 256
    again = finetune(folder, "--resume", "max_steps=2").expect(0)
    assert "micro_batch_tokens=256: " not in again.err, "decided once"
    assert resolved(folder)["micro_batch_tokens"] == 256
    changed = finetune(folder, "--resume", "max_steps=3", "micro_batch_tokens=512").expect(2)
    assert "micro_batch_tokens: changed" in changed.err


def test_short_rows_keep_several_workers_busy(tmp_path: Path, two_blocks: Path) -> None:
    """The budget joined all rows of a step into one microbatch, and all workers but one had nothing to do."""
    shape = {**BY_TOKENS, "micro_batch_tokens": "auto"}
    folder = workspace(tmp_path, two_blocks, pipeline__devices=["cpu"] * 3, max_steps=1, **shape)
    rows = [{"prompt": "Say ", "completion": "x" * (1 + index % 3)} for index in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said = " ".join(finetune(folder).expect(0).err.split())
    assert "a step has 4 microbatches for 3 workers, which will wait " in said
    assert re.search(r"predicted: .* for 1 step \(40 rows an epoch\), each \d+ tokens in 4 microbatches", said)
    remedy = ["micro_batch_tokens=null", "micro_batch_size=1", "gradient_accumulation_steps=12"]
    assert f"{' '.join(remedy)} makes them wait less, with 12 rows a step in place of 8" in said
    again = finetune(folder, *remedy, "output_dir=again").expect(0)
    assert "which will wait" not in again.err


def test_a_device_that_runs_out_of_memory_gets_smaller_microbatches(
    tmp_path: Path, two_blocks: Path, one_by_one: tuple[list[float], list[list[int]]]
) -> None:
    shape = {**BY_TOKENS, "micro_batch_tokens": 512}
    folder = workspace(tmp_path / "adapts", two_blocks, **shape)
    twice = ",".join(f"compute:raise=MemoryError:step=1:nth={count}" for count in (1, 2))
    done = finetune(folder, "on_oom=adapt", fault=twice).expect(0)
    assert "write micro_batch_tokens: 256, pipeline.recompute: layer" in done.err
    adapted = [row["loss"] for row in metrics(folder / "out")]
    assert adapted == pytest.approx(one_by_one[0], rel=TOLERANCE)


# --- packing: auto ----------------------------------------------------------------------------------------------------


def resolved(folder: Path) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load((folder / "out" / "recipe.yaml").read_text())
    return recipe


def test_auto_packs_short_rows_and_a_resumed_run_keeps_to_it(tmp_path: Path, two_blocks: Path) -> None:
    shape = {"max_seq_length": 256, "micro_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2}
    folder = workspace(tmp_path / "auto", two_blocks, packing="auto", **shape)
    done = finetune(folder, "max_steps=1").expect(0)
    assert "packing (auto): on: rows have" in done.err and "packing: 20 rows in" in done.err
    assert resolved(folder)["packing"] is True
    again = finetune(folder, "--resume").expect(0)
    assert "packing (auto)" not in again.err, "decided once"
    tokens = [row["tokens"] for row in metrics(folder / "out")]
    assert len(tokens) == 2 and min(tokens) > 2 * 120, "two rows that are not packed have fewer"
    for words in ("data recipe.yaml", "plan recipe.yaml -v max_seq_length=512"):
        assert "packing (auto): on: rows have" in run(folder, *words.split()).expect(0).out


def test_a_resumed_run_keeps_its_number_of_chunks(tmp_path: Path, two_blocks: Path) -> None:
    """Which decides the last bits, and is written down, as `auto` is where whole rows fit."""
    shape = {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2, "packing": "auto"}
    folder = workspace(tmp_path / "chunks", two_blocks, micro_batch_tokens="auto", **shape)
    finetune(folder, "max_steps=1", "pipeline.sequence_chunks=2").expect(0)
    finetune(folder, "--resume").expect(0)
    recipe = resolved(folder)
    assert (recipe["pipeline"]["sequence_chunks"], recipe["micro_batch_tokens"]) == (2, None)
    finetune(folder, "max_steps=1", f"output_dir={tmp_path / 'whole'}").expect(0)
    assert yaml.safe_load((tmp_path / "whole" / "recipe.yaml").read_text())["pipeline"]["sequence_chunks"] == 1


# --- `max_seq_length: auto`: the longest row of the data, a number for all who ask ------------------------------------

LONG = "a long answer " * 5
AUTO_LENGTH = {"max_seq_length": "auto", "max_steps": 3, "micro_batch_size": None}


@pytest.fixture
def folder(tmp_path: Path, two_blocks: Path) -> Path:
    """The longest row, 81 tokens, is one to evaluate on: longer than the recipe's 64."""
    folder = make_workspace(tmp_path / "work", two_blocks, **AUTO_LENGTH, eval_datasets=[{"path": "eval.jsonl"}])
    (folder / "eval.jsonl").write_text(json.dumps({"prompt": "Say it: ", "completion": LONG}) + "\n")
    return folder


def test_a_run_has_the_number_and_keeps_it(folder: Path) -> None:
    done = finetune(folder, "save_steps=1", "max_steps=2").expect(0)
    saved = load_recipe(folder / "out" / "recipe.yaml").recipe
    longest = saved.max_seq_length
    assert isinstance(longest, int) and longest > 64
    assert f"max_seq_length={longest} (auto): the longest row, eval.jsonl:1" in done.err and "cut to" not in done.err
    finetune(folder, f"max_seq_length={longest}", "output_dir=given", "save_steps=1", "max_steps=2").expect(0)
    assert [row["loss_hex"] for row in metrics(folder / "out")] == [
        row["loss_hex"] for row in metrics(folder / "given")
    ]
    finetune(folder, "--resume", "max_steps=3").expect(0)
    with (folder / "eval.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "Say it: ", "completion": 2 * LONG}) + "\n")
    resumed = finetune(folder, "--resume", "max_steps=4").expect(0)
    assert "evaluation: 1 of 2 rows cut to" in resumed.err
    assert f"max_seq_length={longest}: as when this run began" in resumed.err
    assert load_recipe(folder / "out" / "recipe.yaml").recipe.max_seq_length == longest
    assert len(metrics(folder / "out")) == 4


def test_data_and_scores_have_it_too(folder: Path) -> None:
    shown = json.loads(run(folder, "data", "recipe.yaml", "packing=true", "--json").expect(0).out)
    assert shown["packing"]["max_seq_length"] > 64 and shown["rows"]["too_long"] == 0
    scored = run(folder, "score", "recipe.yaml", "eval.jsonl").expect(0)
    assert "the longest row, eval.jsonl:1" in scored.err


def test_values_that_do_not_go_with_it_are_refused_by_name(folder: Path) -> None:
    done = finetune(folder, "micro_batch_tokens=64").expect(2)
    assert "a row of max_seq_length tokens does not fit into a microbatch" in done.err
    assert "chunks of max_seq_length" in run(folder, "plan", "recipe.yaml", "pipeline.sequence_chunks=64").expect(2).err


def _with_little_memory(cgroup: Path) -> None:
    machine.host_memory.__defaults__ = (Path("/proc"), cgroup)  # type: ignore[attr-defined]


def test_rows_that_do_not_fit_stop_the_run_with_the_length_that_does(folder: Path) -> None:
    (folder / "eval.jsonl").write_text(json.dumps({"prompt": "Say it: ", "completion": 100_000 * "long "}) + "\n")
    cgroup = folder / "cgroup"
    cgroup.mkdir()
    (cgroup / "memory.max").write_text(str(1200 << 20))
    words, before = ("finetune", "recipe.yaml", "--no-dashboard"), partial(_with_little_memory, cgroup)
    done = launch(folder, *words, before=before).finish().expect(5)
    assert "does not fit" not in done.out and "the most that fits: `long_rows` says" in done.err
    assert "(auto): the longest row, eval.jsonl:1" in done.err
    fitting = int(done.err.partition("hint: max_seq_length=")[2].partition(",")[0])
    assert 1000 < fitting < 500_000
    launch(folder, *words, f"max_seq_length={fitting}", "max_steps=1", before=before).finish().expect(0)
    launch(folder, *words, f"max_seq_length={2 * fitting}", "output_dir=more", before=before).finish().expect(5)


def test_plan_estimates_it_or_says_what_stands_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = json.loads(run(folder, "data", "recipe.yaml", "packing=true", "--json").expect(0).out)
    monkeypatch.chdir(folder)
    plan, *_ = plan_with_remedies(load_recipe("recipe.yaml"), "1x4090,host_memory_gib=16")
    exact = counted["packing"]["max_seq_length"]
    assert plan.question.settings.max_seq_length == pytest.approx(exact, abs=8)
    assert any(text.startswith("max_seq_length=") and "about the longest" in text for text in plan.assumptions)
    words = ("plan", "recipe.yaml", "--compare", "max_seq_length=auto,4096")
    auto, given = (row["step_s"] for row in json.loads(run(folder, *words, "--json").expect(0).out)["rows"])
    assert "(auto): about the longest row" in run(folder, *words).expect(0).out
    assert 4 * auto < given, "2048 did not stand for it"
    assert "(auto): about the longest row" in run(folder, "bench", "recipe.yaml").expect(0).err
    write_recipe(folder / "other.yaml", **AUTO_LENGTH, datasets=[{"path": "elsewhere.jsonl"}])
    text = run(folder, "plan", "other.yaml", "--hardware", "1x4090,host_memory_gib=16").expect(0).out
    assert "max_seq_length=2048: assumed for auto" in text
