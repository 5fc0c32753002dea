"""The checks of `roundpipe doctor`: each says what it found and how to fix it. Nothing is changed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from roundpipe_cli import __version__
from roundpipe_cli.choices import OPTIMIZERS, PACKED_FORMATS
from roundpipe_cli.cli.init_choice import choose_settings
from roundpipe_cli.costs import machine, nvidia_smi
from roundpipe_cli.costs.find_model import shipped_figures
from roundpipe_cli.costs.hardware import ASSUMED_HOST_MEMORY_BYTES_PER_S, Hardware
from roundpipe_cli.costs.lost_devices import lost_devices
from roundpipe_cli.costs.machine import describe_memory
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.hub.ask import hub_answers, is_offline
from roundpipe_cli.packages import FAST_KERNELS
from roundpipe_cli.planning.reach import SEQUENCE, Reach, reach_of
from roundpipe_cli.train.floors import FLOORS
from roundpipe_cli.units import GIB, MIB, counted, format_bytes

CheckState = Literal["good", "note", "fails"]
"""Results of a check. `note`: training runs, but slower or without some feature."""

LEAST_VERSIONS = {name: floor for name, (floor, _, _) in FLOORS.items()}
OPTIONAL = {
    "bitsandbytes": "base weights in 8 or 4 bit",
    **dict.fromkeys(FAST_KERNELS, "recurrent blocks at full speed on GPUs, as Qwen3.5 and Qwen3-Next have them"),
    "pynvml": "temperature and power of GPUs in the dashboard",
    "tensorboard": "report_to: [tensorboard]",
    "wandb": "report_to: [wandb]",
}
"""Module -> the feature that needs it."""
_PACKAGES = {"pynvml": "nvidia-ml-py", **FAST_KERNELS}
LEAST_HOST_BYTES = 2 * GIB
LOW_HOST_BYTES = 12 * GIB
LOW_DISK_BYTES = 20 * GIB
LOW_LINK_BYTES_PER_S = 5e9
MEASURED_BYTES = 256 * MIB
UPDATED_ELEMENTS = 16 * 1024**2
_SMI_FIELDS = (
    *("driver_version", "name", "memory.total", "memory.used"),
    *("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    state: CheckState
    found: str
    fix: str | None = None
    """A command, or what to do."""


def all_checks(*, offline: bool) -> Iterator[Check]:
    """All checks in the order of a report; those without torch and network come first."""
    yield _program()
    yield from _versions()
    rows, driver = _driver()
    yield driver
    yield from _gpus(rows)
    yield from _lost()
    yield _memory()
    yield from _host_layout()
    yield from _disk()
    yield from _optional()
    yield from trainable_checks()
    torch_check, num_gpus = _torch(len(rows))
    yield torch_check
    yield _workers(num_gpus)
    yield _locking(num_gpus)
    if torch_check.state != "fails":
        yield from _links(num_gpus)
        yield _update(num_gpus)
        yield from triton_check(num_gpus)
    yield from _hub(offline)


def trainable_checks() -> Iterator[Check]:
    """Report what this machine can train, by the memory model: its largest models, and what bars larger ones."""
    gpus, notes = nvidia_smi.visible_gpus()
    try:
        nvidia_smi.require_memory(gpus)
    except RefusedError as error:
        yield Check("largest", "note", error.in_short, error.problems[0].hint)
        return
    devices = gpus or machine.cpu_devices(2)
    yield from largest_models(machine.this_machine(devices, "this machine", notes, Path("outputs")))
    settings = f"max_seq_length {SEQUENCE}, all of {describe_memory(machine.host_memory())}"
    found = (
        f"of the {len(shipped_figures())} models in the tool's table, as `roundpipe init` writes recipes: {settings}"
    )
    speeds = "speeds are those of `roundpipe plan` for that recipe, and steps of more rows may be faster"
    yield Check("largest, basis", "good", f"{found}; {speeds}")


def largest_models(here: Hardware) -> Iterator[Check]:
    """Report the largest models that a machine trains by each method, with precision and speed of `init`'s recipe."""
    for reach in reach_of(here):
        models = []
        for name in reach.models:
            with suppress(RefusedError):
                choice = choose_settings(name, here, Path("doctor.yaml"), method=reach.method.lower())
                form = choice.plan.question.settings.packed_as
                packed = f" in {PACKED_FORMATS[form].label}" if form else ""
                models.append(f"{name.rpartition('/')[2]}{packed} {choice.plan.tokens_per_s:,.0f} tokens/s")
        limit = f"; too large: {reach.too_large} ({reach.reason})" if reach.too_large else ""
        fix = remedy(reach) if reach.reason else None
        found = ", ".join(models) or "no model of the table"
        yield Check(f"largest, {reach.method}", "good" if models else "note", f"{found}{limit}", fix)


def remedy(reach: Reach) -> str:
    """The change that would let the next larger model fit."""
    reason = reach.reason or ""
    if reason.startswith("host memory"):
        return f"{'method: lora' if reach.method == 'full' else 'weights: mmap'}, or more host memory"
    if reason.startswith("memory of"):
        return "a shorter max_seq_length, pipeline.recompute: layer, or a GPU of more memory"
    if reason.startswith("disk"):
        return "output_dir on another disk, or a smaller save_total_limit"
    return "a GPU, or name pipeline.devices=[cpu,cpu] and be patient"


def _program() -> Check:
    system = f"{platform.system()} {platform.machine()}"
    state: CheckState = "good" if sys.platform == "linux" else "note"
    fix = None if state == "good" else "only Linux is tested; on Windows use WSL2"
    return Check("program", state, f"roundpipe {__version__}, Python {platform.python_version()}, {system}", fix)


def _versions() -> Iterator[Check]:
    for name, floor in LEAST_VERSIONS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "fails", "not installed", f"pip install '{name}>={floor}'")
            continue
        yield version_check(name, version, floor)


def version_check(name: str, version: str, floor: str) -> Check:
    """Check a library against its oldest version that works."""
    try:
        is_old = Version(version) < Version(floor)
    except InvalidVersion:
        return Check(name, "note", f"{version}, which is no version number that can be compared", None)
    if is_old:
        return Check(name, "fails", f"{version}, at least {floor} is needed", f"pip install '{name}>={floor}'")
    return Check(name, "good", version)


def _driver() -> tuple[list[list[str]], Check]:
    """One row of nvidia-smi for each GPU, and the check of the driver."""
    try:
        answer = nvidia_smi.ask_nvidia_smi(_SMI_FIELDS, timeout_s=20.0)
    except (OSError, subprocess.SubprocessError) as error:
        return [], Check("driver", "note", f"nvidia-smi does not answer: {error}", "reboot, or reinstall the driver")
    if answer is None:
        found = "none: no nvidia-smi here, or none that this container may use; training runs on the processor"
        fix = "install the driver, or start the container with --gpus all" if _has_nvidia_card() else None
        return [], Check("driver", "note", found, fix)
    if answer.returncode != 0:
        words = (answer.stdout + answer.stderr).strip().splitlines()
        return [], Check("driver", "note", f"nvidia-smi: {words[0] if words else 'failed'}", "reinstall the driver")
    rows = nvidia_smi.smi_rows(answer, _SMI_FIELDS)
    return rows, Check("driver", "good", f"NVIDIA {rows[0][0]}" if rows else "no GPU listed")


def _has_nvidia_card() -> bool:
    """Whether the PCI bus has a display device of NVIDIA, driver or not."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii") for name in ("vendor", "class"))
        except (OSError, UnicodeDecodeError):
            continue
        if vendor.strip() == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def _torch(num_listed: int) -> tuple[Check, int]:
    """The build of torch, and how many GPUs it can use."""
    try:
        import torch

        from roundpipe_cli.engine.backends import cuda

        version = str(torch.__version__)
        built_for = f"ROCm {torch.version.hip}" if torch.version.hip else "the processor only"
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else built_for
        num_gpus = cuda.num_devices()
    except Exception as error:  # a broken installation may raise anything
        return Check("torch build", "fails", f"cannot be loaded: {error}", "pip install --force-reinstall torch"), 0
    found = f"{version}, for {built_for}, sees {counted(num_gpus, 'GPU')}"
    if num_listed > num_gpus:
        mends = "a driver as new as that CUDA" if torch.version.cuda else "a build for CUDA: see pytorch.org"
        hidden = os.environ.get(nvidia_smi.VISIBLE)
        fix = f"{nvidia_smi.VISIBLE}={hidden} hides some" if hidden is not None else f"install {mends}"
        if hidden is None and num_gpus == len(nvidia_smi.visible_gpus()[0]):
            fix = f"CUDA shows one instance (MIG): {nvidia_smi.VISIBLE}=MIG-... chooses it"
        return Check("torch build", "note", f"{found} of {num_listed} in the machine", fix), num_gpus
    return Check("torch build", "good", found), num_gpus


def _gpus(rows: list[list[str]]) -> Iterator[Check]:
    for index, row in enumerate(rows):
        _, name, total, used, _, most_generation, width, most_width = row
        found = f"{name}, {total} MiB ({used} in use), PCIe {most_generation} x{width}"
        narrow = width.isdigit() and most_width.isdigit() and int(width) < int(most_width)
        fix = f"it could have x{most_width}: another slot, or the board's settings" if narrow else None
        yield Check(f"GPU {index}", "note" if narrow else "good", found, fix)


def _lost() -> Iterator[Check]:
    """The newest losses of devices, one for each device."""
    newest = {text.split(" ", 1)[0]: (time_s, text) for time_s, text in lost_devices()}
    for time_s, text in newest.values():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
        fix = "look at its power, cooling, riser and `dmesg | grep Xid`; pipeline.devices leaves it out"
        if text.startswith("cpu "):
            fix = "a worker on the processor hung: please report it, with the stacks that the run showed"
        yield Check("lost device", "note", f"{when}: {text}", fix)


def _workers(num_gpus: int) -> Check:
    if num_gpus:
        from roundpipe_cli.engine.backends.cuda import describe_device

        found = ", ".join(f"cuda:{index} ({describe_device(index)})" for index in range(num_gpus))
        notice = nvidia_smi.order_notice()
        return Check("workers", "note" if notice else "good", found, notice)
    cores = machine.num_cores()
    name = machine.processor_name() or "processor"
    found = f"no GPU: two CPU workers, {max(1, cores // 2)} of {cores} cores each ({name}); "
    found += "up to 2B parameters, larger models only where pipeline.devices names them"
    return Check("workers", "note", found)


def _links(num_gpus: int) -> Iterator[Check]:
    from roundpipe_cli.engine.backends.base import Backend
    from roundpipe_cli.engine.backends.cpu import CpuBackend
    from roundpipe_cli.engine.link_speed import measure_links

    try:
        backends: list[Backend]
        if num_gpus:
            from roundpipe_cli.engine.backends.cuda import CudaBackend

            backends = [CudaBackend(index) for index in range(num_gpus)]
        else:
            backends = [CpuBackend(1, copy=True)]
        speeds = measure_links(backends, MEASURED_BYTES)
    except Exception as error:  # a check that fails is a finding, whatever the error
        yield Check("links", "note", f"not measured: {error}", "another program may hold the memory")
        return
    for index, speed in enumerate(speeds):
        found = f"{speed.up_bytes_per_s / 1e9:.1f} GB/s up, {speed.down_bytes_per_s / 1e9:.1f} GB/s down, measured"
        if not num_gpus:
            yield Check("memory copy", "good", found.replace(" up", " there").replace(" down", " back"))
            continue
        is_slow = speed.up_bytes_per_s < LOW_LINK_BYTES_PER_S
        fix = f"name it for plan: --hardware ...:pcie_gb_per_s={speed.up_bytes_per_s / 1e9:.1f}" if is_slow else None
        together = " with all GPUs at once" if num_gpus > 1 else ""
        yield Check(f"link {index}", "note" if is_slow else "good", found + together, fix)


def _update(num_gpus: int) -> Check:
    from roundpipe_cli.train.optim.optimizer import measured_update_s
    from roundpipe_cli.train.prepare.devices import updater_threads

    num_threads = updater_threads([f"cuda:{index}" for index in range(num_gpus)])
    update_s = measured_update_s(UPDATED_ELEMENTS, num_threads)
    rate = OPTIMIZERS["adamw"].update_bytes / update_s
    found = f"AdamW takes {1e9 * update_s:.2f} ns a parameter on {counted(num_threads, 'thread')}, measured"
    is_slow = num_gpus > 0 and rate < ASSUMED_HOST_MEMORY_BYTES_PER_S / 2
    fix = f"tell plan how slow: --hardware ...,host_memory_gb_per_s={rate / 1e9:.0f}" if is_slow else None
    return Check("update", "note" if is_slow else "good", found, fix)


def _locking(num_gpus: int) -> Check:
    if not num_gpus:
        return Check("page-locking", "good", "CPU workers need none")
    if not machine.is_wsl():
        return Check("page-locking", "good", "no limit known; a run says where it is refused")
    found = f"{machine.LOCKED_ON_WSL}: the rest is copied through little of it, which is slower"
    return Check("page-locking", "note", found)


def _memory() -> Check:
    memory = machine.host_memory()
    limit = "" if memory.limited_by == "the machine" else f", limited by {memory.limited_by}"
    found = f"{describe_memory(memory)}{limit}"
    if memory.available_bytes < LEAST_HOST_BYTES:
        return Check("host memory", "fails", found, f"at least {format_bytes(LEAST_HOST_BYTES)} must be free")
    if memory.available_bytes < LOW_HOST_BYTES:
        fix = "enough for small models only: a model needs 2 bytes a parameter by LoRA, 18 in full"
        return Check("host memory", "note", found, fix)
    return Check("host memory", "good", found)


def _host_layout() -> Iterator[Check]:
    """NUMA nodes, over which weights are spread, and pages of 2 MiB."""
    layout = machine.host_layout()
    if len(layout.nodes) > 1:
        nodes = ", ".join(map(str, layout.nodes))
        yield Check("memory nodes", "good", f"NUMA nodes {nodes}: weights are spread over all of them")
    if layout.gives_huge_pages:
        yield Check("large pages", "good", f"of 2 MiB, given to weights ({layout.huge_pages})")
    elif layout.huge_pages is not None:
        found = f"of 2 MiB, not given ({layout.huge_pages}); updates of full fine-tuning are slower"
        switch = machine.SYS / machine.SWITCH
        yield Check("large pages", "note", found, f"as root, until the next start: echo madvise > {switch}")


def _disk() -> Iterator[Check]:
    cache = Path(os.path.expanduser(os.environ.get("HF_HOME") or "~/.cache/huggingface"))  # noqa: PTH111 (no home: as it is)
    for name, folder, fix in (
        ("disk, outputs", Path("outputs"), "output_dir=/another/disk for checkpoints"),
        ("disk, models", cache, "HF_HOME=/another/disk for downloaded models"),
    ):
        free = machine.free_disk_bytes(folder)
        is_low = free is not None and free < LOW_DISK_BYTES
        found = f"{folder}: not known" if free is None else f"{format_bytes(free)} free for {folder}"
        yield Check(name, "note" if free is None or is_low else "good", found, fix if is_low else None)


def _hub(offline: bool) -> Iterator[Check]:
    if offline or is_offline():
        yield Check("hub", "good", "not asked: offline; local models, .gguf files and package:NAME work")
    elif hub_answers():
        yield Check("hub", "good", "answers")
    else:
        fix = "check the network or HF_ENDPOINT; local models, .gguf files and package:NAME need no hub"
        yield Check("hub", "note", "cannot be reached", fix)
    from huggingface_hub import get_token

    has_token: bool = bool(get_token())  # the token itself is never shown
    login = None if has_token else "hf auth login, for models whose terms must be accepted"
    yield Check("hub token", "good" if has_token else "note", "there is one" if has_token else "none", login)


def triton_check(num_gpus: int) -> list[Check]:
    """Whether Triton's kernels can be made here; processors use none."""
    if not num_gpus:
        return []
    from roundpipe_cli.kernels.capability import why_no_triton

    missing = why_no_triton()
    if missing is not None:
        return [Check("kernels", "note", f"{missing}: experts are multiplied one after the other on most GPUs")]
    return [Check("kernels", "good", f"triton {importlib.metadata.version('triton')} and a C compiler, for experts")]


def _optional() -> Iterator[Check]:
    for module, needs in OPTIONAL.items():
        spec: Any = importlib.util.find_spec(module)
        package = _PACKAGES.get(module, module)
        if spec is None:
            yield Check(package, "note", f"not installed; needed for {needs}", f"pip install {package}")
        else:
            yield Check(package, "good", f"installed, for {needs}")
