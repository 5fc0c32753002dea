"""Output of `roundpipe --version`: this program, torch and what it was built for, the driver. Loads no torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from roundpipe_cli import __version__

DRIVER_TIMEOUT_S = 10.0


def version_lines() -> list[str]:
    """One line each for roundpipe, torch and driver."""
    return [f"roundpipe {__version__}", torch_line(), driver_line()]


def torch_line() -> str:
    """torch's version and its CUDA, read from the file that its build writes."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        return f"torch has no version file: {error.strerror}"
    found = dict(re.findall(r"^(\w+)(?:\s*:[^=]+)?\s*=\s*'([^']*)'", text, re.MULTILINE))
    built_for = [f"{name} {found[key]}" for key, name in (("cuda", "CUDA"), ("hip", "ROCm")) if key in found]
    return (
        f"torch {found.get('__version__', 'of unknown version')}, built for {(built_for or ['the processor only'])[0]}"
    )


def driver_line() -> str:
    """The NVIDIA driver's version, asked of nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "driver: none (no nvidia-smi)"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"driver: nvidia-smi does not answer ({type(error).__name__})"
    lines = done.stdout.split()
    if done.returncode or not lines:
        return "driver: nvidia-smi finds no GPU"
    return f"driver: NVIDIA {lines[0]}"
