"""Figures of this machine: GPUs (asked of nvidia-smi, so without torch), host memory and its layout, cores, disk.

A container's memory limit counts before the machine's: cgroup v2 and v1 are both read.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from roundpipe_cli.costs.hardware import Device, Hardware, catalogue, find_gpu, gpu_device
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.files import append_line, cache_folder, read_regular
from roundpipe_cli.units import GIB, MIB

# The place of this process in a run, by torchrun's environment variables. No torch.
#
#     RANK, WORLD_SIZE              this process, and how many there are; both or none
#     MASTER_ADDR, MASTER_PORT      where the first one listens
#     LOCAL_RANK, LOCAL_WORLD_SIZE  the same two on this machine, where there is to be one
#
# An empty variable counts as one that is not set.

EXAMPLE = "torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr HOST --master-port 29500 --no-python ..."
MAX_PORT = 65535
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Number of tasks, of srun and the two kinds of mpirun; none of them sets RANK."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a run; alone, it is the first of one."""

    rank: int = 0
    count: int = 1
    """Processes of the run, one on each machine."""
    num_local: int = 1
    """Processes of the run on this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0


def this_process() -> Process:
    """This process' place in the run.

    Raises:
        RefusedError: variables that are no numbers, contradict each other, or are incomplete.
    """
    rank, count = _number("RANK"), _number("WORLD_SIZE")
    local_rank, num_local = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    if rank is None and (count or 1) > 1:
        raise _half("WORLD_SIZE", "RANK")
    if count is None and rank is not None:
        raise _half("RANK", "WORLD_SIZE")
    was_restarted()
    _refuse_outside("RANK", rank, "WORLD_SIZE", count)
    _refuse_outside("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", num_local)
    return Process(rank or 0, 1 if count is None else count, max(1, num_local or 1, (local_rank or 0) + 1))


def require_address() -> None:
    """Refuse an environment that does not say where the first of several processes listens.

    Raises:
        RefusedError: MASTER_ADDR or MASTER_PORT is missing, or is no port.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not _text(name)]
    if missing:
        raise _half("WORLD_SIZE", " and ".join(missing))
    port = _text("MASTER_PORT")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= MAX_PORT):
        raise _wrong("MASTER_PORT", f"a port from 1 to {MAX_PORT}")


def launched_without_ranks() -> str | None:
    """A warning where a launcher started several tasks but none of them knows of the others; else None."""
    for name in LAUNCHERS:
        text = _text(name)
        if text.isdecimal() and int(text) > 1 and not _text("WORLD_SIZE"):
            alone = "RANK and WORLD_SIZE are not set, so each of them trains alone, on all rows"
            return f"{name}={text} tasks were started, but {alone}; torchrun makes them one run"
    return None


def was_restarted() -> bool:
    """Whether torchrun has started this run again after one of its processes ended.

    Raises:
        RefusedError: the variable is no number.
    """
    return (_number("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def _text(name: str) -> str:
    return os.environ.get(name, "").strip()


def _number(name: str) -> int | None:
    """The variable's value; None where it is not set."""
    text = _text(name)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(2**31)):
        raise _wrong(name, "a whole number of at least 0")
    return int(text)


def _refuse_outside(rank_name: str, rank: int | None, count_name: str, count: int | None) -> None:
    if count is not None and count < 1:
        raise _wrong(count_name, "a whole number of at least 1")
    if rank is not None and count is not None and rank >= count:
        raise _wrong(rank_name, f"less than {count_name}={count}")


def _wrong(name: str, expected: str) -> RefusedError:
    return RefusedError(
        "an environment variable of torchrun makes no sense",
        where=name,
        found=repr(os.environ.get(name, "")),
        expected=expected,
        hint=f"unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE for a run on one machine; for several: {EXAMPLE}",
    )


def _half(there: str, missing: str) -> RefusedError:
    return RefusedError(
        "the environment says only in part which process of a run this is",
        where=f"{missing} not set",
        found=f"{there}={_text(there)}",
        expected="all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them",
        hint=f"unset {there} for a run on one machine; for several: {EXAMPLE}",
    )


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
"""The same in bfloat16 where the processor has matrix units for it (amx_bf16). Reported, not measured here."""
CPU_SLOW_BFLOAT16 = 0.75
"""Where it has none, avx512_bf16 included: 102 against 136 tokens/s, measured on a 2-core AVX512-BF16 machine."""
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


def _cgroup_folders(proc: Path, cgroup: Path) -> list[Path]:
    """This process's memory cgroups and their parents, outermost first."""
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


SLOW_NOTE = "slow: "
"""Notes of a machine that begin so say how to be many times faster; a plan shows them with its verdict."""


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


def visible_gpus() -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """The GPUs that nvidia-smi lists (those, in the order, that CUDA_VISIBLE_DEVICES says), and notes on them.

    Empty where there is no driver; takes no GPU memory and loads no torch.
    """
    fields = ("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max", "uuid")
    try:
        answer = ask_nvidia_smi(fields)
    except (OSError, subprocess.SubprocessError):
        return (), ()
    if answer is None or answer.returncode != 0:
        return (), ()
    rows = smi_rows(answer, fields)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        rows = _chosen(rows, chosen.split(","))
    devices, notes = zip(*(_gpu_of(row) for row in rows), strict=True) if rows else ((), ())
    return tuple(devices), tuple(dict.fromkeys(note for pair in notes for note in pair))


def ask_nvidia_smi(fields: Sequence[str], timeout_s: float = 10.0) -> subprocess.CompletedProcess[str] | None:
    """The answer of nvidia-smi on these fields, a line for each GPU; None where there is no such program.

    Raises:
        OSError, subprocess.SubprocessError: it does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)


def smi_rows(answer: subprocess.CompletedProcess[str], fields: Sequence[str]) -> list[list[str]]:
    """The lines of an answer that have all fields."""
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def _chosen(rows: list[list[str]], names: list[str]) -> list[list[str]]:
    """Lines of nvidia-smi by number or by the beginning of a UUID. Like CUDA, ends at the first name of no GPU."""
    found = []
    for name in map(str.strip, names):
        by_number = rows[int(name) : int(name) + 1] if name.isdigit() else []
        row = by_number or [row for row in rows if name.startswith("GPU-") and row[-1].startswith(name)]
        if len(row) != 1:
            break
        found.append(row[0])
    return found


def _gpu_of(row: list[str]) -> tuple[Device, tuple[str, ...]]:
    """A device from one line of nvidia-smi: memory and link as reported, rates from the catalogue."""
    name, memory_mib, generation, lanes, _ = row
    known = find_gpu(name)
    notes = [f"read from nvidia-smi: {name}, {memory_mib} MiB, PCIe {generation} x{lanes}"]
    if known is None:
        notes.append(f"assumed: {name} is not in the catalogue; rates of an rtx-3090")
    else:
        notes.append(f"assumed: rates of {known} by its data sheet, not measured")
    figures = catalogue()[known or "rtx-3090"]
    if generation.isdigit() and lanes.isdigit() and int(lanes):
        figures = replace(figures, pcie_generation=int(generation), pcie_lanes=int(lanes))
    device = gpu_device(known or name, figures)
    if memory_mib.replace(".", "").isdigit():
        device = replace(device, memory_bytes=int(float(memory_mib) * MIB))
    return device, tuple(notes)


def this_machine(devices: tuple[Device, ...], description: str, notes: tuple[str, ...], output_dir: Path) -> Hardware:
    """The machine with these devices, its measured host memory and the free disk under `output_dir`."""
    memory = host_memory()
    measured = f"measured: {memory.total_bytes / GIB:.1f} GiB of host memory ({memory.limited_by})"
    return Hardware(
        description=description,
        devices=devices,
        host_memory_bytes=memory.total_bytes,
        disk_free_bytes=free_disk_bytes(output_dir),
        notes=(*notes, measured),
        is_here=True,
    )


LOCKED_ON_WSL = "WSL2 lets a process page-lock 0.5 to 2 GiB in all; Linux itself has no such limit"


def describe_locking() -> str:
    """Where the limit of page-locked memory comes from. `ulimit -l` is none: NVIDIA's driver does not look at it."""
    return LOCKED_ON_WSL if is_wsl() else "other programs may hold page-locked memory, or a container has a limit"


def is_wsl() -> bool:
    """Whether this is Linux inside Windows, by its kernel's name."""
    return "microsoft" in platform.release().lower()


# Devices that runs on this machine lost, for `doctor`.

LOST_DAYS = 30


def _lost_path() -> Path:
    return cache_folder("lost") / "devices.jsonl"


def note_lost_device(text: str) -> None:
    """Remember that a run lost a device; a cache that cannot be written is no error."""
    with suppress(OSError, ResourceError, RefusedError):
        path = _lost_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, json.dumps({"time": time.time(), "text": text}))


def lost_devices() -> list[tuple[float, str]]:
    """(Unix time, which and why) of devices that runs lost in the last `LOST_DAYS` days, oldest first."""
    found = []
    with suppress(OSError, RefusedError):
        for line in read_regular(_lost_path(), 1 << 20).decode(errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                if time.time() - float(row["time"]) < LOST_DAYS * 86400:
                    found.append((float(row["time"]), str(row["text"])))
    return found


def free_disk_bytes(folder: Path) -> int | None:
    """Free bytes of the file system that `folder` is or would be on."""
    for existing in (folder.absolute(), *folder.absolute().parents):
        if existing.exists():
            with suppress(OSError):
                return shutil.disk_usage(existing).free
            return None
    return None
