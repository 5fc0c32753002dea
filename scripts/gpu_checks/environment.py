"""Versions and devices, before anything else."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

from roundpipe_cli.costs import machine
from roundpipe_cli.units import GIB
from scripts.gpu_checks.place import OPTIONAL, Check, CheckPlace, Figures, check

PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "safetensors", "numpy", *OPTIONAL)
DRIVER_FIELDS = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,compute_cap,power.limit"


def checks(place: CheckPlace) -> Iterator[Check]:
    yield check("packages", packages)
    yield check("host", host)
    yield check("driver", driver)
    yield check("torch", torch_build)
    yield check("devices", devices, place)


def packages() -> Figures:
    """Versions, and what is missing."""
    found: dict[str, str] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        if importlib.util.find_spec(name) is not None:
            found[name] = importlib.metadata.version(name)
    return {**found, "missing": [name for name in PACKAGES if name not in found], "executable": sys.executable}


def host() -> Figures:
    memory = machine.host_memory()
    return {
        "processor": machine.processor_name(),
        "cores": machine.num_cores(),
        "memory_bytes": memory.total_bytes,
        "limited_by": memory.limited_by,
        "is_wsl": machine.is_wsl(),
    }


def driver() -> Figures:
    """What nvidia-smi says, a line for each GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"nvidia-smi": "not found"}
    words = [program, f"--query-gpu={DRIVER_FIELDS}", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    return {"fields": DRIVER_FIELDS, "gpus": done.stdout.splitlines()}


def torch_build() -> Figures:
    import torch

    found = {"cuda": torch.version.cuda, "hip": torch.version.hip, "architectures": torch.cuda.get_arch_list()}
    return {**found, "cudnn": torch.backends.cudnn.version()}


def devices(place: CheckPlace) -> Figures:
    """The GPUs that torch sees, and the machine's name for tables; empty without any."""
    import torch

    with place.devices():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            return {}
        found = []
        for index in range(count):
            one = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            found.append({
                "name": one.name, "capability": f"{one.major}.{one.minor}", "memory_bytes": total, "free_bytes": free,
                "multiprocessors": one.multi_processor_count, "bfloat16": torch.cuda.is_bf16_supported(False),
            })  # fmt: skip
        names = sorted({str(one["name"]) for one in found})
    memory = machine.host_memory().total_bytes / GIB
    label = f"{count} x {', '.join(names)}, torch {torch.__version__}, {machine.num_cores()} cores, {memory:.0f} GiB"
    return {"label": f"simulated on the processor: {label}" if place.is_simulated else label, "gpus": found}
