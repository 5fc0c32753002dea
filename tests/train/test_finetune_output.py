"""What is printed, and what happens when nobody reads it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from roundpipe_cli.cli.lines import LinePrinter, step_line
from roundpipe_cli.dashboard.state import fetching_line
from roundpipe_cli.events import EvaluationFinished, Fetching, Notice, Phase, RunFinished, StepFinished
from tests.dashboard.test_dashboard_watch import write_files
from tests.support.e2e import STAGES, fresh, launch, make_workspace, num_lines
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
