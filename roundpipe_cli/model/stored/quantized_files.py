"""Checkpoints in bitsandbytes' 4 bit (NF4), as transformers saves them, which are read as they are.

A weight `w` of a linear layer is stored as its codes and, beside it, the values that undo them:

    w                                   codes, two a byte
    w.absmax                            scales, float32; quantised once more where there are the next two
    w.nested_absmax, w.nested_quant_map
    w.quant_map                         what a code stands for
    w.quant_state.bitsandbytes__nf4     JSON: shape, dtype, weights to a scale

The codes are those of `packed_weights.py`, so nothing is quantised twice: a packed weight is the same to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_cli.choices import WEIGHTS_PER_SCALE
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.quantization import WHAT_WORKS, is_stored_in_4bit
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import FileTensor
from roundpipe_cli.model.stored.packed_weights import dequantize, import_bitsandbytes, packed_bytes, put_packed
from roundpipe_cli.model.stored.tensors import OpenFiles, StoredTensor

STATE = "quant_state.bitsandbytes__nf4"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)
"""Suffixes beside a weight's name."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def stored_in_4bit(source: ModelSource) -> bool:
    """Whether the model's files hold its weights in bitsandbytes' NF4.

    Raises:
        RefusedError: they are quantised in a way that cannot be read here.
    """
    if source.gguf_file:
        return False
    return is_stored_in_4bit(source.config, str(source.folder / "config.json"))


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
        put_packed(self.codes, self.scales, self.shape, packed)

    def dequantized(self) -> torch.Tensor:
        """The weight, a new tensor."""
        packed = torch.zeros(packed_bytes(self.shape, "4bit"), dtype=torch.uint8)
        self.write(packed)
        return dequantize(packed, self.shape, self.dtype, "4bit")


def read_packed(codes: torch.Tensor, parts: Mapping[str, torch.Tensor], where: str) -> PackedWeight:
    """Put a weight's tensors from the files together.

    Args:
        codes: the tensor under the weight's own name, of any dtype of storage.
        parts: the tensors beside it, by suffix.

    Raises:
        RefusedError: one is missing or is not what bitsandbytes writes.
    """
    functional: Any = import_bitsandbytes().functional
    try:
        state = json.loads(bytes(parts[STATE].numpy()).decode())
        shape = torch.Size(int(size) for size in state["shape"])
        dtype = DTYPES[state["dtype"]]
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
        flat = codes.contiguous().flatten().view(torch.uint8)
        same_map = torch.equal(parts["quant_map"], functional.get_4bit_type("nf4", device="cpu"))
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"[:200]
        raise RefusedError("a weight in 4 bit is not as bitsandbytes writes it", where=where, found=text) from error
    if found != ("nf4", WEIGHTS_PER_SCALE) or not same_map:
        text = f"{found[0]}, {found[1]} weights to a scale" + ("" if same_map else ", with its own code")
        expected = f"nf4, {WEIGHTS_PER_SCALE} weights to a scale; else {WHAT_WORKS}"
        raise RefusedError("a weight in 4 bit has another code", where=where, found=text, expected=expected)
    count = shape.numel()
    if flat.numel() != (count + 1) // 2 or scales.numel() != -(-count // WEIGHTS_PER_SCALE):
        text = f"{flat.numel()} bytes of codes, {scales.numel()} scales"
        raise RefusedError("a weight in 4 bit is not whole", where=where, found=text, expected=f"shape {list(shape)}")
    return PackedWeight(flat, scales.float(), shape, dtype)


def find_nf4(
    pieces: Mapping[str, FileTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """The weights in bitsandbytes' 4 bit."""
    found = {}
    with OpenFiles() as files:
        for key in [key.removesuffix(f".{STATE}") for key in pieces if key.endswith(f".{STATE}")]:
            if key in pieces:
                parts = {part: pieces[f"{key}.{part}"] for part in PARTS if f"{key}.{part}" in pieces}
                shape, own = _described(files.tensor(parts[STATE])) or (torch.Size(pieces[key].shape), dtype)
                found[key] = StoredTensor({"codes": pieces[key], **parts}, shape, own, _dequantize_nf4)
    return found


def _described(state: torch.Tensor) -> tuple[torch.Size, torch.dtype] | None:
    """Shape and type of a weight; None where the files lack them, which `read_packed` refuses."""
    try:
        values = json.loads(bytes(state.numpy()).decode())
        return torch.Size(int(size) for size in values["shape"]), DTYPES[values["dtype"]]
    except (KeyError, ValueError, TypeError):
        return None


def _dequantize_nf4(parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    codes = parts["codes"].clone()
    return read_packed(codes, {role: part.clone() for role, part in parts.items()}, "4 bit").dequantized().to(dtype)


def is_nf4(weight: StoredTensor) -> bool:
    """Whether a weight of the files is in bitsandbytes' 4 bit."""
    return STATE in weight.pieces


def read_nf4(weight: StoredTensor, files: OpenFiles) -> PackedWeight:
    """A weight as bitsandbytes packed it.

    Raises:
        RefusedError: it is not as bitsandbytes writes it.
    """
    parts = {role: files.tensor(piece).clone() for role, piece in weight.pieces.items()}
    codes = weight.pieces["codes"]
    return read_packed(parts.pop("codes"), parts, f"{codes.path}: {codes.key}")
