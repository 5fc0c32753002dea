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

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from roundpipe_cli.model.stored.fp4 import mxfp4_rows, nvfp4
from roundpipe_cli.model.stored.fp8 import FLOATS, in_8bit
from roundpipe_cli.model.stored.scales import as_float, row_ranges, unpack_bits
from roundpipe_cli.model.stored.tensors import FileTensor, OpenFiles, StoredTensor

WORD_BITS = 32


def find_compressed(
    pieces: Mapping[str, FileTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """The weights in any of its formats."""
    bits = sorted({int(weights["num_bits"]) for weights in _weight_settings(settings) if "num_bits" in weights})
    blocks = [weights.get("block_structure") for weights in _weight_settings(settings)]
    block = next(((int(size[0]), int(size[1])) for size in blocks if size), None)
    found = {}
    for key, piece in pieces.items():
        module, _, role = key.rpartition(".")
        beside = {role: pieces[f"{module}.{role}"] for role in _ROLES if f"{module}.{role}" in pieces}
        if role == "weight" and piece.dtype in FLOATS and "weight_scale" in beside:
            zero = beside.get("weight_zero_point")
            is_int = piece.dtype == "I8"
            found[key] = in_8bit(piece, beside["weight_scale"], dtype, block, zero if is_int else None, is_int)
        elif role == "weight_packed":
            found[f"{module}.weight"] = _packed(piece, beside, bits, dtype)
    return found


_ROLES = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")


def _weight_settings(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else []
    weights = [group.get("weights") for group in listed if isinstance(group, dict)]
    return [one for one in weights if isinstance(one, dict)]


def _packed(piece: FileTensor, beside: Mapping[str, FileTensor], bits: list[int], dtype: torch.dtype) -> StoredTensor:
    if "weight_global_scale" in beside:
        return nvfp4(piece, beside["weight_scale"], beside["weight_global_scale"], dtype, divides=True)
    if piece.dtype == "U8":
        return mxfp4_rows(piece, beside["weight_scale"], dtype)
    shape = _shape_of(beside["weight_shape"])
    fitting = [one for one in bits if -(-shape[-1] * one // WORD_BITS) == piece.shape[-1]]
    num_bits = fitting[0] if fitting else 0  # refused where it is unpacked
    return StoredTensor({"codes": piece, **beside}, shape, dtype, partial(_unpack, shape=shape, bits=num_bits))


def _shape_of(piece: FileTensor) -> torch.Size:
    with OpenFiles() as files:
        return torch.Size(int(size) for size in files.tensor(piece))


def _unpack(parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size, bits: int) -> torch.Tensor:
    if not bits:
        raise ValueError(f"{parts['codes'].shape[-1]} words for {shape[-1]} inputs")
    if len(shape) == 3:
        whole = torch.empty(shape, dtype=dtype)
        for expert in range(shape[0]):
            one = {role: part if role == "weight_shape" else part[expert] for role, part in parts.items()}
            whole[expert] = _unpack(one, dtype, torch.Size(shape[1:]), bits)
        return whole
    scale, offset = as_float(parts["weight_scale"]).reshape(-1, parts["weight_scale"].shape[-1]), 1 << (bits - 1)
    zeros = torch.zeros(1, 1)
    if "weight_zero_point" in parts:
        zeros = (unpack_bits(parts["weight_zero_point"].T, bits, shape[0]).T - offset).float()
    num_groups = scale.shape[-1]
    groups = torch.arange(shape[1]) // -(-shape[1] // num_groups)
    if "weight_g_idx" in parts and int(parts["weight_g_idx"].min()) >= 0:  # -1: not set
        groups = parts["weight_g_idx"].long()
    whole = torch.empty(shape, dtype=dtype)
    for rows in row_ranges(*shape):
        codes = (unpack_bits(parts["codes"][rows], bits, shape[1]) - offset).float()
        own = scale if len(scale) == 1 else scale[rows]
        zero = zeros if len(zeros) == 1 else zeros[rows]
        whole[rows] = (codes - (zero if zero.numel() == 1 else zero[:, groups])) * own[:, groups]
    return whole
