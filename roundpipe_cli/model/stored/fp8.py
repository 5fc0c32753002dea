"""Weights as 8-bit floats or whole numbers, with a scale for all, for each row, or for each block.

    w                      codes, E4M3 or E5M2; or E2M1, two a byte
    w_scale_inv, w_scale   float32, 16 bit, or an exponent (E8M0)

Published so by DeepSeek, Qwen and MiniMax (blocks of 128 x 128), Mistral (one scale), Meta's FBGEMM (rows), NVIDIA's
ModelOpt and compressed-tensors. Despite its name `weight_scale_inv` is what a code is multiplied with.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from roundpipe_cli.model.stored.scales import fp4_values, scaled_rows
from roundpipe_cli.model.stored.tensors import FileTensor, StoredTensor

FLOATS = ("F8_E4M3", "F8_E5M2", "F4", "I8")
"""Types of codes; transformers writes two E2M1 codes as an I8."""
BlockSize = tuple[int, int] | None
USUAL_BLOCK = (128, 128)
"""Where the configuration says none, as transformers takes it; for a weight with so many scales only."""


def find_fp8(
    pieces: Mapping[str, FileTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """The weights in 8 bit that have a scale."""
    block = block_of(settings.get("weight_block_size")) or USUAL_BLOCK
    found = {}
    for name, codes in pieces.items():
        scale = scale_of(name, pieces)
        if codes.dtype in FLOATS and scale is not None:
            found[name] = in_8bit(codes, scale, dtype, block)
    return found


def block_of(size: object) -> BlockSize:
    """Rows and columns of a block, as a configuration has them: a list, or `128x128`."""
    sizes = size.split("x") if isinstance(size, str) else size
    return (int(sizes[0]), int(sizes[1])) if isinstance(sizes, (list, tuple)) and len(sizes) == 2 else None


def scale_of(name: str, pieces: Mapping[str, FileTensor]) -> FileTensor | None:
    """The scale beside a weight's codes, under any of its names."""
    module = name.removesuffix("weight") if name.endswith(".weight") else None
    others = [] if module is None else [f"{module}scale", f"{module}qscale_weight"]
    return next((pieces[key] for key in (f"{name}_scale_inv", f"{name}_scale", *others) if key in pieces), None)


def in_8bit(
    codes: FileTensor,
    scale: FileTensor,
    dtype: torch.dtype,
    block: BlockSize,
    zero_point: FileTensor | None = None,
    is_int: bool = False,
) -> StoredTensor:
    """A weight of codes and scales; [experts, rows, columns] or [rows, columns]."""
    two_a_byte = codes.dtype == "I8" and not is_int
    shape = torch.Size((*codes.shape[:-1], 2 * codes.shape[-1])) if two_a_byte else codes.shape
    parts = {"codes": codes, "scale": scale, **({} if zero_point is None else {"zero_point": zero_point})}
    return StoredTensor(parts, shape, dtype, partial(_unpack, shape=shape, block=block, is_int=is_int))


def _unpack(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size, block: BlockSize, is_int: bool
) -> torch.Tensor:
    codes, scale, zero = parts["codes"], parts["scale"], parts.get("zero_point")
    if len(shape) == 3:
        own = scale.numel() > 1
        whole = torch.empty(shape, dtype=dtype)
        for expert in range(shape[0]):
            one = {"codes": codes[expert], "scale": scale[expert] if own else scale}
            whole[expert] = _unpack(one, dtype, torch.Size(shape[1:]), block, is_int)
        return whole

    def values(rows: slice) -> torch.Tensor:
        if codes.dtype == torch.float4_e2m1fn_x2 or (codes.dtype == torch.int8 and not is_int):
            return fp4_values(codes.view(torch.uint8)[rows])
        values = codes[rows].float()
        return values if zero is None else values - _of_rows(zero.float(), rows, shape)

    return scaled_rows(values, scale, shape, dtype, block)


def _of_rows(zero: torch.Tensor, rows: slice, shape: torch.Size) -> torch.Tensor:
    """Zero points, one for all, for each row, or for each group of columns of a row."""
    if zero.numel() == 1:
        return zero.reshape(1, 1)
    grid = zero.reshape(shape[0], -1)[rows]
    return grid.repeat_interleave(shape[1] // grid.shape[1], dim=1)
