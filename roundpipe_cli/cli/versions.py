"""Output of `roundpipe --version`: this program, torch and what it was built for, the driver. Loads no torch."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

from roundpipe_cli import __version__


def version_lines() -> list[str]:
    """One line each for roundpipe, torch and driver."""
    return [f"roundpipe {__version__}", _torch_line(), _driver_line()]


def _torch_line() -> str:
    """torch's version and its CUDA, read from the file that its build writes."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        return f"torch has no version file: {error.strerror}"
    values = dict(re.findall(r"^(\w+)(?:\s*:[^=]+)?\s*=\s*'([^']*)'", text, re.MULTILINE))
    names = (("cuda", "CUDA"), ("hip", "ROCm"))
    built_for = next((f"{name} {values[key]}" for key, name in names if key in values), "the processor only")
    return f"torch {values.get('__version__', 'of unknown version')}, built for {built_for}"


def _driver_line() -> str:
    from roundpipe_cli.costs.nvidia_smi import ask_nvidia_smi

    try:
        done = ask_nvidia_smi(["driver_version"])
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"driver: nvidia-smi does not answer ({type(error).__name__})"
    if done is None:
        return "driver: none (no nvidia-smi)"
    finds_none = done.returncode or not done.stdout.split()
    return "driver: nvidia-smi finds no GPU" if finds_none else f"driver: NVIDIA {done.stdout.split()[0]}"
