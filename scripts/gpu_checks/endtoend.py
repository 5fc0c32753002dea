"""`finetune` as a user has it: on a terminal with its dashboard, killed, and resumed to the losses of a whole run."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from roundpipe_cli.limited import PR_SET_PDEATHSIG
from scripts.gpu_checks.place import Check, CheckPlace, Figures, check, require
from tests.support.e2e import REPOSITORY, make_model, make_workspace, metrics

LIMIT_S, STEPS, KILLED_AT = 140.0, 12, 4
MAX_DIFFERENCE = 1e-3


def checks(place: CheckPlace) -> Iterator[Check]:
    yield check("killed under its dashboard, and resumed", killed_and_resumed, place, limit_s=LIMIT_S)


def killed_and_resumed(place: CheckPlace) -> Figures:
    """SIGKILL after a few steps; the losses of all steps are those of a run that nobody killed."""
    require("omegaconf")
    devices = ["cpu", "cpu"] if place.is_simulated else [f"cuda:{index}" for index in place.pairs[-1]]
    pipeline = {"devices": devices, "threads_per_worker": 1}
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model", num_hidden_layers=2)
        folder = make_workspace(Path(name) / "run", model, pipeline=pipeline, max_steps=STEPS, num_train_epochs=9)
        shown = on_terminal(folder, "output_dir=killed", kill_at=folder / "killed" / "metrics.jsonl")
        for words in (["output_dir=killed", "--resume", "--no-dashboard"], ["output_dir=whole", "--no-dashboard"]):
            done = subprocess.run(command(*words), cwd=folder, env=environment(), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
        losses = [[row["loss"] for row in metrics(folder / kind)] for kind in ("killed", "whole")]
    assert b"\x1b[" in shown, "no dashboard was drawn"
    assert len(losses[0]) == len(losses[1]) == STEPS, losses
    worst = max(abs(one - other) / abs(other) for one, other in zip(*losses, strict=True))
    assert worst <= MAX_DIFFERENCE, losses
    return {"steps": STEPS, "error": worst}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "roundpipe_cli", "finetune", "recipe.yaml", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}


def take_terminal() -> None:
    """Own the terminal, as a shell's program does; end with the check."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def on_terminal(folder: Path, *words: str, kill_at: Path) -> bytes:
    """What a run draws on a terminal until it is killed, a few rows into its metrics."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))  # a terminal has a size
    child = subprocess.Popen(
        command(*words), cwd=folder, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(theirs)
    shown = bytearray()

    def read() -> None:
        try:
            while piece := os.read(ours, 65536):
                shown.extend(piece)
        except OSError:  # the child has ended
            pass

    reader = threading.Thread(target=read)
    reader.start()
    while child.poll() is None and (not kill_at.exists() or kill_at.read_bytes().count(b"\n") < KILLED_AT):
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    reader.join()
    os.close(ours)
    return bytes(shown)
