"""compressed-tensors (llm-compressor), whose settings list groups of layers, each in its own format.

    float-, naive-, int-quantized, mxfp8   weight, weight_scale[, weight_zero_point]
    pack-quantized            weight_packed, weight_scale, weight_shape[, weight_zero_point][, weight_g_idx]
        whole numbers of 1 to 8 bits, less 2^(bits - 1), in words of 32 bits: [out, in x bits / 32]; zero points packed
        along the outputs: [out x bits / 32, groups]
    nvfp4-pack-quantized                      weight_packed, weight_scale, weight_global_scale, which is divided by
    mxfp4-pack-quantized                      weight_packed, weight_scale (exponents)

A weight's format is told by the tensors that it has, and its bits by their shapes, as vLLM's loader needs the settings'
patterns of names for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from roundpipe_cli.model.stored.fp4 import mxfp4_rows, nvfp4
from roundpipe_cli.model.stored.fp8 import FLOATS, block_of, in_8bit
from roundpipe_cli.model.stored.scales import as_float, groups_in_order, row_ranges, unpack_bits
from roundpipe_cli.model.stored.tensors import FileTensor, OpenFiles, StoredTensor

WORD_BITS = 32


def find_compressed(
    pieces: Mapping[str, FileTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """The weights in any of its formats."""
    bits = sorted({int(weights["num_bits"]) for weights in _weight_settings(settings) if "num_bits" in weights})
    sizes = [int(weights.get("group_size") or 0) for weights in _weight_settings(settings)]
    blocks = [block for weights in _weight_settings(settings) if (block := block_of(weights.get("block_structure")))]
    blocks += [(1, size) for size in sizes if size > 0]
    found = {}
    for key, piece in pieces.items():
        module, _, role = key.rpartition(".")
        beside = {role: pieces[f"{module}.{role}"] for role in _ROLES if f"{module}.{role}" in pieces}
        if role == "weight" and piece.dtype in FLOATS and "weight_scale" in beside:
            zero = beside.get("weight_zero_point")
            is_int, scale = piece.dtype == "I8", beside["weight_scale"]
            block = next((one for one in blocks if _covers(one, scale.shape, piece.shape)), None)
            found[key] = in_8bit(piece, scale, dtype, block, zero if is_int else None, is_int)
        elif role == "weight_packed":
            found[f"{module}.weight"] = _packed(piece, beside, bits, sizes, dtype)
    return found


def _covers(block: tuple[int, int], grid: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a weight of `shape` has as many blocks of this size as there are scales; the last may be cut off."""
    blocks = [-(-size // side) for size, side in zip(shape[-2:], block, strict=True)]
    return list(grid[-2:]) == blocks


_ROLES = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")


def _weight_settings(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else []
    weights = [group.get("weights") for group in listed if isinstance(group, dict)]
    return [one for one in weights if isinstance(one, dict)]


def _packed(
    piece: FileTensor, beside: Mapping[str, FileTensor], bits: list[int], sizes: Sequence[int], dtype: torch.dtype
) -> StoredTensor:
    if "weight_global_scale" in beside:
        return nvfp4(piece, beside["weight_scale"], beside["weight_global_scale"], dtype, divides=True)
    if piece.dtype == "U8":
        return mxfp4_rows(piece, beside["weight_scale"], dtype)
    shape = _shape_of(beside["weight_shape"])
    fitting = [one for one in bits if -(-shape[-1] * one // WORD_BITS) == piece.shape[-1]]
    num_bits = fitting[0] if fitting else 0  # refused where it is unpacked
    unpack = partial(_unpack, shape=shape, bits=num_bits, sizes=sizes)
    return StoredTensor({"codes": piece, **beside}, shape, dtype, unpack)


def _shape_of(piece: FileTensor) -> torch.Size:
    with OpenFiles() as files:
        return torch.Size(int(size) for size in files.tensor(piece))


def _unpack(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size, bits: int, sizes: Sequence[int]
) -> torch.Tensor:
    if not bits:
        raise ValueError(f"{parts['codes'].shape[-1]} words for {shape[-1]} inputs")
    if len(shape) == 3:
        whole = torch.empty(shape, dtype=dtype)
        for expert in range(shape[0]):
            one = {role: part if role == "weight_shape" else part[expert] for role, part in parts.items()}
            whole[expert] = _unpack(one, dtype, torch.Size(shape[1:]), bits, sizes)
        return whole
    scale, offset = as_float(parts["weight_scale"]).reshape(-1, parts["weight_scale"].shape[-1]), 1 << (bits - 1)
    zeros = torch.zeros(1, 1)
    if "weight_zero_point" in parts:
        zero = parts["weight_zero_point"]  # one for all is not packed
        packed = zero.dtype == torch.int32
        zeros = ((unpack_bits(zero.T, bits, shape[0]).T - offset) if packed else zero.reshape(1, 1)).float()
    groups = groups_in_order(shape[1], scale.shape[-1], sizes)
    if "weight_g_idx" in parts and int(parts["weight_g_idx"].min()) >= 0:  # -1: not set
        groups = parts["weight_g_idx"].long()
    whole = torch.empty(shape, dtype=dtype)
    for rows in row_ranges(*shape):
        codes = (unpack_bits(parts["codes"][rows], bits, shape[1]) - offset).float()
        own = scale if len(scale) == 1 else scale[rows]
        zero = zeros if len(zeros) == 1 else zeros[rows]
        whole[rows] = (codes - (zero if zero.numel() == 1 else zero[:, groups])) * own[:, groups]
    return whole
