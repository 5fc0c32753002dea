"""Weights of 8-bit and 4-bit floats with scales: found in a checkpoint, read whole, or as they stay packed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from roundpipe_cli.choices import BLOCK_SIZE
from roundpipe_cli.kernels.unpack_codes import code_values, powers, unpack_codes
from roundpipe_cli.model.files.untrusted import FileTensor
from roundpipe_cli.model.stored.tensors import OpenFiles, StoredTensor


def _factors(scale: torch.Tensor) -> torch.Tensor:
    """Float32 of scales in any type."""
    return powers(scale.device)[scale.int()] if scale.dtype == torch.uint8 else scale.float()


def _block_size(size: int, num_blocks: int, block: int | None) -> int:
    if block and -(-size // block) == num_blocks:
        return block
    if num_blocks < 1 or size % num_blocks:
        raise ValueError(
            f"{num_blocks} scales for {size} rows or columns, and the settings say no block of such a size"
        )
    return size // num_blocks


# Weights as 8-bit floats, with a scale for all, for each row, or for each block.
#
#     w                      codes, E4M3 or E5M2; or E2M1, two a byte
#     w_scale_inv, w_scale   float32, 16 bit, or an exponent (E8M0)
#
# Published so by DeepSeek, Qwen and MiniMax (blocks of 128 x 128), Mistral (one scale) and Meta's FBGEMM (rows).
# Despite its name `weight_scale_inv` is what a code is multiplied with.

FLOATS = ("F8_E4M3", "F8_E5M2", "F4", "I8")
"""Types of codes; transformers writes two E2M1 codes as an I8."""
BlockSize = tuple[int, int]
USUAL_BLOCK = (BLOCK_SIZE, BLOCK_SIZE)
"""Where the configuration says none, as transformers takes it; for a weight with so many scales only."""


def find_fp8(
    pieces: Mapping[str, FileTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """The weights in 8 bit that have a scale."""
    size = settings.get("weight_block_size")
    block = (int(size[0]), int(size[1])) if isinstance(size, list) and len(size) == 2 else USUAL_BLOCK
    weights = {}
    for name, codes in pieces.items():
        scale = scale_of(name, pieces)
        if codes.dtype in FLOATS and scale is not None:
            weights[name] = in_8bit(codes, scale, dtype, block)
    return weights


def scale_of(name: str, pieces: Mapping[str, FileTensor]) -> FileTensor | None:
    """The scale beside a weight's codes, under any of its names."""
    module = name.removesuffix("weight") if name.endswith(".weight") else None
    others = [] if module is None else [f"{module}scale", f"{module}qscale_weight"]
    return next((pieces[key] for key in (f"{name}_scale_inv", f"{name}_scale", *others) if key in pieces), None)


def in_8bit(codes: FileTensor, scale: FileTensor, dtype: torch.dtype, block: BlockSize) -> StoredTensor:
    """A weight of codes and scales; [experts, rows, columns] or [rows, columns]."""
    shape = torch.Size((*codes.shape[:-1], 2 * codes.shape[-1]) if codes.dtype == "I8" else codes.shape)
    stays = codes.dtype == "F8_E4M3" and block == USUAL_BLOCK and len(shape) > 1
    stays = stays and (math.prod(scale.shape) == 1 or tuple(scale.shape) == grid_shape(shape))
    unpack = partial(_unpack_fp8, shape=shape, block=block)
    return StoredTensor({"codes": codes, "scale": scale}, shape, dtype, unpack, "fp8_blocks" if stays else None)


def _unpack_fp8(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size, block: BlockSize
) -> torch.Tensor:
    codes, grid = parts["codes"], _factors(parts["scale"])
    if grid.numel() == 1:
        grid = grid.reshape(()).expand(*shape[:-2], 1, 1)
    grid = grid.reshape(*grid.shape, *(1,) * (len(shape) - grid.ndim))
    if grid.shape[:-2] != shape[:-2]:
        raise ValueError(f"{list(grid.shape)} scales for weights {list(shape)}")
    rows, columns = (_block_size(shape[axis], grid.shape[axis], block[axis]) for axis in (-2, -1))
    kind = torch.float4_e2m1fn_x2 if codes.dtype == torch.int8 else codes.dtype
    of_rows, values = _by_row(grid, shape, (rows, columns)), code_values(kind, codes.device)
    return unpack_codes(codes.contiguous().view(torch.uint8), of_rows, values, shape, dtype=dtype)


def _by_row(grid: torch.Tensor, shape: torch.Size, block: BlockSize) -> torch.Tensor:
    """The scales [..., rows, blocks of a row] of a grid [..., blocks, blocks]; one for each weight where a row's last
    block is shorter than others."""
    *others, down, across = grid.shape
    of_rows = grid.unsqueeze(-2).expand(*others, down, block[0], across).flatten(-3, -2)[..., : shape[-2], :]
    if across > 1 and shape[-1] % block[1]:
        of_rows = of_rows.repeat_interleave(block[1], -1)[..., : shape[-1]]
    return of_rows.contiguous()


# Weights as 4-bit floats (E2M1), two a byte, the low half first, with a scale for each 32 of them.
#
# MXFP4 (OCP Microscaling Formats 1.0), as GPT-OSS has it: [experts, out, in], in the model [experts, in, out]
#     w_blocks  [experts, out, in / 32, 16]      w_scales  [experts, out, in / 32], exponents (E8M0)


def find_mxfp4(
    pieces: Mapping[str, FileTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Fused experts as GPT-OSS has them."""
    weights = {}
    for key, blocks in pieces.items():
        name = key.removesuffix("_blocks")
        if name != key and f"{name}_scales" in pieces and len(blocks.shape) == 4:
            experts, rows, num_blocks, num_bytes = blocks.shape
            shape = torch.Size((experts, 2 * num_blocks * num_bytes, rows))
            stored = {"blocks": blocks, "scales": pieces[f"{name}_scales"]}
            stays = num_bytes == MXFP4_BYTES and tuple(stored["scales"].shape) == tuple(blocks.shape[:3])
            unpack = partial(_unpack_experts, shape=shape)
            weights[name] = StoredTensor(stored, shape, dtype, unpack, "mxfp4" if stays else None)
    return weights


def _unpack_experts(parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    codes, scales = parts["blocks"], parts["scales"]
    if (codes.shape[3], codes.shape[:3]) != (MXFP4_BYTES, scales.shape):
        raise ValueError(
            f"{list(scales.shape)} scales for codes {list(codes.shape)}: not {MXFP4_BYTES} bytes to a scale"
        )
    return unpack_mxfp4(codes, scales, shape, dtype)


MXFP4_BYTES = 16
"""Bytes of the codes that share a scale."""


# Both forms as they stay packed: codes of all weights, then all scales.


def stored_codes(weight: StoredTensor, files: OpenFiles) -> torch.Tensor:
    """The bytes of a weight's codes, as the files have them."""
    return files.tensor([*weight.pieces.values()][0]).view(torch.uint8)


def stored_scales(weight: StoredTensor, files: OpenFiles) -> torch.Tensor:
    """The scales of a weight that may stay packed: uint8 exponents of MXFP4, or a float32 grid, one for each block."""
    scale = files.tensor([*weight.pieces.values()][1])
    if weight.packed_as == "mxfp4":
        return scale.view(torch.uint8)
    grid = _factors(scale)
    return grid.reshape(()).expand(grid_shape(weight.shape)) if grid.numel() == 1 else grid


def grid_shape(shape: Sequence[int]) -> torch.Size:
    """Shape of the grid of scales of FP8 blocks."""
    return torch.Size((*shape[:-2], *(-(-size // BLOCK_SIZE) for size in shape[-2:])))


def unpack_mxfp4(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Weights [..., in, out] of codes [..., out, in / 2] and exponents [..., out, in / 32]; on a GPU in that layout."""
    turned, values = torch.Size((*shape[:-2], shape[-1], shape[-2])), code_values(torch.float4_e2m1fn_x2, codes.device)
    if codes.device.type != "cpu":
        return unpack_codes(codes, scales, values, turned, dtype=dtype).transpose(-1, -2)
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    parts = whole.view(-1, *shape[-2:])
    for part, own, exponents in zip(parts, codes.view(len(parts), -1), scales.view(len(parts), -1), strict=True):
        part.copy_(unpack_codes(own, exponents, values, torch.Size(turned[-2:]), dtype=dtype).T)
    return whole


def unpack_blocks(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Weights [..., rows, columns] of codes, and a float32 scale for each block of them."""
    of_rows = _by_row(scales.view(grid_shape(shape)), shape, USUAL_BLOCK)
    values = code_values(torch.float8_e4m3fn, codes.device)
    return unpack_codes(codes, of_rows, values, shape, dtype=dtype)
