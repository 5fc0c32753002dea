"""Environment variables that say nonsense: one clear error before anything starts, never a run that leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roundpipe_cli.cli.finetune import check_environment
from roundpipe_cli.costs.machine import Process, launched_without_ranks, this_process
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import CACHE_VARIABLE
from roundpipe_cli.recipe.schema import PipelineConfig, Recipe
from roundpipe_cli.train.prepare.devices import choose_devices

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Process(0, 1)),
        ("RANK= WORLD_SIZE=", Process(0, 1)),
        ("WORLD_SIZE=1", Process(0, 1)),
        ("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", Process(0, 1)),
        ("RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", Process(3, 8, 2)),
    ],
)
def test_what_torchrun_sets_is_understood(monkeypatch: pytest.MonkeyPatch, text: str, expected: Process) -> None:
    put(monkeypatch, text)
    assert this_process() == expected


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("RANK=1", "WORLD_SIZE not set"),
        ("RANK=0", "WORLD_SIZE not set"),
        ("RANK=1 WORLD_SIZE=", "WORLD_SIZE not set"),
        ("WORLD_SIZE=2", "RANK not set"),
        ("RANK=abc", "RANK"),
        ("RANK=1.0 WORLD_SIZE=2", "RANK"),
        ("RANK=-1 WORLD_SIZE=2", "RANK"),
        ("RANK=2 WORLD_SIZE=2", "RANK"),
        ("RANK=0 WORLD_SIZE=abc", "WORLD_SIZE"),
        ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE"),
        ("RANK=0 WORLD_SIZE=99999999999999999999", "WORLD_SIZE"),
        ("LOCAL_RANK=z", "LOCAL_RANK"),
        ("LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK"),
        ("LOCAL_WORLD_SIZE=8", "LOCAL_WORLD_SIZE"),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=1", "LOCAL_WORLD_SIZE"),
        ("TORCHELASTIC_RESTART_COUNT=x", "TORCHELASTIC_RESTART_COUNT"),
        ("RANK=0 WORLD_SIZE=2", "MASTER_ADDR and MASTER_PORT not set"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", "MASTER_PORT not set"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=x", "MASTER_PORT"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=70000", "MASTER_PORT"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", "MASTER_PORT"),
        ("HF_HUB_OFFLINE=y", "HF_HUB_OFFLINE"),
        ("TRANSFORMERS_OFFLINE=maybe", "TRANSFORMERS_OFFLINE"),
        (f"{CACHE_VARIABLE}={__file__}", CACHE_VARIABLE),
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


def test_named_devices_allow_several_processes_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500")
    named = Recipe(
        model="model",
        datasets=(),
        output_dir="out",
        learning_rate=1e-4,
        gradient_accumulation_steps=4,
        pipeline=PipelineConfig(devices=("cpu",)),
    )
    assert check_environment(named) == Process(1, 2, 2)


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


def test_the_command_leaves_with_2(tmp_path: Path) -> None:
    """As a user sees it: before the model is looked for, and nothing is made."""
    (tmp_path / "recipe.yaml").write_text("model: nowhere\ndatasets: [{path: rows.jsonl}]\n")
    command = [sys.executable, "-m", "roundpipe_cli", "finetune", "recipe.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done
    assert "WORLD_SIZE not set" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
