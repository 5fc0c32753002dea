"""Tensors that travel beside the hidden states from block to block, all in one boundary tensor.

    embed -> [hidden | a | b] -> block.0 (reads a) -> [hidden | b] -> block.1 (writes k) -> [hidden | b | k] -> block.2

Some blocks are given tensors that a gradient flows through (gemma4's inputs of each layer), some hand keys and values
to later blocks through a mapping (gemma4's shared layers). To the engine a boundary is one tensor: these are laid
behind the hidden states in its last dimension, and autograd does the rest. The last block's output is hidden states
alone.

Shapes: B sequences of T tokens; a carried tensor of n elements takes n / (B x T) columns.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roundpipe_cli.model.block_calls import BlockCall, SharedMark, SplitRefusedError, map_values
from roundpipe_cli.model.boundary_layout import CarriedMark, Carry, Name, join


@dataclass(frozen=True)
class SharedStates:
    """What one block does with the mapping that blocks share."""

    written: tuple[tuple[object, tuple[tuple[int | str, ...], ...]], ...] = ()
    """Keys that it sets, each with the shapes of its tensors; "B" and "T" stand for sequences and tokens."""
    read: tuple[object, ...] = ()
    """Keys that it reads."""


def carry_along(
    hidden: torch.Tensor, calls: Sequence[BlockCall], shared: Sequence[SharedStates]
) -> tuple[torch.Tensor, tuple[BlockCall, ...]]:
    """The first boundary tensor, and the calls with marks for what it carries.

    Args:
        hidden: input of the first block, [B, T, ...].
        calls: as recorded for this microbatch.
        shared: for each block; empty where blocks share nothing.

    Raises:
        SplitRefusedError: an argument with a gradient cannot lie beside the hidden states.
    """
    given, marked = _mark_arguments(hidden, calls)
    if not given and not shared:
        return hidden, tuple(calls)
    last_use: dict[Name, int] = {}
    for index, call in enumerate(marked):
        last_use.update((name, index) for name in _marks(call))
    states = shared or [SharedStates()] * len(calls)
    readers = {key: index for index, state in enumerate(states) for key in state.read}
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    sizes = {"B": hidden.shape[0], "T": hidden.shape[1]}
    done = []
    for index, (call, state) in enumerate(zip(marked, states, strict=True)):
        incoming = dict(shapes)
        for key, symbols in state.written:
            for place, symbolic in enumerate(symbols):
                shapes[(key, place)] = tuple(sizes[one] if isinstance(one, str) else one for one in symbolic)
                last_use[(key, place)] = readers.get(key, -1)
        shapes = {name: shape for name, shape in shapes.items() if last_use[name] > index}
        done.append(replace(call, carry=Carry(tuple(hidden.shape), incoming, tuple(shapes))))
    return join(hidden, list(given.values())), tuple(done)


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
                hint="this architecture is not supported; choose another model",
            )
        name = names.setdefault(id(value), ("argument", len(names)))
        given[name] = value
        return CarriedMark(name)

    marked = [map_values(call, functools.partial(mark, where=f"block.{index}")) for index, call in enumerate(calls)]
    return given, marked


def _marks(call: BlockCall) -> Iterator[Name]:
    found: list[Name] = []

    def note(value: Any) -> Any:
        if isinstance(value, CarriedMark):
            found.append(value.name)
        return value

    map_values(call, note)
    yield from found


class _NotedMapping(dict[Any, Any]):
    """Notes which keys are read and set."""

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


def find_shared(
    blocks: Sequence[torch.nn.Module], calls: Sequence[BlockCall], hidden: torch.Tensor
) -> tuple[SharedStates, ...]:
    """Which keys each block sets and reads in the mapping that blocks share; empty where they share nothing.

    Runs the blocks on the meta device.

    Args:
        blocks: parameters on the meta device.
        calls: as recorded for `hidden`, [B, T, ...], with other numbers of sequences and tokens than any width.
    """
    if not any(_has_shared(call) for call in calls):
        return ()
    mapping, states = _NotedMapping(), []
    symbols = {hidden.shape[0]: "B", hidden.shape[1]: "T"}
    hidden = _on_meta(hidden)
    with torch.no_grad():
        for block, call in zip(blocks, calls, strict=True):
            mapping.read, mapping.written = [], []
            filled = map_values(
                call.map_tensors(_on_meta), lambda value: mapping if isinstance(value, SharedMark) else value
            )
            hidden = filled.run(copy.deepcopy(block)._apply(_on_meta), hidden)
            written = tuple(
                (key, tuple(tuple(symbols.get(size, size) for size in tensor.shape) for tensor in mapping[key]))
                for key in dict.fromkeys(mapping.written)
            )
            own = set(mapping.written)
            states.append(SharedStates(written, tuple(key for key in dict.fromkeys(mapping.read) if key not in own)))
    return tuple(states) if any(state.read for state in states) else ()


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Fused experts have no other dtype there."""
    return tensor.to("meta", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)


def _has_shared(call: BlockCall) -> bool:
    return any(isinstance(value, SharedMark) for value in (*call.args, *call.kwargs.values()))
