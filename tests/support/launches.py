"""What a model launches on a device: counted as it is dispatched, and for a block of a model on meta tensors.

`LaunchCounter` counts operators, bytes of traffic, products and their FLOPs, and host waits. A launch is an operator
that writes memory; views and allocations are none. Gradient adds and casts count. Traffic is the bytes of all tensors
that an operator reads and writes, each once: what a kernel must move at least. FLOPs are those of matrix products, 2
for each multiplication and addition; attention with `is_causal` skips half of them, a mask that is a tensor skips
none. Works on meta tensors, so at any size.

    counter = LaunchCounter()
    with counter:
        block(hidden)
    counter.launches.num_launches

`block_launches` runs one block of each kind for a microbatch, forward, recompute and backward, at any width, on meta
tensors. Attention and torch's RMS norm are one operator forward and one backward there, as the fused kernels are; a
mask of bools is made additive before, as torch does.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_cli.choices import PackedName
from roundpipe_cli.kernels.capability import loops_over_groups, takes_triton
from roundpipe_cli.model.block_calls import BlockCall
from roundpipe_cli.model.expert_lora import use_grouped_kernel
from roundpipe_cli.model.fused import FusedOps
from roundpipe_cli.model.last_projection import block_kind
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.model.stored.packed_weights import PackedParameter, packed_bytes, quantizable_names
from roundpipe_cli.model.taps import GradientTaps
from roundpipe_cli.model.worker_model import WorkerModel
from roundpipe_cli.train.measure import is_launch

META = torch.device("meta")
TIMED_PASSES = 2
PRODUCTS = frozenset(  # operators that are matrix products, attention included: their bytes are not counted as traffic
    {"mm", "bmm", "addmm", "addmm_", "baddbmm", "linear", "_grouped_mm", "attention", "attention_backward"}
    | {"grouped_mm", "grouped_outer"}
    | {f"_scaled_dot_product_{kind}_attention{end}" for kind in ("flash", "efficient", "cudnn", "fused")
       for end in ("", "_backward", "_for_cpu", "_for_cpu_backward")}
)  # fmt: skip
HOST_WAITS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim", "is_nonzero"}
    | {"unique_consecutive"}
)
"""Operators in which the host waits for the device: it needs a number, or the size of the result."""
_FILLS = frozenset({"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"})
"""Their argument gives shape and type, and is not read."""
ATTENTION_BACKWARD = 2.5  # of the forward's FLOPs: the scores again, and four products (arXiv 2205.14135)


@dataclass
class Launches:
    """Counts of one pass."""

    num_operators: int = 0  # dispatched operators; one may launch several kernels
    num_launches: int = 0
    num_products: int = 0  # matrix products and attention among the launches
    traffic_bytes: int = 0  # bytes that all operators other than products read and write
    product_flops: float = 0.0
    num_host_waits: int = 0
    operators: Counter[str] = field(default_factory=Counter)  # by name


class LaunchCounter(TorchDispatchMode):
    """Counts the operators that a thread dispatches while it is entered."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = Launches()
        self._capability = capability

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if not is_launch(func):
            return
        found = self.launches
        tensors = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in torch.utils._pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        waits, count = int(name in HOST_WAITS), 1
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
            if _reads_target(name):
                found.traffic_bytes += sum(map(touched_bytes, _written(func, args)))


def _written(func: Any, args: Any) -> list[torch.Tensor]:
    """What an operator writes over, among the arguments without a name."""
    given = zip(func._schema.arguments, args, strict=False)
    return [one for of, one in given if of.alias_info is not None and of.alias_info.is_write and one is not None]


def _reads_target(name: str) -> bool:
    """Whether an operator that writes in place also reads what it writes over."""
    return name == "drop" or (name.endswith("_") and name not in ("copy_", "fill_", "fill_mask_", "zero_"))


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a tensor has, those of an expanded one once."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= 1 if stride == 0 and length else length
    return count * tensor.element_size()


def product_flops(name: str, tensors: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> float:
    """FLOPs of one operator of `PRODUCTS`, by its tensors in order and all arguments by name."""
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
    if name == "grouped_mm" and len(tensors) > 3:
        low, b = tensors[3:5]
        flops += 2 * low.numel() * b.shape[-1]
    return flops


@dataclass(frozen=True)
class BlockLaunches:
    """One kind of block, for one microbatch."""

    blocks: tuple[int, ...]  # number of blocks of this kind
    forward: Launches
    recompute: Launches  # with the graph, so that backward can follow
    backward: Launches  # launches of the backward, with the sums of parameters' gradients over microbatches
    host_s: float  # seconds that a thread takes to issue the three on meta tensors, the least of a few tries


def _on_meta_only(schema: str, fake: Callable[..., Any]) -> Any:
    """An operator that stands for a kernel on meta tensors."""
    name = schema.partition("(")[0]
    torch.library.define(f"roundpipe::{name}", schema.removeprefix(name))
    torch.library.register_fake(f"roundpipe::{name}", fake)
    return getattr(torch.ops.roundpipe, name)


_attention = _on_meta_only(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal) -> Tensor",
    lambda query, key, value, mask, is_causal: query.new_empty((*query.shape[:-1], value.shape[-1])),
)
_attention_backward = _on_meta_only(
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, bool is_causal) -> Tensor[]",
    lambda gradient, query, key, value, is_causal: [torch.empty_like(one) for one in (query, key, value)],
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.is_causal = inputs[4]


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*_attention_backward(gradient, *ctx.saved_tensors, ctx.is_causal), None, None)


torch.library.register_autograd("roundpipe::attention", _differentiate, setup_context=_save)


_rms_norm = _on_meta_only(
    "rms_norm(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)",
    lambda x, weight, eps: (torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)),
)
_rms_norm_backward = _on_meta_only(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor rstd, Tensor? weight) -> Tensor",
    lambda gradient, x, rstd, weight: torch.empty_like(x),
)
_rms_norm_weight_gradient = _on_meta_only(
    "rms_norm_weight_gradient(Tensor gradient, Tensor x, Tensor rstd) -> Tensor",
    lambda gradient, x, rstd: x.new_empty(x.shape[-1]),
)


def _save_norm(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.set_materialize_grads(False)


def _differentiate_norm(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    trains = weight is not None and ctx.needs_input_grad[1]
    grad_weight = _rms_norm_weight_gradient(gradient, x, rstd) if trains else None
    return _rms_norm_backward(gradient, x, rstd, weight), grad_weight, None


torch.library.register_autograd("roundpipe::rms_norm", _differentiate_norm, setup_context=_save_norm)


class FusedFunctions(TorchFunctionMode):
    """Puts one operator in the place of functions that are one kernel on a GPU and that meta tensors would take apart:
    `scaled_dot_product_attention` and `rms_norm`, whose backward is another for each gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.rms_norm:
            return _rms_norm(args[0], kwargs["weight"], kwargs["eps"])[0]
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value, *rest = args
        given = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)), **(kwargs or {})}
        mask = given.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, query.new_zeros(()), query.new_full((), -math.inf))
        return _attention(query, key, value, mask, bool(given.get("is_causal")))


def block_launches(
    model: nn.Module,
    split: ModelSplit,
    tokens: int,
    capability: tuple[int, int] = (9, 0),
    fused: FusedOps | None = None,
    packed: PackedName | None = None,
) -> list[BlockLaunches]:
    """Launches of one block of each kind, for a sequence of `tokens`, by a GPU of this capability.
    `model`: on the meta device, adapters included; left as it is. Without `fused`, experts too go by their own code."""
    found = []
    for passes in block_passes(model, split, tokens, capability, fused, packed):
        forward, recompute, backward = (
            _counted(run, capability) for run in (passes.forward, passes.recompute, passes.backward)
        )
        host_s = min(_timed(passes) for _ in range(TIMED_PASSES))
        found.append(BlockLaunches(passes.blocks, forward, recompute, backward, host_s))
    return found


def block_passes(
    model: nn.Module,
    split: ModelSplit,
    tokens: int,
    capability: tuple[int, int],
    fused: FusedOps | None,
    packed: PackedName | None = None,
) -> list[BlockPasses]:
    """One block of each kind on meta tensors, ready to be issued; see `block_launches`."""
    worker = worker_on_meta(model, split, fused, packed)
    use_grouped_kernel(worker.blocks, partial(takes_triton, [capability], allowed=fused is not None))
    prologue = worker.prologue(torch.zeros((1, tokens), dtype=torch.long))
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return moved.setdefault(id(tensor), tensor.to(META))

    calls = [call.map_tensors(move) for call in prologue.calls]
    kinds: dict[Any, list[int]] = {}
    for index, block in enumerate(worker.blocks):
        kinds.setdefault(block_kind(block, calls[index]), []).append(index)
    hidden = prologue.hidden.detach().to(META)
    return [BlockPasses(worker, tuple(blocks), calls[blocks[0]], hidden) for blocks in kinds.values()]


def worker_on_meta(
    model: nn.Module, split: ModelSplit, fused: FusedOps | None = None, packed: PackedName | None = None
) -> WorkerModel:
    """A worker whose blocks are bound to meta tensors; its embedding gathers zeros on the host."""
    names = dict(model.named_parameters())
    trainable = frozenset(name for name, parameter in names.items() if parameter.requires_grad)
    host = {name: torch.zeros((), dtype=one.dtype).expand(one.shape) for name, one in names.items()}
    worker = WorkerModel(model, split, host, trainable, device=META, fused=fused)
    in_form = quantizable_names(model, split.blocks_path) if packed else frozenset()

    def on_meta(name: str) -> nn.Parameter:
        whole = names[name]
        if packed is None or name not in in_form:
            return nn.Parameter(whole.to(META), name in trainable)
        stored = torch.empty(packed_bytes(whole.shape, packed), dtype=torch.uint8, device=META)
        return PackedParameter.of(stored, whole.shape, whole.dtype, packed)

    for layer in range(1, len(worker.blocks) + 1):
        worker.bind(layer, {name: on_meta(name) for name in worker.names_of(layer)})
    return worker


class BlockPasses:
    """A block's three passes, to be issued one after the other by one thread."""

    def __init__(self, worker: WorkerModel, blocks: tuple[int, ...], call: BlockCall, hidden: torch.Tensor) -> None:
        self.blocks = blocks  # those of this kind; the first is issued
        self._worker, self._index, self._call, self._hidden = worker, blocks[0], call, hidden
        self._parameters = [one for one in worker.blocks[blocks[0]].parameters() if one.requires_grad]
        self._sums = [torch.empty(one.shape, dtype=torch.float32, device=META) for one in self._parameters]
        self._output: torch.Tensor | None = None

    def forward(self) -> None:
        with torch.no_grad(), FusedFunctions():
            self._worker.run_block(self._index, self._call, self._hidden, dropout_seed=0)

    def recompute(self) -> None:
        with FusedFunctions():
            hidden = self._hidden.detach().requires_grad_()
            self._output = self._worker.run_block(self._index, self._call, hidden, dropout_seed=0)

    def issue(self) -> None:
        self.forward()
        self.recompute()
        self.backward()

    def backward(self) -> None:
        assert self._output is not None
        gradient = torch.empty_like(self._output)

        def add(index: int, found: torch.Tensor) -> None:
            self._sums[index].add_(found)

        with GradientTaps(self._parameters, add):
            self._output.backward(gradient)
        self._output = None


def _counted(run: Callable[[], None], capability: tuple[int, int]) -> Launches:
    counter = LaunchCounter(capability)
    with counter:
        run()
    return counter.launches


def _timed(passes: BlockPasses) -> float:
    start_s = time.thread_time()
    passes.issue()
    return time.thread_time() - start_s
