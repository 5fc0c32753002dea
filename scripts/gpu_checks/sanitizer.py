"""compute-sanitizer on tiny models; simulated, the same steps with events that come late and copies put off."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from roundpipe_cli.engine.backends import cuda
from scripts.gpu_checks.place import Check, CheckPlace, Figures, SkippedCheckError, check
from tests.support.simulated_cases import CASES, is_equal, page_locked

TOOLS = ("memcheck", "initcheck", "synccheck")
NAMES = ("lora", "full")
ERROR_CODE = 9
LIMIT_S = 150.0
ROOT = Path(__file__).resolve().parents[2]


def checks(place: CheckPlace) -> Iterator[Check]:
    if place.is_simulated:
        for name in NAMES:
            yield check(f"{name}, late events", late_events, name)
        return
    for tool in TOOLS:
        yield check(tool, sanitized, place, tool, limit_s=LIMIT_S)


def late_events(name: str) -> Figures:
    """Bits and order of accesses under two seeds."""
    case, expected = CASES[name], CASES[name].on_processor()
    for seed in range(2):
        found, simulation = case.simulated(seed, lazy=seed == 1, tolerant=True)
        assert is_equal(found, expected) and not simulation.unordered, f"seed {seed}: {simulation.unordered[:1]}"
    return {"unordered": 0}


def sanitized(place: CheckPlace, tool: str) -> Figures:
    """Tiny steps in a process under one of the sanitizer's tools."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        raise SkippedCheckError("compute-sanitizer is not installed")
    words = [program, "--tool", tool, "--error-exitcode", str(ERROR_CODE), "--target-processes", "all"]
    words += [sys.executable, "-c", f"from scripts.gpu_checks.sanitizer import tiny; tiny({place.first})"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # an access beyond a tensor then shows
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    if "Device not supported" in done.stdout:
        raise SkippedCheckError(f"compute-sanitizer does not support this device: {done.stdout[-300:]}")
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-1000:]}"
    return {"last_line": (done.stdout.strip().splitlines() or [""])[-1]}


def tiny(index: int) -> None:
    """A step each of LoRA and full fine-tuning, two workers on one GPU."""
    for name in NAMES[:2]:
        rig = CASES[name].rig()
        with page_locked(rig):
            CASES[name].on(rig, [cuda.CudaBackend(index), cuda.CudaBackend(index)])
