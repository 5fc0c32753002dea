"""How a model calls its blocks: noted by stubs in their place, played back by workers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError


class SplitRefusedError(RefusedError):
    """The model does something that the split cannot carry. Exit code 2."""


class HiddenMark:
    """Stands for the hidden states in recorded arguments."""

    def __repr__(self) -> str:
        return "HIDDEN"


HIDDEN = HiddenMark()


class CacheMark:
    """Stands for the cache in recorded arguments."""

    def __repr__(self) -> str:
        return "CACHE"


CACHE = CacheMark()


@dataclass(frozen=True)
class BlockCall:
    """How the model called one block, the hidden states replaced by `HIDDEN`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> BlockCall:
        """This call with `function` applied to every tensor among its arguments."""
        return BlockCall(
            tuple(_map(value, function) for value in self.args),
            {key: _map(value, function) for key, value in self.kwargs.items()},
        )

    def run(self, block: nn.Module, hidden: torch.Tensor, cache: object = None) -> torch.Tensor:
        """Call `block` on `hidden` [batch, tokens, hidden_size]; returns hidden states of the same shape.

        `cache` takes the place of `CACHE`, in calls that were recorded with one.
        """
        own = {id(HIDDEN): hidden, id(CACHE): cache}
        args = (own.get(id(value), value) for value in self.args)
        kwargs = {key: own.get(id(value), value) for key, value in self.kwargs.items()}
        result = block(*args, **kwargs)
        output: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else result
        return output


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(_map(item, function) for item in value)
    return value


@dataclass
class CallRecorder:
    """Notes that the stubs of one forward make."""

    num_blocks: int
    result_length: int
    calls: list[BlockCall] = field(default_factory=list)
    first_hidden: torch.Tensor | None = None
    last_hidden: torch.Tensor | None = None
    """Set before the forward: the last stub returns it in place of what it was given."""
    cache: object = None
    """Set before the forward: what calls hold `CACHE` in place of."""
    _expected: torch.Tensor | None = None

    def reset(self) -> None:
        self.calls, self.first_hidden, self._expected = [], None, None

    def record(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the call of block `index`; returns what the block's caller expects."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
            if self.calls:  # it comes from a stub
                raise WrongResultShapeError
            raise SplitRefusedError(
                "a block is not given hidden states of the usual shape",
                where=f"block.{index}, {'argument 0' if args else 'hidden_states'}",
                found=str(list(hidden.shape)) if isinstance(hidden, torch.Tensor) else type(hidden).__name__,
                expected="a tensor [batch, tokens, hidden size]",
                hint="this architecture is not supported; choose another model",
            )
        if index != len(self.calls):
            raise SplitRefusedError(
                "the model does not call its blocks once and in order",
                where=f"block.{index}",
                found=f"call number {len(self.calls) + 1} of a forward is block {index}",
                expected=f"block {len(self.calls)}",
            )
        if self._expected is not None and hidden is not self._expected:
            if hidden.shape != self._expected.shape:
                raise WrongResultShapeError
            raise SplitRefusedError(
                "the model changes the hidden states between two blocks", where=f"block.{index - 1} to block.{index}"
            )
        if self.first_hidden is None:
            self.first_hidden = hidden
        if args:
            call = BlockCall((HIDDEN, *args[1:]), dict(kwargs))
        else:
            call = BlockCall((), {key: HIDDEN if key == "hidden_states" else value for key, value in kwargs.items()})
        self.calls.append(call if self.cache is None else self._without_cache(call))
        if index == self.num_blocks - 1 and self.last_hidden is not None:
            hidden = self.last_hidden
        self._expected = hidden
        return hidden if self.result_length == 0 else (hidden, *([None] * (self.result_length - 1)))

    def _without_cache(self, call: BlockCall) -> BlockCall:
        return BlockCall(
            tuple(CACHE if value is self.cache else value for value in call.args),
            {key: CACHE if value is self.cache else value for key, value in call.kwargs.items()},
        )


class WrongResultShapeError(Exception):
    """The blocks of this model return something else than this recorder gives."""


class RecordingBlock(nn.Module):
    """Stands in for one block: notes how it was called and passes the hidden states on."""

    def __init__(self, block: nn.Module, index: int, recorder: CallRecorder) -> None:
        super().__init__()
        self.__dict__["_stands_for"] = block  # not a submodule: attributes are looked up, weights are not held
        self._index = index
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_stands_for"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.record(self._index, args, kwargs)


class BeforeBlocks(nn.Module):
    """Stands in, on the host, for a module of the tail: works as it does before the blocks, and passes the hidden
    states on after them. Some models (nanochat) use their last norm before the first block too."""

    def __init__(self, module: nn.Module, recorder: CallRecorder) -> None:
        super().__init__()
        has_weights = any(True for _ in module.parameters())  # such a one does not run before the blocks
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
    stubs = nn.ModuleList(RecordingBlock(block, index, recorder) for index, block in enumerate(blocks))
    replace_module(model, blocks_path, stubs)
    return blocks
