"""Frozen weights in 4 or 8 bit by bitsandbytes, in FP8, or as published: packed on the host, unpacked for use.

4 bit: NF4 (arXiv 2305.14314). 8 bit: its blockwise dynamic code (arXiv 2110.02861), for weights alone: products are
computed with the unpacked weights, other than those of LLM.int8. A packed weight is one run of
bytes: codes, then the scales that they are to be multiplied by. bitsandbytes has one for each 64 weights, so 4.5 or 8.5
bits a weight; FP8 has one for each row. What is published in MXFP4 or FP8 blocks has its own codes and scales.

    | codes, 4 or 8 bit each | pad to 64 bytes | scales, float32, of MXFP4 exponents |

A block's weights are dequantised for its call and dropped after it. What autograd would keep of them for the backward
is kept packed and dequantised again when asked for, so a graph costs no memory for weights. Where there is memory for a
stage's whole weights they are held for a visit (`PackedParameter.stays_whole`): the same bits, dequantised once.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from roundpipe_cli.choices import PACKED_FORMATS, UNPACKED_AT_ONCE, WEIGHTS_PER_SCALE, PackedName
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.kernels.unpack_codes import E8M0_BIAS, FP4_VALUES, code_values, unpack_codes
from roundpipe_cli.model.stored.scaled_floats import grid_shape, unpack_blocks, unpack_mxfp4
from roundpipe_cli.model.stored.tensors import FINITE_CHECK_ELEMENTS, check_finite

# Recognises linear layers: one matrix, one tensor in, one tensor out.


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is torch's Linear or transformers' Conv1D, or made of one, and returns one tensor.

    Some routers (llama4, phimoe) are made of Linear and return tuples; what is done to linear layers would break them.
    """
    if not isinstance(module, nn.Linear):
        return type(module).__name__ == "Conv1D"
    return type(module).forward is nn.Linear.forward or _returns_a_tensor(module)


def _returns_a_tensor(module: nn.Linear) -> bool:
    """Try it on two rows on the meta device."""
    shadow = type(module).__new__(type(module))
    shadow.__dict__ = {**module.__dict__, "_forward_hooks": {}, "_forward_pre_hooks": {}}
    shadow.__dict__.pop("forward", None)
    shadow._parameters = {
        name: None if value is None else nn.Parameter(value.detach().to("meta"), requires_grad=False)
        for name, value in module._parameters.items()
    }
    try:
        with torch.no_grad():
            result = shadow.forward(torch.empty(2, module.in_features, device="meta", dtype=shadow.weight.dtype))
    except Exception:  # a module that is no linear layer may raise anything
        return False
    return isinstance(result, torch.Tensor) and result.shape == (2, module.out_features)


# Frozen weights in FP8, e4m3 (arXiv 2209.05433), with a float32 scale for each row.
#
#     weight[row, :] = codes[row, :] * scale[row]            scale[row] = max |weight[row, :]| / 448
#
# 448 is the largest number of e4m3, which has a sign, 4 bits of exponent and 3 of mantissa: a weight changes by at most
# 1/16 of itself, or by 2^-10 of the scale where that is more. A row is what is contiguous: of a linear layer what makes
# one output; of GPT-2's Conv1D, and of experts that hold their matrices transposed, what one input contributes.
#
# A row with a weight that is not finite is not a number from end to end, by its scale.

LARGEST_E4M3 = 448.0
"""The largest number of e4m3."""


def quantize_rows(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write `values` [..., columns] into `codes`, uint8 [values.numel()], and `scales`, float32 [rows]."""
    rows = values.reshape(-1, values.shape[-1])
    own_codes = codes.view(torch.float8_e4m3fn).view(rows.shape)
    num_rows = max(1, PACKED_AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, len(rows), num_rows):
        part = rows[start : start + num_rows].float()
        scale = scales[start : start + num_rows]
        # a row of zeros, or of the smallest numbers, must not be divided by zero
        torch.clamp(part.abs().amax(1) / LARGEST_E4M3, min=torch.finfo(torch.float32).tiny, out=scale)
        # quotients may round to a number beyond the largest
        own_codes[start : start + num_rows].copy_((part / scale[:, None]).clamp_(-LARGEST_E4M3, LARGEST_E4M3))


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The weights, a new tensor, of uint8 codes and float32 scales [rows].

    The same on every device: an exact factor, one product in float32, rounded once.
    """
    if codes.device.type == "cpu":  # by a table: its own conversion takes each number by itself, 2.5 times the time
        values = code_values(torch.float8_e4m3fn, codes.device)
        return unpack_codes(codes, scales, values, shape, dtype=dtype)
    rows = codes.view(-1, shape[-1])
    return rows.view(torch.float8_e4m3fn).to(dtype).mul_(scales[:, None]).view(shape)


ALIGNMENT_BYTES = 64
"""Parameters and scales begin at multiples of this: alignment changes the bits of CPU kernels."""
PACKED_AT_ONCE = 1 << 22
"""Weights that are packed in one call, a multiple of a scale's weights."""


def packed_bytes(shape: torch.Size, kind: PackedName) -> int:
    """Size of a packed weight."""
    group = PACKED_FORMATS[kind].weights_per_scale
    if kind == "fp8_blocks":
        num_scales = grid_shape(shape).numel()
    else:
        num_scales = shape[:-1].numel() if group is None else -(-shape.numel() // group)
    return _codes_bytes(shape.numel(), kind) + PACKED_FORMATS[kind].scale_bytes * num_scales


def _parts(packed: torch.Tensor, count: int, kind: PackedName) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of `count` weights, views."""
    scales = packed[_codes_bytes(count, kind) :]
    return packed[: _num_codes(count, kind)], scales if kind == "mxfp4" else scales.view(torch.float32)


def _codes_bytes(num_elements: int, kind: PackedName) -> int:
    return -(-_num_codes(num_elements, kind) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _num_codes(num_elements: int, kind: PackedName) -> int:
    """In bytes."""
    return (num_elements * PACKED_FORMATS[kind].bits + 7) // 8


def import_bitsandbytes() -> Any:
    """The library, or None where it is not installed.

    On processors with bfloat16 its import fetches a kernel from the hub and runs it, if the package `kernels` is there.
    Nothing is downloaded to be run here, so that package is out of its sight meanwhile. Four functions for devices that
    it has no kernels for it hands to torch.compile, which takes a second: they stay as they are. PEFT imports the
    library too, whenever it is installed, so this comes first.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    if "bitsandbytes" not in sys.modules:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "kernels"}
        logger = logging.getLogger("bitsandbytes.backends.cpu.ops")  # it says that the package is missing
        level, sys.modules["kernels"] = logger.level, None  # type: ignore[assignment]  # an import of it fails
        logger.setLevel(logging.ERROR)
        compiled = torch.compile
        torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)  # type: ignore[assignment]
        try:
            importlib.import_module("bitsandbytes")
        finally:
            torch.compile = compiled
            logger.setLevel(level)
            del sys.modules["kernels"]
            sys.modules.update(hidden)
    return sys.modules["bitsandbytes"]


def require_bitsandbytes(where: str = "load_in_4bit: true") -> None:
    """Refuse early where the library is missing; `where`: what of the recipe needs it."""
    if import_bitsandbytes() is None:
        raise RefusedError(
            "weights in 4 or 8 bit need the package bitsandbytes",
            where=where,
            found="not installed",
            hint="pip install bitsandbytes",
        )


def quantize(values: torch.Tensor, packed: torch.Tensor, kind: PackedName) -> None:
    """Write `values`, of any shape, into `packed`, uint8 [packed_bytes(values.shape, kind)].

    Some scales' worth at a time: bitsandbytes needs several times the memory of what it packs at once.
    """
    flat = values.contiguous().view(-1)
    codes, scales = _parts(packed, len(flat), kind)
    if kind == "fp8":
        quantize_rows(values, codes, scales)
        return
    for start in range(0, len(flat), PACKED_AT_ONCE):
        part = flat[start : start + PACKED_AT_ONCE]
        own_codes, own_scales = _quantize(part, kind)
        codes[_num_codes(start, kind) :][: own_codes.numel()].copy_(own_codes.flatten())
        scales[start // WEIGHTS_PER_SCALE :][: own_scales.numel()].copy_(own_scales.flatten())


def _quantize(values: torch.Tensor, kind: PackedName) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of some weights, by bitsandbytes."""
    functional = import_bitsandbytes().functional
    if kind == "8bit":
        codes, state = functional.quantize_blockwise(values, _dynamic_map(values.device), blocksize=WEIGHTS_PER_SCALE)
    else:
        codes, state = functional.quantize_4bit(values, blocksize=WEIGHTS_PER_SCALE, quant_type="nf4")
    return codes, state.absmax


@cache
def _dynamic_map(device: torch.device) -> torch.Tensor:
    """Float32 [256]: what an 8-bit code stands for, times the scale."""
    code: torch.Tensor = import_bitsandbytes().functional.create_dynamic_map().to(device)
    return code


def dequantize(packed: torch.Tensor, shape: torch.Size, dtype: torch.dtype, kind: PackedName) -> torch.Tensor:
    """The weights of `packed` as a new tensor."""
    count = shape.numel()
    codes, scales = _parts(packed, count, kind)
    if kind in _BY_TABLE:
        return _BY_TABLE[kind](codes, scales, shape, dtype)
    if count <= UNPACKED_AT_ONCE:
        return _dequantize(codes, scales, shape, dtype, kind=kind)
    whole = torch.empty(shape, dtype=dtype, device=packed.device)
    for start in range(0, count, UNPACKED_AT_ONCE):
        part = whole.view(-1)[start : start + UNPACKED_AT_ONCE]
        own_codes = codes[_num_codes(start, kind) :][: _num_codes(len(part), kind)]
        own_scales = scales[start // WEIGHTS_PER_SCALE :][: -(-len(part) // WEIGHTS_PER_SCALE)]
        part.copy_(_dequantize(own_codes, own_scales, part.shape, dtype, kind=kind).view(-1))
    return whole


_BY_TABLE = {"fp8": dequantize_rows, "mxfp4": unpack_mxfp4, "fp8_blocks": unpack_blocks}
"""Formats that are no codes of bitsandbytes."""


def _dequantize(
    codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size, dtype: torch.dtype, *, kind: PackedName
) -> torch.Tensor:
    """The weights of at most `UNPACKED_AT_ONCE` codes, by bitsandbytes."""
    functional = import_bitsandbytes().functional
    count = shape.numel()
    # bitsandbytes compiles a function, in seconds, for each shape whose last dimension is odd: those are flat here
    own_shape = shape if not shape or shape[-1] % 2 == 0 else torch.Size([count + count % 2])
    state = functional.QuantState(  # type: ignore[no-untyped-call]
        absmax=scales,
        shape=shape if kind == "8bit" else own_shape,
        code=_dynamic_map(codes.device) if kind == "8bit" else None,
        blocksize=WEIGHTS_PER_SCALE,
        quant_type=None if kind == "8bit" else "nf4",
        dtype=dtype,
    )
    whole: torch.Tensor
    if kind == "8bit":
        whole = functional.dequantize_blockwise(codes, state).view(shape)
    else:
        whole = functional.dequantize_4bit(codes.unsqueeze(1), state).view(-1)[:count].view(shape)
    return whole


@dataclass(frozen=True)
class PackedWeight:
    """A weight as a model's files have it packed."""

    codes: torch.Tensor
    """uint8, in any shape"""
    scales: torch.Tensor
    """float32, or exponents as uint8, in any shape"""
    shape: torch.Size
    """Shape of the unpacked weight."""
    dtype: torch.dtype
    kind: PackedName = "4bit"

    def write(self, packed: torch.Tensor) -> None:
        """Copy the weight into uint8 [packed_bytes]."""
        for own, part in zip(_parts(packed, self.shape.numel(), self.kind), (self.codes, self.scales), strict=True):
            own.copy_(part.flatten())

    def dequantized(self) -> torch.Tensor:
        """The weight, a new tensor."""
        packed = torch.zeros(packed_bytes(self.shape, self.kind), dtype=torch.uint8)
        self.write(packed)
        return dequantize(packed, self.shape, self.dtype, self.kind)

    def check_finite(self, dtype: torch.dtype, where: str) -> None:
        """As `check_finite` of the unpacked weight, which is unpacked only where codes and scales do not tell."""
        if self.kind == "mxfp4":
            largest = FP4_VALUES[-1] * torch.exp2(self.scales.amax().double() - E8M0_BIAS)
        else:
            largest = LARGEST_E4M3 * self.scales.double().abs().amax()
        parts = self.codes.flatten().split(FINITE_CHECK_ELEMENTS) if self.kind == "fp8_blocks" else ()
        if any(bool(((part & 127) == 127).any()) for part in parts) or not bool(largest <= torch.finfo(dtype).max):
            check_finite(replace(self, dtype=torch.float32).dequantized(), dtype, where)


class PackedParameter(nn.Parameter):
    """A packed weight in place of a module's weight; uint8, never trained."""

    whole_shape: torch.Size
    whole_dtype: torch.dtype
    kind: PackedName
    stays_whole: bool = False
    """Whether dequantised weights are held until `let_go`."""
    _whole: torch.Tensor | None = None

    @staticmethod
    def of(packed: torch.Tensor, shape: torch.Size, dtype: torch.dtype, kind: PackedName) -> PackedParameter:
        """`packed`, uint8 [packed_bytes], in place of a weight of `shape` that is used in `dtype`."""
        parameter = PackedParameter(packed, requires_grad=False)
        parameter.whole_shape, parameter.whole_dtype, parameter.kind = shape, dtype, kind
        return parameter

    def dequantized(self) -> torch.Tensor:
        """The weight: a new tensor, or the held one; nobody writes to it."""
        if self._whole is not None:
            return self._whole
        whole = dequantize(self.detach(), self.whole_shape, self.whole_dtype, self.kind)
        if self.stays_whole:
            self._whole = whole
        return whole

    def let_go(self) -> None:
        """Drop the held weight, and hold none from now on."""
        self.stays_whole, self._whole = False, None


PackedPlace = tuple[nn.Module, str, PackedParameter]
"""(module, attribute, its packed parameter)."""


@dataclass(frozen=True)
class _Kept:
    """A dequantised weight as a graph keeps it: the packed weight, and the view of it that was saved."""

    parameter: PackedParameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def whole_weights(places: Sequence[PackedPlace]) -> Iterator[None]:
    """Put dequantised weights into `places`; a graph that is made meanwhile keeps them packed."""
    by_storage: dict[int, PackedParameter] = {}  # by the storage itself: on the meta device all addresses are 0

    def pack(tensor: torch.Tensor) -> Any:
        parameter = by_storage.get(tensor.untyped_storage()._cdata)
        if parameter is None:
            # An output would hold its own graph here: nothing frees one that no backward goes through, after a failure.
            return tensor.detach()
        return _Kept(parameter, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    try:
        for module, attribute, parameter in places:
            whole = parameter.dequantized()
            by_storage[whole.untyped_storage()._cdata] = parameter
            module._parameters[attribute] = whole  # type: ignore[assignment]  # modules read it, nobody trains it
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        for module, attribute, parameter in places:
            module._parameters[attribute] = parameter


def _unpack(kept: Any) -> torch.Tensor:
    if isinstance(kept, _Kept):
        return kept.parameter.dequantized().as_strided(kept.size, kept.stride, kept.offset)
    tensor: torch.Tensor = kept
    return tensor


def quantizable_names(model: nn.Module, blocks_path: str) -> frozenset[str]:
    """Names of the frozen weights that are kept packed: of linear layers and of fused experts, in blocks.

    Embedding, LM head, norms, routers and adapters stay as they are, as with transformers' own 4-bit loading.
    """
    found = set()
    for path, module in model.named_modules():
        if not path.startswith(f"{blocks_path}."):
            continue
        for attribute, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad:
                continue
            if parameter.ndim == 3 or (attribute == "weight" and is_linear(module)):
                found.add(f"{path}.{attribute}")
    return frozenset(found)


MIN_PACKED_SHARE = 0.95
"""With a smaller packed share of the blocks' frozen matrices the user gets a notice. Routers always stay whole."""


def check_packed(model: nn.Module, blocks_path: str, packed: Collection[str], kind: PackedName) -> str | None:
    """A notice about the blocks' frozen matrices that stay whole; None: there are few.

    Raises:
        RefusedError: nothing is packed.
    """
    whole: dict[str, int] = {}
    num_packed, label, key = 0, PACKED_FORMATS[kind].label, PACKED_FORMATS[kind].key
    for path, module in model.get_submodule(blocks_path).named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad or parameter.ndim < 2:
                continue
            if f"{blocks_path}.{path}.{attribute}" in packed:
                num_packed += parameter.numel()
            else:
                of = type(module).__name__
                whole[of] = whole.get(of, 0) + parameter.numel()
    kinds = ", ".join(sorted(whole, key=lambda of: -whole[of])[:3])
    if not num_packed:
        raise RefusedError(
            f"none of this model's weights can be kept in {label}",
            where=f"{key}: true",
            found=f"blocks of {kinds or 'no matrices'}",
            expected="blocks with linear layers, or fused experts",
            hint=f"{key}=false",
        )
    share = num_packed / (num_packed + sum(whole.values()))
    if share >= MIN_PACKED_SHARE:
        return None
    return f"{share:.0%} of the blocks' frozen weights are kept in {label}; whole stay those of {kinds}"
