"""From a Hugging Face causal language model to a list of layers, without per-model code.

The model's own forward runs once with its blocks replaced by recording stubs. Each stub notes how its block was called
and passes the hidden states on, so the model's own code decides masks, position embeddings and whatever else a block
is given:

    input_ids -> [embed: everything before the first block] -> block.0 -> ... -> block.L-1 -> [tail: norm] -> LM head
                  runs on the host, records each block's        stages, cut anywhere           one layer, `head`
                  arguments on the way

The same run proves what the engine relies on, or refuses the model: every block is called once and in order, nothing
happens between two blocks, no argument is an object that a block could change or carries a gradient, no parameter is
shared between blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from roundpipe_cli.model.block_calls import (
    NOT_SUPPORTED,
    BlockCall,
    CallRecorder,
    SharedMark,
    SplitRefusedError,
    WrongResultShapeError,
    install_stubs,
)
from roundpipe_cli.model.boundary import CarriedMark
from roundpipe_cli.model.carried import HandedOn, SharedStates, call_values, carry_along, find_states, weights_dtype
from roundpipe_cli.model.module_copies import materialised_copy
from roundpipe_cli.model.router_loss import WANTED, RouterLoss, find_router_loss

ROWS, TOKENS = 3, 11
"""Sequences and tokens of the probe's forward: numbers that are no width of a model."""
RESULTS = ((0, False), (1, False), (2, True), (2, False), (3, True), (3, False), (4, True), (4, False))
"""Results that blocks may return: length of a tuple (0: hidden states alone); whether the next block is given it."""


@dataclass(frozen=True)
class ModelSplit:
    """How one model comes apart. Paths are dotted module names within the causal language model."""

    blocks_path: str
    num_blocks: int
    backbone_path: str
    """The module that the causal model calls to get its last hidden states."""
    tail_paths: tuple[str, ...]
    """Modules that run between the last block and the backbone's output, in order."""
    embedding_path: str
    result_length: int
    """0 if blocks return the hidden states, else the length of the tuple that they return."""
    output_type: type
    """Class of the backbone's output."""
    shared: tuple[SharedStates, ...] = ()
    """The use that each block makes of a mapping that blocks share; empty where they share nothing."""
    handed: tuple[HandedOn, ...] = ()
    """Tensors that each block returns for the next one beside hidden states; empty where that reads nothing."""
    casts_tail: bool = False
    """Whether the model casts the last hidden states to the dtype of the tail's weights."""
    unreached: frozenset[str] = frozenset()
    """Names of parameters that text never reaches: towers for pictures and sound."""
    caller_path: str = ""
    """The module that calls the backbone and has the LM head, as far as a forward shows; "": the model itself."""
    boundary_columns: int = 0
    """Width of the widest boundary tensor, in values per token of the weights' size: hidden states and companions."""
    embedding_weight: str = ""
    """The first name of the embedding's matrix among the model's parameters: of a tied one it may be the head's."""

    routers: RouterLoss | None = None
    """The routers' balancing loss, if it is trained."""
    no_router_loss: str = ""
    """The reason why it is not trained, though the model's configuration asks for it."""

    def layer_names(self) -> tuple[str, ...]:
        return ("embed", *(f"block.{index}" for index in range(self.num_blocks)), "head")

    def recorder(self) -> CallRecorder:
        """A recorder for a forward with stubs in place of this model's blocks."""
        return CallRecorder(self.num_blocks, self.result_length, hands_on=bool(self.handed))


class NotCalledError(SplitRefusedError):
    """The error for a list of modules that the model does not call for text."""


def find_blocks(model: nn.Module) -> list[str]:
    """Paths of the module lists that may be the language model's blocks, the likeliest first.

    First come lists as long as the configuration says, then those with more parameters: a model that reads pictures
    has a list of blocks for those too, which text does not call.

    Raises:
        SplitRefusedError: there is no such list.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    length = getattr(text, "num_hidden_layers", None)
    found: dict[str, tuple[bool, int]] = {}
    for path, module in model.named_modules():  # outer modules come first, so the shallowest of equals wins
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            size = sum(parameter.numel() for parameter in module.parameters())
            if size and not any(path.startswith(f"{outer}.") for outer in found):
                found[path] = (len(module) == length, size)
    if not found:
        raise SplitRefusedError("the model has no list of blocks", where=type(model).__name__)
    return sorted(found, key=lambda path: found[path], reverse=True)


def split_model(model: nn.Module) -> ModelSplit:
    """Find the layers of `model` (parameters on the meta device or real), and prove the cut.

    Runs the model's forward on a few tokens with stubs for blocks and made-up weights for the rest.

    Raises:
        SplitRefusedError: the model does something that the split cannot carry; names layer and argument.
    """
    _refuse_layer_drop(model)
    *others, last = find_blocks(model)
    for path in others:
        with suppress(NotCalledError):
            return _with_router_loss(model, _split_at(model, path))
    return _with_router_loss(model, _split_at(model, last))


def _with_router_loss(model: nn.Module, split: ModelSplit) -> ModelSplit:
    config: Any = model.config
    if not getattr(config.get_text_config(), WANTED, False):
        return split
    found = find_router_loss(model, split.blocks_path)
    if isinstance(found, str):
        return replace(split, no_router_loss=found)
    dtype = weights_dtype(model.get_submodule(split.blocks_path).children())
    columns = split.boundary_columns + max(1, torch.float32.itemsize // dtype.itemsize)
    return replace(split, routers=found, boundary_columns=columns)


def _split_at(model: nn.Module, blocks_path: str) -> ModelSplit:
    num_blocks = len(list(model.get_submodule(blocks_path).children()))
    _refuse_shared_parameters(model, blocks_path)
    first_error: Exception | None = None
    for result_length, hands_on in RESULTS:
        recorder = CallRecorder(num_blocks, result_length, hands_on)
        try:
            return _probe(model, blocks_path, recorder)
        except (WrongResultShapeError, IndexError, TypeError, ValueError, AttributeError) as error:
            if first_error is None or isinstance(first_error, WrongResultShapeError):
                first_error = error
    found = f"{type(first_error).__name__}: {first_error}" if str(first_error) else "blocks of an unknown result type"
    what = "the model's forward does not run with stand-ins for its blocks"
    raise SplitRefusedError(what, where=type(model).__name__, found=found)


def _refuse_shared_parameters(model: nn.Module, blocks_path: str) -> None:
    owner: dict[int, str] = {}
    for index, block in enumerate(model.get_submodule(blocks_path)._modules.values()):  # children() drops repetitions
        assert block is not None
        for name, parameter in block.named_parameters():
            here = f"block.{index}"
            if owner.setdefault(id(parameter), here) != here:
                raise SplitRefusedError(
                    "two blocks share a parameter", where=f"{owner[id(parameter)]} and {here}", found=name
                )


def _refuse_layer_drop(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.replace("_", "").endswith("layerdrop") and isinstance(value, float) and value > 0:
                what, where = "the model leaves blocks out at random in training", f"{path}.{name}".lstrip(".")
                hint = f'set "{name}": 0.0 in the model\'s config.json'
                raise SplitRefusedError(what, where=where, found=str(value), expected="0.0", hint=hint)


@dataclass
class _Trace:
    """Which modules ran: all before the first block, the outermost after the last, and the outermost of the model."""

    before_blocks: set[str] = field(default_factory=set)
    after_blocks: list[str] = field(default_factory=list)
    top_level: list[str] = field(default_factory=list)
    around_blocks: dict[str, Any] = field(default_factory=dict)
    """Path and output of each module that the blocks are in."""
    backbone_output: Any = None


def _probe(model: nn.Module, blocks_path: str, recorder: CallRecorder) -> ModelSplit:
    probe = materialised_copy(model, blocks_path)
    install_stubs(probe, blocks_path, recorder)
    config: Any = probe.config
    recorder.replaces_last, recorder.num_tokens = True, (ROWS, TOKENS)
    trace = _Trace()
    handles = list(_install_trace(probe, blocks_path, recorder, trace))
    ids = torch.arange(1, 1 + ROWS * TOKENS).reshape(ROWS, TOKENS) % config.get_text_config().vocab_size
    try:
        with torch.enable_grad():  # shows which arguments a gradient would have to flow through
            logits = probe.train(False)(input_ids=ids, use_cache=False)[0]
    finally:
        for handle in handles:
            handle.remove()
    if not recorder.calls:
        raise NotCalledError("the model does not call its blocks", where=blocks_path, found="no call for text")
    if len(recorder.calls) != recorder.num_blocks:
        raise SplitRefusedError(
            "the model does not call each of its blocks once",
            where=blocks_path,
            found=f"{len(recorder.calls)} calls",
            expected=f"{recorder.num_blocks}",
        )
    for index, call in enumerate(recorder.calls):
        _refuse_arguments(index, call)
    assert recorder.first_hidden is not None and recorder.last_hidden is not None
    blocks = list(model.get_submodule(blocks_path).children())
    shared, handed = find_states(blocks, recorder.calls, recorder.first_hidden)
    dtype = weights_dtype(blocks)
    boundary, calls = carry_along(
        recorder.first_hidden, recorder.calls, shared, handed, dtype=dtype
    )  # may refuse the model
    limit = getattr(config.get_text_config(), "index_topk", None) or TOKENS
    columns = [boundary.shape[2:].numel(), *(call.carry.most_columns(limit) for call in calls if call.carry)]
    outermost = next((path for path in trace.top_level if blocks_path.startswith(path + ".")), "")
    with_hidden = [path for path, output in trace.around_blocks.items() if hasattr(output, "last_hidden_state")]
    backbone_path = min(with_hidden, key=len, default=outermost)  # llama4's outermost has the LM head in it
    trace.backbone_output = trace.around_blocks.get(backbone_path)
    callers = [path for path in trace.around_blocks if backbone_path.startswith(path + ".")]
    if not backbone_path:
        raise SplitRefusedError("the model has no separate backbone below its head", where=type(model).__name__)
    tail_paths = tuple(path for path in trace.after_blocks if path.startswith(backbone_path + "."))
    casts_tail = _check_tail(probe, tail_paths, recorder.last_hidden, trace)
    # the tail's weights lie with the head, where nothing before the first block reads or trains them
    for path in tail_paths:
        if path in trace.before_blocks and any(True for _ in probe.get_submodule(path).parameters()):
            what = "the model uses the same weights before its first block and after its last"
            raise SplitRefusedError(what, where=path, hint=NOT_SUPPORTED)
    given = [value for call in recorder.calls for value in call_values(call) if isinstance(value, torch.Tensor)]
    embedding = probe.get_input_embeddings()  # type: ignore[operator]
    embedding_path = next(path for path, module in probe.named_modules() if module is embedding)
    matrix = getattr(embedding, "weight", None)
    return ModelSplit(
        blocks_path,
        recorder.num_blocks,
        backbone_path,
        tail_paths,
        embedding_path,
        recorder.result_length,
        type(trace.backbone_output),
        shared,
        handed,
        casts_tail,
        _unreached(probe, blocks_path, [recorder.first_hidden, logits, *given]),
        caller_path=max(callers, key=len, default=""),
        boundary_columns=max(columns) * boundary.dtype.itemsize // dtype.itemsize,
        embedding_weight=next((name for name, one in probe.named_parameters() if one is matrix), ""),
    )


def _unreached(probe: nn.Module, blocks_path: str, results: Sequence[torch.Tensor]) -> frozenset[str]:
    """Names of parameters outside the blocks from which no gradient graph of `results` comes."""
    reached = {id(tensor) for tensor in results}
    waiting, seen = [tensor.grad_fn for tensor in results], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        waiting += [edge for edge, _ in node.next_functions]
    outside = (item for item in probe.named_parameters() if not item[0].startswith(f"{blocks_path}."))
    return frozenset(name for name, parameter in outside if parameter.requires_grad and id(parameter) not in reached)


def _install_trace(
    probe: nn.Module, blocks_path: str, recorder: CallRecorder, trace: _Trace
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    depth = 0
    after_depth: int | None = None

    def enter(path: str, *_: Any) -> None:
        nonlocal depth, after_depth
        depth += 1
        if depth == 1:
            trace.top_level.append(path)
        if not recorder.calls:
            trace.before_blocks.add(path)
        if after_depth is None and len(recorder.calls) == recorder.num_blocks and not blocks_path.startswith(path):
            trace.after_blocks.append(path)
            after_depth = depth

    def leave(path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal depth, after_depth
        if after_depth == depth:
            after_depth = None
        depth -= 1
        if blocks_path.startswith(path + "."):
            trace.around_blocks[path] = output

    for path, module in probe.named_modules():
        if path and not (path == blocks_path or path.startswith(blocks_path + ".")):
            yield module.register_forward_pre_hook(functools.partial(enter, path))
            yield module.register_forward_hook(functools.partial(leave, path))


def _check_tail(probe: nn.Module, tail_paths: tuple[str, ...], hidden: torch.Tensor, trace: _Trace) -> bool:
    """Whether the model casts the hidden states before its tail; whatever else it does with them is refused."""
    expected = trace.backbone_output[0]
    tail = [probe.get_submodule(path) for path in tail_paths]
    dtypes = [parameter.dtype for module in tail for parameter in module.parameters()]
    for casts, dtype in [(False, hidden.dtype), *((True, dtype) for dtype in dtypes[:1] if dtype != hidden.dtype)]:
        found = hidden.to(dtype)
        with torch.no_grad(), suppress(TypeError, RuntimeError):  # one that takes more, or other hidden states
            for module in tail:
                found = module(found)
        if found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(found, expected):
            return casts
    raise SplitRefusedError(
        "what the model does between its last block and its head is more than its modules",
        where=", ".join(tail_paths) or "after the last block",
    )


def _refuse_arguments(index: int, call: BlockCall) -> None:
    named = [(f"argument {position}", value) for position, value in enumerate(call.args)]
    for name, value in [*named, *call.kwargs.items()]:
        if not _carries(value):
            raise SplitRefusedError(
                "a block is given an object that it could change, which the split cannot carry",
                where=f"block.{index}, {name}",
                found=type(value).__name__,
                expected="tensors, numbers, strings, None, or tuples, lists and dicts of these",
                hint=NOT_SUPPORTED,
            )


def _carries(value: Any) -> bool:
    if type(value) in (tuple, list, dict):
        return all(map(_carries, value.values() if type(value) is dict else value))
    plain = (torch.Tensor, bool, int, float, str, torch.dtype, Enum, SharedMark, CarriedMark)
    return value is None or isinstance(value, plain)
