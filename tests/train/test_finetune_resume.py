"""Stopped, killed, resumed: the run comes out as if nothing had happened."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from roundpipe_cli.dashboard.replay import RunFiles
from roundpipe_cli.events import StepFinished
from roundpipe_cli.train.adapt import Fit
from roundpipe_cli.train.checkpoint.reading import load_newest
from roundpipe_cli.train.checkpoint.resume import SavedState
from roundpipe_cli.train.checkpoint.writing import Saver, Snapshot
from roundpipe_cli.train.loop import Trainer
from roundpipe_cli.train.result.model_card import model_card
from tests.support.e2e import (
    STAGES,
    Outcome,
    Running,
    assert_same_run,
    child_environment,
    command_line,
    edit_json,
    finetune,
    launch,
    make_workspace,
    metrics,
    num_lines,
    numbers,
    tree,
)
from tests.train.test_overlapped_updates import run, trainer_of

ADAPTER = "adapter_model.safetensors"
SLOW_STEP = {"ROUNDPIPE_FAULT": "optimizer:slow=2:step=3"}


def _ignore_hangups() -> None:
    """As nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A working directory with a run of 6 steps, two epochs, under nohup: it outlives its terminal."""
    folder = make_workspace(tmp_path_factory.mktemp("whole") / "work", model, **STAGES)
    running = start(folder, before=_ignore_hangups)
    running.wait_for_steps(2)
    running.kill(signal.SIGHUP)
    assert "SIGHUP" not in running.finish().expect(0).err
    return folder


def start(folder: Path, *words: str, **options: Any) -> Running:
    return launch(folder, "finetune", "recipe.yaml", *words, **options)


def contents(output_dir: Path) -> dict[str, bytes]:
    """Every file but the lock, which each run may touch."""
    return {name: data for name, data in tree(output_dir).items() if name != ".roundpipe.lock"}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Outcome]:
    """The results of a run that a signal stopped after 4 of its 6 steps, to copy, and what it said."""
    folder = make_workspace(tmp_path_factory.mktemp("stopped") / "work", model, **STAGES)
    running = start(folder, environment=SLOW_STEP)
    running.wait_for_steps(3)
    time.sleep(0.5)  # into the slow step, behind the look for signals after the one before
    running.kill(signal.SIGTERM)
    return folder / "out", running.finish().expect(128 + signal.SIGTERM)


@pytest.fixture
def halfway(folder: Path, stopped: tuple[Path, Outcome]) -> Path:
    """`folder` with the stopped run in it."""
    shutil.copytree(stopped[0], folder / "out")
    return folder


def assert_same(folder: Path, whole: Path) -> None:
    assert_same_run(folder / "out", whole / "out")
    assert not [path.name for path in (folder / "out").iterdir() if path.name.startswith((".tmp", ".del"))]


# --- killed ---------------------------------------------------------------------------------------------------------


def test_killed_at_chosen_points(folder: Path, whole: Path) -> None:
    """In the middle of the first save (nothing to resume yet), then of the final result."""
    for point in ("ckpt_writer:kill:nth=2", "export:kill:nth=1"):
        assert not list((folder / "out").glob("step-*"))
        assert finetune(folder, fault=point).code == -signal.SIGKILL
    done = finetune(folder, "--resume").expect(0)
    assert_same(folder, whole)
    mine = report_of(folder / "out")
    assert mine["loss"] == report_of(whole / "out")["loss"] and mine["measured"]["steps"] == 0
    assert "loss " in done.err


# --- signals --------------------------------------------------------------------------------------------------------


def test_a_signal_stops_at_a_step_border_with_a_checkpoint(stopped: tuple[Path, Outcome]) -> None:
    """tests/reliability/test_reliability.py tries Ctrl-C, once and twice, a terminal that goes, and all phases."""
    out, done = stopped
    steps = num_lines(out / "metrics.jsonl")
    assert f"stopped by SIGTERM after step {steps} of 6, with a checkpoint" in done.err
    assert "SIGTERM: stopping after this step, with a checkpoint" in done.err
    assert "--resume" in done.err and "error" not in done.err
    assert (out / f"step-{steps:08d}").is_dir() and not (out / "report.json").exists()


def test_a_signal_while_torch_loads(folder: Path) -> None:
    """Libraries swallow exceptions while they are imported; a stop gets through."""
    options: dict[str, Any] = {"cwd": folder, "env": child_environment(), "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command_line("finetune", "recipe.yaml"), **options) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "reading recipe.yaml ...\n", "before anything heavy is imported"
        assert process.stderr.readline() == "loading torch and transformers ...\n"
        process.send_signal(signal.SIGINT)
        words = process.stderr.read()
    assert process.returncode == 130
    assert words == "stopped by SIGINT before the first finished step: no checkpoint was written\n"
    assert not (folder / "out").exists()


# --- resume ---------------------------------------------------------------------------------------------------------


def test_resume_where_nothing_was_saved(folder: Path) -> None:
    done = finetune(folder, "--resume").expect(6)
    assert (
        "no checkpoint to resume from" in done.err and "loading torch" not in done.err and not (folder / "out").exists()
    )
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("mine")
    finetune(folder, "--resume").expect(6)
    assert tree(folder / "out") == {"notes.txt": b"mine"}


def test_a_finished_run_is_left_as_it_is(folder: Path, whole: Path) -> None:
    shutil.copytree(whole / "out", folder / "out")
    before = contents(folder / "out")
    done = finetune(folder, "--resume").expect(0)
    assert "this run is finished" in done.err and "nothing was changed" in done.err
    done = finetune(folder).expect(2)
    assert "--resume" in done.err and "output_dir=" in done.err
    assert contents(folder / "out") == before
    (folder / "out" / "report.json").unlink()
    before.pop("report.json")
    finetune(folder).expect(2)
    assert contents(folder / "out") == before


def test_a_finished_result_of_which_a_file_is_gone_is_written_again(folder: Path, whole: Path) -> None:
    """It once said that the result is there. Without a checkpoint it says what is missing."""
    out = Path(shutil.copytree(whole / "out", folder / "out"))
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
        before = (out / name).read_bytes()
        (out / name).unlink()
        done = finetune(folder, "--resume").expect(0)
        assert f"files of the result are gone: {name}" in done.err
        assert (out / name).read_bytes() == before
    assert_same_run(out, whole / "out")
    (out / "adapter_config.json").unlink()
    for checkpoint in out.glob("step-*"):
        shutil.rmtree(checkpoint)
    assert "a result without adapter_config.json" in finetune(folder, "--resume").expect(6).err


def test_what_changed_is_refused_with_a_diff_or_allowed(halfway: Path, whole: Path) -> None:
    """The recipe, special tokens, numbers that the weights are computed with, rows; and metrics that lost a row."""
    folder, out = halfway, halfway / "out"
    before = contents(out)
    edit_json(folder / "model" / "tokenizer_config.json", eos_token="<s>")
    edit_json(folder / "model" / "config.json", rms_norm_eps=1e-3)
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "new", "completion": "row"}\n')
    changes = ["learning_rate=2e-2", "lora.dropout=0.2", "kernels=reference"]
    done = finetune(folder, "--resume", *changes, "num_train_epochs=1").expect(2)
    diff = [("learning_rate", "0.01", "0.02"), ("lora.dropout", "0.1", "0.2"), ("num_train_epochs", "2", "1")]
    diff.append(("kernels", '"auto"', '"reference"'))
    for key, old, new in diff:
        assert f"{key}: changed since the checkpoint was written\n  found: {new}\n  expected: {old}" in done.err
    for key in ("tokenizer", "model (config.json)", "datasets (content)"):
        assert f"{key}: changed" in done.err and f"--allow-changed {key.partition(' ')[0]}" in done.err
    assert contents(out) == before and done.err.count("changed since") == len(diff) + 3, "not the weights"
    (out / "metrics.jsonl").write_bytes(b"".join(before["metrics.jsonl"].splitlines(keepends=True)[1:]))
    keys = ("learning_rate", "lora.dropout", "kernels", "tokenizer", "model", "datasets")
    allowed = [f"--allow-changed={key}" for key in keys]
    done = finetune(folder, "--resume", *changes, *allowed).expect(0)
    assert [row["step"] for row in metrics(out)] == list(range(2, 7))
    assert numbers(out)[:3] == numbers(whole / "out")[1:4]
    report, last = report_of(out), metrics(out)[-1]["loss"]
    assert report["loss"]["first"] is None and report["loss"]["last"] == last != metrics(whole / "out")[-1]["loss"]
    assert f"last loss {last:.4f}" in done.err


def test_rows_are_compared_by_their_tokens_and_which_of_them_are_trained(halfway: Path) -> None:
    """A run begun before other tokens of its rows were trained is refused; rows written in another way are the same."""
    path = halfway / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    moved = [{"prompt": row["prompt"] + row["completion"][0], "completion": row["completion"][1:]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in moved), encoding="utf-8")
    assert "datasets (content): changed since" in finetune(halfway, "--resume").expect(2).err
    path.write_text("".join(json.dumps(row, indent=None, separators=(" ,", ": ")) + "\n\n" for row in rows))
    assert "changed since" not in finetune(halfway, "--resume").expect(0).err


def report_of(output_dir: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((output_dir / "report.json").read_text())
    return report


OTHER_PIPELINE = (
    *("pipeline.devices=[cpu,cpu,cpu]", "pipeline.recompute=layer", "logging_steps=3", "save_steps=5"),
    *("pipeline.forward_stages=[[0,1],[2,2]]", "pipeline.backward_stages=[[3,4],[1,2],[0,0]]"),
)


def assert_whole_report(folder: Path, whole: Path, done: Outcome, first_step: int) -> None:
    """The report of a resumed run has the first loss of the whole one, and says what was measured."""
    mine, theirs = report_of(folder / "out"), report_of(whole / "out")
    assert mine["loss"] == theirs["loss"] and mine["loss"]["first"] == metrics(whole / "out")[0]["loss"]
    assert (mine["measured"]["first_step"], mine["measured"]["steps"]) == (first_step, 7 - first_step)
    assert theirs["measured"]["first_step"] == 1
    assert f"loss {mine['loss']['first']:.4f} -> {mine['loss']['last']:.4f}" in done.err
    assert f"since step {first_step}" in done.err, done.err
    _, events = RunFiles(folder / "out").poll()
    assert [event.step for _, event in events if isinstance(event, StepFinished)] == list(range(1, 7))


def test_a_resumed_run_has_the_bits_and_the_report_of_the_whole_run(halfway: Path, whole: Path) -> None:
    """A run that began at 4.2023 and was resumed at its end was reported with a first loss of 0.3832."""
    edit_json(halfway / "model" / "config.json", transformers_version="9.9")  # which changes nothing
    first_step = int(max((halfway / "out").glob("step-*")).name[5:]) + 1
    done = finetune(halfway, "--resume", *OTHER_PIPELINE).expect(0)
    assert_same(halfway, whole)
    assert_whole_report(halfway, whole, done, first_step)
    card = model_card(halfway / "out", base=None, merged=False)
    assert f"| first training loss | {report_of(whole / 'out')['loss']['first']:.4f} |" in card


def test_a_named_checkpoint_of_another_run(folder: Path, whole: Path) -> None:
    """It continues in a free folder with the metrics so far; a killed one begins again, a second run is refused."""
    other = Path(shutil.copytree(whole / "out", folder / "other"))
    named = "resume_from_checkpoint=other/step-00000004"
    died = finetune(folder, "--resume", named, fault="optimizer:kill:step=4")
    assert died.code < 0 and not list((folder / "out").glob("step-*"))
    before = contents(other)
    done = finetune(folder, named).expect(0)
    assert "other stays as it is" in done.err and contents(other) == before
    assert_same(folder, whole)
    assert_whole_report(folder, whole, done, 5)
    done = finetune(folder, "--resume", named).expect(2)
    assert "of another run" in done.err and "resume_from_checkpoint=auto" in done.err


def test_killed_after_going_back(folder: Path, whole: Path) -> None:
    """Story: resumed from step 4 of 8 and killed before the next save; `--resume` took step 8, and the metrics had
    rows 1, 2, 3, 4, 9."""
    assert finetune(folder, "save_steps=1", "save_total_limit=5", fault="optimizer:kill:step=4").code < 0
    words = ("--resume", "resume_from_checkpoint=out/step-00000002")
    died = finetune(folder, *words, fault="optimizer:kill:step=2")
    assert died.code < 0
    assert "resuming after step 2" in died.err
    assert "set-aside-step-00000003" in died.err and "move any that you need" in died.err
    left = {path.name for path in (folder / "out").glob("*step-*")} - {"set-aside-step-00000004"}  # killed in its save
    assert left == {"step-00000001", "step-00000002", "set-aside-step-00000003"}
    finetune(folder, "--resume").expect(0)
    assert_same(folder, whole)
    assert not list((folder / "out").glob("set-aside-*"))


def test_a_finished_run_goes_on_to_more_epochs(folder: Path, whole: Path) -> None:
    """Story: it said that it was finished. The old result is kept; what becomes of the learning rate is said."""
    shutil.copytree(whole / "out", folder / "out")
    old = (folder / "out" / ADAPTER).read_bytes()
    done = finetune(folder, "--resume", "num_train_epochs=3").expect(0)
    assert "the run has 9 steps instead of 6: the learning rate follows the schedule of 9 steps from here" in done.err
    rate = metrics(folder / "out")[6]["learning_rate"]
    assert f"step 6 had {metrics(whole / 'out')[5]['learning_rate']:.4g}, step 7 has {rate:.4g}" in done.err
    assert "A run of 9 steps from the start would have had other rates up to here" in done.err
    assert [row["step"] for row in metrics(folder / "out")] == list(range(1, 10))
    assert (folder / "out" / "result-00000006" / ADAPTER).read_bytes() == old
    assert (folder / "out" / "result-00000006" / "report.json").exists()
    assert (folder / "out" / ADAPTER).read_bytes() != old


def test_a_finished_run_with_a_constant_learning_rate_goes_on_as_if_never_stopped(folder: Path) -> None:
    """To the bit: the rows come in the same order, from the middle of an epoch too."""
    constant = ("lr_scheduler_type=constant", "warmup_steps=0")
    finetune(folder, *constant, "output_dir=longer", "max_steps=2").expect(0)
    done = finetune(folder, *constant, "output_dir=longer", "max_steps=4", "--resume").expect(0)
    assert "so far the learning rate is that of a run of 4 steps" in done.err
    finetune(folder, *constant, "output_dir=at_once", "max_steps=4").expect(0)
    assert_same_run(folder / "longer", folder / "at_once")


def test_every_value_of_a_checkpoint_is_restored(
    tmp_path: Path, two_blocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a run that was only restored says what the one says that it was restored from, for values that
    no run begins with."""
    words = ("dtype=float16", "save_steps=2", "max_steps=2", "early_stopping_patience=9", "eval_steps=2")
    words = (*words, "eval_datasets=[{path: rows.jsonl}]", "on_oom=adapt", "micro_batch_size=2")
    first = trainer_of(tmp_path / "first", two_blocks, *words)
    run(first)
    checkpoint = load_newest(first.output_dir)
    saved: dict[str, Any] = checkpoint.meta
    changed: dict[str, Any] = {
        "num_updates": 9,
        "loss_scale": 4096.0,
        "steps_since_overflow": 7,
        "training_s": 1234.5,
        "skipped_steps": 5,
        "kept": {"mean": 0.5},
        "fit": Fit(1, "layer", 3).to_json(first.recipe),
        "data_position": {"epoch": 1, "window": 0, "offset": 2},
        "evaluation": {"last_step": 2, "last_loss": 1.5, "best_step": 2, "best_loss": 1.25, "kept_step": 2,
                       "kept_loss": 1.25, "num_worse": 4},
    }  # fmt: skip
    assert set(SavedState.__annotations__) == {*changed, "num_steps"}, "num_steps only says that the recipe grew"
    assert all(saved[key] != value for key, value in changed.items())
    older = replace(checkpoint, meta={**saved, **changed})
    again = trainer_of(tmp_path / "again", two_blocks, *words, checkpoint=older)
    monkeypatch.setattr(Trainer, "_is_last", lambda *_: True)
    shutil.copytree(first.output_dir, again.output_dir, dirs_exist_ok=True)
    monkeypatch.setattr(again, "_write_result", lambda _: None)
    again.run()
    begun: list[Snapshot] = []
    with again._rows:
        again._saver = cast(Saver, SimpleNamespace(begin=lambda one, _: begun.append(one)))
        again._save(3)
    found = {key: begun[0].meta[key] for key in changed}
    assert 1234.5 < found.pop("training_s") < changed.pop("training_s") + 60  # it goes on counting
    assert found == changed
