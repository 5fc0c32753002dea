"""Frozen weights in FP8: unpacked to the processor's bits. Their rate is a part of `rates`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from roundpipe_cli.model.stored.packed_weights import PackedParameter, packed_bytes, quantize
from scripts.gpu_checks.place import Check, CheckPlace, Figures, check, skip_unless_real


def checks(place: CheckPlace) -> Iterator[Check]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield check(f"unpacking, {str(dtype).removeprefix('torch.')}", unpacking, place, dtype)


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
