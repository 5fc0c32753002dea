"""Figures of this machine apart from its GPUs: host memory, its layout and its locking, cores, disk.

A container's memory limit counts before the machine's: cgroup v2 and v1 are both read.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from roundpipe_cli.costs.hardware import Device, Hardware, with_measured
from roundpipe_cli.costs.measurement import MEASURE, MEASURED_ON, own_path, read_measurement
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.units import GIB, format_bytes

# Layout of the host's memory: NUMA nodes, and pages of 2 MiB for memory that asks for them.

SYS = Path("/sys")
NODES = "devices/system/node"
SWITCH = "kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Memory nodes and pages, as the system reports them."""

    nodes: tuple[int, ...]
    """NUMA nodes that have memory; one or none where the system does not tell."""
    huge_pages: str | None
    """always, madvise or never; None: the system has no such switch."""

    @property
    def gives_huge_pages(self) -> bool:
        """Whether memory that asks for pages of 2 MiB gets them."""
        return self.huge_pages in ("always", "madvise")


def host_layout(system: Path = SYS) -> HostLayout:
    """Read from `/sys`; a system without it has one node and no switch."""
    listed = _read(system / NODES / "has_memory") or _read(system / NODES / "online")
    chosen = re.search(r"\[(\w+)\]", _read(system / SWITCH))
    return HostLayout(_numbers(listed), chosen[1] if chosen else None)


def _read(path: Path) -> str:
    """The text of a file of the system; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _numbers(text: str) -> tuple[int, ...]:
    """`0-1,4` as (0, 1, 4)."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return ()
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


CPU_FLOAT32_FLOPS_PER_S_PER_CORE = 60e9
"""Whole training steps of SmolLM2-135M in float32 on a 2-core AVX-512 machine: 150 tokens/s."""
CPU_BFLOAT16_SPEEDUP = 2.6
"""Speed of bfloat16, in that of float32, where the processor has matrix units for it (amx_bf16). Reported, not
measured here."""
CPU_SLOW_BFLOAT16 = 0.75
"""Speed of bfloat16 without such units, avx512_bf16 included: 102 against 136 tokens/s on a 2-core
AVX512-BF16 machine."""
CPU_NO_16_BIT = 0.1
"""In bfloat16 or float16 on an x86 processor without AVX-512: 10 against 96 tokens/s, on a 2-core AVX2 machine."""
CPU_MEMORY_BYTES_PER_S = 20e9
MAX_PARAMETERS_ON_CPU = 2_000_000_000
"""Larger models are trained on the processor only if the recipe names the devices."""


def is_large_for_cpu(hardware: Hardware, parameters: int) -> bool:
    """Whether the machine has no GPU, and the model more than `MAX_PARAMETERS_ON_CPU`."""
    return all(device.is_cpu for device in hardware.devices) and parameters > MAX_PARAMETERS_ON_CPU


_LIMIT_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and use of a cgroup, version 2 and version 1."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory in bytes; a container's limit is taken into account."""

    total_bytes: int
    available_bytes: int
    limited_by: str
    """`the machine` or the cgroup file that sets the limit."""


def host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Memory that this process may use. Unknown systems (no /proc) count as 8 GiB."""
    pairs = (line.split(":", 1) for line in _read(proc / "meminfo").splitlines() if ":" in line)
    figures = {key: int(words[0]) * 1024 for key, value in pairs if (words := value.split()) and words[0].isdecimal()}
    total = figures.get("MemTotal", 8 * GIB)
    memory = HostMemory(total, figures.get("MemAvailable", total), "the machine")
    for folder in _cgroup_folders(proc, cgroup):
        for limit_name, used_name in _LIMIT_FILES:
            limit = _read_int(folder / limit_name)
            if limit is not None and limit < memory.total_bytes:
                used = _read_int(folder / used_name) or 0
                lines = _read(folder / "memory.stat").splitlines()
                # page cache that the kernel gives back before it refuses memory
                reclaimable = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
                free = max(0, limit - used + reclaimable)
                memory = HostMemory(limit, min(memory.available_bytes, free), str(folder / limit_name))
    return memory


def process_bytes() -> int:
    """Resident memory of this process without `file_bytes`; 0 where the system does not tell."""
    return _resident_bytes("RssAnon:", "RssShmem:")


def file_bytes() -> int:
    """Resident pages of files, such as mapped weights, which the system takes back where memory is short."""
    return _resident_bytes("RssFile:")


def _resident_bytes(*kinds: str) -> int:
    lines = (line.split() for line in _read(Path("/proc/self/status")).splitlines())
    return sum(1024 * int(words[1]) for words in lines if words and words[0] in kinds)


def describe_memory(memory: HostMemory) -> str:
    """`32 GiB of host memory, 21.5 GiB of it free now`, for `doctor`, `init`, `plan`; `finetune` takes what is free."""
    return f"{format_bytes(memory.total_bytes)} of host memory, {format_bytes(memory.available_bytes)} of it free now"


def _cgroup_folders(proc: Path, cgroup: Path) -> list[Path]:
    """Memory cgroups of this process and their parents, outermost first."""
    folders = [cgroup, cgroup / "memory"]
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = cgroup / "memory" if controllers else cgroup
        for part in Path(path.strip("/")).parts:
            folder = folder / part
            folders.append(folder)
    return folders


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdecimal() else None


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_devices(count: int) -> tuple[Device, ...]:
    """`count` logical workers that share this machine's cores and memory equally."""
    rate = CPU_FLOAT32_FLOPS_PER_S_PER_CORE * num_cores() / count
    rate16 = rate * _speedup_in_16_bit()
    device = Device(
        name="cpu",
        is_cpu=True,
        memory_bytes=host_memory().total_bytes,
        memory_bytes_per_s=CPU_MEMORY_BYTES_PER_S / count,
        fp16_accumulate_flops_per_s=rate16,
        fp32_accumulate_flops_per_s=rate16,
        float32_flops_per_s=rate,
        has_bfloat16=True,
        link_bytes_per_s=CPU_MEMORY_BYTES_PER_S / 2,
    )
    return (device,) * count


def processor_name() -> str:
    """The processor's own name; empty where the system does not tell."""
    lines = _cpuinfo().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _cpuinfo() -> str:
    return _read(Path("/proc/cpuinfo"))


SLOW_NOTE, NOT_USED = "slow: ", "note: this machine's own measurement"
"""Notes of a machine that begin so say how to be many times faster, or to know more; a plan shows them with its
verdict."""


def slow_in_16_bit(dtype: str) -> str | None:
    """A note for workers on this machine's processor, where it computes `dtype` many times slower than float32."""
    if dtype == "float32" or _speedup_in_16_bit() > CPU_NO_16_BIT:
        return None
    return (
        f"{SLOW_NOTE}no AVX-512 here, so {dtype} takes {1 / CPU_NO_16_BIT:.0f} times as long as float32; "
        "set dtype=float32"
    )


def _speedup_in_16_bit() -> float:
    """Operations a second in 16 bit, in those in float32."""
    features = _cpuinfo()
    if "amx_bf16" in features:
        return CPU_BFLOAT16_SPEEDUP
    return CPU_NO_16_BIT if "avx2" in features and "avx512" not in features else CPU_SLOW_BFLOAT16


def this_machine(devices: tuple[Device, ...], description: str, notes: tuple[str, ...], output_dir: Path) -> Hardware:
    """The machine with these devices, its measured host memory and the free disk under `output_dir`; with the rates of
    its own measurement where there is one."""
    memory = host_memory()
    measured = f"measured: {memory.total_bytes / GIB:.1f} GiB of host memory ({memory.limited_by})"
    return _with_own_rates(
        Hardware(
            description=description,
            devices=devices,
            host_memory_bytes=memory.total_bytes,
            disk_free_bytes=free_disk_bytes(output_dir),
            notes=(*notes, measured),
            is_here=True,
        )
    )


ASSUMED_RATES = ("assumed: rates of", "assumed: CPU rates")
"""How notes on rates that nobody measured begin."""


def _with_own_rates(hardware: Hardware) -> Hardware:
    """The machine with what `roundpipe doctor --measure` measured; a note says so, or why that is not used."""
    try:
        if not own_path().exists():
            return hardware
        measurement, torch = read_measurement(own_path()), metadata.version("torch")
        parts = len(hardware.devices) / len(measurement.workers)
        devices = tuple(filter(None, (with_measured(one, measurement, cpu_parts=parts) for one in hardware.devices)))
        why = "" if len(devices) == len(hardware.devices) else "it is of other devices"
        why = why if measurement.torch == torch else f"it was made with torch {measurement.torch}, here is {torch}"
        if (measurement.processor, measurement.cores) != (processor_name(), num_cores()):
            why = "it is of another processor"
    except RefusedError as error:
        why = error.in_short
    if why:
        note = f"{NOT_USED} is not used: {why}; `{MEASURE}` measures anew"
        return replace(hardware, notes=(*hardware.notes, note))
    return replace(
        hardware,
        devices=devices,
        description=f"{hardware.description}, {MEASURED_ON}{measurement.label}",
        host_memory_bytes_per_s=measurement.update_bytes_per_s,
        notes=(measurement.note, *(note for note in hardware.notes if not note.startswith(ASSUMED_RATES))),
    )


LOCKED_ON_WSL = "WSL2 lets a process page-lock 0.5 to 2 GiB in all; Linux itself has no such limit"


def describe_locking() -> str:
    """Where the limit of page-locked memory comes from. `ulimit -l` is none: NVIDIA's driver does not look at it."""
    return LOCKED_ON_WSL if is_wsl() else "other programs may hold page-locked memory, or a container has a limit"


def is_wsl() -> bool:
    """Whether this is Linux inside Windows, by its kernel's name."""
    return "microsoft" in platform.release().lower()


def free_disk_bytes(folder: Path) -> int | None:
    """Free bytes of the file system that `folder` is or would be on."""
    for existing in (folder.absolute(), *folder.absolute().parents):
        if existing.exists():
            with suppress(OSError):
                return shutil.disk_usage(existing).free
            return None
    return None
