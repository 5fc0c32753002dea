"""Checkpoints in bitsandbytes' 4 bit (NF4), as transformers saves them, which are read as they are.

A weight `w` of a linear layer is stored as its codes and, beside it, the values that undo them:

    w                                   codes, two a byte
    w.absmax                            scales, float32; quantised once more where there are the next two
    w.nested_absmax, w.nested_quant_map
    w.quant_map                         what a code stands for
    w.quant_state.bitsandbytes__nf4     JSON: shape, dtype, weights to a scale

The codes are those of `packed_weights.py`, so nothing is quantised twice: a packed weight is the same to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from roundpipe_cli.choices import WEIGHTS_PER_SCALE
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.quantization import WHAT_WORKS
from roundpipe_cli.model.files.untrusted import FileTensor, refusing
from roundpipe_cli.model.stored.packed_weights import PackedWeight, import_bitsandbytes
from roundpipe_cli.model.stored.tensors import OpenFiles, StoredTensor

STATE = "quant_state.bitsandbytes__nf4"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)
"""Suffixes beside a weight's name."""
_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        code = (state["quant_type"], int(state["blocksize"]))
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
    if code != ("nf4", WEIGHTS_PER_SCALE) or not same_map:
        text = f"{code[0]}, {code[1]} weights to a scale" + ("" if same_map else ", with its own code")
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
    weights = {}
    with OpenFiles() as files:
        for key in [key.removesuffix(f".{STATE}") for key in pieces if key.endswith(f".{STATE}")]:
            if key in pieces:
                beside = {suffix: pieces[f"{key}.{suffix}"] for suffix in PARTS if f"{key}.{suffix}" in pieces}
                shape, whole_dtype = torch.Size(pieces[key].shape), dtype
                with suppress(KeyError, ValueError, TypeError):  # which `read_packed` refuses
                    _, shape, whole_dtype = _state_of(files.tensor(beside[STATE]))
                weights[key] = StoredTensor(
                    {"codes": pieces[key], **beside}, shape, whole_dtype, _dequantize_nf4, "4bit"
                )
    return weights


def _dequantize_nf4(parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return read_packed({role: part.clone() for role, part in parts.items()}, "4 bit").dequantized().to(dtype)


def is_nf4(weight: StoredTensor) -> bool:
    """Whether a weight of the files is in bitsandbytes' 4 bit."""
    return STATE in weight.pieces


def read_nf4(weight: StoredTensor, files: OpenFiles) -> PackedWeight:
    """A weight as bitsandbytes packed it; what it does not write so is refused."""
    tensors = {role: files.tensor(piece).clone() for role, piece in weight.pieces.items()}
    codes = weight.pieces["codes"]
    return read_packed(tensors, f"{codes.path}: {codes.key}")
