"""From `pipeline.devices` to one backend per worker."""

from __future__ import annotations

import os
from collections.abc import Sequence

from roundpipe_cli.costs.machine import num_cores
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.errors import RefusedError


def choose_devices(devices: str | Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """The device of each worker, and a notice if they were chosen for want of a GPU.

    Raises:
        RefusedError: a device that does not exist.
    """
    if devices == "auto":
        found = cuda.num_devices()
        if found:
            return tuple(f"cuda:{index}" for index in range(found)), None
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        which = "no GPU found" if hidden is None else f"no GPU found among CUDA_VISIBLE_DEVICES={hidden}"
        return ("cpu", "cpu"), f"{which}: training on two CPU workers (pipeline.devices=[cpu,cpu])"
    assert not isinstance(devices, str), "checked by the recipe"
    available = cuda.num_devices()
    for device in devices:
        if device != "cpu" and int(device.removeprefix("cuda:")) >= available:
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


def threads_per_worker(setting: str | int, num_workers: int) -> int:
    """Intra-op threads of each CPU worker."""
    return max(1, num_cores() // num_workers) if isinstance(setting, str) else setting


def make_backends(devices: Sequence[str], num_threads: int, *, count_bytes: bool = False) -> list[Backend]:
    """One backend per worker; `count_bytes`: workers on the processor count their live bytes, which makes them slow."""
    return [
        CpuBackend(num_threads, count_bytes=count_bytes)
        if device == "cpu"
        else cuda.CudaBackend(int(device.removeprefix("cuda:")))
        for device in devices
    ]
