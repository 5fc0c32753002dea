"""A checkpoint's weights by name, dequantised as they are read where its files hold them quantised."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.choices import SCALE_BYTES, WEIGHTS_PER_SCALE
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.quantization import WHAT_WORKS, quantization_settings, stored_form
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import FileTensor, are_equal, file_tensors, find_shards, read_config, refusing
from roundpipe_cli.model.stored.conversions import find_targets
from roundpipe_cli.model.stored.packed_weights import dequantize, import_bitsandbytes, packed_bytes
from roundpipe_cli.model.stored.tensors import OpenFiles, StoredTensor, own_shapes, plain, tied_names

# Weights from codes and scales: the common part of the quantised formats.
#
# Everything is computed in float32, some rows at a time, and rounded once to the type that is asked for: a code times
# its scale is exact in float32, or rounded once.

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
        part = slice(start, min(start + step, shape[0]))
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
    found = {}
    for name, codes in pieces.items():
        scale = scale_of(name, pieces)
        if codes.dtype in FLOATS and scale is not None:
            found[name] = in_8bit(codes, scale, dtype, block)
    return found


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
        own = scale.numel() > 1
        whole = torch.empty(shape, dtype=dtype)
        for expert in range(shape[0]):
            one = {"codes": codes[expert], "scale": scale[expert] if own else scale}
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
    turned = torch.Size((shape[2], shape[1]))
    for expert, (blocks, scales) in enumerate(zip(parts["blocks"], parts["scales"], strict=True)):
        packed = blocks.flatten(1)
        whole[expert] = scaled_rows(lambda rows, packed=packed: fp4_values(packed[rows]), scales, turned, dtype).T  # type: ignore[misc]
    return whole


# Checkpoints in bitsandbytes' 4 bit (NF4), as transformers saves them, which are read as they are.
#
# A weight `w` of a linear layer is stored as its codes and, beside it, the values that undo them:
#
#     w                                   codes, two a byte
#     w.absmax                            scales, float32; quantised once more where there are the next two
#     w.nested_absmax, w.nested_quant_map
#     w.quant_map                         what a code stands for
#     w.quant_state.bitsandbytes__nf4     JSON: shape, dtype, weights to a scale
#
# The codes are those of `packed_weights.py`, so nothing is quantised twice: a packed weight is the same to the bit.

STATE = "quant_state.bitsandbytes__nf4"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)
"""Suffixes beside a weight's name."""
_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def stored_in_4bit(source: ModelSource) -> bool:
    """Whether the model's files hold its weights in bitsandbytes' NF4.

    Raises:
        RefusedError: they are quantised in a way that cannot be read here.
    """
    if source.gguf_file:
        return False
    return stored_form(source.config, str(source.folder / "config.json")) == "bitsandbytes"


@dataclass(frozen=True)
class PackedWeight:
    """A weight as bitsandbytes packed it."""

    codes: torch.Tensor
    """uint8 [half of the weights]"""
    scales: torch.Tensor
    """float32 [one for each 64 weights]"""
    shape: torch.Size
    dtype: torch.dtype

    def write(self, packed: torch.Tensor) -> None:
        """Copy the weight into uint8 [packed_bytes], in the layout of `packed_weights.quantize`."""
        packed[: self.codes.numel()].copy_(self.codes.flatten())
        packed[len(packed) - SCALE_BYTES * self.scales.numel() :].view(torch.float32).copy_(self.scales.flatten())

    def dequantized(self) -> torch.Tensor:
        """The weight, a new tensor."""
        packed = torch.zeros(packed_bytes(self.shape, "4bit"), dtype=torch.uint8)
        self.write(packed)
        return dequantize(packed, self.shape, self.dtype, "4bit")


def read_packed(parts: Mapping[str, torch.Tensor], where: str) -> PackedWeight:
    """Put a weight's tensors from the files together.

    Args:
        parts: `codes`, the tensor under the weight's own name, of any dtype of storage; those beside it, by suffix.

    Raises:
        RefusedError: one is missing or is not what bitsandbytes writes.
    """
    functional: Any = import_bitsandbytes().functional
    with refusing("a weight in 4 bit is not as bitsandbytes writes it", where):
        state, shape, dtype = _state_of(parts[STATE])
        found = (state["quant_type"], int(state["blocksize"]))
        scales = parts["absmax"].flatten()
        if "nested_absmax" in parts:
            inner = functional.QuantState(
                absmax=parts["nested_absmax"],
                code=parts["nested_quant_map"],
                blocksize=int(state["nested_blocksize"]),
                dtype=torch.float32,
            )
            scales = functional.dequantize_blockwise(scales, inner) + float(state["nested_offset"])
        flat = parts["codes"].contiguous().flatten().view(torch.uint8)
        same_map = torch.equal(parts["quant_map"], functional.get_4bit_type("nf4", device="cpu"))
    if found != ("nf4", WEIGHTS_PER_SCALE) or not same_map:
        text = f"{found[0]}, {found[1]} weights to a scale" + ("" if same_map else ", with its own code")
        expected = f"nf4, {WEIGHTS_PER_SCALE} weights to a scale; else {WHAT_WORKS}"
        raise RefusedError("a weight in 4 bit has another code", where=where, found=text, expected=expected)
    count = shape.numel()
    if flat.numel() != (count + 1) // 2 or scales.numel() != -(-count // WEIGHTS_PER_SCALE):
        text = f"{flat.numel()} bytes of codes, {scales.numel()} scales"
        raise RefusedError("a weight in 4 bit is not whole", where=where, found=text, expected=f"shape {list(shape)}")
    return PackedWeight(flat, scales.float(), shape, dtype)


def _state_of(part: torch.Tensor) -> tuple[dict[str, Any], torch.Size, torch.dtype]:
    """The state that bitsandbytes notes of a weight, its shape and its type; other errors where the files lack it."""
    state = json.loads(bytes(part.numpy()).decode())
    return state, torch.Size(int(size) for size in state["shape"]), _STATE_DTYPES[state["dtype"]]


def find_nf4(
    pieces: Mapping[str, FileTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """The weights in bitsandbytes' 4 bit."""
    found = {}
    with OpenFiles() as files:
        for key in [key.removesuffix(f".{STATE}") for key in pieces if key.endswith(f".{STATE}")]:
            if key in pieces:
                parts = {part: pieces[f"{key}.{part}"] for part in PARTS if f"{key}.{part}" in pieces}
                shape, own = torch.Size(pieces[key].shape), dtype
                with suppress(KeyError, ValueError, TypeError):  # which `read_packed` refuses
                    _, shape, own = _state_of(files.tensor(parts[STATE]))
                found[key] = StoredTensor({"codes": pieces[key], **parts}, shape, own, _dequantize_nf4)
    return found


def _dequantize_nf4(parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return read_packed({role: part.clone() for role, part in parts.items()}, "4 bit").dequantized().to(dtype)


def is_nf4(weight: StoredTensor) -> bool:
    """Whether a weight of the files is in bitsandbytes' 4 bit."""
    return STATE in weight.pieces


def read_nf4(weight: StoredTensor, files: OpenFiles) -> PackedWeight:
    """A weight as bitsandbytes packed it; what it does not write so is refused."""
    parts = {role: files.tensor(piece).clone() for role, piece in weight.pieces.items()}
    codes = weight.pieces["codes"]
    return read_packed(parts, f"{codes.path}: {codes.key}")


Find = Callable[[Mapping[str, FileTensor], Mapping[str, Any], torch.dtype], dict[str, StoredTensor]]
FORMATS: dict[str, Find] = {"fp8": find_fp8, "fbgemm_fp8": find_fp8, "mxfp4": find_mxfp4, "bitsandbytes": find_nf4}
"""By `quant_method` of config.json."""
BESIDE = frozenset(
    {*("activation_scale", "input_scale", "output_scale", "qscale_act"), *("k_scale", "v_scale", "q_scale")}
)
"""Last parts of the names of scales of activations and caches, which training does not quantise."""


def find_stored(folder: Path, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Name in the unquantised checkpoint -> weight, of a model folder; `dtype` is that of dequantised ones.

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

    `model`: the skeleton, tied by its configuration, without adapters. Returns a notice for the user; None where the
    configuration is right.
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
            one, same = found[first], found[other]  # quantised ones are never one table
            if one.is_quantized or same.is_quantized or not are_equal(one.pieces[""], same.pieces[""]):
                path, _, attribute = other.rpartition(".")
                old = model.get_parameter(other)
                fresh = nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad)
                setattr(model.get_submodule(path), attribute, fresh)
                yield other


def _configs_above(model: nn.Module, names: list[str]) -> Iterator[Any]:
    """The model's configurations that may tie these weights: its own, its language model's, those of outer modules."""
    top: Any = model.config
    yield from (top, top.get_text_config())
    for path, module in model.named_modules():
        if hasattr(module, "config") and any(name.startswith(f"{path}.") for name in names):
            yield module.config
