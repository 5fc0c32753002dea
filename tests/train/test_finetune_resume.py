"""Stopped, killed, resumed, gone back, continued: the run comes out as if nothing had happened, or says why not."""

from __future__ import annotations

import json
import re
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
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.adapt import Fit
from roundpipe_cli.train.checkpoint.reading import load_newest
from roundpipe_cli.train.checkpoint.resume import SavedState
from roundpipe_cli.train.checkpoint.writing import Saver, Snapshot
from roundpipe_cli.train.loop import Trainer
from roundpipe_cli.train.prepare.learning_rate import rate_schedule_of
from roundpipe_cli.train.result.model_card import model_card
from tests.support.e2e import (
    STAGES,
    Outcome,
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
    write_rows,
)
from tests.train.test_optimizer import run, trainer_of

ADAPTER = "adapter_model.safetensors"
NINE_STEPS = {"num_train_epochs": 3, "save_steps": 1, "save_total_limit": 20, **STAGES}
"""Three epochs, with the checkpoint of each step."""
GO_BACK = ("--resume", "resume_from_checkpoint=out/step-00000004")


def _ignore_hangups() -> None:
    """As nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    return make_workspace(tmp_path / "work", model, **NINE_STEPS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A working directory with a finished run under nohup: it outlives its terminal."""
    folder = make_workspace(tmp_path_factory.mktemp("whole") / "work", model, **NINE_STEPS)
    running = launch(folder, "finetune", "recipe.yaml", before=_ignore_hangups)
    running.wait_for_steps(2)
    running.kill(signal.SIGHUP)
    assert "SIGHUP" not in running.finish().expect(0).err
    return folder


@pytest.fixture
def work(tmp_path: Path, whole: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "work"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Outcome]:
    """The results of a run that a signal stopped after 4 of its 9 steps, to copy, and what it said."""
    folder = make_workspace(tmp_path_factory.mktemp("stopped") / "work", model, **NINE_STEPS)
    slow = {"ROUNDPIPE_FAULT": "optimizer:slow=2:step=3"}
    running = launch(folder, "finetune", "recipe.yaml", environment=slow)
    running.wait_for_steps(3)
    time.sleep(0.5)  # into the slow step, behind the look for signals after the one before
    running.kill(signal.SIGTERM)
    return folder / "out", running.finish().expect(128 + signal.SIGTERM)


@pytest.fixture
def halfway(folder: Path, stopped: tuple[Path, Outcome]) -> Path:
    """`folder` with the stopped run in it."""
    shutil.copytree(stopped[0], folder / "out")
    return folder


def contents(output_dir: Path) -> dict[str, bytes]:
    """Every file but the lock, which each run may touch."""
    return {name: data for name, data in tree(output_dir).items() if name != ".roundpipe.lock"}


def report_of(output_dir: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((output_dir / "report.json").read_text())
    return report


# --- signals: tests/reliability/test_reliability.py tries Ctrl-C, a terminal that goes, all phases, and kills --------


def test_a_signal_stops_at_a_step_border_with_a_checkpoint(stopped: tuple[Path, Outcome]) -> None:
    out, done = stopped
    steps = num_lines(out / "metrics.jsonl")
    assert f"stopped by SIGTERM after step {steps} of 9, with a checkpoint" in done.err
    assert "SIGTERM: stopping after this step, with a checkpoint" in done.err
    assert "--resume" in done.err and "error" not in done.err
    assert (out / f"step-{steps:08d}").is_dir() and not (out / "report.json").exists()


def test_a_signal_while_the_result_is_written_is_answered_truly(folder: Path) -> None:
    """Story: it said that the run stops after this step; the run wrote its result and ended as finished."""
    slow = {"ROUNDPIPE_FAULT": "export:slow=1"}
    running = launch(folder, "finetune", "recipe.yaml", "max_steps=1", environment=slow)
    running.wait_until(lambda: "writing the result" in running.err)
    time.sleep(0.2)
    running.kill(signal.SIGINT)
    said = running.finish().expect(0).err
    assert "SIGINT: training is over, the result is written first; Ctrl-C stops at once, without the result\n" in said


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
    assert words == "stopped by SIGINT before the first finished step: no new checkpoint was written\n"
    assert not (folder / "out").exists()


def test_a_finished_result_of_which_a_file_is_gone_is_written_again(work: Path, whole: Path) -> None:
    """It once said that the result is there. Without a checkpoint it says what is missing."""
    out = work / "out"
    for name in (ADAPTER, "adapter_config.json", "tokenizer.json"):
        before = (out / name).read_bytes()
        (out / name).unlink()
        done = finetune(work, "--resume").expect(0)
        assert f"files of the result are gone: {name}" in done.err
        assert (out / name).read_bytes() == before
    assert_same_run(out, whole / "out")
    (out / "adapter_config.json").unlink()
    for checkpoint in out.glob("step-*"):
        shutil.rmtree(checkpoint)
    assert "a result without adapter_config.json" in finetune(work, "--resume").expect(6).err


def test_a_run_that_went_back_continues_where_it_stopped(work: Path) -> None:
    """Story: the hint said `the same command with --resume`, which goes back once more and sets the new steps aside."""
    running = launch(
        work, "finetune", "recipe.yaml", *GO_BACK, environment={"ROUNDPIPE_FAULT": "optimizer:slow=2:step=6"}
    )
    running.wait_until(lambda: num_lines(work / "out" / "metrics.jsonl") == 6)
    running.kill(signal.SIGTERM)
    stopped = running.finish().expect(128 + signal.SIGTERM)
    words = re.findall(r"(--resume resume_from_checkpoint=auto) continues", stopped.err)
    assert len(words) == 2, "at its start, for a kill, and at its end"
    step = len(metrics(work / "out"))
    done = finetune(work, *GO_BACK, *words[0].split()[1:]).expect(0)
    assert f"resuming after step {step}," in done.err and step > 4


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
    diff = [("learning_rate", "0.01", "0.02"), ("lora.dropout", "0.1", "0.2"), ("num_train_epochs", "3", "1")]
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
    assert [row["step"] for row in metrics(out)][:8] == list(range(2, 10))
    assert "note: learning_rate: 0.02 from here on, 0.01 until now (--allow-changed learning_rate)\n" in done.err
    assert done.err.count("--allow-changed") == (out / "events.jsonl").read_text().count("--allow-changed") == len(keys)
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


OTHER_PIPELINE = (
    *("pipeline.devices=[cpu,cpu,cpu]", "pipeline.recompute=layer", "logging_steps=3", "save_steps=5"),
    *("pipeline.forward_stages=[[0,1],[2,2]]", "pipeline.backward_stages=[[3,4],[1,2],[0,0]]"),
)


def assert_whole(folder: Path, whole: Path, done: Outcome) -> None:
    """A run resumed after step 4 has the bits of the whole one and its first loss, and says what it measured."""
    assert_same_run(folder / "out", whole / "out")
    assert not [path.name for path in (folder / "out").iterdir() if path.name.startswith((".tmp", ".del"))]
    mine, theirs = report_of(folder / "out"), report_of(whole / "out")
    assert mine["loss"] == theirs["loss"] and mine["loss"]["first"] == metrics(whole / "out")[0]["loss"]
    assert (mine["measured"]["first_step"], mine["measured"]["steps"]) == (5, 5)
    assert theirs["measured"]["first_step"] == 1
    assert f"loss {mine['loss']['first']:.4f} -> {mine['loss']['last']:.4f}" in done.err
    assert "since step 5" in done.err, done.err
    _, events = RunFiles(folder / "out").poll()
    assert [event.step for _, event in events if isinstance(event, StepFinished)] == list(range(1, 10))


def test_a_resumed_run_has_the_bits_and_the_report_of_the_whole_run(halfway: Path, whole: Path) -> None:
    """A run that began at 4.2023 and was resumed at its end was reported with a first loss of 0.3832."""
    edit_json(halfway / "model" / "config.json", transformers_version="9.9")  # which changes nothing
    done = finetune(halfway, "--resume", *OTHER_PIPELINE).expect(0)
    assert_whole(halfway, whole, done)
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
    assert_whole(folder, whole, done)
    done = finetune(folder, "--resume", named).expect(2)
    assert "of another run" in done.err and "resume_from_checkpoint=auto" in done.err


def test_every_value_of_a_checkpoint_returns(tmp_path: Path, two_blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a run that was only restored says what that one says, for values that no run begins with."""
    words = ("dtype=float16", "save_steps=2", "max_steps=2", "early_stopping_patience=9", "eval_steps=2")
    words = (*words, "eval_datasets=[{path: rows.jsonl}]", "on_oom=adapt", "micro_batch_size=2")
    first = trainer_of(tmp_path / "first", two_blocks, *words)
    run(first)
    checkpoint = load_newest(first.output_dir)
    saved: dict[str, Any] = checkpoint.meta
    changed: dict[str, Any] = {
        **{"num_updates": 9, "loss_scale": 4096.0, "steps_since_overflow": 7, "training_s": 1234.5, "skipped_steps": 5},
        **{"kept": {"mean": 0.5}, "fit": Fit(1, "layer", 3).to_json(first.recipe)},
        "data_position": {"epoch": 1, "window": 0, "offset": 2},
        "evaluation": {
            **{"last_step": 2, "last_loss": 1.5, "best_step": 2, "best_loss": 1.25, "kept_step": 2},
            **{"kept_loss": 1.25, "num_worse": 4},
        },
    }
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


# --- other rows a step, or other rows --------------------------------------------------------------------------------

CASES: dict[str, tuple[list[str], int, float, str]] = {
    # after step 4, epoch 1.4: overrides, steps of the whole run, its last epoch, and what is said
    "twice the rows": (["gradient_accumulation_steps=4"], 7, 3, "a step has 8 rows instead of 4"),
    "half the rows": (["gradient_accumulation_steps=1"], 12, 3, "a step has 2 rows instead of 4"),
    "same rows": (["micro_batch_size=1", "gradient_accumulation_steps=4"], 9, 3, ""),
    "tokens": (["micro_batch_tokens=512"], 9, 3, ""),
    "packed": (["packing=true"], 9, 3, "rows are packed now"),
    "packed between epochs": (["packing=true"], 9, 3, "rows are packed now"),
    "more epochs": (
        ["num_train_epochs=4", "gradient_accumulation_steps=4"],
        9,
        4,
        "5 more steps to the end of epoch 4",
    ),
    "more rows": ([], 13, 3, "the rows are others"),
    "max_steps": (["max_steps=9", "gradient_accumulation_steps=4"], 9, 4, "the run ends after step 9, as max_steps"),
}


@pytest.mark.parametrize("case", CASES)
def test_epochs_end_whole_with_other_rows_a_step(folder: Path, whole: Path, case: str) -> None:
    """Done steps were taken from the new total: a run of three epochs ended at 2.73, or at 3.8, in silence."""
    words, num_steps, last_epoch, said = CASES[case]
    if case == "more rows":
        write_rows(folder / "rows.jsonl", 20)
    keys = [word.partition("=")[0] for word in words] + ["datasets"]
    step, began = (3, "1.00") if case.endswith("between epochs") else (4, "1.20" if case == "more rows" else "1.40")
    words = [*words, f"resume_from_checkpoint={whole}/out/step-0000000{step}"]
    log = {"ROUNDPIPE_ROW_LOG": str(folder / "rows.txt")}
    done = finetune(folder, *words, *(f"--allow-changed={key}" for key in keys), environment=log).expect(0)
    assert ("continues in another order" in done.err) == (case in ("packed", "more rows"))
    rows = metrics(folder / "out")
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert rows[-1]["epoch"] == pytest.approx(last_epoch, abs=0.2 if case == "max_steps" else 0)
    assert all(one["epoch"] < other["epoch"] for one, other in zip(rows[4:], rows[5:], strict=False))
    assert f"resuming after step {step}, epoch {began}," in done.err
    assert f"step {num_steps}/{num_steps}" in done.err + done.out
    assert said in done.err
    assert said or ("instead of" not in done.err and "more steps" not in done.err)
    rate = rate_schedule_of(load_recipe(folder / "recipe.yaml", words).recipe, num_steps)
    assert [row["learning_rate"] for row in rows[4:]] == [rate(step) for step in range(4, num_steps)]
    assert ("the learning rate follows the schedule of" in done.err) == (num_steps != 9)
    assert report_of(folder / "out")["num_steps"] == num_steps
    if case == "twice the rows":  # those of the epoch that is under way go on behind those of the steps that are done
        steps = [json.loads(line)["rows"] for line in (folder / "rows.txt").read_text().splitlines()]
        assert [len(rows) for rows in steps] == [6, 8, 2] and sorted(steps[1] + steps[2]) == list(range(10))


def test_fewer_epochs_than_are_done_are_refused(folder: Path, whole: Path) -> None:
    words = ["num_train_epochs=1", f"resume_from_checkpoint={whole}/out/step-00000004"]
    assert "past the end" in finetune(folder, *words, "--allow-changed=num_train_epochs").expect(2).err


# --- going back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["finished", "killed", "continued"])
def test_going_back(work: Path, state: str) -> None:
    """Of a finished run it did nothing. Killed before the next save, it took the newest step: rows 1, 2, 3, 4, 9."""
    whole, out = numbers(work / "out"), work / "out"
    words, last = (["num_train_epochs=4"], 12) if state == "continued" else ([], 9)
    again = GO_BACK
    if state == "continued":
        finetune(work, "--resume", *words).expect(0)
    elif state == "killed":  # once after step 7, in a save, and once more after going back
        for path in [*out.glob("adapter*"), *out.glob("report.*")]:
            path.unlink()
        for step in (8, 9):
            shutil.rmtree(out / f"step-{step:08d}")
        (out / ".tmp-step-00000008").mkdir()
        died = finetune(work, *GO_BACK, fault="optimizer:kill:step=4")
        assert died.code < 0 and "set-aside-step-00000005" in died.err
        left = {path.name for path in out.glob("step-*")}
        assert left == {f"step-{step:08d}" for step in range(1, 5)}
        again = ("--resume",)
    done = finetune(work, *again, *words).expect(0)
    assert "resuming after step 4, epoch 1.40, from" in done.err
    assert state == "killed" or "set-aside-step-00000005" in done.err
    assert [row["step"] for row in metrics(out)] == list(range(1, last + 1))
    assert state == "continued" or numbers(out) == whole
    assert not list(out.glob("set-aside-*")), "each step was saved again"
    results = sorted(path.name for path in out.glob("result-*"))
    kept = {"finished": ["result-00000009"], "continued": ["result-00000009", "result-00000012"]}
    assert results == kept.get(state, [])


def test_a_finished_run_is_left_as_it_is(work: Path) -> None:
    """Also where it goes back to its end; and what changed is said."""
    before = contents(work / "out")
    done = finetune(work, "--resume", "resume_from_checkpoint=out/step-00000009").expect(0)
    assert "this run is finished: all 9 steps are done" in done.err and "nothing was changed" in done.err
    done = finetune(work, "--resume", "learning_rate=0.5").expect(2)
    assert "learning_rate: changed since the checkpoint was written" in done.err
    assert contents(work / "out") == before


def test_a_checkpoint_that_was_moved_away_is_one_to_go_back_to(work: Path) -> None:
    """README says of those that were set aside: move any that you need."""
    (work / "kept").mkdir()
    (work / "out" / "step-00000007").rename(work / "kept" / "set-aside-step-00000007")
    done = finetune(work, "resume_from_checkpoint=kept/set-aside-step-00000007", "output_dir=again").expect(0)
    assert "rows of only 0 of the 7 steps" in done.err
    assert numbers(work / "again") == numbers(work / "out")[7:]


# --- training further ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "last"), [("max_steps=11", 11), ("num_train_epochs=4", 12)])
def test_a_finished_run_is_trained_further(work: Path, words: str, last: int) -> None:
    """Story: it said that it was finished. The old result is kept; what becomes of the learning rate is said."""
    out, old = work / "out", (work / "out" / ADAPTER).read_bytes()
    told = {name: (out / name).read_bytes() for name in ("recipe.yaml", "README.md", "report.html")}
    done = finetune(work, "--resume", words).expect(0)
    assert {name: (out / "result-00000009" / name).read_bytes() for name in told} == told
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert (out / "result-00000009" / "report.json").exists() and (out / ADAPTER).read_bytes() != old
    assert (out / "result-00000009" / ADAPTER).read_bytes() == old
    assert f"the run has {last} steps instead of 9: the learning rate follows the schedule of {last} steps" in done.err
    step_9, step_10 = (row["learning_rate"] for row in rows[8:10])
    assert f"step 9 had {step_9:.4g}, step 10 has {step_10:.4g}" in done.err
    assert f"A run of {last} steps from the start would have had other rates up to here" in done.err
    assert "this run is finished" in finetune(work, "--resume", words).expect(0).err
    if last == 11:  # more is asked for, and cannot be; nothing happened once, and the exit code was 0
        before = contents(out)
        done = finetune(work, "--resume", words, "num_train_epochs=7").expect(2)
        assert "num_train_epochs" in done.err and "all 11 steps are done" in done.err
        assert "max_steps: 11 ends the run" in done.err and contents(out) == before


def test_a_finished_run_with_a_constant_learning_rate_goes_on_as_if_never_stopped(folder: Path) -> None:
    """To the bit: the rows come in the same order, from the middle of an epoch too."""
    constant = ("lr_scheduler_type=constant", "warmup_steps=0")
    finetune(folder, *constant, "output_dir=longer", "max_steps=2").expect(0)
    done = finetune(folder, *constant, "output_dir=longer", "max_steps=4", "--resume").expect(0)
    assert "so far the learning rate is that of a run of 4 steps" in done.err
    finetune(folder, *constant, "output_dir=at_once", "max_steps=4").expect(0)
    assert_same_run(folder / "longer", folder / "at_once")


def test_a_run_that_stopped_early_needs_more_patience(folder: Path) -> None:
    shutil.copy(folder / "rows.jsonl", folder / "eval.jsonl")
    keys = ("eval_datasets=[{path: eval.jsonl}]", "eval_steps=1", "learning_rate=2.0")
    stopped = finetune(folder, *keys, "early_stopping_patience=1").expect(0)
    assert len(metrics(folder / "out")) < 9 and "num_train_epochs=" not in stopped.err, "which would be refused"
    again = finetune(folder, *keys, "early_stopping_patience=1", "--resume").expect(0)
    assert "this run is finished" in again.err
    done = finetune(folder, *keys, "early_stopping_patience=1", "num_train_epochs=4", "--resume").expect(2)
    assert "it stopped early; a larger early_stopping_patience continues it" in done.err
    finetune(folder, *keys, "early_stopping_patience=50", "--resume").expect(0)
    assert len(metrics(folder / "out")) == 9
