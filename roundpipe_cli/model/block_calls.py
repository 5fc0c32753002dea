"""A model's calls of its blocks: recorded by stubs in their place, replayed by workers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.attention import PackedRows, packed_rows, recurrent_blocks
from roundpipe_cli.model.boundary import SUMS, CarriedMark, Carry
from roundpipe_cli.model.dropout import NOISE_ATTRIBUTE, embedding_noise
from roundpipe_cli.model.router_loss import Routed


class StandIn(nn.Module):
    """Stands in the place of a module of the model: has its attributes, for code that reads them, not its weights."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)


NOT_SUPPORTED = "this architecture is not supported; choose another model"


class SplitRefusedError(RefusedError):
    """The model does something that the split cannot carry. Exit code 2."""


HIDDEN, CACHE = CarriedMark(("hidden", 0)), CarriedMark(("cache", 0))


def result_place(value: Any) -> int | None:
    """Place in the result of the block before that an argument stands for; None: it is something else."""
    return value.name[1] if isinstance(value, CarriedMark) and value.name[0] == "result" else None


@dataclass(frozen=True)
class SharedMark:
    """Stands for a mapping that blocks share; it is empty before the first block."""

    kind: type[MutableMapping[Any, Any]]


@dataclass(frozen=True)
class BlockCall:
    """The model's call of one block, with `HIDDEN` in place of the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    carry: Carry | None = None
    """Tensors that travel beside the hidden states; None: nothing."""
    routed: Routed | None = None
    """How it adds to the sums of the routers among them; None: no such loss is trained."""

    def input_like(self, hidden: torch.Tensor) -> torch.Tensor:
        """Something that this block could be given where the first one is given `hidden`."""
        return hidden if self.carry is None else self.carry.sample(hidden)

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> BlockCall:
        """The call with `function` applied to every tensor among its arguments."""
        call = map_values(self, lambda value: function(value) if isinstance(value, torch.Tensor) else value)
        if call.routed is None or call.routed.weights is None:
            return call
        return replace(call, routed=replace(call.routed, weights=function(call.routed.weights)))

    @property
    def holds_rows(self) -> bool:
        """Whether it has the places of packed rows instead of a mask."""
        return any(isinstance(value, PackedRows) for value in (*self.args, *self.kwargs.values()))

    def run(self, block: nn.Module, hidden: torch.Tensor, cache: object = None) -> torch.Tensor:
        """Call `block` on `hidden` [batch, tokens, ...]; returns hidden states of the same shape.

        Where something travels with them, both are boundary tensors as `Carry` says. `cache` takes the place of
        `CACHE`, in calls that were recorded with one.
        """
        parts: dict[Any, torch.Tensor] = {}
        if self.carry is not None:
            hidden, parts = self.carry.unpack(hidden)
        given = {**parts, HIDDEN.name: hidden, CACHE.name: cache}
        shared: list[MutableMapping[Any, Any]] = []

        def fill(value: Any) -> Any:
            if isinstance(value, SharedMark):  # with the carried tensors that earlier blocks put into it
                shared.append(value.kind())
                for key in dict.fromkeys(key for key, _ in parts if key not in ("argument", "result", "sums")):
                    shared[-1][key] = tuple(tensor for (other, _), tensor in parts.items() if other == key)
                return shared[-1]
            return given[value.name] if isinstance(value, CarriedMark) else value

        call = map_values(self, fill)
        run = functools.partial(block, *call.args, **call.kwargs)
        if self.routed is None:
            result = run()
        else:
            result, parts[SUMS] = self.routed.run(block, run, parts[SUMS])
        output: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else result
        if self.carry is None:
            return output
        if isinstance(result, (tuple, list)):
            parts.update({("result", place): one for place, one in enumerate(result) if place})
        for mapping in shared:
            parts.update({(key, place): one for key, value in mapping.items() for place, one in enumerate(value)})
        return self.carry.pack(output, parts)


def map_values(call: BlockCall, function: Callable[[Any], Any]) -> BlockCall:
    """`call` with `function` applied to each of its arguments, and to each part of tuples, lists and dicts of such."""
    return replace(
        call,
        args=tuple(_map(value, function) for value in call.args),
        kwargs={key: _map(value, function) for key, value in call.kwargs.items()},
    )


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_map(item, function) for item in value)
    if type(value) is dict and value:
        return {key: _map(item, function) for key, item in value.items()}
    if isinstance(value, PackedRows):
        return value.map_tensors(function)
    return function(value)


@dataclass
class CallRecorder:
    """Collects the calls that the stubs of one forward see."""

    num_blocks: int
    result_length: int
    hands_on: bool = False
    """Where blocks return more than hidden states, the model is given marks for it, else None."""
    calls: list[BlockCall] = field(default_factory=list)
    first_hidden: torch.Tensor | None = None
    replaces_last: bool = False
    """Set before the forward: the last stub returns other hidden states than it was given."""
    last_hidden: torch.Tensor | None = None
    """The result of that call."""
    num_tokens: tuple[int, int] | None = None
    """Set before the forward: sequences and tokens, which hidden states begin with; None: not checked."""
    cache: object = None
    """Set before the forward: what calls hold `CACHE` in place of."""
    recurrent: frozenset[int] = frozenset()
    """Indices of recurrent blocks: the model gives them no mask, so they are told where packed rows lie."""
    _expected: torch.Tensor | None = None

    def reset(self) -> None:
        self.calls, self.first_hidden, self._expected = [], None, None

    def record(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call of block `index`; returns a result of the form that its caller expects."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        lead = self.num_tokens
        if not isinstance(hidden, torch.Tensor) or hidden.dim() < 3 or lead not in (None, tuple(hidden.shape[:2])):
            if self.calls:  # it comes from a stub
                raise WrongResultShapeError
            raise SplitRefusedError(
                "a block is not given hidden states of the usual shape",
                where=f"block.{index}, {'argument 0' if args else 'hidden_states'}",
                found=str(list(hidden.shape)) if isinstance(hidden, torch.Tensor) else type(hidden).__name__,
                expected="a tensor [batch, tokens, ...]",
                hint=NOT_SUPPORTED,
            )
        if index != len(self.calls):
            raise SplitRefusedError(
                "the model does not call its blocks once and in order",
                where=f"block.{index}",
                found=f"call number {len(self.calls) + 1} of a forward is block {index}",
                expected=f"block {len(self.calls)}",
            )
        if self._expected is not None and not _is_same(hidden, self._expected):
            if hidden.shape != self._expected.shape:
                raise WrongResultShapeError
            raise SplitRefusedError(
                "the model changes the hidden states between two blocks", where=f"block.{index - 1} to block.{index}"
            )
        if self.first_hidden is None:
            self.first_hidden = hidden
        args, kwargs = (HIDDEN, *args[1:]) if args else (), dict(kwargs)
        if not args:
            kwargs["hidden_states"] = HIDDEN
        if index in self.recurrent and kwargs.get("attention_mask", kwargs) is None:
            kwargs["attention_mask"] = packed_rows()
        marked = {key: self._marked(value) for key, value in kwargs.items()}
        self.calls.append(BlockCall(tuple(map(self._marked, args)), marked))
        if index == self.num_blocks - 1 and self.replaces_last:
            hidden = self.last_hidden = torch.randn(hidden.shape).to(hidden.dtype)
        self._expected = hidden
        if self.result_length == 0:
            return hidden
        marks = (CarriedMark(("result", place)) for place in range(1, self.result_length))
        return (hidden, *(mark if self.hands_on else None for mark in marks))

    def _marked(self, value: Any) -> Any:
        """A mark for the cache, and for an empty mapping, which blocks fill: each call then gets one of its own."""
        if value is self.cache and value is not None:
            return CACHE
        return SharedMark(type(value)) if isinstance(value, MutableMapping) and not value else value


def _is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are one, or one is a view of all of the other."""
    same = found.data_ptr() == expected.data_ptr() and found.dtype == expected.dtype
    return found is expected or (same and found.shape == expected.shape and found.stride() == expected.stride())


class WrongResultShapeError(Exception):
    """The blocks of this model return other results than this recorder gives."""


class RecordingBlock(StandIn):
    """Stands in for one block: notes how it was called and passes the hidden states on."""

    def __init__(self, block: nn.Module, index: int, recorder: CallRecorder) -> None:
        super().__init__(block)
        self._index = index
        self._recorder = recorder

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.record(self._index, args, kwargs)


class BeforeBlocks(StandIn):
    """Stands in, on the host, for a module of the tail: works as it does before the blocks, and passes the hidden
    states on after them. Some models (nanochat) use their last norm before the first block too."""

    def __init__(self, module: nn.Module, recorder: CallRecorder) -> None:
        super().__init__(module)  # zaya reads the dtype of its weight
        has_weights = any(True for _ in module.parameters())  # a module with weights does not run before the blocks
        self._module = None if has_weights else copy.deepcopy(module)
        self._recorder = recorder

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._module is None or self._recorder.calls:
            return args[0]
        return self._module(*args, **kwargs)


def replace_module(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Put `module` at `path` in `model`; returns what was there."""
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    old = getattr(parent, name)
    setattr(parent, name, module)
    assert isinstance(old, nn.Module)
    return old


def install_stubs(model: nn.Module, blocks_path: str, recorder: CallRecorder) -> list[nn.Module]:
    """Replace the blocks of `model` by recording stubs; returns the blocks."""
    blocks = list(model.get_submodule(blocks_path).children())
    recorder.recurrent = recurrent_blocks(blocks)
    stubs = nn.ModuleList(RecordingBlock(block, index, recorder) for index, block in enumerate(blocks))
    replace_module(model, blocks_path, stubs)
    return blocks


class BackboneStub(StandIn):
    """Stands in for the backbone below the LM head: returns the hidden states that it was handed."""

    def __init__(self, output_type: type, backbone: nn.Module) -> None:
        super().__init__(backbone)
        self._output_type = output_type
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output_type(last_hidden_state=self.hidden)


# Everything before the first block, on the host: rows of the table gathered from host memory, and their gradients.

EmbedLeaf = tuple[str, torch.Tensor | None, torch.Tensor]
"""Parameter name, token ids of its rows or None, leaf."""


class GatheringEmbedding(StandIn):
    """The model's input embedding on the host: gathers the rows that a microbatch needs and nothing else.

    The table itself never becomes a leaf of a graph; its gradient comes back as rows.
    """

    def __init__(self, embedding: nn.Module, trainable: bool, added: Any = None) -> None:
        """`added`: `TokenRows` that take the place of some of its rows; None: there are none."""
        super().__init__(embedding)
        self._trainable = trainable
        self.added = added
        if added is not None:
            places = torch.full((int(embedding.num_embeddings),), -1)  # type: ignore[arg-type]
            places[added.ids] = torch.arange(len(added.ids))
            self._places = places
        self.token_ids: torch.Tensor | None = None
        """After a forward: the distinct token ids, [U]."""
        self.rows: torch.Tensor | None = None
        """After a forward: their rows [U, H], the leaf that gets the gradient."""
        self.noise_seed: int | None = None
        """Seed of the noise that is added to the rows; None: no noise."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        result = self._gather(input_ids)
        alpha = getattr(self.original, NOISE_ATTRIBUTE, 0.0)
        if alpha and self.noise_seed is not None:
            result = result + embedding_noise(result, alpha, self.noise_seed)
        return result

    def _gather(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedding = self.original
        if not self._trainable:
            result: torch.Tensor = embedding(input_ids)
            if self.added is None or self.added._disable_adapters:
                return result
            places = self._places[input_ids]
            own = self._of_rows(self.added.rows, places.clamp(min=0))
            return torch.where((places >= 0)[..., None], own, result)
        padding = embedding.padding_idx
        self.token_ids, positions = torch.unique(input_ids, return_inverse=True)
        self.rows = embedding._parameters["weight"].detach()[self.token_ids].requires_grad_()
        # Rows are renumbered, so the padding row (whose gradient is left out) is too.
        matches = [] if padding is None else (self.token_ids == padding).nonzero().flatten().tolist()
        return self._of_rows(self.rows, positions, matches[0] if matches else None)

    def _of_rows(self, rows: torch.Tensor, positions: torch.Tensor, padding: int | None = None) -> torch.Tensor:
        """The embedding's result for `positions` in `rows`, which take the place of its table."""
        embedding = self.original
        held = embedding._parameters["weight"], embedding.padding_idx
        embedding._parameters["weight"], embedding.padding_idx = rows, padding
        try:
            result: torch.Tensor = embedding(positions)
        finally:
            embedding._parameters["weight"], embedding.padding_idx = held
        return result


@dataclass
class EmbedGradient:
    """Gradient of one parameter of the embed layer for one microbatch."""

    name: str
    token_ids: torch.Tensor | None
    """Rows of the parameter that `gradient` [U, H] belongs to; None if it is the whole parameter's."""
    gradient: torch.Tensor


@dataclass
class Prologue:
    """Result of everything before the first block, for one microbatch, on the host."""

    hidden: torch.Tensor
    """Input of block 0, [B, T, H], with its graph if the embed layer is trainable."""
    calls: tuple[BlockCall, ...]
    """The call of each block; tensors on the host."""
    leaves: tuple[EmbedLeaf, ...] = ()
    """(parameter name, token ids or None, leaf) of each trainable parameter of the embed layer."""

    def backward(self, grad_hidden: torch.Tensor) -> list[EmbedGradient]:
        """Gradients of the embed layer's parameters from that of `hidden`; frees the graph."""
        leaves = [leaf for _, _, leaf in self.leaves]
        gradients = torch.autograd.grad(self.hidden, leaves, grad_hidden.to(self.hidden.dtype), allow_unused=True)
        return [
            EmbedGradient(name, token_ids, gradient)
            for (name, token_ids, _), gradient in zip(self.leaves, gradients, strict=True)
            if gradient is not None
        ]
