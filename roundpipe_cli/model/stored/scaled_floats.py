"""Weights of 8-bit and 4-bit floats with scales, dequantised a few rows at a time.

Everything is computed in float32, and rounded once to the type that is asked for: a code times its scale is exact in
float32, or rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from roundpipe_cli.model.files.untrusted import FileTensor
from roundpipe_cli.model.stored.tensors import StoredTensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7 of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3); 8 to 15 are their negatives."""
E8M0_BIAS = 127
ELEMENTS_AT_ONCE = 1 << 22
ROWS_AT_ONCE = 32
"""Least rows at a time, and what their number is a multiple of."""


def scaled_rows(
    values: Callable[[slice], torch.Tensor],
    scale: torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """A weight of `shape` [rows, columns] from its values and a grid of scales.

    Args:
        values: float32 of some rows.
        scale: one for all, one for each row, or one for each block.
        block: rows and columns of a block; the last ones may be cut off. None: as the shapes say.

    Raises:
        ValueError: the grid does not cover the weight.
    """
    whole = torch.empty(shape, dtype=dtype)
    grid = torch.exp2(scale.float() - E8M0_BIAS) if scale.dtype == torch.uint8 else scale.float()
    grid = grid.reshape(1, 1) if grid.numel() == 1 else grid.reshape(-1, 1) if grid.ndim == 1 else grid
    rows, columns = (_block_size(shape[i], grid.shape[i], None if block is None else block[i]) for i in (0, 1))
    step = max(ROWS_AT_ONCE, ELEMENTS_AT_ONCE // max(1, shape[1]) // ROWS_AT_ONCE * ROWS_AT_ONCE)
    for start in range(0, shape[0], step):
        chunk = slice(start, min(start + step, shape[0]))
        of_rows = grid[torch.arange(chunk.start, chunk.stop) // rows]
        whole[chunk] = values(chunk) * of_rows.repeat_interleave(columns, dim=1)[:, : shape[1]]
    return whole


def _block_size(size: int, num_blocks: int, block: int | None) -> int:
    if block and -(-size // block) == num_blocks:
        return block
    if num_blocks < 1 or size % num_blocks:
        raise ValueError(
            f"{num_blocks} scales for {size} rows or columns, and the settings say no block of such a size"
        )
    return size // num_blocks


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """Float32 [..., 2 n] of codes [..., n], two a byte, the low half first."""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    codes = packed.contiguous().view(torch.uint8)
    return torch.stack([table[(codes & 15).int()], table[(codes >> 4).int()]], dim=-1).flatten(-2)


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
USUAL_BLOCK = (128, 128)
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
    return StoredTensor({"codes": codes, "scale": scale}, shape, dtype, partial(_unpack_fp8, shape=shape, block=block))


def _unpack_fp8(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size, block: BlockSize
) -> torch.Tensor:
    codes, scale = parts["codes"], parts["scale"]
    if len(shape) == 3:
        one_each = scale.numel() > 1
        whole = torch.empty(shape, dtype=dtype)
        for expert in range(shape[0]):
            one = {"codes": codes[expert], "scale": scale[expert] if one_each else scale}
            whole[expert] = _unpack_fp8(one, dtype, torch.Size(shape[1:]), block)
        return whole

    def values(rows: slice) -> torch.Tensor:
        if codes.dtype in (torch.float4_e2m1fn_x2, torch.int8):
            return fp4_values(codes.view(torch.uint8)[rows])
        return codes[rows].float()

    return scaled_rows(values, scale, shape, dtype, block=block)


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
            weights[name] = StoredTensor(stored, shape, dtype, partial(_unpack_experts, shape=shape))
    return weights


def _unpack_experts(parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    whole = torch.empty(shape, dtype=dtype)
    turned = torch.Size((shape[2], shape[1]))
    for expert, (blocks, scales) in enumerate(zip(parts["blocks"], parts["scales"], strict=True)):
        packed = blocks.flatten(1)
        whole[expert] = scaled_rows(lambda rows, packed=packed: fp4_values(packed[rows]), scales, turned, dtype).T  # type: ignore[misc]
    return whole
