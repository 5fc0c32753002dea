"""Clocks that are wrong, jump or stand still (RELIABILITY 29): they change neither numbers nor what is kept."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.cache import CACHE_VARIABLE
from tests.support.e2e import (
    MAX_WAIT_S,
    REPOSITORY,
    assert_same_run,
    child_environment,
    command_line,
    finetune,
    launch,
    make_workspace,
    metrics,
    run,
)

HOUR_S, DAY_S = 3600.0, 86400.0
WATCHDOG_S = 3.0  # the proof at the start may take longer on a busy machine: the reference run makes it


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, model: Path, shared_caches: Path) -> Path:
    """Output directory of a run at the right time."""
    work = workspace(tmp_path_factory.mktemp("reference"), model)
    finetune(work, environment={CACHE_VARIABLE: str(shared_caches)}).expect(0)
    return work / "out"


def workspace(folder: Path, model: Path, **changes: Any) -> Path:
    return make_workspace(folder / "work", model, save_total_limit=2, **changes)


def assert_same(out: Path, reference: Path) -> None:
    assert_same_run(out, reference)
    assert sorted(path.name for path in out.glob("step-*")) == sorted(path.name for path in reference.glob("step-*"))


def assert_sane_times(work: Path, printed: str) -> None:
    """No time is negative or an hour long, in what the run printed or wrote, and it can be watched."""
    out = work / "out"
    for row in metrics(out):
        assert 0 < row["step_s"] < MAX_WAIT_S and row["tokens_per_s"] > 0, row
    report = json.loads((out / "report.json").read_text())
    assert 0 < report["seconds"] < MAX_WAIT_S, report
    assert "eta " in printed and not re.search(r"eta (-|\d+h)", printed), printed
    steps = [json.loads(line)["step"] for line in run(work, "watch", "out", "--json").expect(0).out.splitlines()]
    assert steps == [row["step"] for row in metrics(out)]


def run_until_killed(work: Path, shift: str, fault: str, *words: str) -> None:
    """`roundpipe finetune` in a new process whose clock is off by `shift`, up to a fault that kills it."""
    command = ["faketime", "-f", shift, *command_line("finetune", "recipe.yaml", *words)]
    environment = child_environment({"ROUNDPIPE_FAULT": fault})
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=MAX_WAIT_S)
    assert done.returncode != 0 and "Caught Killed" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("faketime") is None, reason="needs faketime (apt-get install faketime)")
def test_days_between_the_runs(tmp_path: Path, model: Path, reference: Path) -> None:
    """Begun tomorrow, killed after an update and before its save, resumed yesterday, killed again, ended today."""
    work = workspace(tmp_path, model)
    fault = {"ROUNDPIPE_FAULT": "optimizer:kill:step=3"}
    begun = launch(work, "finetune", "recipe.yaml", environment=fault, before=partial(clock_off_by, DAY_S)).finish()
    assert begun.code == -signal.SIGKILL
    assert [path.name for path in (work / "out").glob("step-*")] == ["step-00000002"]
    run_until_killed(work, "-1d", "ckpt_writer:kill:step=6", "--resume")
    assert (work / "out" / "step-00000004").exists()
    done = finetune(work, "--resume").expect(0)
    assert_same(work / "out", reference)
    assert_sane_times(work, done.out + done.err)


def clock_off_by(seconds: float) -> None:
    """From now on `time.time` is off; `run_until_killed` moves the clocks of all libraries."""
    real = time.time
    time.time = lambda: real() + seconds


def jumping_clock() -> None:
    """From now on `time.time` is an hour off, in turn ahead and behind, with every few calls."""
    real, calls = time.time, [0]

    def jumped() -> float:
        calls[0] += 1
        return real() + (HOUR_S if calls[0] // 3 % 2 else -HOUR_S)

    time.time = jumped


def test_jumps_of_an_hour_in_a_run_that_is_stopped_too(tmp_path: Path, model: Path, reference: Path) -> None:
    """Stopped in a step beside a save, for three times as long as the watchdog waits: it is not stuck."""
    work = workspace(tmp_path, model, watchdog_s=WATCHDOG_S)
    slow = {"ROUNDPIPE_FAULT": "compute:slow=0.05,ckpt_writer:slow=0.2"}
    running = launch(work, "finetune", "recipe.yaml", environment=slow, before=jumping_clock)
    out = work / "out"
    running.wait_until(lambda: any(out.glob(".tmp-step-*")))
    running.kill(signal.SIGSTOP)
    time.sleep(3 * WATCHDOG_S)
    running.kill(signal.SIGCONT)
    done = running.finish().expect(0)
    assert_same(out, reference)
    assert_sane_times(work, done.out + done.err)


def test_no_wall_clock_decides_anything() -> None:
    """`time.time` and dates are for names, logs and the age of cached files only; waiting is monotonic."""
    allowed: dict[str, Any] = {"cache.py": 2, "events.py": 1, "follow.py": 1, "lost_devices.py": 2}
    found = {
        path.name: count
        for path in (REPOSITORY / "roundpipe_cli").rglob("*.py")
        if (count := path.read_text(encoding="utf-8").count("time.time()")) > 0
    }
    assert found == allowed
