"""`watch` in plain lines, of files that a run has left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from roundpipe_cli.cli.watch import watch
from roundpipe_cli.dashboard.live import MIN_HEIGHT, last_frame
from roundpipe_cli.dashboard.replay import RunFiles
from roundpipe_cli.dashboard.state import fold_all
from roundpipe_cli.events import EvaluationFinished, Event, RunStopped, StepFinished, WorkSeen, encode
from roundpipe_cli.train.monitor.telemetry import metrics_row
from tests.support.recorded import recorded_run

REWARDS = {"rewards_chosen": 0.8, "rewards_rejected": 0.1, "reward_margin": 0.7, "reward_accuracy": 0.875}


def write_files(folder: Path, events: Sequence[tuple[float, Event]]) -> Path:
    """The files that a run with these events leaves."""
    step, rows, lines = 0, [], []
    for time_s, event in events:
        if isinstance(event, StepFinished):
            step = event.step
            rows.append(metrics_row(event))
        elif not isinstance(event, WorkSeen):
            lines.append({"t": time_s, "step": step, **encode(event)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_that_is_over_is_told_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines are read in no time, so workers were looked at in the first and the last step only; and of a run that
    stopped the last step was not the last one."""
    events = recorded_run(2)
    watch([str(write_files(tmp_path, [*events, (events[-1][0], RunStopped("stopped by SIGINT"))]))], verbose=True)
    said = capsys.readouterr().err
    looks = [line.split()[1] for line in said.splitlines() if line.startswith("  step ")]
    assert looks[0] == "1" and looks[-1] == "40" and 4 <= len(looks) <= 8, looks
    assert said.count("  worker 0: cuda:0, busy ") == said.count("  worker 1: cuda:1, busy ") == len(looks)
    assert said.rstrip().endswith("stopped by SIGINT")


def test_preference_pairs_are_told_from_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`watch` dropped their evaluations, showed the gradient norm in place of the margin, and `--json` null."""
    events = [
        (time_s, replace(event, preference=REWARDS) if isinstance(event, (StepFinished, EvaluationFinished)) else event)
        for time_s, event in recorded_run(2)
    ]
    write_files(tmp_path, events)
    state = fold_all(RunFiles(tmp_path).poll()[1])
    assert state.step is not None and state.step.preference == REWARDS and len(state.evaluations) == 4
    watch([str(tmp_path)])
    out = capsys.readouterr().out
    assert "margin 0.700" in out and "eval  40/100  loss 1.1531  margin 0.7  accuracy 88%  best" in out
    watch([str(tmp_path)], json_output=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["preference"] == REWARDS


@pytest.mark.parametrize("num_workers", [2, 16])
def test_the_frame_that_stays_has_every_worker(num_workers: int) -> None:
    """`and 12 more workers: a higher terminal shows them`, though what is above a terminal's first line scrolls."""
    from rich.console import Console

    frame = last_frame(fold_all(recorded_run(num_workers)), Console(force_terminal=True), (60, 15))
    text = "\n".join(line.plain for line in frame)
    assert all(f"cuda:{worker} " in text for worker in range(num_workers)) and "more workers" not in text
    assert "loss" in text and "wait" in text and len(frame) >= MIN_HEIGHT - 1
