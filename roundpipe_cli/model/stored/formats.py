"""A checkpoint's weights by name, dequantised as they are read where its files hold them quantised.

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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.model.files.quantization import COMPRESSED, quantization_settings, stored_form
from roundpipe_cli.model.files.untrusted import FileTensor, are_equal, file_tensors, find_shards, read_config
from roundpipe_cli.model.stored.conversions import find_targets
from roundpipe_cli.model.stored.quantized_files import find_nf4
from roundpipe_cli.model.stored.tensors import (
    OpenFiles,
    StoredTensor,
    own_shapes,
    plain,
    tied_names,
)

# Weights from codes and scales: the common part of the quantised formats.
#
# Everything is computed in float32, some rows at a time, and rounded once to the type that is asked for: a code times
# its scale is exact in float32, or rounded once.

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7 of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3); 8 to 15 are their negatives."""
E8M0_BIAS = 127
ELEMENTS_AT_ONCE = 1 << 22
ROWS_AT_ONCE = 32
"""Least rows at a time, and what their number is a multiple of: 32 numbers of b bits fill b words of 32 bits."""


def row_ranges(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Ranges of rows to compute at once."""
    step = max(ROWS_AT_ONCE, ELEMENTS_AT_ONCE // max(1, num_columns) // ROWS_AT_ONCE * ROWS_AT_ONCE)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


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
    grid = as_float(scale)
    grid = grid.reshape(1, 1) if grid.numel() == 1 else grid.reshape(-1, 1) if grid.ndim == 1 else grid
    rows, columns = (_block_size(shape[i], grid.shape[i], None if block is None else block[i]) for i in (0, 1))
    for part in row_ranges(*shape):
        of_rows = grid[torch.arange(part.start, part.stop) // rows]
        whole[part] = values(part) * of_rows.repeat_interleave(columns, dim=1)[:, : shape[1]]
    return whole


def _block_size(size: int, num_blocks: int, block: int | None) -> int:
    if block and -(-size // block) == num_blocks:
        return block
    if num_blocks < 1 or size % num_blocks:
        raise ValueError(
            f"{num_blocks} scales for {size} rows or columns, and the settings say no block of such a size"
        )
    return size // num_blocks


def groups_in_order(num_inputs: int, num_groups: int, sizes: Iterable[int] = ()) -> torch.Tensor:
    """Group of each input, int64 [num_inputs]: by the first of `sizes` that makes so many groups, else equal ones.

    Raises:
        ValueError: neither suits.
    """
    size = next((one for one in sizes if one > 0 and -(-num_inputs // one) == num_groups), None)
    return torch.arange(num_inputs) // _block_size(num_inputs, num_groups, size)


def as_float(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32; a byte is an exponent (E8M0)."""
    return torch.exp2(scale.float() - E8M0_BIAS) if scale.dtype == torch.uint8 else scale.float()


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """Float32 [..., 2 n] of codes [..., n], two a byte, the low half first."""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    codes = packed.contiguous().view(torch.uint8)
    return torch.stack([table[(codes & 15).int()], table[(codes >> 4).int()]], dim=-1).flatten(-2)


def unpack_bits(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Int64 [..., count]: numbers of `bits` bits that lie one after the other in words of 32 bits, low bits first.

    Args:
        words: int32 [..., n].

    Raises:
        ValueError: too few words.
    """
    if words.shape[-1] * 32 < count * bits:
        raise ValueError(f"{words.shape[-1]} words of 32 bits for {count} numbers of {bits} bits")
    wide = words.long() & 0xFFFFFFFF
    start = torch.arange(count) * bits
    word, offset = start // 32, start % 32
    after = (word + 1).clamp(max=words.shape[-1] - 1)
    both = wide[..., word] | (wide[..., after] << 32)
    return (both >> offset) & ((1 << bits) - 1)


# Weights as 8-bit floats or whole numbers, with a scale for all, for each row, or for each block.
#
#     w                      codes, E4M3 or E5M2; or E2M1, two a byte
#     w_scale_inv, w_scale   float32, 16 bit, or an exponent (E8M0)
#
# Published so by DeepSeek, Qwen and MiniMax (blocks of 128 x 128), Mistral (one scale), Meta's FBGEMM (rows), NVIDIA's
# ModelOpt and compressed-tensors. Despite its name `weight_scale_inv` is what a code is multiplied with.

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
    *,
    zero_point: FileTensor | None = None,
    is_int: bool = False,
) -> StoredTensor:
    """A weight of codes and scales; [experts, rows, columns] or [rows, columns]."""
    two_a_byte = codes.dtype == "I8" and not is_int
    shape = torch.Size((*codes.shape[:-1], 2 * codes.shape[-1])) if two_a_byte else torch.Size(codes.shape)
    parts = {"codes": codes, "scale": scale, **({} if zero_point is None else {"zero_point": zero_point})}
    return StoredTensor(parts, shape, dtype, partial(_unpack_fp8, shape=shape, block=block, is_int=is_int))


def _unpack_fp8(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size, block: BlockSize, *, is_int: bool
) -> torch.Tensor:
    codes, scale, zero = parts["codes"], parts["scale"], parts.get("zero_point")
    if len(shape) == 3:
        own = scale.numel() > 1
        whole = torch.empty(shape, dtype=dtype)
        for expert in range(shape[0]):
            one = {"codes": codes[expert], "scale": scale[expert] if own else scale}
            whole[expert] = _unpack_fp8(one, dtype, torch.Size(shape[1:]), block, is_int=is_int)
        return whole

    def values(rows: slice) -> torch.Tensor:
        if codes.dtype == torch.float4_e2m1fn_x2 or (codes.dtype == torch.int8 and not is_int):
            return fp4_values(codes.view(torch.uint8)[rows])
        values = codes[rows].float()
        return values if zero is None else values - _of_rows(zero.float(), rows, shape)

    return scaled_rows(values, scale, shape, dtype, block=block)


def _of_rows(zero: torch.Tensor, rows: slice, shape: torch.Size) -> torch.Tensor:
    """Zero points, one for all, for each row, or for each group of columns of a row."""
    if zero.numel() == 1:
        return zero.reshape(1, 1)
    grid = zero.reshape(shape[0], -1)[rows]
    return grid.repeat_interleave(shape[1] // grid.shape[1], dim=1)


# Weights as 4-bit floats (E2M1), two a byte, the low half first, with a scale for each 16 or 32 of them.
#
# MXFP4 (OCP Microscaling Formats 1.0), as GPT-OSS has it: [experts, out, in], in the model [experts, in, out]
#     w_blocks  [experts, out, in / 32, 16]      w_scales  [experts, out, in / 32], exponents (E8M0)
# NVFP4, as NVIDIA's ModelOpt writes it: code x weight_scale x weight_scale_2
#     weight    [out, in / 2]                    weight_scale  [out, in / 16], E4M3      weight_scale_2  float32


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
            found[key] = in_8bit(piece, scale, dtype, block, zero_point=zero if is_int else None, is_int=is_int)
        elif role == "weight_packed":
            found[f"{module}.weight"] = _packed(piece, beside, bits, sizes, dtype=dtype)
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
    piece: FileTensor, beside: Mapping[str, FileTensor], bits: list[int], sizes: Sequence[int], *, dtype: torch.dtype
) -> StoredTensor:
    if "weight_global_scale" in beside:
        return nvfp4(piece, beside["weight_scale"], beside["weight_global_scale"], dtype, divides=True)
    if piece.dtype == "U8":
        return mxfp4_rows(piece, beside["weight_scale"], dtype)
    shape = _shape_of(beside["weight_shape"])
    fitting = [one for one in bits if -(-shape[-1] * one // WORD_BITS) == piece.shape[-1]]
    num_bits = fitting[0] if fitting else 0  # refused where it is unpacked
    unpack = partial(_unpack_bits, shape=shape, bits=num_bits, sizes=sizes)
    return StoredTensor({"codes": piece, **beside}, shape, dtype, unpack)


def _shape_of(piece: FileTensor) -> torch.Size:
    with OpenFiles() as files:
        return torch.Size(int(size) for size in files.tensor(piece))


def _unpack_bits(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: torch.Size, bits: int, *, sizes: Sequence[int]
) -> torch.Tensor:
    if not bits:
        raise ValueError(f"{parts['codes'].shape[-1]} words for {shape[-1]} inputs")
    if len(shape) == 3:
        whole = torch.empty(shape, dtype=dtype)
        for expert in range(shape[0]):
            one = {role: part if role == "weight_shape" else part[expert] for role, part in parts.items()}
            whole[expert] = _unpack_bits(one, dtype, torch.Size(shape[1:]), bits, sizes=sizes)
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


# A checkpoint's weights by name, dequantised as they are read where its files hold them quantised.
#
# Each format has its own file. bitsandbytes' 4 bit, which stays packed where that is wanted, is in
# `quantized_files.py`.

Find = Callable[[Mapping[str, FileTensor], Mapping[str, Any], torch.dtype], dict[str, StoredTensor]]
FORMATS: dict[str, Find] = {
    "fp8": find_fp8,
    "fbgemm_fp8": find_fp8,
    "mxfp4": find_mxfp4,
    "modelopt": find_modelopt,
    COMPRESSED: find_compressed,
    "bitsandbytes": find_nf4,
}
"""By `quant_method` of config.json."""
BESIDE = frozenset(
    {
        *("activation_scale", "input_scale", "input_global_scale", "input_zero_point", "output_scale", "qscale_act"),
        *("k_scale", "v_scale", "q_scale"),
    }
)
"""Last parts of the names of scales of activations and caches, which training does not quantise."""


def find_stored(folder: Path, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Name in the unquantised checkpoint -> weight, of a model folder.

    Args:
        dtype: of the weights that are dequantised.

    Raises:
        RefusedError: the files are quantised in a form that cannot be read, or cannot be read at all.
    """
    config = read_config(folder)
    pieces = file_tensors(find_shards(folder))
    form = stored_form(config, str(folder / "config.json"))
    if form is None:
        return {name: plain(piece) for name, piece in pieces.items()}
    found = FORMATS[form](pieces, quantization_settings(config), dtype)
    used = {piece.key for weight in found.values() for piece in weight.pieces.values()}
    rest = {
        name: plain(piece)
        for name, piece in pieces.items()
        if name not in used and name not in found and name.rpartition(".")[2] not in BESIDE
    }
    return {**rest, **found}


# Tables that a configuration ties while the files hold each of them: the LM head beside the embedding.
#
# As in transformers' loader the files decide: tables that are equal are one, of others each is kept.

FLAG = "tie_word_embeddings"


def untie_stored(model: nn.Module, folder: Path) -> str | None:
    """Give each table that the files hold a parameter, and change the configuration to say so.

    Args:
        model: the skeleton, tied by its configuration, without adapters.
        folder: of safetensors files.

    Returns:
        a notice for the user; None where the configuration is right.

    Raises:
        RefusedError: files that cannot be read.
    """
    untied = list(_untie(model, folder))
    if not untied:
        return None
    if not tied_names(model):  # what is still tied, a bias say, is so by the same flag
        for config in _configs_above(model, untied):
            if getattr(config, FLAG, False):
                setattr(config, FLAG, False)
    return (
        f"the files hold {' and '.join(untied)} beside the embedding, with other values: both are used, though the "
        f"model's configuration says {FLAG}: true; a whole model that is saved says false"
    )


def _untie(model: nn.Module, folder: Path) -> Iterator[str]:
    """Names of the weights that get a parameter of their own, after they got it."""
    tied = tied_names(model)
    if not tied:
        return
    stored = find_stored(folder, torch.float32)
    found = {target: stored[name] for name, target in find_targets(model, stored, own_shapes(model)).items()}
    names = [name for name, _ in model.named_parameters() if name in tied]
    for name in names:
        first, *others = [one for one in (name, *tied[name]) if one in found] or [name]
        for other in others:
            if not _are_equal(found[first], found[other]):
                path, _, attribute = other.rpartition(".")
                old = model.get_parameter(other)
                fresh = nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad)
                setattr(model.get_submodule(path), attribute, fresh)
                yield other


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether both are one table, by their bytes; quantised ones are not."""
    if first.is_quantized or second.is_quantized:
        return False
    one, other = (weight.pieces[""] for weight in (first, second))
    return are_equal(one, other)


def _configs_above(model: nn.Module, names: list[str]) -> Iterator[Any]:
    """The model's configurations that may tie these weights: its own, its language model's, those of outer modules."""
    top: Any = model.config
    yield from (top, top.get_text_config())
    for path, module in model.named_modules():
        if hasattr(module, "config") and any(name.startswith(f"{path}.") for name in names):
            yield module.config
