"""A memory cgroup as a container has it (RELIABILITY 44): refused before loading, or it runs; killed, it resumes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundpipe_cli.costs.memory import interpreter_bytes
from tests.support.e2e import (
    MAX_WAIT_S,
    child_environment,
    command_line,
    finetune,
    launch,
    make_model,
    make_workspace,
    num_lines,
    numbers,
)
from tests.support.versions import at_least

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
        process = subprocess.Popen(
            command_line("finetune", "recipe.yaml", *words),
            cwd=folder,
            env=child_environment(),
            preexec_fn=self.enter,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
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
