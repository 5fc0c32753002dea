"""What page-locking costs, and how fast bytes move: up, down, both at once, one GPU and all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from roundpipe_cli.costs.machine import host_memory
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.link_speed import measure_links
from scripts.gpu_checks.place import Check, CheckPlace, Figures, check

SIZES = {"tiny": 2**20, "full": 2**30}
CHUNK_BYTES = 32 * 2**20
LOCKING_S = 20.0
NUM_CHUNKS = {"tiny": 2, "full": 64}


def checks(place: CheckPlace) -> Iterator[Check]:
    yield check("page-locked memory until it is refused", locked_until_refused, place)
    if place.is_quick:
        yield check("links at once", links, place, place.indices)
        return
    yield check("registration", registration, place)
    yield check("allocation", allocation, place)
    yield check("one link", links, place, (place.first,))
    if len(place.indices) > 1:
        yield check("links at once", links, place, place.indices)
    for name in ("up", "down", "both"):
        yield check(f"chunks {name}", chunks, place, name)
    yield check("small copies", small_copies, place)


def timed(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def locked_until_refused(place: CheckPlace) -> Figures:
    """Bytes that the system page-locks in pieces, up to half of the memory that is available, or for `LOCKING_S`."""
    size = SIZES[place.scale] // 4
    most, buffers, was_refused = host_memory().available_bytes // 2 if not place.is_simulated else 4 * size, [], False
    with place.devices():
        end_s = time.monotonic() + LOCKING_S
        while (len(buffers) + 1) * size <= most and time.monotonic() < end_s and not was_refused:
            buffer = torch.ones(size, dtype=torch.uint8)
            was_refused = not cuda.register_host_buffer(buffer, place.first)
            buffers += [] if was_refused else [buffer]
        for buffer in buffers:
            cuda.unregister_host_buffer(buffer)
    return {"locked_bytes": len(buffers) * size, "was_refused": was_refused}


def registration(place: CheckPlace) -> Figures:
    """`cudaHostRegister` of memory that was written before, and its undoing."""
    buffer = torch.ones(SIZES[place.scale], dtype=torch.uint8)
    with place.devices():
        taken_s = timed(lambda: _registered(buffer, place.first))
        given_s = timed(lambda: cuda.unregister_host_buffer(buffer))
    return {"register_gb_per_s": buffer.nbytes / taken_s / 1e9, "unregister_gb_per_s": buffer.nbytes / given_s / 1e9}


def _registered(buffer: torch.Tensor, index: int) -> None:
    assert cuda.register_host_buffer(buffer, index), "this machine does not let us page-lock memory"


def allocation(place: CheckPlace) -> Figures:
    """Page-locked memory by torch's own allocator, new and used again, and memory of the device."""
    size = SIZES[place.scale] // 4
    with place.devices():
        backend = cuda.CudaBackend(place.first)
        host = torch.empty(size, dtype=torch.uint8)
        new_s = timed(lambda: backend.host_like(host))
        again_s = timed(lambda: backend.host_like(host))
        device_s = timed(lambda: (backend.allocate(size), backend.synchronize()))
    return {"pinned_gb_per_s": size / new_s / 1e9, "pinned_again_s": again_s, "device_s": device_s}


def links(place: CheckPlace, indices: tuple[int, ...]) -> Figures:
    """Large copies, all GPUs at once."""
    with place.devices():
        speeds = measure_links([cuda.CudaBackend(index) for index in indices], SIZES[place.scale])
    return {
        "up_gb_per_s": [speed.up_bytes_per_s / 1e9 for speed in speeds],
        "down_gb_per_s": [speed.down_bytes_per_s / 1e9 for speed in speeds],
    }


def chunks(place: CheckPlace, way: str) -> Figures:
    """Copies in chunks of 32 MiB, as the engine's lanes issue them."""
    size = CHUNK_BYTES if place.scale == "full" else 2**16
    count = NUM_CHUNKS[place.scale]
    host = [torch.ones(size, dtype=torch.uint8) for _ in range(2)]
    with place.devices():
        backend = cuda.CudaBackend(place.first)
        for buffer in host:
            _registered(buffer, place.first)
        device = [backend.allocate(size) for _ in range(2)]
        backend.synchronize()

        def copy(num: int) -> None:
            for _ in range(num):
                if way != "down":
                    backend.copy_up([(device[0], host[0])])
                if way != "up":
                    backend.copy_down([(host[1], device[1])])
            backend.synchronize()

        copy(2)
        seconds = timed(lambda: copy(count))
        for buffer in host:
            cuda.unregister_host_buffer(buffer)
    return {"gb_per_s_each_way": size * count / seconds / 1e9}


def small_copies(place: CheckPlace) -> Figures:
    """Host time to issue a copy of a few bytes, and until the host knows that it is done."""
    with place.devices():
        backend = cuda.CudaBackend(place.first)
        host = backend.host_like(torch.zeros(64))
        device, count = backend.device_like(host), 20 if place.is_simulated else 2000
        issued_s = timed(lambda: [backend.copy_up([(device, host)]) for _ in range(count)])
        backend.synchronize()
        known_s = timed(lambda: [(backend.copy_up([(device, host)]), backend.synchronize()) for _ in range(count)])
    return {"issue_us": issued_s / count * 1e6, "issue_and_wait_us": known_s / count * 1e6}
