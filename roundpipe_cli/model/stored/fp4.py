"""Weights as 4-bit floats (E2M1), two a byte, the low half first, with a scale for each 16 or 32 of them.

MXFP4 (OCP Microscaling Formats 1.0), as GPT-OSS has it: [experts, out, in], in the model [experts, in, out]
    w_blocks  [experts, out, in / 32, 16]      w_scales  [experts, out, in / 32], exponents (E8M0)
NVFP4, as NVIDIA's ModelOpt writes it: code x weight_scale x weight_scale_2
    weight    [out, in / 2]                    weight_scale  [out, in / 16], E4M3      weight_scale_2  float32
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from roundpipe_cli.model.stored.fp8 import find_fp8
from roundpipe_cli.model.stored.scales import as_float, fp4_values, row_ranges, scaled_rows
from roundpipe_cli.model.stored.tensors import FileTensor, StoredTensor


def find_mxfp4(
    pieces: Mapping[str, FileTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Fused experts as GPT-OSS has them."""
    found = {}
    for key, blocks in pieces.items():
        name = key.removesuffix("_blocks")
        if name != key and f"{name}_scales" in pieces and len(blocks.shape) == 4:
            experts, rows, num_blocks, num_bytes = blocks.shape
            shape = torch.Size((experts, 2 * num_blocks * num_bytes, rows))
            parts = {"blocks": blocks, "scales": pieces[f"{name}_scales"]}
            found[name] = StoredTensor(parts, shape, dtype, partial(_unpack_experts, shape=shape))
    return found


def _unpack_experts(parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    whole = torch.empty(shape, dtype=dtype)
    for expert, (blocks, scales) in enumerate(zip(parts["blocks"], parts["scales"], strict=True)):
        whole[expert] = _scaled(blocks.flatten(1), as_float(scales), torch.Size((shape[2], shape[1])), dtype).T
    return whole


def _scaled(packed: torch.Tensor, scale: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return scaled_rows(lambda rows: fp4_values(packed[rows]), scale, shape, dtype)


def find_modelopt(
    pieces: Mapping[str, FileTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """NVFP4 and FP8 as ModelOpt writes them, in one checkpoint or in two."""
    found = find_fp8(pieces, settings, dtype)
    for name, codes in pieces.items():
        scale, second = pieces.get(f"{name}_scale"), pieces.get(f"{name}_scale_2")
        if codes.dtype == "U8" and scale is not None and second is not None:
            found[name] = nvfp4(codes, scale, second, dtype, divides=False)
    return found


def nvfp4(
    codes: FileTensor, scale: FileTensor, second: FileTensor, dtype: torch.dtype, *, divides: bool
) -> StoredTensor:
    """A weight, or experts' weights, in NVFP4.

    Args:
        second: the scale of all.
        divides: whether that is divided by.
    """
    shape = torch.Size((*codes.shape[:-1], 2 * codes.shape[-1]))
    parts = {"codes": codes, "scale": scale, "second": second}
    return StoredTensor(parts, shape, dtype, partial(_unpack_nvfp4, shape=shape, divides=divides))


def _unpack_nvfp4(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size, divides: bool
) -> torch.Tensor:
    codes, scale, second = parts["codes"], parts["scale"], parts["second"].float()
    whole = torch.empty(shape, dtype=dtype)
    if len(shape) == 3:
        factors = second.reshape(-1).expand(shape[0]) if second.numel() == 1 else second.reshape(shape[0])
        for expert in range(shape[0]):
            one = {"codes": codes[expert], "scale": scale[expert], "second": factors[expert]}
            whole[expert] = _unpack_nvfp4(one, dtype, torch.Size(shape[1:]), divides)
        return whole
    grid, factor = scale.float(), second.reshape(())
    for rows in row_ranges(*shape):
        exact = fp4_values(codes[rows]) * grid[rows].repeat_interleave(shape[1] // grid.shape[1], dim=1)
        whole[rows] = exact / factor if divides else exact * factor
    return whole


def mxfp4_rows(codes: FileTensor, scale: FileTensor, dtype: torch.dtype) -> StoredTensor:
    """A linear layer's weight in MXFP4: codes [out, in / 2], exponents [out, in / 32]."""
    shape = torch.Size((*codes.shape[:-1], 2 * codes.shape[-1]))
    return StoredTensor({"codes": codes, "scale": scale}, shape, dtype, partial(_unpack_rows, shape=shape))


def _unpack_rows(parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return _scaled(parts["codes"], as_float(parts["scale"]), shape, dtype)
