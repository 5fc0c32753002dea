"""Tensors that travel beside the hidden states from block to block, all in one boundary tensor.

    embed -> [hidden | a | b] -> block.0 (reads a) -> [hidden | b] -> block.1 (writes k) -> [hidden | b | k] -> block.2

Some blocks are given tensors that a gradient flows through (gemma4's inputs of each layer), some hand keys and values
to later blocks through a mapping (gemma4's shared layers), some return more than hidden states, which the next block is
given (zaya's states of routers, hy_v4's chosen keys). To the engine a boundary is one tensor: these are laid
behind the hidden states in its last dimension, and autograd does the rest. The last block's output is hidden states
alone.

Shapes: B sequences of T tokens; a carried tensor of n elements takes n / (B x T) columns.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roundpipe_cli.model.block_calls import BlockCall, ResultMark, SharedMark, SplitRefusedError, map_values
from roundpipe_cli.model.boundary_layout import Carried, CarriedMark, Carry, Name, join


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
    dtype: torch.dtype,
) -> tuple[torch.Tensor, tuple[BlockCall, ...]]:
    """The first boundary tensor, and the calls with marks for what it carries.

    Args:
        hidden: input of the first block, [B, T, ...].
        calls: as recorded for this microbatch.
        shared: for each block; empty where blocks share nothing.
        handed: for each block; empty where blocks return nothing that the next one reads.
        dtype: of the blocks' weights.

    Raises:
        SplitRefusedError: an argument with a gradient cannot lie beside the hidden states.
    """
    given, marked = _mark_arguments(hidden, calls)
    if not given and not shared and not handed:
        return hidden, tuple(calls)
    marked = _mark_results(marked, handed)
    last_use: dict[Name, int] = {}
    for index, call in enumerate(marked):
        last_use.update((name, index) for name in _marks(call))
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
        for place, symbolic, own in handed[index] if handed else ():
            travelling[("result", place)] = Carried(_shape(symbolic, sizes), own or dtype, "T" in symbolic[2:])
        travelling = {name: form for name, form in travelling.items() if last_use.get(name, -1) > index}
        done.append(replace(call, carry=Carry(tuple(hidden.shape), hidden.dtype, incoming, tuple(travelling))))
    return join(hidden, list(given.values())), tuple(done)


def _shape(symbolic: Symbols, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[one] if isinstance(one, str) else one for one in symbolic)


def _mark_results(calls: Sequence[BlockCall], handed: Sequence[HandedOn]) -> list[BlockCall]:
    """The calls with marks of tensors in place of what the block before returns; None where that is no tensor."""
    before = ((), *handed[:-1]) if handed else ((),) * len(calls)

    def mark(value: Any, places: set[int]) -> Any:
        if not isinstance(value, ResultMark):
            return value
        return CarriedMark(("result", value.place)) if value.place in places else None

    return [
        map_values(call, functools.partial(mark, places={place for place, _, _ in own}))
        for call, own in zip(calls, before, strict=True)
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
                hint="this architecture is not supported; choose another model",
            )
        name = names.setdefault(id(value), ("argument", len(names)))
        given[name] = value
        return CarriedMark(name)

    marked = [map_values(call, functools.partial(mark, where=f"block.{index}")) for index, call in enumerate(calls)]
    return given, marked


def _marks(call: BlockCall) -> Iterator[Name]:
    yield from (value.name for value in _values(call) if isinstance(value, CarriedMark))


class _NotedMapping(dict[Any, Any]):
    """A mapping that records which keys are read and set."""

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

    Runs the blocks on the meta device.

    Args:
        blocks: parameters on the meta device.
        calls: as recorded for `hidden`, [B, T, ...], with other numbers of sequences and tokens than any width.
    """
    shares = any(_has(call, SharedMark) for call in calls)
    read = {value.place for call in calls for value in _values(call) if isinstance(value, ResultMark)}
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
                if isinstance(value, ResultMark):
                    return before.get(value.place)
                return mapping if isinstance(value, SharedMark) else value

            results: list[Any] = []
            own = copy.deepcopy(block)._apply(on_meta)
            own.register_forward_hook(lambda _module, _args, result, results=results: results.append(result))
            hidden = map_values(call.map_tensors(on_meta), fill).run(own, hidden)
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


def _has(call: BlockCall, kind: type) -> bool:
    return any(isinstance(value, kind) for value in _values(call))


def _values(call: BlockCall) -> Iterator[Any]:
    """All arguments, and parts of tuples, lists and dicts."""
    found: list[Any] = []
    map_values(call, lambda value: found.append(value) or value)  # type: ignore[func-returns-value]
    yield from found
