"""From `pipeline.devices` to one backend per worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from roundpipe_cli.costs.machine import num_cores
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.backends.cuda_process import set_up_process
from roundpipe_cli.engine.backends.turns import IssueTurns
from roundpipe_cli.engine.link_speed import measure_links
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.schema import Recipe

ASSUMED_LINK_BYTES_PER_S = 25e9
"""PCIe 4.0 with 16 lanes."""
LINK_BYTES = 16 * 1024**2
"""Bytes that are copied to all GPUs at once to measure their links."""


def choose_devices(devices: str | Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """The device of each worker, and a notice if CPU workers were chosen because there is no GPU.

    Raises:
        RefusedError: a device that does not exist.
    """
    if devices == "auto":
        found = cuda.num_devices()
        if found:
            return tuple(f"cuda:{index}" for index in range(found)), None
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        which = "no GPU found" if hidden is None else f"no GPU found (CUDA_VISIBLE_DEVICES is {hidden or 'empty'})"
        return ("cpu", "cpu"), f"{which}: computing on two CPU workers (pipeline.devices=[cpu,cpu])"
    assert not isinstance(devices, str), "checked by the recipe"
    available = cuda.num_devices()
    for device in devices:
        if device != "cpu" and gpu_index(device) >= available:
            names = ", ".join(f"cuda:{index}" for index in range(available))
            raise RefusedError(
                "no such device",
                where="pipeline.devices",
                found=device,
                expected=f"cpu or one of {names}" if names else "cpu (torch sees no GPU here)",
                hint="pipeline.devices=auto takes all GPUs",
            )
    if len({device == "cpu" for device in devices}) > 1:
        raise RefusedError(
            "processors and GPUs cannot work in one pool",
            where="pipeline.devices",
            found=", ".join(devices),
            expected="either cpu or cuda devices",
        )
    return tuple(devices), None


def with_dtype_of(recipe: Recipe, devices: Sequence[str]) -> tuple[Recipe, str | None]:
    """The recipe in float16 where a device has no bfloat16, as in `plan`, and a notice of that."""
    if recipe.dtype != "bfloat16":
        return recipe, None
    indices = {name: gpu_index(name) for name in devices if name != "cpu"}
    lacking = [f"{n} ({cuda.describe_device(index)})" for n, index in indices.items() if not cuda.has_bfloat16(index)]
    if not lacking:
        return recipe, None
    text = f"no bfloat16 on {', '.join(lacking)}: training in float16 with loss scaling (dtype: float16)"
    return replace(recipe, dtype="float16"), text


def gpu_index(device: str) -> int:
    """N of `cuda:N`."""
    return int(device.removeprefix("cuda:"))


def threads_per_worker(setting: str | int, num_workers: int) -> int:
    """Intra-op threads of each CPU worker."""
    return max(1, num_cores() // num_workers) if isinstance(setting, str) else setting


def updater_threads(devices: Sequence[str]) -> int:
    """Intra-op threads of updates, which run beside steps: of each GPU, the threads that issue keep a core."""
    return max(1, num_cores() - sum(device != "cpu" for device in devices))


def make_backends(
    devices: Sequence[str],
    num_threads: int,
    *,
    float16_accumulation: bool = False,
    deterministic: bool = False,
    count_bytes: bool = False,
) -> list[Backend]:
    """One backend per worker; with `count_bytes` those on the processor count their live bytes, which is slow."""
    if gpus := {gpu_index(device) for device in devices if device != "cpu"}:
        set_up_process(gpus, float16_accumulation=float16_accumulation, deterministic=deterministic)
    turns = IssueTurns() if len(devices) > 1 else None
    return [
        CpuBackend(num_threads, count_bytes=count_bytes)
        if device == "cpu"
        else cuda.CudaBackend(gpu_index(device), turns)
        for device in devices
    ]


def slowest_link_bytes_per_s(devices: Sequence[str]) -> float:
    """How fast weights come to the GPU with the slowest link while all GPUs' links are in use; a few milliseconds. A
    GPU that is named twice gives each of its workers half; ASSUMED_LINK_BYTES_PER_S where it cannot be measured."""
    names = list(dict.fromkeys(devices))
    try:
        speeds = measure_links([cuda.CudaBackend(gpu_index(name)) for name in names], LINK_BYTES)
    except RuntimeError:  # out of memory, on the card or page-locked; the run will report it
        return ASSUMED_LINK_BYTES_PER_S
    shares = (speed.up_bytes_per_s / devices.count(name) for name, speed in zip(names, speeds, strict=True))
    return float(f"{min(shares):.2g}")  # small differences between measurements must not change the cut
