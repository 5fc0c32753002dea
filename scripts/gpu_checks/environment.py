"""Versions and devices, before anything else."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roundpipe_cli.costs import machine
from roundpipe_cli.units import GIB
from scripts.gpu_checks.place import OPTIONAL, Check, CheckPlace, Figures, SkippedCheckError, check, skip_unless_real

PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "safetensors", "numpy", *OPTIONAL)
DRIVER_FIELDS = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,compute_cap,power.limit"
LOAD_FIELDS = (
    "pcie.link.gen.current,pcie.link.width.current,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,"
    "clocks_throttle_reasons.active"
)
"""The last is a mask: 0x4 the power limit, 0x20 and 0x40 heat, 0x80 the power supply."""
LOAD_S = 3.0


def checks(place: CheckPlace) -> Iterator[Check]:
    yield check("packages", packages)
    yield check("host", host)
    yield check("driver", driver)
    yield check("torch", torch_build)
    yield check("devices", devices, place)
    yield check("topology", topology)
    yield check("messages of the driver", driver_messages)
    yield check("under load", under_load, place)


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
    return {"fields": DRIVER_FIELDS, "gpus": asked(program, DRIVER_FIELDS)}


def asked(program: str, fields: str) -> list[str]:
    """A line of nvidia-smi for each GPU."""
    words = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()


def topology() -> Figures:
    """How GPUs and processors are connected, and which memory is near."""
    nodes = Path("/sys/devices/system/node/online")
    found: dict[str, Any] = {"numa_nodes": nodes.read_text().strip() if nodes.exists() else "unknown"}
    if program := shutil.which("nvidia-smi"):
        done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=30)
        found["topology"] = (done.stdout or done.stderr).splitlines()
    return found


def driver_messages() -> Figures:
    """The kernel's lines about GPU faults (Xid), where this user may read them."""
    if shutil.which("dmesg") is None:
        return {"xid": "dmesg not found"}
    done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=30)
    if done.returncode:
        return {"xid": done.stderr.strip()[:200]}
    return {"xid": [line for line in done.stdout.splitlines() if "Xid" in line][-20:]}


def under_load(place: CheckPlace) -> Figures:
    """Clocks, throttling and the links' generation while all GPUs multiply and copy."""
    skip_unless_real(place, "load")
    import torch

    program = shutil.which("nvidia-smi")
    if program is None or not torch.cuda.is_available():
        raise SkippedCheckError("nvidia-smi or a CUDA device is missing")
    host = torch.ones(2**26, dtype=torch.uint8, pin_memory=True)
    made = [torch.ones(4096, 4096, dtype=torch.float16, device=torch.device("cuda", index)) for index in place.indices]
    warm_s = time.monotonic() + LOAD_S
    asking: subprocess.Popen[str] | None = None
    while asking is None or asking.poll() is None:
        for one in made:
            one @ one
            host.to(one.device, non_blocking=True)
        for one in made:
            torch.cuda.synchronize(one.device)
        if asking is None and time.monotonic() > warm_s:
            words = [program, f"--query-gpu={LOAD_FIELDS}", "--format=csv,noheader"]
            asking = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    return {"fields": LOAD_FIELDS, "gpus": asking.communicate()[0].splitlines()}


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
