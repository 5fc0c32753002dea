"""Layout of what travels behind the hidden states from block to block: the sums of the routers' balancing loss, too.

The loss (`output_router_logits: true`) is one of all blocks; its gradient comes back the way the sums came:

    embed -> [hidden | 0] -> block.0 -> [hidden | sums] -> ... -> block.L-1 -> [hidden | sums] -> head, which adds
                                                                                coefficient x E x sum_e f_e p_e

f_e: share of tokens routed to expert e, p_e: its mean probability, over all layers and all tokens but padding (Switch
Transformer, https://huggingface.co/papers/2101.03961, equations 4 to 6, as transformers computes them for each
forward). A microbatch is a forward, and its loss counts as much as its share of the step's target tokens.

Shapes: B sequences of T tokens, E experts. Sums are float32 [2E]: tokens routed to each expert, then probabilities. In
16 bit each is two columns' worth of bits; its gradient is a rounded value and what that left.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roundpipe_cli.sizes import SIZE_NAMES

if TYPE_CHECKING:
    from roundpipe_cli.model.head import HeadResult


# Layout of a boundary tensor between two blocks: the hidden states, and behind them carried tensors.
#
# Shapes: B sequences of T tokens; a tensor of n elements takes n / (B x T) columns of the last dimension, whole numbers
# and sums twice as many in 16 bit.

Name = tuple[object, int]
"""(key of a shared mapping, place in its value), ("argument", number), ("result", place in that of the block before) or
`SUMS`; a mark may also stand for ("hidden", 0) and ("cache", 0)."""
SUMS: Name = ("sums", 0)
"""The sums of the routers, which keep their bits."""


@dataclass(frozen=True)
class CarriedMark:
    """Stands in a recorded argument for what each call is given anew: the carried tensor of that name, say."""

    name: Name


@dataclass(frozen=True)
class Carried:
    """Form of a tensor that travels beside the hidden states."""

    shape: tuple[int, ...]
    """It begins with sequences and tokens, or has as many elements as fit behind them."""
    dtype: torch.dtype
    is_open: bool = False
    """The last dimension may be another one than `shape` says: as many columns as the others leave."""


@dataclass(frozen=True)
class Carry:
    """Layout of one block's boundary tensors."""

    hidden_shape: tuple[int, ...]
    """[B, T, ...] of the hidden states."""
    dtype: torch.dtype
    """Dtype of the hidden states, and so of the boundary tensor."""
    tensors: Mapping[Name, Carried]
    """Tensors that come in, in order; at most one of them is open."""
    kept: tuple[Name, ...]
    """Names of the tensors that go out, in order."""

    @property
    def num_columns(self) -> int:
        """Size of the last dimension of the incoming boundary tensor."""
        return sum(self._columns())

    def most_columns(self, limit: int) -> int:
        """`num_columns` where the last dimension of what is open is `limit`, as many keys as an indexer chooses."""
        forms = {
            name: replace(form, shape=(*form.shape[:-1], limit)) if form.is_open else form
            for name, form in self.tensors.items()
        }
        return replace(self, tensors=forms).num_columns

    def unpack(self, boundary: torch.Tensor) -> tuple[torch.Tensor, dict[Name, torch.Tensor]]:
        """The hidden states and the carried tensors by name."""
        if not self.tensors:
            return boundary, {}
        columns = self._columns()
        excess = boundary.shape[-1] - sum(columns)
        for index, form in enumerate(self.tensors.values(), 1):
            columns[index] += excess if form.is_open else 0
        hidden, *others = boundary.split(columns, dim=-1)
        parts = zip(self.tensors.items(), others, strict=True)
        return hidden.reshape(self.hidden_shape), {name: _decoded(name, part, form) for (name, form), part in parts}

    def unpack_last(self, boundary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last block's hidden states, and the sums of the routers if they travel behind them."""
        hidden, parts = replace(self, tensors={name: self.tensors[name] for name in self.kept}).unpack(boundary)
        return hidden, parts.get(SUMS)

    def pack(self, hidden: torch.Tensor, tensors: Mapping[Name, torch.Tensor]) -> torch.Tensor:
        """The boundary tensor: hidden states, and behind them the tensors that later blocks read."""
        return join(hidden, {name: tensors[name] for name in self.kept})

    def sample(self, hidden: torch.Tensor) -> torch.Tensor:
        """An example of an incoming boundary tensor, for hidden states like `hidden`; zeros for whole numbers, sums."""
        if not self.tensors:
            return torch.randn(self.hidden_shape).to(hidden.device, hidden.dtype)
        own, *others = self._columns()
        parts = [torch.randn(*hidden.shape[:2], own)]
        for (name, form), columns in zip(self.tensors.items(), others, strict=True):
            make = torch.zeros if _keeps_bits(name, form.dtype) else torch.randn
            parts.append(make(*hidden.shape[:2], columns))
        return torch.cat(parts, dim=-1).to(hidden.device, hidden.dtype)

    def _columns(self) -> list[int]:
        """Widths of the hidden states and of each tensor that comes in."""
        found, lead = [math.prod(self.hidden_shape[2:])], math.prod(self.hidden_shape[:2])
        for name, form in self.tensors.items():
            width = _width(self.dtype) if _keeps_bits(name, form.dtype) else 1
            found.append(-(-math.prod(form.shape) * width // lead))
        return found


def _keeps_bits(name: Name, dtype: torch.dtype) -> bool:
    return name == SUMS or not (dtype.is_floating_point or dtype == torch.bool)


def _width(dtype: torch.dtype) -> int:
    """Columns of a boundary tensor of `dtype` that 32 bits take."""
    return max(1, torch.float32.itemsize // dtype.itemsize)


def _encoded(name: Name, tensor: torch.Tensor, lead: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` as columns [B, T, columns] of `dtype`: sums, and whole numbers of up to 31 bits, keep their bits."""
    if name == SUMS:
        return _filled(_ToBits.apply(tensor, dtype), lead)  # type: ignore[no-untyped-call]
    if not _keeps_bits(name, tensor.dtype):
        return tensor.to(dtype).reshape(*lead, -1)
    return tensor.to(torch.int32).reshape(*lead, -1).contiguous().view(dtype)


def _filled(values: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """`values` [n] as columns [B, T, columns], zeros behind them."""
    columns = -(-values.numel() // lead.numel())
    return nn.functional.pad(values, (0, lead.numel() * columns - values.numel())).view(*lead, columns)


def _decoded(name: Name, part: torch.Tensor, form: Carried) -> torch.Tensor:
    if name == SUMS:
        sums: torch.Tensor = _OfBits.apply(part.flatten()[: math.prod(form.shape) * _width(part.dtype)])  # type: ignore[no-untyped-call]
        return sums
    shape = (*form.shape[:-1], -1) if form.is_open else form.shape
    if not _keeps_bits(name, form.dtype):
        return part.reshape(shape).to(form.dtype)
    return part.detach().contiguous().view(torch.int32).reshape(shape).to(form.dtype)


def join(hidden: torch.Tensor, others: Mapping[Name, torch.Tensor]) -> torch.Tensor:
    """One boundary tensor [B, T, columns]; the hidden states as they are where nothing goes with them."""
    if not others:
        return hidden
    lead, dtype = hidden.shape[:2], hidden.dtype
    return torch.cat([hidden.flatten(2), *(_encoded(name, one, lead, dtype) for name, one in others.items())], dim=-1)


WANTED = "trains_router_loss"
"""Attribute of a configuration, set where its file says `output_router_logits: true`."""


@dataclass(frozen=True)
class RouterLoss:
    """The balancing loss of one model."""

    num_experts: int
    top_k: int
    coefficient: float
    routers: tuple[tuple[str, ...], ...]
    """For each block, paths of its modules that return logits."""
    place: int
    """Index of the logits in what they return."""

    def weights_of(self, lengths: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
        """float32 [B x T]: 0 for padding, else 1, from the `lengths` [B] without it; None: nothing is padded."""
        if lengths is None or not bool((lengths < tokens).any()):
            return None
        return (torch.arange(tokens)[None] < lengths[:, None]).float().flatten()

    def sums_of(self, logits: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Sums over the tokens of one router, in the order of transformers' own."""
        probabilities = torch.softmax(logits.flatten(0, -2), dim=-1)
        chosen = torch.topk(probabilities.detach(), self.top_k, dim=-1).indices
        of_tokens = torch.ones_like(probabilities[:, 0]).float() if weights is None else weights
        one_hot = torch.zeros(probabilities.shape, device=logits.device).scatter_(1, chosen, 1.0)
        routed = (one_hot * of_tokens[:, None]).sum(0)
        values = probabilities.float()
        return torch.cat([routed, (values if weights is None else values * weights[:, None]).sum(0)])

    def of_sums(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss, times its coefficient, in float64, and its gradient for the sums, float32 [2E]."""
        routed, probabilities = sums.detach().split(self.num_experts)
        num_rows = (routed.double().sum() / self.top_k).clamp(min=1.0)
        shares = (self.coefficient * self.num_experts / num_rows**2) * routed.double()
        gradient = torch.cat([torch.zeros_like(routed), shares.float()])
        return (shares * probabilities.double()).sum(), gradient

    def add_to(self, head: HeadResult, sums: torch.Tensor, num_units: int, gradient_scale: float) -> None:
        """Add the loss of a microbatch, as one of each of its `num_units` target tokens, to what its head gave."""
        loss, of_sums = self.of_sums(sums)
        head.loss_sum = head.loss_sum + num_units * loss
        if head.grad_hidden is not None:  # the gradient of what `join` makes, from those of its parts
            own = head.grad_hidden
            bits = _gradient_of_bits(of_sums * (num_units * gradient_scale), own.dtype)
            head.grad_hidden = torch.cat([own.flatten(2), _filled(bits, own.shape[:2])], dim=-1)


@dataclass(frozen=True)
class Routed:
    """How one block adds to the sums."""

    loss: RouterLoss
    paths: tuple[str, ...]
    weights: torch.Tensor | None
    """From `weights_of`."""

    def run(self, block: nn.Module, call: Callable[[], Any], sums: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The result of `call`, in which the block runs, and the sums that it leaves."""
        logits: list[torch.Tensor] = []

        def note(_module: nn.Module, _args: Any, result: Any) -> None:
            logits.append(result[self.loss.place] if isinstance(result, tuple) else result)

        with ExitStack() as hooks:
            for path, module in block.named_modules():
                if path in self.paths:
                    hooks.callback(module.register_forward_hook(note).remove)
            result = call()
        for one in logits:
            sums = sums + self.loss.sums_of(one, self.weights)
        return result, sums


def find_router_loss(model: nn.Module, blocks_path: str) -> RouterLoss | str:
    """The balancing loss of `model`, whose blocks are whole, or why it cannot be trained here."""
    config: Any = model.config
    text = config.get_text_config()
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if function is None:
        return "transformers has no such loss for this model type"
    spec: Any = next(
        (
            recorded["router_logits"]
            for module in model.modules()
            if "router_logits" in (recorded := getattr(module, "_can_record_outputs", None) or {})
        ),
        None,
    )
    target = getattr(spec, "target_class", None)
    if target is None:
        return "transformers does not say which module of a block is its router"
    num_experts, top_k = (_number((model, text), SIZE_NAMES[key]) for key in ("num_experts", "num_experts_per_tok"))
    weight = getattr(model, "router_aux_loss_coef", getattr(text, "router_aux_loss_coef", None))
    if not num_experts or not top_k or not isinstance(weight, (int, float)):
        return "its configuration does not say how many experts there are, how many a token has, or the loss's weight"
    blocks = model.get_submodule(blocks_path).named_children()
    wanted_path = f".{spec.layer_name.strip('.')}." if spec.layer_name else "."
    routers = tuple(
        tuple(
            path
            for path, module in block.named_modules()
            if isinstance(module, target) and wanted_path in f".{blocks_path}.{name}.{path}."
        )
        for name, block in blocks
    )
    found = RouterLoss(num_experts, top_k, float(weight), routers, spec.index)
    return found if any(routers) and _is_usual(function, found) else "its balancing loss is not the usual one"


def describe_router_loss(routers: RouterLoss | None, why_not: str) -> str | None:
    """A line that says whether a model's balancing loss is trained; None where its configuration asks for none."""
    asked = "output_router_logits: true in the model's configuration"
    if routers is not None:
        weight = f"router_aux_loss_coef {routers.coefficient:g}"
        return f"{asked}: the routers' balancing loss is trained with its {weight}; evaluation leaves it out"
    return f"{asked} trains no balancing loss: {why_not}" if why_not else None


def leave_out_router_loss(config: Any) -> str | None:
    """Do not train the balancing loss, for its sums are over whole sequences; words for the user where it was asked."""
    text = config.get_text_config()
    if not getattr(text, WANTED, False):
        return None
    delattr(text, WANTED)
    return (
        "output_router_logits: true in the model's configuration trains no balancing loss: it is a sum over whole "
        "sequences, which pipeline.sequence_chunks and mlp_chunk_tokens cut"
    )


def _number(places: Sequence[Any], names: Sequence[str]) -> int:
    values = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), 0)


def _is_usual(function: Callable[..., Any], loss: RouterLoss) -> bool:
    """Whether a model's own function gives the same numbers, with padding and without."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(10, loss.num_experts, generator=generator) for _ in range(2)]
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    for given in (None, mask):
        weights = None if given is None else given.flatten().float()
        ours, _ = loss.of_sums(sum((loss.sums_of(one, weights) for one in logits), torch.zeros(2 * loss.num_experts)))
        try:
            theirs = loss.coefficient * float(function(tuple(logits), loss.num_experts, loss.top_k, given))
        except (TypeError, ValueError, RuntimeError):
            return False
        if abs(theirs - float(ours)) > 1e-5 * abs(theirs):
            return False
    return True


# -- sums as columns ---------------------------------------------------------------------------------------------


class _ToBits(torch.autograd.Function):
    """float32 [n] -> its bits as values of another dtype; the gradient's columns are added up."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.clone() if dtype.itemsize >= torch.float32.itemsize else values.contiguous().view(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if gradient.dtype.itemsize >= torch.float32.itemsize:
            return gradient, None
        return gradient.float().view(-1, 2).sum(1), None


class _OfBits(torch.autograd.Function):
    """The inverse of `_ToBits`; the gradient becomes a rounded value and the remainder, in its columns."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.dtype = values.dtype
        wide = values.dtype.itemsize >= torch.float32.itemsize
        return values.clone() if wide else values.clone().contiguous().view(torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _gradient_of_bits(gradient, ctx.dtype)


def _gradient_of_bits(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize >= torch.float32.itemsize:
        return gradient
    rounded = gradient.to(dtype)
    return torch.stack([rounded, (gradient - rounded.float()).to(dtype)], dim=1).flatten()
