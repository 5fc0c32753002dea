"""Frozen weights in 4 bit: NF4 by bitsandbytes (arXiv 2305.14314), packed on the host and in slots, whole only in use.

A packed weight is one run of bytes: two weights a byte, then one float32 scale for each 64 weights: 4.5 bits a weight.

    | codes, 4 bit each | pad to 64 bytes | scales, float32 |

A block's weights are dequantised for its call and dropped after it. What autograd would keep of them for the backward
is kept packed and dequantised again when asked for, so a graph costs no memory for weights.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError

WEIGHTS_PER_SCALE = 64
_ALIGNMENT_BYTES = 64


def packed_bytes(num_elements: int) -> int:
    """Size of a packed weight."""
    return _codes_bytes(num_elements) + 4 * _num_scales(num_elements)


def _codes_bytes(num_elements: int) -> int:
    return -(-((num_elements + 1) // 2) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _num_scales(num_elements: int) -> int:
    return -(-num_elements // WEIGHTS_PER_SCALE)


def import_bitsandbytes() -> Any:
    """The library, or None where it is not installed.

    On processors with bfloat16 its import fetches a kernel from the hub and runs it, if the package `kernels` is there.
    Nothing is downloaded to be run here, so that package is out of its sight meanwhile. PEFT imports the library too,
    whenever it is installed, so this comes first.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    if "bitsandbytes" not in sys.modules:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "kernels"}
        logger = logging.getLogger("bitsandbytes.backends.cpu.ops")  # says that it misses the package
        level, sys.modules["kernels"] = logger.level, None  # type: ignore[assignment]  # an import of it fails
        logger.setLevel(logging.ERROR)
        try:
            importlib.import_module("bitsandbytes")
        finally:
            logger.setLevel(level)
            del sys.modules["kernels"]
            sys.modules.update(hidden)
    return sys.modules["bitsandbytes"]


def require_bitsandbytes() -> None:
    """Refuse early where the library is missing.

    Raises:
        RefusedError: it is not installed.
    """
    if import_bitsandbytes() is None:
        raise RefusedError(
            "4-bit weights need the package bitsandbytes",
            where="load_in_4bit: true",
            found="not installed",
            hint="pip install bitsandbytes",
        )


def quantize(values: torch.Tensor, packed: torch.Tensor) -> None:
    """Write `values`, of any shape, into `packed`, uint8 [packed_bytes(values.numel())]."""
    functional = import_bitsandbytes().functional
    codes, state = functional.quantize_4bit(values.contiguous(), blocksize=WEIGHTS_PER_SCALE, quant_type="nf4")
    packed[: codes.numel()].copy_(codes.flatten())
    packed[_codes_bytes(values.numel()) :].view(torch.float32).copy_(state.absmax)


def dequantize(packed: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The weights of `packed` as a new tensor."""
    functional = import_bitsandbytes().functional
    count = shape.numel()
    state = functional.QuantState(  # type: ignore[no-untyped-call]
        absmax=packed[_codes_bytes(count) :].view(torch.float32),
        shape=shape,
        code=None,
        blocksize=WEIGHTS_PER_SCALE,
        quant_type="nf4",
        dtype=dtype,
    )
    whole: torch.Tensor = functional.dequantize_4bit(packed[: (count + 1) // 2].unsqueeze(1), state)
    return whole


class PackedParameter(nn.Parameter):
    """A packed weight in a module's place for a weight; uint8, never trained."""

    whole_shape: torch.Size
    whole_dtype: torch.dtype

    @staticmethod
    def of(packed: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> PackedParameter:
        """
        Args:
            packed: uint8 [packed_bytes].
            shape: of the weight.
            dtype: in which the weight is used.
        """
        parameter = PackedParameter(packed, requires_grad=False)
        parameter.whole_shape, parameter.whole_dtype = shape, dtype
        return parameter

    def dequantized(self) -> torch.Tensor:
        """The weight, a new tensor."""
        return dequantize(self.detach(), self.whole_shape, self.whole_dtype)


PackedPlace = tuple[nn.Module, str, PackedParameter]
"""(module, attribute, what is there)."""


@dataclass(frozen=True)
class _Kept:
    """What a graph keeps of a dequantised weight: where to get it again, and the view that was asked for."""

    parameter: PackedParameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def whole_weights(places: Sequence[PackedPlace]) -> Iterator[None]:
    """Put dequantised weights into `places`; a graph that is made meanwhile keeps them packed."""
    by_storage: dict[int, PackedParameter] = {}
    for module, attribute, parameter in places:
        whole = parameter.dequantized()
        by_storage[whole.untyped_storage().data_ptr()] = parameter
        module._parameters[attribute] = whole  # type: ignore[assignment]  # modules read it, nobody trains it

    def pack(tensor: torch.Tensor) -> Any:
        parameter = by_storage.get(tensor.untyped_storage().data_ptr())
        if parameter is None:
            return tensor
        return _Kept(parameter, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    try:
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
    """Names of the frozen weights that are kept in 4 bit: of linear layers and of fused experts, in blocks.

    Embedding, LM head, norms, routers and adapters stay as they are, as with transformers' own 4-bit loading.
    """
    found = set()
    for path, module in model.named_modules():
        if not path.startswith(f"{blocks_path}."):
            continue
        for attribute, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad:
                continue
            if parameter.ndim == 3 or (isinstance(module, nn.Linear) and attribute == "weight"):
                found.add(f"{path}.{attribute}")
    return frozenset(found)
