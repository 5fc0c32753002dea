"""Tensors that travel beside the hidden states from block to block: those of a model, and each block's.

    embed -> [hidden | a | b] -> block.0 (reads a) -> [hidden | b] -> block.1 (writes k) -> [hidden | b | k] ->

Some blocks are given tensors that a gradient flows through (gemma4's inputs of each layer), some hand keys and values
to later blocks through a mapping (gemma4's shared layers), some return more than hidden states, which the next block
is given (zaya's states of routers, hy_v4's chosen keys). To the engine a boundary is one tensor: these are laid
behind the hidden states in its last dimension, and autograd does the rest. The last block's output is hidden states
alone.

Shapes: B sequences of T tokens; a carried tensor of n elements takes n / (B x T) columns.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roundpipe_cli.model.block_calls import (
    NOT_SUPPORTED,
    BlockCall,
    SharedMark,
    SplitRefusedError,
    map_values,
    result_place,
)
from roundpipe_cli.model.boundary import SUMS, Carried, CarriedMark, Carry, Name, join
from roundpipe_cli.model.router_loss import Routed, RouterLoss


@dataclass(frozen=True)
class SharedStates:
    """How one block uses the mapping that blocks share."""

    written: tuple[tuple[object, tuple[Symbols, ...]], ...] = ()
    """Keys that it sets, each with the shapes of its tensors; "B" and "T" stand for sequences and tokens."""
    read: tuple[object, ...] = ()
    """Keys that it reads."""


Symbols = tuple[int | str, ...]
"""A shape in which "B" stands for sequences and "T" for tokens."""
HandedOn = tuple[tuple[int, Symbols, torch.dtype | None], ...]
"""Tensors that one block returns for the next one: place in its result, shape, dtype (None: the weights') of each."""


def carry_along(
    hidden: torch.Tensor,
    calls: Sequence[BlockCall],
    shared: Sequence[SharedStates],
    handed: Sequence[HandedOn],
    *,
    dtype: torch.dtype,
    routers: RouterLoss | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[BlockCall, ...]]:
    """The first boundary tensor, and the calls with marks for what it carries.

    Args:
        hidden: input of the first block, [B, T, ...].
        shared, handed: for each block, from `find_states`.
        dtype: of the blocks' weights.
        routers: whose sums travel too.
        lengths: [B], tokens of each sequence without padding, for these; None: nothing is padded.

    Raises:
        SplitRefusedError: an argument with a gradient cannot lie beside the hidden states.
    """
    given, marked = _mark_arguments(hidden, calls)
    last_use: dict[Name, int] = {}
    routed: list[Routed | None] = [None] * len(calls)
    if routers is not None:
        given[SUMS], last_use[SUMS] = torch.zeros(2 * routers.num_experts), len(calls)
        weights = routers.weights_of(lengths, hidden.shape[1])
        routed = [Routed(routers, paths, weights) for paths in routers.routers]
    if not given and not shared and not handed:
        return hidden, tuple(calls)
    marked = _mark_results(marked, handed)
    for index, call in enumerate(marked):
        last_use |= {value.name: index for value in call_values(call) if isinstance(value, CarriedMark)}
    states = shared or [SharedStates()] * len(calls)
    readers = {key: index for index, state in enumerate(states) for key in state.read}
    travelling = {name: Carried(tuple(tensor.shape), tensor.dtype) for name, tensor in given.items()}
    sizes = {"B": hidden.shape[0], "T": hidden.shape[1]}
    done = []
    for index, (call, state) in enumerate(zip(marked, states, strict=True)):
        incoming = dict(travelling)
        for key, symbols in state.written:
            for place, symbolic in enumerate(symbols):
                travelling[(key, place)] = Carried(_shape(symbolic, sizes), hidden.dtype)
                last_use[(key, place)] = readers.get(key, -1)
        for place, symbolic, own_dtype in handed[index] if handed else ():
            travelling[("result", place)] = Carried(_shape(symbolic, sizes), own_dtype or dtype, "T" in symbolic[2:])
        travelling = {name: form for name, form in travelling.items() if last_use.get(name, -1) > index}
        carry = Carry(tuple(hidden.shape), hidden.dtype, incoming, tuple(travelling))
        done.append(replace(call, carry=carry, routed=routed[index]))
    return join(hidden, given), tuple(done)


def _shape(symbolic: Symbols, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[one] if isinstance(one, str) else one for one in symbolic)


def _mark_results(calls: Sequence[BlockCall], handed: Sequence[HandedOn]) -> list[BlockCall]:
    """The calls with marks of tensors in place of what the block before returns; None where that is no tensor."""
    before = ((), *handed[:-1]) if handed else ((),) * len(calls)

    def mark(value: Any, places: set[int]) -> Any:
        return value if result_place(value) in (None, *places) else None

    return [
        map_values(call, functools.partial(mark, places={place for place, _, _ in tensors}))
        for call, tensors in zip(calls, before, strict=True)
    ]


def _mark_arguments(
    hidden: torch.Tensor, calls: Sequence[BlockCall]
) -> tuple[dict[Name, torch.Tensor], list[BlockCall]]:
    """Tensors among the arguments that a gradient flows through, by name, and the calls with marks in their place."""
    names: dict[int, Name] = {}
    given: dict[Name, torch.Tensor] = {}

    def mark(value: Any, where: str) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        if value.dtype != hidden.dtype or value.numel() % hidden.shape[:2].numel():
            raise SplitRefusedError(
                "a block is given a tensor that a gradient flows through, beside the hidden states",
                where=where,
                found=f"{value.dtype} {list(value.shape)}",
                expected=f"{hidden.dtype}, and a multiple of {list(hidden.shape[:2])} elements",
                hint=NOT_SUPPORTED,
            )
        name = names.setdefault(id(value), ("argument", len(names)))
        given[name] = value
        return CarriedMark(name)

    marked = [map_values(call, functools.partial(mark, where=f"block.{index}")) for index, call in enumerate(calls)]
    return given, marked


class _NotedMapping(dict[Any, Any]):
    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []
        self.written: list[Any] = []

    def __getitem__(self, key: Any) -> Any:
        self.read.append(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.written.append(key)
        super().__setitem__(key, value)


def find_states(
    blocks: Sequence[torch.nn.Module], calls: Sequence[BlockCall], hidden: torch.Tensor
) -> tuple[tuple[SharedStates, ...], tuple[HandedOn, ...]]:
    """For each block, the keys that it sets and reads in the mapping that blocks share, and what it returns for the
    next one; each empty where there is no such thing.

    Runs the blocks on the meta device. `calls` were recorded for `hidden` [B, T, ...], B and T unlike any width.
    """
    shares = any(isinstance(value, SharedMark) for call in calls for value in call_values(call))
    read = {place for call in calls for place in map(result_place, call_values(call)) if place is not None}
    if not shares and not read:
        return (), ()
    on_meta = functools.partial(_on_meta, dtype=weights_dtype(blocks))
    mapping, states, handed = _NotedMapping(), [], []
    symbols = {hidden.shape[0]: "B", hidden.shape[1]: "T"}
    hidden, before = on_meta(hidden), dict[int, Any]()
    with torch.no_grad():
        for block, call in zip(blocks, calls, strict=True):
            mapping.read, mapping.written = [], []

            def fill(value: Any, before: dict[int, Any] = before) -> Any:
                if (place := result_place(value)) is not None:
                    return before.get(place)
                return mapping if isinstance(value, SharedMark) else value

            results: list[Any] = []
            twin = copy.deepcopy(block)._apply(on_meta)
            twin.register_forward_hook(lambda _module, _args, result, results=results: results.append(result))
            hidden = map_values(call.map_tensors(on_meta), fill).run(twin, hidden)
            written = tuple(
                (key, tuple(_symbolic(tensor, symbols) for tensor in mapping[key]))
                for key in dict.fromkeys(mapping.written)
            )
            set_here = set(mapping.written)
            states.append(SharedStates(written, tuple(k for k in dict.fromkeys(mapping.read) if k not in set_here)))
            before = {place: results[0][place] for place in read if isinstance(results[0], (tuple, list))}
            handed.append(
                tuple(
                    (place, _symbolic(tensor, symbols), None if tensor.dtype == torch.bfloat16 else tensor.dtype)
                    for place, tensor in sorted(before.items())
                    if isinstance(tensor, torch.Tensor)
                )
            )
    shared = tuple(states) if any(state.read for state in states) else ()
    return shared, tuple(handed) if any(handed) else ()


def weights_dtype(blocks: Iterable[torch.nn.Module]) -> torch.dtype:
    """The dtype of the blocks' first weights."""
    return next(p.dtype for block in blocks for p in block.parameters() if p.is_floating_point())


def _symbolic(tensor: torch.Tensor, symbols: Mapping[int, str]) -> Symbols:
    return tuple(symbols.get(size, size) for size in tensor.shape)


def _on_meta(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Fused experts have no other dtype there than bfloat16. `dtype`: the model's; others of a 16-bit model stay."""
    narrow = tensor.is_floating_point() and (tensor.dtype == dtype or dtype == torch.float32)
    return tensor.to("meta", torch.bfloat16 if narrow else tensor.dtype)


def call_values(call: BlockCall) -> list[Any]:
    """All arguments, and parts of tuples, lists and dicts."""
    values: list[Any] = []
    map_values(call, lambda value: values.append(value) or value)  # type: ignore[func-returns-value]
    return values
