"""Whole runs in an odd system: clocks that jump, a memory cgroup (RELIABILITY 29, 44); and what they leave behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli import finetune as finetune_here
from roundpipe_cli.cache import CACHE_VARIABLE
from roundpipe_cli.costs.memory import interpreter_bytes
from roundpipe_cli.train.checkpoint.output_dir import OutputDir
from tests.support.e2e import (
    MAX_WAIT_S,
    REPOSITORY,
    STAGES_OF_TWO,
    assert_same_run,
    child_environment,
    command_line,
    finetune,
    forked,
    launch,
    make_model,
    make_workspace,
    metrics,
    num_lines,
    numbers,
    run,
)
from tests.support.versions import at_least

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


MIB = 1024**2
ENOUGH_BYTES = 170 * MIB + interpreter_bytes(num_gpus=0)
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
HOG = """
import sys, time
held = []
while True:
    held.append(b"x" * (1 << 24))
    time.sleep(0.01)
"""


class Group:
    """A memory cgroup of its own."""

    def __init__(self) -> None:
        base, self._limit_name = (V1, "memory.limit_in_bytes") if V1.is_dir() else (V2, "memory.max")
        self.folder = base / f"roundpipe-test-{os.getpid()}"
        self.folder.mkdir()

    def limit(self, num_bytes: int) -> None:
        (self.folder / self._limit_name).write_text(str(num_bytes))

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def run(self, folder: Path, *words: str) -> tuple[int, str, int]:
        """Exit code, what it said, and its peak of resident memory in bytes."""
        options: dict[str, Any] = {"cwd": folder, "env": child_environment(), "preexec_fn": self.enter, "text": True}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command_line("finetune", "recipe.yaml", *words), **options)
        peak, deadline_s = 0, time.monotonic() + MAX_WAIT_S
        while process.poll() is None:
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            peak = max(peak, int(found[1]) * 1024 if found else 0)
            assert time.monotonic() < deadline_s
            time.sleep(0.03)
        return process.returncode, process.communicate()[0], peak


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    try:
        made = Group()
        made.limit(4096 * MIB)
    except OSError as error:
        pytest.skip(f"needs root and memory cgroups ({error.strerror})")
    yield made
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            return made.folder.rmdir()
        except OSError:  # the last process is on its way out
            time.sleep(0.1)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run in `free`, which had all memory."""
    folder = tmp_path_factory.mktemp("memory")
    work = make_workspace(folder / "work", make_model(folder / "made"), pipeline__threads_per_worker=1)
    finetune(work, "output_dir=free").expect(0)
    return work


def test_refused_before_loading_or_run_within_the_limit(group: Group, work: Path) -> None:
    group.limit(400 * MIB)
    code, text, _ = group.run(work)
    assert code == 5, text
    needed = re.search(r"host memory: needs ([\d.]+) MiB, has [\d.]+ MiB", text)
    assert needed, text
    assert "Needed are interpreter" in text, "the largest part comes first"
    assert re.search(rf"found: [\d.]+ MiB available now of 400 MiB \({group.folder}/memory", text), text
    assert "loading torch" not in text and not (work / "out" / "metrics.jsonl").exists()
    group.limit(ENOUGH_BYTES)
    code, text, peak = group.run(work)
    assert code == 0, text
    assert peak == pytest.approx(float(needed[1]) * MIB, rel=0.1 if at_least("torch", "2.13") else 0.15)
    assert numbers(work / "out") == numbers(work / "free")


def test_a_run_that_the_kernel_killed_resumes(group: Group, work: Path) -> None:
    """Another process of the container takes all memory, and the kernel chooses the run."""
    group.limit(ENOUGH_BYTES)
    slow = {"ROUNDPIPE_FAULT": "optimizer:slow=60:step=4"}  # there until it is killed
    running = launch(work, "finetune", "recipe.yaml", "output_dir=killed", environment=slow, before=group.enter)
    hog = None
    try:
        running.wait_until(lambda: num_lines(work / "killed" / "metrics.jsonl") >= 3)
        Path(f"/proc/{running.process.pid}/oom_score_adj").write_text("1000")
        hog = subprocess.Popen([sys.executable, "-c", HOG], preexec_fn=group.enter)
        assert running.finish().code == -9
    finally:
        running.kill()
        if hog is not None:
            hog.kill()
            hog.wait()
    finetune(work, "output_dir=killed", "--resume").expect(0)
    assert numbers(work / "killed") == numbers(work / "free")


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


@pytest.mark.parametrize(("sign", "fault"), [("tokenising", "tokenize:slow=1"), (" 2/3 ", "ckpt_writer:slow=0.3")])
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
        finetune_here("recipe.yaml", {"output_dir": name, "max_steps": steps, "val_set_size": 2, **every})
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
