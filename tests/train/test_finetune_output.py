"""What is printed, and given to trackers, and what happens when nobody reads it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.cli.lines import LinePrinter, step_line
from roundpipe_cli.dashboard.state import fetching_line
from roundpipe_cli.events import EvaluationFinished, Event, Fetching, Notice, Phase, RunFinished, StepFinished
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.monitor import trackers
from roundpipe_cli.train.monitor.trackers import TRACKERS, RunInfo, TrackerRun, Trackers
from tests.dashboard.test_dashboard_watch import write_files
from tests.support.e2e import (
    STAGES,
    STAGES_OF_TWO,
    finetune,
    fresh,
    launch,
    make_workspace,
    metrics,
    num_lines,
    numbers,
)
from tests.support.recorded import recorded_run

STEP = StepFinished(
    step=12, num_steps=5000, loss=1.23456, learning_rate=9.5e-4, grad_norm=0.4567, tokens=4096, tokens_per_s=12345.6,
    step_s=0.33, bubble_ratio=0.1234, utilization=(0.9, 0.8), upload_bytes=0, device_peak_bytes=0, eta_s=4988 * 2.5,
    epoch=0.6,
)  # fmt: skip
NOW_S = 1_800_000_000.0
"""08:00 in UTC, in which tests run."""


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    return make_workspace(tmp_path / "a folder", model, **STAGES)


def test_a_step_is_one_line_of_a_terminal() -> None:
    """With the epoch, and the time of day of the end; on a narrow terminal what says least is left out."""
    short = replace(STEP, num_steps=20, tokens_per_s=123.4, eta_s=3608.4)
    whole = "step 12/20  epoch 0.60  loss 1.2346  grad 0.46  lr 9.5e-04  123 tok/s  bubble 12%  eta 1h00m at 09:00"
    assert step_line(short, NOW_S) == step_line(short, NOW_S, 200) == whole
    for width in (60, 80, 100):
        large, margin = replace(STEP, grad_norm=123456.0, eta_s=2e6), replace(STEP, preference={"reward_margin": 0.1})
        for step in (STEP, large, margin):
            assert len(step_line(step, NOW_S, width)) < max(width, 78), (width, step_line(step, NOW_S, width))
    assert " margin 0.000 " in step_line(replace(short, preference={"reward_margin": 0.0}), NOW_S, 80)
    assert " margin 0.102 " in step_line(replace(short, preference={"reward_margin": 0.1018}), NOW_S, 80)
    assert " kl 0.102  grad " in step_line(replace(short, preference={"nll_loss": 1.2, "kl": 0.1018}), NOW_S)
    assert "grad inf" in step_line(replace(STEP, grad_norm=float("inf")), NOW_S)


def test_steps_go_to_stdout_and_words_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter(logging_steps=5)
    for step in range(1, 13):
        printer(replace(STEP, step=step, num_steps=12))
    for event in (Notice("a"), Phase("b"), RunFinished("out", 12, 60.0), Notice("warning: a lot is lost")):
        printer(event)
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines()] == ["1/12", "5/12", "10/12", "12/12"]
    done = "done: 12 steps in 1m00s; the result is in out"
    assert err.splitlines() == ["note: a", "b ...", done, "warning: a lot is lost"]


def test_steps_as_json_are_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter(logging_steps=1, as_json=True)
    printer(replace(STEP, step=3, grad_norm=float("inf")))
    printer(EvaluationFinished(3, 12, 1.5, 4.5, 100, 0.5, True, samples=(("?" * 300 + "!", "Yes" + "." * 300),)))
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert (row["step"], row["grad_norm"], float.fromhex(row["loss_hex"])) == (3, None, row["loss"])
    assert "perplexity 4.5" in err
    assert f"sample: {'?' * 199 + '!'!r} -> {'Yes' + '.' * 197!r}" in err, (
        "the prompt's end, and the answer's beginning"
    )


def test_a_download_says_what_is_left() -> None:
    part = Fetching(3, 12, 2**30, 4 * 2**30, 2.0**26)
    assert fetching_line(part) == "downloading: 3 of 12 files, 1 GiB of 4 GiB, 64 MiB/s, 48 s left"
    assert fetching_line(replace(part, bytes_per_s=0.0)) == "downloading: 3 of 12 files, 1 GiB of 4 GiB"


def _write_to(path: str, *streams: int) -> None:
    for stream in streams:
        os.dup2(os.open(path, os.O_WRONLY), stream)


def test_head_reads_three_lines_and_training_goes_on(folder: Path) -> None:
    """All in one: a pipe that closes, no UTF-8, NO_COLOR, a recipe path with spaces, a bar-free full save."""
    (folder / "recipe.yaml").rename(folder / "my own recipe.yaml")
    os.mkfifo(folder / "pipe")
    environment, before = {"LC_ALL": "C", "NO_COLOR": "1"}, partial(_write_to, str(folder / "pipe"), 1)
    command = ("finetune", "my own recipe.yaml", "method=full", "max_steps=5")
    running = launch(folder, *command, environment=environment, before=before)
    done = subprocess.run(["head", "-3", "pipe"], cwd=folder, capture_output=True, timeout=120)
    words = running.finish().expect(0).err
    assert [line.split()[1] for line in done.stdout.decode().splitlines()] == ["1/5", "2/5", "3/5"]
    assert "Traceback" not in words and "BrokenPipe" not in words and "\x1b" not in words and "%|" not in words
    assert "\ndone: 5 steps in" in words and words.splitlines()[-1].endswith("report.html")
    assert num_lines(folder / "out" / "metrics.jsonl") == 5


def test_closed_streams(folder: Path) -> None:
    """The numbers of closed streams went to the next files opened, and progress lines into metrics.jsonl."""
    done = launch(folder, "finetune", "recipe.yaml", "max_steps=1", closed=(0, 1, 2)).finish().expect(0)
    assert num_lines(folder / "out" / "metrics.jsonl") == 1 and (folder / "out" / "report.json").exists()
    assert done.out == done.err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_data_that_a_full_disk_lost_are_an_error(folder: Path) -> None:
    """Story: `convert axolotl.yaml > mine.yaml` on a full disk left half a recipe and exit code 0."""
    for words in ("recipes ls --json", "plan recipe.yaml", "recipes show quickstart"):
        done = launch(folder, *words.split(), before=partial(_write_to, "/dev/full", 1)).finish().expect(5)
        assert "the output could not be written whole" in done.err, words
    write_files(folder, recorded_run(2))
    for words in ("watch .", "watch . --json"):
        launch(folder, *words.split(), before=partial(_write_to, "/dev/full", 1)).finish().expect(5)
    launch(folder, "finetune", "nope.yaml", before=partial(_write_to, "/dev/full", 1, 2)).finish().expect(2)


def test_a_locale_without_utf_8(folder: Path) -> None:
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": "1"}
    done = fresh(folder, "finetune", "näher.yaml", environment=environment).expect(2)
    assert "there is no recipe n" in done.err
    assert done.err.isascii() and "\x1b" not in done.err


# --- report_to: a tracker that fails or hangs costs one line ----------------------------------------------------------

SECRET = "canary-4711-secret"


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.directory_watcher import DirectoryDeletedError
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    with contextlib.suppress(DirectoryDeletedError):  # it is not there yet
        events.Reload()
    return {tag: {item.step: item.value for item in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_metrics_of_every_step(tmp_path: Path, two_blocks: Path) -> None:
    """Also of a run that was killed and resumed; and no secret is in its files."""
    changes = {"report_to": ["tensorboard"], "val_set_size": 2, "num_train_epochs": 3, **STAGES_OF_TWO}
    folder = make_workspace(tmp_path / "work", two_blocks, **changes)
    environment = {"HF_TOKEN": SECRET}
    keys = f"lora.target_modules=.*(q_proj|{SECRET})"
    hanging = {**environment, "ROUNDPIPE_FAULT": "optimizer:slow=60:step=5"}
    running = launch(folder, "finetune", "recipe.yaml", keys, environment=hanging)
    running.wait_for_steps(5)
    running.wait_until(lambda: 5 in scalars(folder / "out" / "tensorboard").get("train/loss", ()))
    running.kill()
    assert running.finish().code == -9
    finetune(folder, keys, "--resume", environment=environment).expect(0)
    files = [path.read_bytes() for path in (folder / "out" / "tensorboard").iterdir()]
    assert all(SECRET.encode() not in content for content in files) and any(b"q_proj" in content for content in files)
    seen = scalars(folder / "out" / "tensorboard")
    rows = metrics(folder / "out")
    for name in ("loss", "learning_rate", "grad_norm", "tokens", "tokens_per_s", "step_s", "bubble_ratio"):
        assert seen[f"train/{name}"] == pytest.approx({row["step"]: row[name] for row in rows}, rel=1e-6)
    evaluation = json.loads((folder / "out" / "eval.jsonl").read_text().splitlines()[-1])
    for name in ("loss", "tokens", "seconds", "perplexity"):
        assert seen[f"eval/{name}"] == pytest.approx({evaluation["step"]: evaluation[name]}, rel=1e-6)
    finetune(folder, keys, "report_to=[]", "output_dir=without").expect(0)
    assert numbers(folder / "without") == numbers(folder / "out")


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_missing_package_is_told_before_anything_loads(name: str, folder: Path) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    done = finetune(folder, f"report_to=[{name}]").expect(2)
    assert f"pip install {name}" in done.err and "loading torch" not in done.err
    assert not (folder / "out").exists()


# --- trackers that do not behave ------------------------------------------------------------------------------------


def tracked(tmp_path: Path, patch: pytest.MonkeyPatch, flush_s: float = 10.0, num_steps: int = 3, **parts: Any) -> Any:
    """Events of a run, and the settings given to a tracker of ours, which fails by its `init`, `log` or `close`."""
    patch.setenv("WANDB_API_KEY", SECRET)
    told, given = list[Event](), list[RunInfo]()

    def begin(info: RunInfo) -> TrackerRun:
        given.append(info)
        parts.get("init", print)()
        return TrackerRun("stub-1", parts.get("log", print), parts.get("close", print))

    patch.setitem(trackers.TRACKERS, "wandb", begin)
    file = tmp_path / "mine.yaml"
    keys = f"report_to: [wandb]\nrevision: branch-{SECRET}\n"
    file.write_text(f"model: some/model\ndatasets: [{{path: rows.jsonl}}]\n{keys}")
    with Trackers(load_recipe(file).recipe, tmp_path, 0, told.append, flush_s=flush_s) as tell:
        for step in range(1, num_steps + 1):
            tell(replace(STEP, step=step))
    return told, given


def notices(told: list[Event]) -> list[str]:
    return [event.text for event in told if isinstance(event, Notice)]


def test_numbers_and_recipe_arrive_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []
    told, (info,) = tracked(tmp_path, monkeypatch, log=lambda *row: rows.append(row))
    assert len(told) == 3 and [step for step, _ in rows] == [1, 2, 3]
    assert rows[0][1]["train/loss"] == STEP.loss
    assert info.config["lora.r"] == 16 and SECRET not in json.dumps(info.config)
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "stub-1"}


@pytest.mark.parametrize("where", ["init", "log", "close"])
def test_a_tracker_that_fails_costs_one_line(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SystemExit(f"no network for {SECRET}")

    (notice,) = notices(tracked(tmp_path, monkeypatch, **{where: fail})[0])
    assert "the run continues: SystemExit: no network for ***" in notice


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(trackers, "MAX_WAITING", 5)
    told, _ = tracked(tmp_path, monkeypatch, flush_s=0.1, num_steps=50, log=lambda *_: release.wait(60))
    release.set()
    assert len(told) - len(notices(told)) == 50
    slow, left = notices(told)
    assert "too slow" in slow and ("left behind" in left)
