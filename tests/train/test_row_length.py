"""`max_seq_length: auto`: the longest row of the data, a number for all who ask, an error where it does not fit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from roundpipe_cli.cli.plan import plan_with_remedies
from roundpipe_cli.costs import machine
from roundpipe_cli.recipe.load import load_recipe
from tests.support.e2e import finetune, launch, make_workspace, metrics, run, write_recipe
from tests.train.test_nodes import free_port, start_one
from tests.train.test_nodes import machine as machine_folder

LONG = "a long answer " * 5
AUTO = {"max_seq_length": "auto", "max_steps": 3, "micro_batch_size": None}


@pytest.fixture
def folder(tmp_path: Path, two_blocks: Path) -> Path:
    """The longest row, 81 tokens, is one to evaluate on: longer than the recipe's 64."""
    folder = make_workspace(tmp_path / "work", two_blocks, **AUTO, eval_datasets=[{"path": "eval.jsonl"}])
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
    write_recipe(folder / "other.yaml", **AUTO, datasets=[{"path": "elsewhere.jsonl"}])
    text = run(folder, "plan", "other.yaml", "--hardware", "1x4090,host_memory_gib=16").expect(0).out
    assert "max_seq_length=2048: assumed for auto" in text


def test_machines_with_other_longest_rows_are_refused_by_name(folder: Path) -> None:
    write_recipe(folder / "recipe.yaml", **AUTO)
    port, other = free_port(), machine_folder(folder, 1)
    with (other / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "Say it: ", "completion": LONG}) + "\n")
    for outcome in [process.finish() for process in [start_one(folder, rank, 2, port) for rank in (0, 1)]]:
        assert "max_seq_length: the machines of this run do not train the same" in outcome.expect(2).err
