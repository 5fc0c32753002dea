"""What ends a command by its true exit code: limits of the system, refusals before anything is loaded, and environment
variables that say nonsense: one clear error before anything starts, never a run that leaves nothing."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roundpipe_cli.cache import CACHE_VARIABLE
from roundpipe_cli.cli.finetune import finetune
from roundpipe_cli.cli.output import explained, run_command
from roundpipe_cli.cli.training import check_environment
from roundpipe_cli.engine.backends.base import is_out_of_memory
from roundpipe_cli.errors import RefusedError, as_ours
from roundpipe_cli.recipe.schema import PipelineConfig, Recipe
from roundpipe_cli.torchrun import Process, launched_without_ranks, this_process
from roundpipe_cli.train.prepare.devices import choose_devices
from tests.support.e2e import python

NOBODY = 65_533
"""A user without processes, whom the limit binds: root is exempt."""


STARTS = (lambda: threading.Thread(target=print).start(), lambda: subprocess.run([sys.executable, "-V"], check=True))


@pytest.mark.parametrize("start", STARTS)
def test_no_more_threads_or_processes_is_exit_5(tmp_path: Path, start: Callable[[], Any]) -> None:
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


def test_a_folder_that_is_held_or_holds_a_run_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    """Imports that the refusal does not need took 7 s of processor time."""
    (tmp_path / "recipe.yaml").write_text("model: m\ndatasets: [{path: rows.jsonl}]\noutput_dir: out\n")
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
        "    heavy = {'torch', 'transformers', 'datasets', 'numpy', 'roundpipe_cli.planning'} & set(sys.modules)\n"
        "    print(ended.code, 'roundpipe_cli.recipe.load' in sys.modules, sorted(heavy))\n"
    )
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert python(code, tmp_path).stdout == "3 True []\n"
    for name, text in ((".roundpipe", ""), ("report.json", "{}")):
        (tmp_path / "out" / name).write_text(text)
    done = python(code, tmp_path)
    assert done.stdout == "2 True []\n" and "the output directory already holds a run" in done.stderr


# --- the environment ------------------------------------------------------------------------------------------------

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
)
RECIPE = Recipe(model="model", datasets=(), output_dir="out", learning_rate=1e-4, gradient_accumulation_steps=4)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def put(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for pair in text.split():
        monkeypatch.setenv(*pair.split("=", 1))


def test_what_torchrun_sets_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ("", "RANK= WORLD_SIZE=", "WORLD_SIZE=1", "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1")
    of_eight = {"RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2": Process(3, 8, 2)}
    for text, expected in {**dict.fromkeys(alone, Process(0, 1)), **of_eight}.items():
        with monkeypatch.context() as patch:
            put(patch, text)
            assert this_process() == expected


@pytest.mark.parametrize(
    ("text", "where"),
    [
        *(("RANK=1", "WORLD_SIZE not set"), ("WORLD_SIZE=2", "RANK not set"), ("RANK=abc", "RANK")),
        *(("RANK=2 WORLD_SIZE=2", "RANK"), ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE"), ("LOCAL_RANK=z", "LOCAL_RANK")),
        ("RANK=0 WORLD_SIZE=99999999999999999999", "WORLD_SIZE"),
        *(("LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK"), ("LOCAL_WORLD_SIZE=8", "LOCAL_WORLD_SIZE")),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=1", "LOCAL_WORLD_SIZE"),
        ("TORCHELASTIC_RESTART_COUNT=x", "TORCHELASTIC_RESTART_COUNT"),
        ("TRANSFORMERS_OFFLINE=maybe", "TRANSFORMERS_OFFLINE"),
        (f"{CACHE_VARIABLE}={__file__}/below", CACHE_VARIABLE),
        (f"{CACHE_VARIABLE}=~nobody-of-that-name/cache", CACHE_VARIABLE),
    ],
)
def test_nonsense_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: str, where: str) -> None:
    """RANK=1 alone once trained into a temporary folder and ended with 0; RANK=abc was a bug with a traceback."""
    put(monkeypatch, text)
    with pytest.raises(RefusedError) as caught:
        check_environment(RECIPE)
    (problem,) = caught.value.problems
    assert (problem.where, caught.value.exit_code) == (where, 2)
    assert problem.found and problem.expected


@pytest.mark.parametrize(("address", "where"), [
    ("", "MASTER_ADDR and MASTER_PORT not set"), ("MASTER_ADDR=a", "MASTER_PORT not set"),
    ("MASTER_ADDR=a MASTER_PORT=x", "MASTER_PORT"), ("MASTER_ADDR=a MASTER_PORT=0", "MASTER_PORT"),
])  # fmt: skip
def test_a_run_without_an_address_is_refused_at_once(monkeypatch: Any, capsys: Any, address: str, where: str) -> None:
    """It loaded torch first, and said that it would wait 10 s for machines that cannot be told."""
    put(monkeypatch, f"RANK=0 WORLD_SIZE=2 {address}")
    with pytest.raises(RefusedError) as caught:
        finetune("recipe.yaml", no_dashboard=True)
    assert [problem.where for problem in caught.value.problems] == [where]
    assert "waits" not in capsys.readouterr().err


def test_named_devices_allow_several_processes_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500")
    assert check_environment(replace(RECIPE, pipeline=PipelineConfig(devices=("cpu",)))) == Process(1, 2, 2)


def test_a_launcher_without_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun -n 2 roundpipe finetune` starts two whole runs, which may be meant: each over its own seed."""
    assert launched_without_ranks() is None
    put(monkeypatch, "SLURM_STEP_NUM_TASKS=2")
    assert "trains alone" in (launched_without_ranks() or "")
    put(monkeypatch, "WORLD_SIZE=2")
    assert launched_without_ranks() is None


def test_hidden_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt CUDA_VISIBLE_DEVICES hides all GPUs: the notice that the processor is used says so."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "gpu0")
    devices, notice = choose_devices("auto")
    if devices == ("cpu", "cpu"):  # a driver that was asked before stays with its answer
        assert "CUDA_VISIBLE_DEVICES is gpu0" in (notice or "")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert "CUDA_VISIBLE_DEVICES is empty" in (choose_devices("auto")[1] or "")


def test_no_bar_of_a_library_is_drawn() -> None:
    """Story: `generate` of a GGUF file, whose reader's tqdm was loaded first, wrote hundreds of lines into a log."""
    code = "import sys\nfrom roundpipe_cli.cli.app import main\nsys.argv = ['roundpipe', '--help']\ntry: main()\n"
    code += "except SystemExit: pass\nfrom tqdm.auto import tqdm\nprint(sum(tqdm(range(300))))"
    done = python(code)
    assert done.stdout.endswith(f"{sum(range(300))}\n") and "300" not in done.stderr


@pytest.mark.parametrize(
    "ask",
    [
        *(lambda: torch.empty(2**60, dtype=torch.uint8), lambda: torch.ones(1).expand(2**58).clone()),
        *(lambda: bytearray(2**62), lambda: mmap.mmap(-1, 2**60), lambda: np.zeros(2**60, dtype=np.uint8)),
    ],
)
def test_a_device_or_host_without_memory_is_no_bug_of_ours(ask: Callable[[], object]) -> None:
    """It was one in `generate`; workers on the processor did not know torch's error."""
    error = explained(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"))
    assert error.exit_code == 5 and "--batch-size" in str(error) and "more" not in str(error)
    with pytest.raises((RuntimeError, MemoryError, OSError)) as caught:
        ask()
    ours = [explained(caught.value), as_ours(caught.value, "saving", "step 1")]
    assert [error.exit_code for error in ours] == [5, 5] and "--batch-size" in str(ours[0])
    assert is_out_of_memory(caught.value) and not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
