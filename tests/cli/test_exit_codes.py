"""What ends a command by its true exit code: limits of the system, and refusals before anything is loaded."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from roundpipe_cli.cli.output import run_command
from tests.support.e2e import child_environment, write_recipe, write_rows

NOBODY = 65_533
"""A user without processes, whom the limit binds: root is exempt."""


def _thread() -> None:
    threading.Thread(target=lambda: None).start()


def _process() -> None:
    subprocess.run([sys.executable, "--version"], check=True)


@pytest.mark.parametrize("start", [_thread, _process])
def test_no_more_threads_or_processes_is_exit_5(tmp_path: Path, start: Callable[[], None]) -> None:
    """RLIMIT_NPROC was told as a bug of ours; a container's limit on processes ends in the same errors."""
    said = os.open(tmp_path / "stderr", os.O_RDWR | os.O_CREAT)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.dup2(said, 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115, PTH123
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
            if os.getuid() == 0:
                os.setuid(NOBODY)
            code = run_command(start)
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    text = (tmp_path / "stderr").read_text()
    assert os.waitstatus_to_exitcode(status) == 5, text
    assert "no more threads or processes" in text and "ulimit -u" in text


def test_a_second_run_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """It took 7 s of processor time to load what the refusal does not need."""
    write_recipe(tmp_path / "recipe.yaml")
    write_rows(tmp_path / "rows.jsonl")
    lock = tmp_path / "out" / ".roundpipe.lock"
    lock.parent.mkdir()
    lock.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    code = (
        "import sys\n"
        "from roundpipe_cli.cli.app import main\n"
        "sys.argv = ['roundpipe', 'finetune', 'recipe.yaml']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as ended:\n"
        "    heavy = {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "    print(ended.code, sorted(heavy))\n"
    )
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, timeout=60
        )
    assert done.stdout == "3 []\n", done.stdout + done.stderr


def test_a_folder_that_holds_a_run_is_refused_before_the_planner_is_imported(tmp_path: Path) -> None:
    """It took 3.4 times the processor time of `--help`, most of it for imports that only later checks need."""
    (tmp_path / "recipe.yaml").write_text("model: m\ndatasets: [{path: rows.jsonl}]\noutput_dir: out\n")
    (tmp_path / "out").mkdir()
    for name, text in ((".roundpipe", ""), ("report.json", "{}")):
        (tmp_path / "out" / name).write_text(text)
    command = [sys.executable, "-X", "importtime", "-m", "roundpipe_cli", "finetune", "recipe.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "the output directory already holds a run" in done.stderr
    assert "roundpipe_cli.recipe.load" in done.stderr and "roundpipe_cli.planning" not in done.stderr
