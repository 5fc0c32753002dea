"""What the simulation must know of each of torch's operations: what it writes, and whether the host has to wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_HOST_WAITS = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "is_nonzero"),
        *("_unique2", "unique_dim", "unique_consecutive"),
    )
)
"""On a device these return when all work before them is done: the host needs a number, or the size of the result."""
_MIXED = frozenset({"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"})
"""These take indices on the host for tensors on a device; they are uploaded, and the host waits."""
_RESHAPES = frozenset(
    {"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh", "aten::_has_same_storage_numel", "aten::set_"}
)


def _histogram(values: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.histc(values.float(), *args).to(values.dtype)


def _check_wider(left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype) -> None:
    """As torch (aten/src/ATen/native/cuda/Blas.cpp, aten/src/ATen/cuda/CUDABlas.cpp)."""
    if left.dtype != right.dtype:
        raise RuntimeError("expected mat1 and mat2 to have the same dtype")
    if left.dtype not in (torch.float16, torch.bfloat16) or out_dtype not in (left.dtype, torch.float32):
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    narrow = torch.backends.cuda.matmul.allow_fp16_accumulation
    if left.dtype == torch.float16 and out_dtype == torch.float32 and narrow:
        raise RuntimeError(
            "gemm input type at::Half and output type float is not supported with allowFP16AccumulationCuBLAS"
        )


def _wider_product(left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    _check_wider(left, right, out_dtype)
    return torch.mm(left.to(out_dtype), right.to(out_dtype))


def _wider_sum(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype, *, out: torch.Tensor
) -> torch.Tensor:
    _check_wider(left, right, out_dtype)
    if not total.dtype == out.dtype == out_dtype:
        raise RuntimeError("self dtype must match out_dtype, and so must out's")
    return torch.addmm(total, left.to(out_dtype), right.to(out_dtype), out=out)


SUBSTITUTES: dict[str, Callable[..., Any]] = {
    "aten.histc.default": _histogram,
    "aten.mm.dtype": _wider_product,
    "aten.addmm.dtype_out": _wider_sum,
}
"""What devices can do and the processor cannot: a histogram of integers, a product with a result of another type."""


@dataclass(frozen=True)
class Operation:
    """What there is to know about one overload."""

    name: str
    written: frozenset[int | str]
    """Arguments that are written, by place or name."""
    is_view: bool
    """It touches no data."""
    host_waits: bool
    mixes_devices: bool
    reads_form_alone: bool
    """Of its arguments: sizes and types, no data."""
    fills: bool
    """It writes its results; an allocation does not."""


@cache
def operation_of(func: Any) -> Operation:
    schema = func._schema
    written: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
    returns = schema.returns
    aliases = [one.alias_info is not None and not one.alias_info.is_write for one in returns]
    is_view = (bool(returns) and all(aliases)) or schema.name in _RESHAPES
    name = schema.name
    form = name.endswith("_like") or name.startswith("aten::new_")
    fills = not name.startswith(("aten::empty", "aten::new_empty"))
    return Operation(name, frozenset(written), is_view, name in _HOST_WAITS, name in _MIXED, form, fills)


def tensors_in(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    """(tensor, whether it is written) of an operation's arguments."""
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            yield value, key in operation.written
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor):
                    yield item, key in operation.written


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte behind the last that a tensor may touch in its storage."""
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    last = 0
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if length == 0:
            return start, start
        last += (length - 1) * stride
    return start, start + (last + 1) * size
