"""Adapters on fused experts: two grouped low-rank products beside the base product, with PEFT's parameters and names.

PEFT adds the adapters of all experts to their weights at every call (W + s B A: 4.8 GB for a layer of Qwen3-235B), and
does so through `torch.nn.utils.parametrize`, whose cache is one dictionary for the whole process. Here the model's own
forward runs, and where it multiplies grouped tokens with an adapted weight it gets

    y = x W^T + s (x A^T) B^T        per expert; x [S, in] sorted by expert, W [E, out, in], A [E, r, in], B [E, out, r]

On the processor a loop over 128 experts costs more than their small products, so each expert's tokens are laid out in
rows of equal number, the rest zero, and all experts are one batched product; a base product so large that the zeros
would cost more stays a loop:

    x [S, in] --> [E, C, in] --bmm--> [E, C, out] --> y [S, out]        C: most tokens of an expert

On GPUs where torch has no kernel for grouped products, ours takes them.

S: (token, expert) pairs, E: experts, r: rank, s: scaling.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from roundpipe_cli.kernels.grouped_mm import AdaptedProduct, grouped_mm
from roundpipe_cli.library_names import library_name
from roundpipe_cli.model.stored.packed_weights import import_bitsandbytes

# transformers' `grouped_mm` implementation sorts tokens by expert on the device and asks torch for grouped products,
# which are a loop on most cards (`kernels/grouped_mm.py`). While an expert module runs, a mode of its own answers those
# questions; adapters of the module are registered with it.

Takes = Callable[[torch.dtype, int], bool]
"""Whether our kernels multiply weights of such a type, with adapters of such a rank (0: without)."""
_MODE = "_grouped_kernel"
"""Attribute of an expert module."""


@dataclass(frozen=True)
class ExpertAdapter:
    """One adapter of the experts in a module's parameter."""

    a: torch.Tensor
    """[E, r, in]"""
    b: torch.Tensor
    """[E, out, r]"""
    scaling: float


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins, equal for its transpose; on the meta device all addresses are 0."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def uses_grouped_products(module: nn.Module) -> bool:
    """Whether a module holds fused experts that transformers multiplies by grouped products."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return implementation == "grouped_mm" and hasattr(module, "_apply_gate")


class GroupedByKernel(TorchFunctionMode):
    """While active in a thread, grouped products are our kernels' where `takes` says so, and have adapters' beside."""

    def __init__(self, takes: Takes, *, forgets: bool) -> None:
        super().__init__()
        self.takes = takes
        self._forgets = forgets
        self._adapters: dict[tuple[int, int], ExpertAdapter] = {}
        """Place of adapted weights -> their adapter."""
        self._used: set[tuple[int, int]] = set()

    @contextmanager
    def adapted(self, weights: torch.Tensor, adapter: ExpertAdapter) -> Iterator[None]:
        """Add an adapter's product to each one with `weights`, within the block."""
        place = place_of(weights)
        self._adapters[place] = adapter
        try:
            yield
            assert place in self._used, "adapted experts were not multiplied by a grouped product"
        finally:
            del self._adapters[place]
            self._used.discard(place)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(args) < 2 or "grouped_mm" not in getattr(func, "__name__", str(func)):
            return func(*args, **kwargs)
        tokens, weights = args[:2]
        ends = kwargs["offs"] if "offs" in kwargs else args[2]  # int32 [E]: where each expert's tokens end
        place = place_of(weights)
        one = self._adapters.get(place)
        if one is None and self.takes(weights.dtype, 0):
            return grouped_mm(tokens, weights, ends)
        if one is None:
            return func(tokens, self.with_empty_groups(weights, ends), *args[2:], **kwargs)
        self._used.add(place)
        if self.takes(weights.dtype, one.a.shape[1]):
            return AdaptedProduct.apply(tokens, weights, one.a, one.b, ends, one.scaling)  # type: ignore[no-untyped-call]
        groups = _groups(ends, tokens.shape[0]) if tokens.device.type == "cpu" else None
        if groups is not None:
            return _Batched.apply(tokens, weights, one.a, one.b, groups, one.scaling)  # type: ignore[no-untyped-call]
        missing = -one.a.shape[1] % (ROW_BYTES // tokens.element_size())
        a, b = functional.pad(one.a, (0, 0, 0, missing)), functional.pad(one.b, (0, missing))
        a, b = (self.with_empty_groups(factors.transpose(1, 2), ends) for factors in (a, b))
        beside = functional.grouped_mm(functional.grouped_mm(tokens, a, offs=ends), b, offs=ends)
        return torch.add(func(*args, **kwargs), beside, alpha=one.scaling)

    def with_empty_groups(self, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`weights` [E, in, out] for torch's own product, with gradients of zero for groups that have no rows.

        `ends` int32 [E]. The same tensor where the device's kernel sees to that itself.
        """
        if not self._forgets or not weights.requires_grad:
            return weights
        shown: torch.Tensor = _EmptyGroups.apply(weights, ends)  # type: ignore[no-untyped-call]
        return shown


class _EmptyGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ends)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (ends,) = ctx.saved_tensors
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return gradient.masked_fill_(is_empty[:, None, None], 0.0), None  # in place: nobody else holds this product


def use_grouped_kernel(blocks: Iterable[nn.Module], takes: Takes, *, forgets: bool = False) -> frozenset[torch.dtype]:
    """Have the fused experts in `blocks` (one worker's own) multiply by our kernels where `takes` says so.

    `forgets`: torch's own product writes no gradient for an expert without a token on this worker's device. Returns the
    types of their weights.
    """
    found = set()
    for module in (module for block in blocks for module in block.modules()):
        if uses_grouped_products(module):
            module.__dict__[_MODE] = GroupedByKernel(takes, forgets=forgets)
            module.__dict__["forward"] = types.MethodType(_forward, module)
            found |= {p.dtype for p in module._parameters.values() if p is not None and p.ndim == 3}
    return frozenset(found)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with module.__dict__[_MODE]:
        return type(module).forward(module, *args, **kwargs)


ROW_BYTES = 16
"""torch's own grouped products take rows of a multiple of this."""
PEFT_LAYER = "peft.tuners.lora.layer"
MAX_PADDING, MAX_ROWS = 8, 2**17
"""Rows of a batched product: for each (token, expert) pair, and in all. Above, experts are looped over."""
MAX_WASTED_FLOPS = 2e7
"""Operations on zeros in a base product; looping over 128 experts takes as long (half a millisecond)."""


def isolate_expert_adapters(model: nn.Module) -> None:
    """Make every wrapper of fused experts in `model` (one worker's own copy) fast and independent of other workers."""
    import_bitsandbytes()
    from peft.tuners.lora.layer import ParamWrapper

    for module in model.modules():
        if isinstance(module, ParamWrapper):
            library_name(PEFT_LAYER, "ParamWrapper._activate_lora")  # PEFT calls this attribute
            module.__dict__["_activate_lora"] = types.MethodType(_activate, module)


@contextmanager
def _activate(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
    """In place of `ParamWrapper._activate_lora`."""
    adapters = [name for name in active_adapters if name in wrapper.lora_A]
    if not adapters:
        yield
        return
    assert len(adapters) == 1, "the trainer has one adapter"
    layer, name = wrapper.get_base_layer(), wrapper.parameter_name
    weights = layer._parameters[name]
    kernel: GroupedByKernel | None = layer.__dict__.get(_MODE)
    is_grouped = uses_grouped_products(layer) and (weights.device.type == "cpu" or weights.dtype == torch.bfloat16)
    is_taken = kernel is not None and kernel.takes(weights.dtype, wrapper.r[adapters[0]])
    if wrapper.num_experts == 1 or not (is_grouped or is_taken):
        with _added(wrapper, adapters[0], layer, name):
            yield
        return
    experts, rank = wrapper.num_experts, wrapper.r[adapters[0]]
    lora_a, lora_b = wrapper.lora_A[adapters[0]].weight, wrapper.lora_B[adapters[0]].weight
    b = lora_b.view(-1, rank, experts).permute(2, 0, 1).contiguous()  # PEFT's parameters, an expert at a time
    adapter = ExpertAdapter(lora_a.view(experts, rank, -1), b, float(wrapper.scaling[adapters[0]]))
    mode = kernel or GroupedByKernel(lambda dtype, rank: False, forgets=False)
    with mode if kernel is None else nullcontext(), mode.adapted(weights, adapter):
        yield


@contextmanager
def _added(wrapper: Any, adapter: str, layer: Any, name: str) -> Iterator[None]:
    """PEFT's own way: adapted weights in the parameter's slot for the time of the call."""
    weights = layer._parameters[name]
    if wrapper.num_experts > 1:
        library_name(PEFT_LAYER, "ParamWrapper.get_delta_factors")
        proxy = library_name(PEFT_LAYER, "_LoraFactorsProxy")(*wrapper.get_delta_factors(adapter))
    else:
        library_name(PEFT_LAYER, "ParamWrapper.get_delta_weight")
        proxy = library_name(PEFT_LAYER, "_LoraParameterProxy")(wrapper.get_delta_weight(adapter))
    layer._parameters[name] = proxy(weights)
    try:
        yield
    finally:
        layer._parameters[name] = weights


@dataclass(frozen=True)
class _Groups:
    """Places of the sorted (token, expert) pairs when each expert has the same number of rows."""

    num_experts: int
    num_rows: int
    """C: of each expert."""
    ends: torch.Tensor
    """int32 [E]: where each expert's pairs end."""
    places: torch.Tensor
    """int64 [S]: row of each pair in [E * C]."""

    def wastes(self, weights: torch.Tensor) -> bool:
        """Whether zeros cost more than a loop in a product with `weights` [E, in, out]."""
        zeros = self.num_experts * self.num_rows - self.places.numel()
        return 2.0 * zeros * weights.shape[1] * weights.shape[2] > MAX_WASTED_FLOPS

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[S, width] -> [E, C, width], zero where there is no pair."""
        width = values.shape[1]
        rows = values.new_zeros(self.num_experts * self.num_rows, width)
        return rows.index_copy_(0, self.places, values).view(self.num_experts, self.num_rows, width)

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """[E, C, width] -> [S, width]."""
        return rows.view(-1, rows.shape[2]).index_select(0, self.places)

    def sum(
        self, x: torch.Tensor, rows: torch.Tensor, w: torch.Tensor, low: torch.Tensor, *, b: torch.Tensor, s: float
    ) -> torch.Tensor:
        """x W + s low B per expert: x [S, in], also rows [E, C, in]; W [E, in, out], low [E, C, r], B [E, r, out]."""
        if self.wastes(w):
            return functional.grouped_mm(x, w, offs=self.ends).add_(self.collect(torch.bmm(low, b)), alpha=s)
        return self.collect(torch.bmm(rows, w).baddbmm_(low, b, alpha=s))


def _groups(ends: torch.Tensor, num_pairs: int) -> _Groups | None:
    """Groups of experts whose pairs end at `ends` [E]; None where they are so unequal that rows would be wasted."""
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    num_experts, num_rows = counts.numel(), int(counts.max())
    if num_experts * num_rows > min(MAX_PADDING * num_pairs, MAX_ROWS):
        return None
    shift = torch.arange(num_experts) * num_rows - (ends - counts)
    places = torch.arange(num_pairs) + shift.repeat_interleave(counts, output_size=num_pairs)
    return _Groups(num_experts, num_rows, ends, places)


class _Batched(torch.autograd.Function):
    """Base and adapter products of all experts as batched products. The base is frozen: it has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, groups: _Groups, scaling: float
    ) -> torch.Tensor:
        """x [S, in], w [E, in, out], a [E, r, in], b [E, out, r] -> [S, out]; `scaling`: of the adapters' products."""
        rows = groups.spread(x)
        low = torch.bmm(rows, a.transpose(1, 2))
        ctx.save_for_backward(x, w, a, b, low)
        ctx.groups, ctx.scaling = groups, scaling
        return groups.sum(x, rows, w, low, b=b.transpose(1, 2), s=scaling)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, w, a, b, low = ctx.saved_tensors
        scaling, groups = ctx.scaling, ctx.groups
        rows = groups.spread(gradient)
        grad_low = torch.bmm(rows, b).mul_(scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = groups.sum(gradient, rows, w.transpose(1, 2), grad_low, b=a, s=1.0)
        grad_a = torch.bmm(grad_low.transpose(1, 2), groups.spread(x))
        grad_b = torch.bmm(rows.transpose(1, 2), low).mul_(scaling)
        return grad_x, None, grad_a, grad_b, None, None
