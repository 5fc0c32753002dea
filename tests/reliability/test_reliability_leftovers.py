"""Whatever ends a run, none of its processes outlives it, and its lock goes with it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from roundpipe_cli.train.checkpoint.output_dir import OutputDir
from tests.support.e2e import launch, make_model, make_workspace

GONE_WITHIN_S = 40.0
"""Five seconds, on a machine that does eight other things."""


def session_members(leader: int) -> list[int]:
    """Processes of the session, zombies left out."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            members.append(int(folder.name))
    return members


@pytest.mark.parametrize(
    ("sign", "fault"),
    [
        ("tokenising", "tokenize:slow=1"),
        pytest.param("starting the workers", "compute:slow=0.05", marks=pytest.mark.sweep),
        (" 2/3 ", "ckpt_writer:slow=0.3"),
    ],
)
def test_a_killed_run_leaves_no_process_and_no_lock(tmp_path: Path, sign: str, fault: str) -> None:
    work = make_workspace(tmp_path / "work", make_model(tmp_path / "model", num_hidden_layers=1), num_train_epochs=1)
    words = ("finetune", "recipe.yaml")
    running = launch(work, *words, environment={"ROUNDPIPE_FAULT": fault}, before=os.setsid)
    running.wait_until(lambda: sign in running.out + running.err)
    assert running.process.pid in session_members(running.process.pid or 0)
    running.kill(signal.SIGKILL)
    assert running.finish().code == -signal.SIGKILL
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while left := session_members(running.process.pid or 0):
        assert time.monotonic() < deadline_s, f"processes {left} outlive the run"
        time.sleep(0.05)
    with OutputDir(work / "out", resume=any((work / "out").glob("step-*"))):
        pass
