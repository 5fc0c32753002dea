"""Whatever ends a run, none of its processes outlives it, and its lock goes with it; nor do files and threads."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from roundpipe_cli import finetune
from roundpipe_cli.train.checkpoint.output_dir import OutputDir
from tests.support.e2e import STAGES_OF_TWO, forked, launch, make_model, make_workspace

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


def held_by_this_process() -> dict[str, Counter[str]]:
    """Open files, threads, and files in the folder for temporary ones."""
    files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            files.append(str(descriptor.readlink()))
    return {
        "files": Counter(files),
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "system's threads": Counter(str(len(list(Path("/proc/self/task").iterdir())))),
        "temporary": Counter(path.name for path in Path(tempfile.gettempdir()).iterdir()),
    }


def runs_of_one_program(folder: str) -> list[dict[str, Counter[str]]]:
    """What is held after a run, which loads libraries, and after another one with all that a run may do."""
    os.chdir(folder)
    Path("temporary").mkdir()
    tempfile.tempdir = str(Path("temporary").resolve())
    held = []
    for name, steps in (("first", 2), ("second", 5)):
        every = {"eval_steps": 1, "save_steps": 1, "eval_samples": 1, "load_best_model_at_end": True}
        finetune("recipe.yaml", {"output_dir": name, "max_steps": steps, "val_set_size": 2, **every})
        gc.collect()
        held.append(held_by_this_process())
    return held


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_leaves_no_open_file_thread_or_temporary_file(tmp_path: Path, method: str) -> None:
    """A descriptor that each evaluation lost was not noticed."""
    model = make_model(tmp_path / "model", num_hidden_layers=2)
    work = make_workspace(tmp_path / "work", model, method=method, num_train_epochs=9, **STAGES_OF_TWO)
    first, second = forked(runs_of_one_program, str(work))
    assert first["threads"] and first["files"]
    assert second == first
