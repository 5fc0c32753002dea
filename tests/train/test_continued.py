"""What README, GUIDE and the recipe keys say of resuming, going back and training further, for runs in every state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.prepare.learning_rate import rate_schedule_of
from tests.support.e2e import STAGES, finetune, make_workspace, metrics, numbers, tree, write_rows

KEEP_ALL = ("save_steps=1", "save_total_limit=20")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A working directory with a finished run of three epochs, 9 steps, that has the checkpoint of each step."""
    folder = make_workspace(tmp_path_factory.mktemp("finished") / "work", model, num_train_epochs=3, **STAGES)
    finetune(folder, *KEEP_ALL).expect(0)
    return folder


@pytest.fixture
def work(tmp_path: Path, finished: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "work"))


def run_files(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(folder).items() if name != ".roundpipe.lock"}


CASES: dict[str, tuple[list[str], int, float, str]] = {
    # after step 4, epoch 1.4: overrides, steps of the whole run, its last epoch, and what is said
    "twice the rows": (["gradient_accumulation_steps=4"], 7, 3, "a step has 8 rows instead of 4"),
    "half the rows": (["gradient_accumulation_steps=1"], 12, 3, "a step has 2 rows instead of 4"),
    "same rows": (["micro_batch_size=1", "gradient_accumulation_steps=4"], 9, 3, ""),
    "tokens": (["micro_batch_tokens=512"], 9, 3, ""),
    "packed": (["packing=true"], 9, 3, "rows are packed now"),
    "more epochs": (
        ["num_train_epochs=4", "gradient_accumulation_steps=4"],
        9,
        4,
        "5 more steps to the end of epoch 4 make 9",
    ),
    "more rows": ([], 13, 3, "the rows are others"),
    "max_steps": (["max_steps=9", "gradient_accumulation_steps=4"], 9, 4, "the run ends after step 9, as max_steps"),
}


@pytest.mark.parametrize("case", CASES)
def test_epochs_end_whole_with_other_rows_a_step(tmp_path: Path, finished: Path, case: str) -> None:
    """Steps that are done were taken from the new total, though they had other rows: a run of three epochs ended at
    2.73, or at 3.8, and nothing was said of epochs."""
    words, num_steps, last_epoch, said = CASES[case]
    folder = tmp_path / "work"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("out"))
    if case == "more rows":
        write_rows(folder / "rows.jsonl", 20)
    keys = [word.partition("=")[0] for word in words] + ["datasets"]
    words = [*words, f"resume_from_checkpoint={finished}/out/step-00000004"]
    done = finetune(folder, *words, *(f"--allow-changed={key}" for key in keys)).expect(0)
    rows, began = metrics(folder / "out"), "1.20" if case == "more rows" else "1.40"
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert rows[-1]["epoch"] == pytest.approx(last_epoch, abs=0.2 if case == "max_steps" else 0)
    assert all(one["epoch"] < other["epoch"] for one, other in zip(rows[4:], rows[5:], strict=False))
    assert (
        f"step {num_steps}/{num_steps}" in done.err + done.out and f"resuming after step 4, epoch {began}," in done.err
    )
    assert said in done.err
    assert said or ("instead of" not in done.err and "more steps" not in done.err)
    rate = rate_schedule_of(load_recipe(folder / "recipe.yaml", words).recipe, num_steps)
    assert [row["learning_rate"] for row in rows[4:]] == [rate(step) for step in range(4, num_steps)]
    assert ("the learning rate follows the schedule of" in done.err) == (num_steps != 9)
    assert json.loads((folder / "out" / "report.json").read_text())["num_steps"] == num_steps


def test_what_was_trained_is_not_trained_again(tmp_path: Path, finished: Path) -> None:
    """The rows of the epoch that is under way go on behind those of the steps that are done."""
    words = ["gradient_accumulation_steps=4", "--allow-changed=gradient_accumulation_steps"]
    shutil.copytree(finished, tmp_path / "work", ignore=shutil.ignore_patterns("out"))
    log = tmp_path / "rows.txt"
    named = f"resume_from_checkpoint={finished}/out/step-00000004"
    finetune(tmp_path / "work", *words, named, environment={"ROUNDPIPE_ROW_LOG": str(log)}).expect(0)
    steps = [json.loads(line)["rows"] for line in log.read_text().splitlines()]
    assert [len(rows) for rows in steps] == [6, 8, 2] and sorted(steps[1] + steps[2]) == list(range(10))


def test_fewer_epochs_than_are_done_are_refused(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished, tmp_path / "work", ignore=shutil.ignore_patterns("out"))
    words = ["num_train_epochs=1", f"resume_from_checkpoint={finished}/out/step-00000004"]
    assert "num_train_epochs: changed" in finetune(tmp_path / "work", *words).expect(2).err
    done = finetune(tmp_path / "work", *words, "--allow-changed=num_train_epochs").expect(2)
    assert "past the end" in done.err


# --- going back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["finished", "killed", "continued"])
def test_going_back(work: Path, state: str) -> None:
    """Of a finished run it did nothing, and the exit code was 0."""
    whole = numbers(work / "out")
    more, last = (["num_train_epochs=4"], 12) if state == "continued" else ([], 9)
    if state == "continued":
        finetune(work, "--resume", *more, *KEEP_ALL).expect(0)
    elif state != "finished":
        _forget_result(work / "out", last=7)
    if state == "killed":
        (work / "out" / ".tmp-step-00000008").mkdir()
    done = finetune(work, "--resume", "resume_from_checkpoint=out/step-00000004", *KEEP_ALL, *more).expect(0)
    assert "resuming after step 4, epoch 1.40, from" in done.err and "set-aside-step-00000005" in done.err
    assert [row["step"] for row in metrics(work / "out")] == list(range(1, last + 1))
    if state != "continued":
        assert numbers(work / "out") == whole
    assert not list((work / "out").glob("set-aside-*")), "each step was saved again"
    results = sorted(path.name for path in (work / "out").glob("result-*"))
    kept = {"finished": ["result-00000009"], "continued": ["result-00000009", "result-00000012"]}
    assert results == kept.get(state, [])


def _forget_result(out: Path, last: int) -> None:
    """What is left of a run that ended after step `last`."""
    for path in [*out.glob("adapter*"), out / "report.json", *out.glob("report.*")]:
        path.unlink(missing_ok=True)
    for folder in out.glob("step-*"):
        if int(folder.name[5:]) > last:
            shutil.rmtree(folder)


def test_going_back_to_the_end_changes_nothing(work: Path) -> None:
    before = run_files(work / "out")
    done = finetune(work, "--resume", "resume_from_checkpoint=out/step-00000009", *KEEP_ALL).expect(0)
    assert "this run is finished: all 9 steps are done" in done.err
    assert run_files(work / "out") == before


def test_a_checkpoint_that_was_moved_away_is_one_to_go_back_to(work: Path) -> None:
    """README says of those that were set aside: move any that you need."""
    (work / "kept").mkdir()
    (work / "out" / "step-00000007").rename(work / "kept" / "set-aside-step-00000007")
    done = finetune(work, "resume_from_checkpoint=kept/set-aside-step-00000007", "output_dir=again").expect(0)
    assert "rows of only 0 of the 7 steps" in done.err
    assert numbers(work / "again") == numbers(work / "out")[7:]


# --- training further ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["max_steps=11"], ["num_train_epochs=4"]], ids=" ".join)
def test_a_finished_run_is_trained_further(work: Path, words: list[str]) -> None:
    done = finetune(work, "--resume", *words, *KEEP_ALL).expect(0)
    last = 11 if "max_steps" in words[0] else 12
    assert [row["step"] for row in metrics(work / "out")] == list(range(1, last + 1))
    assert (work / "out" / "result-00000009" / "report.json").exists()
    assert f"the run has {last} steps instead of 9" in done.err
    again = finetune(work, "--resume", *words, *KEEP_ALL).expect(0)
    assert "this run is finished" in again.err


def test_what_cannot_train_further_is_refused(work: Path) -> None:
    """More was asked for; nothing happened, and the exit code was 0."""
    finetune(work, "--resume", "max_steps=10", *KEEP_ALL).expect(0)
    before = run_files(work / "out")
    done = finetune(work, "--resume", "max_steps=10", "num_train_epochs=7", *KEEP_ALL).expect(2)
    assert "num_train_epochs" in done.err and "all 10 steps are done" in done.err
    assert "max_steps: 10 ends the run" in done.err
    assert run_files(work / "out") == before


def test_a_run_that_stopped_early_needs_more_patience(tmp_path: Path, model: Path) -> None:
    folder = make_workspace(tmp_path / "work", model, num_train_epochs=3, **STAGES)
    shutil.copy(folder / "rows.jsonl", folder / "eval.jsonl")
    keys = ("eval_datasets=[{path: eval.jsonl}]", "eval_steps=1", "learning_rate=2.0", *KEEP_ALL)
    finetune(folder, *keys, "early_stopping_patience=1").expect(0)
    stopped = len(metrics(folder / "out"))
    assert stopped < 9
    again = finetune(folder, *keys, "early_stopping_patience=1", "--resume").expect(0)
    assert "this run is finished" in again.err
    done = finetune(folder, *keys, "early_stopping_patience=1", "num_train_epochs=4", "--resume").expect(2)
    assert "it stopped early; a larger early_stopping_patience continues it" in done.err
    finetune(folder, *keys, "early_stopping_patience=50", "--resume").expect(0)
    assert len(metrics(folder / "out")) == 9


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_what_changed_is_listed(work: Path, state: str) -> None:
    """Of a finished run it was not: it was said to be finished."""
    if state == "stopped":
        _forget_result(work / "out", last=7)
    before = run_files(work / "out")
    done = finetune(work, "--resume", "learning_rate=0.5", *KEEP_ALL).expect(2)
    assert "learning_rate: changed since the checkpoint was written" in done.err
    assert run_files(work / "out") == before
