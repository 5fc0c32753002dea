"""Launches on a device, counted as it is dispatched: operators, bytes of traffic, products and their FLOPs, host waits.

A launch is an operator that writes memory; views and allocations are none. Gradient adds and casts count. A custom
operator counts as often as `KERNELS_OF_CUSTOM` says, once otherwise. Traffic is the bytes of all tensors that an
operator reads and writes, each once: what a kernel must move at least. FLOPs are those of matrix products, 2 for each
multiplication and addition; attention with `is_causal` skips half of them, a mask that is a tensor skips none. Works on
meta tensors, so at any size.

    counter = LaunchCounter()
    with counter:
        block(hidden)
    counter.launches.num_launches
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_cli.kernels.grouped_choice import loops_over_groups

PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "addmm_", "baddbmm", "linear", "_grouped_mm", "attention", "attention_backward"}
    | {"_scaled_mm", "_scaled_mm_v2", "grouped_mm", "grouped_mm_lora", "grouped_outer"}
    | {f"_scaled_dot_product_{kind}_attention{end}" for kind in ("flash", "efficient", "cudnn", "fused")
       for end in ("", "_backward", "_for_cpu", "_for_cpu_backward")}
)  # fmt: skip
"""Operators that are matrix products, attention included: their bytes are not counted as traffic."""
HOST_WAITS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim", "is_nonzero"}
    | {"unique_consecutive"}
)
"""Operators in which the host waits for the device: it needs a number, or the size of the result."""
_FILLS = frozenset({"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"})
"""Their argument gives shape and type, and is not read."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward, of its forward's: the scores again, and four products (arXiv 2205.14135)."""
_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "alias", "_has_same_storage_numel"})
KERNELS_OF_CUSTOM: dict[str, int] = {}
"""Custom operator, as `namespace::name` -> kernels that it launches."""


@dataclass
class Launches:
    """Counts of one pass."""

    num_operators: int = 0
    """Dispatched operators; one may launch several kernels."""
    num_launches: int = 0
    num_products: int = 0
    """Matrix products and attention among the launches."""
    traffic_bytes: int = 0
    """Bytes that all operators other than products read and write."""
    product_flops: float = 0.0
    num_host_waits: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    """By name."""


class LaunchCounter(TorchDispatchMode):
    """Counts the operators that a thread dispatches while it is entered."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        """
        Args:
            capability: of the GPU that launches are counted for.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = Launches()
        self._capability = capability

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        namespace, _, name = func._schema.name.partition("::")
        if name.startswith(_ALLOCATIONS) or name in _VIEWS or _is_view(func):
            return
        found = self.launches
        tensors = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in torch.utils._pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        waits, count = int(name in HOST_WAITS), 1
        if namespace != "aten":
            count = KERNELS_OF_CUSTOM.get(func._schema.name, 1)
        if name == "_grouped_mm" and loops_over_groups(self._capability, tensors[0].dtype):
            groups = max(one.shape[0] for one in tensors if one.dim() in (1, 3))
            waits, count = waits + 1, groups
        if not made and not waits and not any(one.alias_info for one in func._schema.arguments):
            return
        found.num_host_waits += waits
        found.num_operators += 1
        found.num_launches += count
        found.operators[name] += count
        if name in PRODUCTS:
            found.num_products += count
            names = (one.name for one in func._schema.arguments)
            found.product_flops += product_flops(name, tensors, {**dict(zip(names, args, strict=False)), **kwargs})
        else:
            read = () if name in _FILLS else tensors
            found.traffic_bytes += sum(map(touched_bytes, {id(one): one for one in (*read, *made)}.values()))
            written = func._schema.arguments
            if any(one.alias_info is not None and one.alias_info.is_write for one in written) and _reads_target(name):
                found.traffic_bytes += sum(map(touched_bytes, made[:1]))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _reads_target(name: str) -> bool:
    """Whether an operator that writes in place also reads what it writes over."""
    return name.endswith("_") and name not in ("copy_", "fill_", "zero_")


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a tensor has, those of an expanded one once."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= 1 if stride == 0 and length else length
    return count * tensor.element_size()


def product_flops(name: str, tensors: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> float:
    """FLOPs of one operator of `PRODUCTS`.

    Args:
        tensors: among its arguments, in their order.
        arguments: all, by name.
    """
    if "attention" in name:
        is_backward = "backward" in name
        query, key, value = tensors[1:4] if is_backward else tensors[:3]
        pairs = query.shape[:-1].numel() * key.shape[-2] / (2 if arguments.get("is_causal") else 1)
        return 2 * pairs * (query.shape[-1] + value.shape[-1]) * (ATTENTION_BACKWARD if is_backward else 1)
    left, right = tensors[1:3] if "add" in name else tensors[:2]
    if name == "linear":
        return 2 * left.numel() * right.shape[0]
    if name == "grouped_outer":  # [S, M], [S, N]
        return 2 * left.numel() * right.shape[1]
    flops = 2 * left.numel() * right.shape[-1]
    if name == "grouped_mm_lora":
        low, b = tensors[2:4]
        flops += 2 * low.numel() * b.shape[-1]
    return flops
