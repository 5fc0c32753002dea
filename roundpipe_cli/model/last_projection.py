"""Products that a recompute may leave out of a block: only its output is made of them, which backward never reads.

    x --norm, attention--> + --norm, gate, up--> act --down_proj--> * scale --> + --> output
                           |____________________________________________________|
                                                    ^ computed for nothing: the backward of all that follows it is
                                                      linear, so no gradient depends on its value

Nothing here knows a model: which linear modules these are is read from the autograd graph of one call of the block, and
proven by putting NaN in the place of their products: every gradient must keep every bit. A block that normalises its
output (gemma2, olmo2) reads the product again and is left alone.

Only the product is left out, below autograd: the graph, what it saves and so the backward's bits are those of an
ordinary call.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_cli.model.block_calls import BlockCall
from roundpipe_cli.model.fused import FusedLora
from roundpipe_cli.model.mlp_chunks import ATTRIBUTE, MlpChunks
from roundpipe_cli.model.stored.packed_weights import is_linear

Found = TypeVar("Found")

_aten = torch.ops.aten
_SHAPES: dict[Any, Callable[..., tuple[int, ...]]] = {
    _aten.mm.default: lambda a, b: (a.shape[0], b.shape[1]),
    _aten.addmm.default: lambda _, a, b: (a.shape[0], b.shape[1]),
    _aten.bmm.default: lambda a, b: (*a.shape[:2], b.shape[2]),
    _aten.linear.default: lambda a, b, *_: (*a.shape[:-1], b.shape[0]),
}
"""Matrix products that a linear module comes down to, and the shape of each result."""

_PASSES = frozenset(
    f"{name}Backward0"
    for name in (
        "Add", "Sub", "Mul", "Div", "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy", "Squeeze",
        "Unsqueeze", "Transpose", "T", "Permute", "Slice", "NativeDropout",
    )
)  # fmt: skip
"""Linear operations; a product of two tensors counts where it has not kept the one that comes from here."""


class NoProducts(TorchDispatchMode):
    """While active in a thread, matrix products are not computed: their results hold `fill`."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fill = fill

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shape = _SHAPES.get(func)
        if shape is None:
            return func(*args, **(kwargs or {}))
        return args[0].new_full(shape(*args), self._fill)


class _Unread:
    """Replaces the forward of a linear module that cannot leave its product out itself."""

    def __init__(self, module: nn.Module) -> None:
        self.fill: float | None = None
        self._forward = module.forward
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.fill is None else NoProducts(self.fill):
            return self._forward(*args, **kwargs)


class UnreadProducts:
    """Leaves out the products of some modules of one block while entered. Belongs to one thread."""

    def __init__(self, block: nn.Module, names: Iterable[str], fill: float = 0.0) -> None:
        """Wrap the modules `names` of `block`, one worker's own copy."""
        self._fill = fill
        self._forwards = []
        for module in map(block.get_submodule, names):
            own = module.__dict__.get("forward")
            self._forwards.append(own if isinstance(own, (MlpChunks, FusedLora, _Unread)) else _Unread(module))

    def __enter__(self) -> None:
        for forward in self._forwards:
            forward.fill = self._fill

    def __exit__(self, *_: object) -> None:
        for forward in self._forwards:
            forward.fill = None


class BlockProbe:
    """Runs one block on a few tokens, forward and backward, as often as needed."""

    def __init__(self, block: nn.Module, call: BlockCall, hidden: torch.Tensor, seeded: Callable[[], Any]) -> None:
        """`block` has weights that can be read and keeps no gradients; `seeded` makes the dropout mode of each call."""
        self._block, self._call, self._seeded = block, call, seeded
        self._hidden = call.input_like(hidden).detach()

    def find(self) -> tuple[str, ...]:
        """Names of the modules whose products may be left out; none if the proof fails."""
        try:
            found = self._candidates()
            expected = self._digests(()) if found else {}
            if not expected:
                return ()
            if self._digests(found) != expected:
                found = tuple(name for name in found if self._digests((name,)) == expected)
                found = found if self._digests(found) == expected else ()
            return found
        except RuntimeError:  # this processor lacks an operation in this dtype: nothing is proven
            return ()

    def _run(self) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = self._hidden.clone().requires_grad_()
        with torch.enable_grad(), self._seeded():
            return leaf, self._call.run(self._block, leaf)

    def _candidates(self) -> tuple[str, ...]:
        """Linear modules called once whose result goes through nothing but linear operations to the output, and modules
        that go in chunks of tokens, of which the proof alone decides."""
        made: dict[str, list[torch.Tensor]] = {}
        with ExitStack() as hooks:
            for name, module in self._block.named_modules():
                if is_linear(module) or isinstance(module.__dict__.get("forward"), FusedLora):
                    handle = module.register_forward_hook(
                        lambda _module, _args, result, name=name: made.setdefault(name, []).append(result)
                    )
                    hooks.callback(handle.remove)
            _, output = self._run()
        once = {results[0].grad_fn: name for name, results in made.items() if len(results) == 1}
        once.pop(None, None)
        found: set[str] = set()
        waiting, seen = [output.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in once:
                found.add(once[node])
            elif node.name() in _PASSES:
                waiting += [edge for index, (edge, _) in enumerate(node.next_functions) if _is_unread(node, index)]
        chunked = (name for name, module in self._block.named_modules() if ATTRIBUTE in module.__dict__)
        return (*(name for name in made if name in found), *chunked)

    def _digests(self, left_out: Collection[str]) -> dict[str, str]:
        """Digest of every gradient, with NaN in place of some modules' products. Empty where one is not finite."""
        digests: dict[str, str] = {}
        finite = True

        def note(name: str, gradient: torch.Tensor) -> None:
            nonlocal finite
            finite = finite and bool(gradient.isfinite().all())
            flat = gradient.contiguous().reshape(-1).view(torch.uint8)
            digests[name] = hashlib.sha256(flat.numpy().data).hexdigest()

        def drop(name: str, parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            note(name, parameter.grad)
            parameter.grad = None  # a large model's block has gigabytes of them

        with ExitStack() as hooks:
            for name, parameter in self._block.named_parameters():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(lambda p, name=name: drop(name, p))
                    hooks.callback(handle.remove)
            with UnreadProducts(self._block, left_out, math.nan):
                leaf, output = self._run()
            generator = torch.Generator().manual_seed(0)
            torch.autograd.backward(output, torch.randn(output.shape, generator=generator).to(output.dtype))
        assert leaf.grad is not None
        note("", leaf.grad)
        return digests if finite else {}


def _is_unread(node: Any, index: int) -> bool:
    """Whether `node` has not kept its input `index` for its backward."""
    if node.name() == "MulBackward0":
        return (node._saved_self if index == 0 else node._saved_other) is None
    if node.name() == "DivBackward0":
        return index == 0 and node._saved_self is None
    return True


def block_kind(block: nn.Module, call: BlockCall) -> tuple[object, ...]:
    """Equal for blocks that compute the same with other weights: their modules, parameters and arguments."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    parameters = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters())
    return modules, parameters, tuple(map(_form, call.args)), tuple((k, _form(v)) for k, v in call.kwargs.items())


def by_kind(blocks: Sequence[nn.Module], calls: Sequence[BlockCall], find: Callable[[int], Found]) -> list[Found]:
    """For each block what `find` finds for the first one of its kind, by index; it is asked once for each kind."""
    found: dict[object, Found] = {}
    kinds = [block_kind(block, call) for block, call in zip(blocks, calls, strict=True)]
    for index, kind in enumerate(kinds):
        if kind not in found:
            found[kind] = find(index)
    return [found[kind] for kind in kinds]


def _form(value: Any) -> object:
    if isinstance(value, tuple):
        return tuple(map(_form, value))
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else repr(value)
