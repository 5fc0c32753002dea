"""How fast bytes move between the host and each device, all devices at once: links often share a root port."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.base import Backend

NUM_REPEATS = 4


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Speed of one worker's link while all others copy too."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    both_bytes_per_s: float
    """In each direction while both are used."""


def measure_links(backends: Sequence[Backend], num_bytes: int) -> list[LinkSpeed]:
    """Copy `num_bytes` to every device at once, a few times, then back, then half of them each way; page-locked where
    the device is a GPU.

    Raises:
        RuntimeError: a device refused the memory or the copy.
    """
    barrier = threading.Barrier(len(backends))

    with ThreadPoolExecutor(len(backends)) as pool:
        measured = [pool.submit(_measure, backend, num_bytes, barrier) for backend in backends]
    errors = [error for one in measured if (error := one.exception()) is not None]
    if errors:
        first = next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        raise RuntimeError(f"the links cannot be measured: {first}") from first
    return [one.result() for one in measured]


def _measure(backend: Backend, num_bytes: int, barrier: threading.Barrier) -> LinkSpeed:
    registered = False
    try:
        host = torch.zeros(num_bytes, dtype=torch.uint8)
        registered = backend.device.type != "cpu" and cuda.register_host_buffer(host, backend.device.index or 0)
        with backend.worker_thread():
            device = backend.allocate(num_bytes)
        with backend.copy_thread():
            up_s = _timed(lambda: backend.copy_up([(device, host)]), backend, barrier)
            down_s = _timed(lambda: backend.copy_down([(host, device)]), backend, barrier)
            half = num_bytes // 2

            def both() -> None:
                backend.copy_up([(device[:half], host[:half])])
                backend.copy_down([(host[half:], device[half:])])

            both_s = _timed(both, backend, barrier)
    except BaseException:
        barrier.abort()
        raise
    finally:
        if registered:
            with contextlib.suppress(RuntimeError):
                cuda.unregister_host_buffer(host)
    moved = NUM_REPEATS * num_bytes
    return LinkSpeed(moved / up_s, moved / down_s, moved / 2 / both_s)


def _timed(copy: Callable[[], object], backend: Backend, barrier: threading.Barrier) -> float:
    """Seconds that `NUM_REPEATS` copies take, begun with those of all other devices."""
    copy()  # warms up
    backend.synchronize()
    barrier.wait()
    start_s = time.perf_counter()
    for _ in range(NUM_REPEATS):
        copy()
    backend.synchronize()
    return time.perf_counter() - start_s
