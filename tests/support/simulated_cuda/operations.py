"""What the simulation must know of each of torch's operations: what it writes, and whether the host has to wait."""

from __future__ import annotations

import itertools
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


def _flash_rows(
    query: torch.Tensor, key: torch.Tensor, ends: Sequence[torch.Tensor], window: Sequence[int], scale: float | None
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """(queries, keys, scores [key heads, heads of each, queries, keys] in float32 or wider) of each row; the causal
    mask is aligned to the lower right."""
    assert window[1] == 0, "causal"
    pairs = zip(*(itertools.pairwise(one.tolist()) for one in ends), strict=True)
    for (first, end), (first_key, end_key) in pairs:
        if first == end:
            continue
        queries, keys = slice(first, end), slice(first_key, end_key)
        scores = torch.einsum("qkgd,skd->kgqs", grouped(query[queries], key), wide(key[keys]))
        behind = torch.arange(end_key - end + first, end_key)[:, None] - torch.arange(first_key, end_key)
        hidden = (behind < 0) | ((behind > window[0]) & (window[0] >= 0))
        yield queries, keys, (scores * (scale or query.shape[-1] ** -0.5)).masked_fill(hidden, -torch.inf)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def grouped(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, width] -> [tokens, key heads, heads of each, width], as wide numbers."""
    return wide(query).unflatten(1, (key.shape[1], -1))


def flash_forward(query: Any, key: Any, value: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flash attention of rows: output, log-sums [heads, queries] in float32, state of the random numbers."""
    *ends, _, _, _, scale, window = rest[:7]
    result, sums = torch.zeros_like(query), query.new_zeros(query.shape[1::-1], dtype=wide(query).dtype)
    for queries, keys, scores in _flash_rows(query, key, ends, window, scale):
        sums[:, queries] = scores.logsumexp(-1).flatten(0, 1)
        found = torch.einsum("kgqs,skd->qkgd", scores.softmax(-1), wide(value[keys]))
        result[queries] = found.flatten(1, 2).to(query.dtype)
    return result, sums, torch.zeros(2, dtype=torch.uint64)


def flash_backward(
    gradient: Any, query: Any, key: Any, value: Any, result: Any, sums: Any, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its backward: from queries, keys, values, output and log-sums alone."""
    *ends, _, _, _, _, scale, window = rest
    found = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for queries, keys, scores in _flash_rows(query, key, ends, window, scale):
        given, weights = grouped(gradient[queries], key), (scores - sums[:, queries].view(*scores.shape[:3], 1)).exp()
        pull = (given * grouped(result[queries], key)).sum(-1).permute(1, 2, 0)[..., None]
        factor = weights * (torch.einsum("qkgd,skd->kgqs", given, wide(value[keys])) - pull)
        factor = factor * (scale or query.shape[-1] ** -0.5)
        found[0][queries] = torch.einsum("kgqs,skd->qkgd", factor, wide(key[keys])).flatten(1, 2).to(query.dtype)
        found[1][keys] = torch.einsum("kgqs,qkgd->skd", factor, grouped(query[queries], key)).to(query.dtype)
        found[2][keys] = torch.einsum("kgqs,qkgd->skd", weights, given).to(query.dtype)
    return found[0], found[1], found[2]


def _flash_workspace(_: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any) -> int:
    """Bytes that the kernel's backward takes meanwhile: gradients of queries in float32, sums of their products, and
    gradients of keys and values for each head where heads share them (flash_attn's `mha_varlen_bwd`)."""
    heads, width = query.shape[1:]
    expanded = 2 * key.shape[0] * heads * width * query.element_size() if heads != key.shape[1] else 0
    return 4 * query.shape[0] * heads * (width + 1) + expanded


WORKSPACES: dict[str, Callable[..., int]] = {"torch_attn._varlen_attn_backward.default": _flash_workspace}
"""Bytes of the device's memory that an operation takes while it works."""
SUBSTITUTES: dict[str, Callable[..., Any]] = {
    "torch_attn._varlen_attn.default": flash_forward,
    "torch_attn._varlen_attn_backward.default": flash_backward,
    "aten.histc.default": _histogram,
    "aten.mm.dtype": _wider_product,
    "aten.addmm.dtype_out": _wider_sum,
}
"""What devices can do and the processor cannot: a histogram of integers, a product with a result of another type,
attention of rows of other lengths."""


@dataclass(frozen=True)
class Operation:
    """What there is to know about one overload."""

    name: str
    written: frozenset[int | str]  # arguments that are written, by place or name
    is_view: bool  # it touches no data
    host_waits: bool
    mixes_devices: bool
    reads_form_alone: bool  # of its arguments: sizes and types, no data
    fills: bool  # it writes its results; an allocation does not


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
