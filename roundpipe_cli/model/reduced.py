"""A model cut to one block of each kind, with random weights, and its own forward and backward.

    embed -> block.0 -> - -> - -> block.3 -> - -> norm -> LM head        -: a block of a kind that is there already,
                                                                            which passes its hidden states on

Everything else is the model's own code, so numbers of blocks and lists of their types need not be made to fit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_cli.choices import IGNORED_LABEL, SIZE_NAMES
from roundpipe_cli.model.attention import SINKS_NAME
from roundpipe_cli.model.block_calls import BlockCall, StandIn, install_stubs, result_place
from roundpipe_cli.model.chunks import ChunkCache
from roundpipe_cli.model.dropout import NOISE_ATTRIBUTE, SeededDropout, layer_seed
from roundpipe_cli.model.fused import FusedOps
from roundpipe_cli.model.last_projection import block_kind
from roundpipe_cli.model.lora import experts_per_token
from roundpipe_cli.model.new_tokens import row_owners
from roundpipe_cli.model.split import ModelSplit, materialised_copy

SMALL_MODEL_PARAMETERS = 200_000
"""Up to here a model is tried whole."""
MAX_WIDTH, MAX_HIDDEN = 256, 512
"""Widths of a feed-forward part and of hidden states in a narrower model."""
MAX_VOCABULARY = 512
"""Rows of the embedding and of the LM head beyond these are cut off."""

WIDTHS = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "expert_ffn_hidden_size"),
)
"""Keys of a configuration, in transformers' names: widths of feed-forward parts."""


class SkippedBlock(StandIn):
    """Passes the hidden states on as a block returns them; other attributes are those of the block."""

    def __init__(self, block: nn.Module, result_length: int, handed: Mapping[int, int | str]) -> None:
        """`handed`: place in the result -> argument with what the block before returned there."""
        super().__init__(block)
        self._result_length, self._handed = result_length, handed

    def __deepcopy__(self, memo: dict[int, Any]) -> SkippedBlock:
        return SkippedBlock(self.original, self._result_length, self._handed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        for value in (*args, *kwargs.values()):
            if isinstance(value, ChunkCache):  # the cache expects keys and values of every block
                column = hidden.flatten(2)[:, None, :, :1]
                value.update(column, column, 0)
        if self._result_length == 0:
            return hidden
        given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}  # type: ignore[dict-item]
        keys = (self._handed.get(place) for place in range(1, self._result_length))
        return (hidden, *(None if key is None else given.get(key) for key in keys))


@dataclass(frozen=True)
class Reduced:
    """The cut model, parameters on the meta device."""

    model: nn.Module
    kept: tuple[int, ...]
    """Indices of the blocks that were kept."""
    vocab_size: int
    fused: FusedOps | None = None
    """Its modules that compute by fused operators."""

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def reduce_model(model: nn.Module, split: ModelSplit) -> Reduced:
    """Cut `model` (parameters on the meta device), which is left as it is."""
    blocks = list(model.get_submodule(split.blocks_path).children())
    kept = list(range(len(blocks)))
    memo, vocab_size = _cut_tables(model, split.blocks_path)
    if sum(parameter.numel() for parameter in model.parameters()) > SMALL_MODEL_PARAMETERS:
        calls = _calls(model, split)
        kept = _one_of_each_kind(blocks, calls)
        for index, (block, call) in enumerate(zip(blocks, calls, strict=True)):
            if index not in kept:
                memo[id(block)] = SkippedBlock(block, split.result_length, _handed(call))
    cut: Any = copy.deepcopy(model, memo)
    if vocab_size < cut.config.get_text_config().vocab_size:
        for owner in row_owners(cut).values():
            owner.token_indices.update({name: [*range(len(ids))] for name, ids in owner.token_indices.items()})
    for module in cut.modules():
        if (getattr(module, "padding_idx", None) or 0) >= vocab_size:
            module.padding_idx = vocab_size - 1
        if NOISE_ATTRIBUTE in vars(module):  # which is not the model's own
            setattr(module, NOISE_ATTRIBUTE, 0.0)
    return Reduced(cut, tuple(kept), vocab_size)


def _handed(call: BlockCall) -> dict[int, int | str]:
    """Place in the result of the block before -> argument that it is."""
    arguments: dict[int | str, Any] = {**dict(enumerate(call.args)), **call.kwargs}  # type: ignore[dict-item]
    return {place: key for key, value in arguments.items() if (place := result_place(value)) is not None}


def shrunk_configs(config: Any) -> Iterator[Any]:
    """Copies of `config` for narrower models of the same blocks, the smallest first; some may not work."""
    small = _narrow_feed_forward(config)
    text = small.get_text_config()
    heads, head_size = (_number(text, key) for key in ("num_attention_heads", "head_dim"))
    groups = _number(text, "num_key_value_heads") or heads
    if heads and groups and head_size:
        smallest = copy.deepcopy(small)
        text = smallest.get_text_config()
        text.num_key_value_heads = min(groups, 2 if groups < heads else 4)
        text.num_attention_heads = text.num_key_value_heads * min(4, heads // groups)
        text.hidden_size = min(text.hidden_size, MAX_HIDDEN)
        text.head_dim = head_size
        yield smallest
    yield small


def _number(text: Any, key: str) -> int:
    value = getattr(text, key, None)
    return value if isinstance(value, int) else 0


def _narrow_feed_forward(config: Any) -> Any:
    small = copy.deepcopy(config)
    text = small.get_text_config()
    experts = max(8, 2 * _number(text, "n_group"), 2 * experts_per_token(text))
    for keys, most in ((WIDTHS, MAX_WIDTH), (SIZE_NAMES["num_experts"], experts)):
        for key in keys:
            value = getattr(text, key, None)
            if isinstance(value, int):
                setattr(text, key, min(value, most))
            elif isinstance(value, (list, tuple)):
                setattr(text, key, [min(one, most) if isinstance(one, int) else one for one in value])
    return small


def _calls(model: nn.Module, split: ModelSplit) -> list[BlockCall]:
    probe = materialised_copy(model, split.blocks_path)
    recorder = split.recorder()
    install_stubs(probe, split.blocks_path, recorder)
    with torch.no_grad():
        probe.train(False)(input_ids=torch.arange(1, 6)[None], use_cache=False)
    return recorder.calls


def _one_of_each_kind(blocks: Sequence[nn.Module], calls: Sequence[BlockCall]) -> list[int]:
    """Blocks of one kind have equal modules, shapes, arguments and plain attributes, but for their number."""
    found: dict[object, int] = {}
    for index, (block, call) in enumerate(zip(blocks, calls, strict=True)):
        plain = tuple(
            (path, name, value)
            for path, module in block.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) and not name.endswith(("_idx", "_index", "_id", "_number"))
        )
        found.setdefault((block_kind(block, call), plain), index)
    return sorted(found.values())


def _cut_tables(model: nn.Module, blocks_path: str) -> tuple[dict[int, Any], int]:
    """By id, tables with fewer rows for those that have one for each token; and the number of tokens left."""
    config: Any = model.config
    whole: int = config.get_text_config().vocab_size
    trained = (len(ids) for owner in row_owners(model).values() for ids in owner.token_indices.values())
    size = min(whole, MAX_VOCABULARY + max(trained, default=0))
    tables = {
        id(table): nn.Parameter(table.new_empty((size, *table.shape[1:])), table.requires_grad)
        for name, table in model.named_parameters(remove_duplicate=False)
        if table.shape[:1] == (whole,) and not name.startswith(f"{blocks_path}.")
    }
    return tables, size


def random_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Float32 weights by name, from which every gradient comes: no zeros, as those of fresh adapters."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in model.named_parameters():
        scale = 0.5 / max(parameter.shape[-1], 1) ** 0.5 if parameter.dim() > 1 else 0.1
        values = torch.randn(parameter.shape, generator=generator).mul_(scale)
        if parameter.dim() == 1 and "norm" in name:
            values += 1
        weights[name] = values.to(parameter.dtype).float()
    return weights


@dataclass(frozen=True)
class Piece:
    """One microbatch to try a model on; as the engine's."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    row_starts: tuple[int, ...] = ()
    """Where the rows of a packed sequence begin: the model itself gets them one by one; empty: it is not packed."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one step."""

    loss: float
    """Mean of the target tokens' losses in nats."""
    gradients: Mapping[str, torch.Tensor]
    """Float32 or float64, of every trained parameter that has one."""


class PlainModel:
    """The model's own forward and backward, in train mode, without anything of the engine's."""

    def __init__(
        self, model: nn.Module, split: ModelSplit, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        """`model` (on the meta device) with float32 `weights`, computing in `dtype`: its own or a wider one."""
        self._split = split
        self._parameters: dict[str, nn.Parameter] = {}
        own: dict[int, Any] = {}
        for name, parameter in model.named_parameters():
            values = weights[name].to(dtype if parameter.is_floating_point() else parameter.dtype, copy=True)
            own[id(parameter)] = self._parameters[name] = nn.Parameter(values, parameter.requires_grad)
        plain = copy.deepcopy(model, own)
        plain._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        config: Any = plain.config
        if config._attn_implementation == SINKS_NAME:
            config._attn_implementation = "eager"  # transformers' own
        if dtype == torch.float64:  # fused products have no kernel for it
            for module in plain.modules():
                if hasattr(getattr(module, "config", None), "_experts_implementation"):
                    module.config._experts_implementation = "eager"  # type: ignore[union-attr]
        self._plain = plain.train()
        self.has_drawn = False
        """Whether a forward drew random numbers."""

    def run(self, pieces: Sequence[Piece], seed: int, step: int) -> Outcome:
        """One step, each microbatch by a model that has met no other one; random draws are the engine's."""
        targets = sum(int((piece.labels[:, 1:] != IGNORED_LABEL).sum()) for piece in pieces)
        total = 0.0
        sums: dict[str, torch.Tensor] = {}
        for index, piece in enumerate(pieces):
            total += self._one(piece, targets, functools.partial(layer_seed, seed, step, index))
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    gradient = parameter.grad if parameter.dtype == torch.float64 else parameter.grad.float()
                    sums[name] = sums[name].add_(gradient) if name in sums else gradient
                    parameter.grad = None
        return Outcome(total / targets, sums)

    def _one(self, piece: Piece, targets: int, seed_of: Callable[[int], int]) -> float:
        shared = {id(parameter): parameter for parameter in self._parameters.values()}
        fresh = copy.deepcopy(self._plain, dict(shared))
        more: dict[str, Any] = {"use_cache": False}
        balance: torch.Tensor | float = 0.0
        if piece.position_ids is not None:
            more["position_ids"] = piece.position_ids
        if piece.row_starts:
            ends = [*piece.row_starts[1:], piece.input_ids.shape[1]]
            rows = [piece.input_ids[:, start:end] for start, end in zip(piece.row_starts, ends, strict=True)]
            logits = torch.cat(
                [copy.deepcopy(fresh, dict(shared))(input_ids=row, use_cache=False).logits for row in rows], 1
            )
            logits = logits[:, :-1].flatten(0, 1)
        else:
            routers = self._split.routers
            if routers is not None:
                more["output_router_logits"] = True
            with seeded_layers(fresh.get_submodule(self._split.blocks_path), seed_of) as modes:
                output = fresh(input_ids=piece.input_ids, **more)
            logits = output.logits[:, :-1].flatten(0, 1)
            if routers is not None:
                balance = routers.coefficient * output.aux_loss * int((piece.labels[:, 1:] != IGNORED_LABEL).sum())
            self.has_drawn |= any(mode.num_draws for mode in modes)
        if logits.dtype != torch.float64:
            logits = logits.float()
        labels = piece.labels[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        loss = loss + balance
        (loss / targets).backward()
        return float(loss.detach().double())


@contextmanager
def seeded_layers(blocks: nn.Module, seed_of: Callable[[int], int]) -> Iterator[list[SeededDropout]]:
    """Seeds what is drawn by layer, as the engine does: a mode around each block's forward, and one before the first.
    Yields those that were entered."""
    modes: list[SeededDropout] = []
    with ExitStack() as hooks, ExitStack() as entered:

        def enter(layer: int) -> None:
            entered.close()
            modes.append(entered.enter_context(SeededDropout(seed_of(layer))))

        enter(0)
        for number, block in enumerate(blocks.children(), 1):
            hooks.callback(block.register_forward_pre_hook(lambda *_, layer=number: enter(layer)).remove)
            hooks.callback(block.register_forward_hook(lambda *_: entered.close()).remove)
        yield modes
