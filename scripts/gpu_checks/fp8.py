"""Frozen weights in FP8: unpacked to the processor's bits, and the time of that beside a product."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from roundpipe_cli.model.stored.packed_weights import PackedParameter, packed_bytes, quantize
from scripts.gpu_checks.place import Check, CheckPlace, Figures, check, skip_unless_real

SIZES = {"tiny": ((64, 128, 96),), "full": ((8192, 4096, 14336), (8192, 14336, 4096), (2048, 4096, 4096))}
"""(tokens, in, out); full: layers of Llama-3.1-8B."""
REPEATS = 20


def checks(place: CheckPlace) -> Iterator[Check]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield check(f"unpacking, {str(dtype).removeprefix('torch.')}", unpacking, place, dtype)
    for sizes in SIZES[place.scale]:
        yield check(f"time, {' x '.join(map(str, sizes))}", compared, place, sizes, limit_s=120.0)


def made(shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str) -> PackedParameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(shape[1] ** -0.5).to(dtype)
    packed = torch.zeros(packed_bytes(values.shape, "fp8"), dtype=torch.uint8)
    quantize(values, packed, "fp8")
    return PackedParameter.of(packed.to(device), values.shape, dtype, "fp8")


def unpacking(place: CheckPlace, dtype: torch.dtype) -> Figures:
    """A card gives the processor's bits."""
    skip_unless_real(place, "a conversion by a card")
    found = made((200, 328), dtype, torch.device("cuda", place.first)).dequantized()
    assert torch.equal(found.cpu(), made((200, 328), dtype, "cpu").dequantized())
    return {"same_bits": True}


def compared(place: CheckPlace, sizes: tuple[int, int, int]) -> Figures:
    """Milliseconds of a product in bfloat16 and of unpacking its weight, in turn."""
    skip_unless_real(place, "the time of a conversion")
    torch.cuda.set_device(place.first)
    tokens, width, columns = sizes
    weight = made((columns, width), torch.bfloat16, torch.device("cuda", place.first))
    whole, x = weight.dequantized(), torch.randn(tokens, width, device=weight.device, dtype=torch.bfloat16)
    ways: dict[str, Callable[[], object]] = {
        "bfloat16": lambda: torch.mm(x, whole.t()),
        "unpacking": weight.dequantized,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, run in ways.items():
            times[name].append(seconds(run))
    return {"milliseconds": {name: 1e3 * sorted(found)[len(found) // 2] for name, found in times.items()}}


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s
