"""A model cut to one block of each kind, with random weights.

    embed -> block.0 -> - -> - -> block.3 -> - -> norm -> LM head        -: a block of a kind that is there already,
                                                                            which passes its hidden states on

Everything else is the model's own code, so numbers of blocks and lists of their types need not be made to fit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_cli.model.block_calls import BlockCall, StandIn, install_stubs, result_place
from roundpipe_cli.model.chunks import ChunkCache
from roundpipe_cli.model.dropout import NOISE_ATTRIBUTE
from roundpipe_cli.model.fused import FusedOps
from roundpipe_cli.model.last_projection import block_kind
from roundpipe_cli.model.lora import experts_per_token
from roundpipe_cli.model.module_copies import materialised_copy
from roundpipe_cli.model.new_tokens import row_owners
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.sizes import SIZE_NAMES, size_of

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
    """Modules of the cut model that compute by fused operators."""

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
    heads, head_size = (size_of([text], [key]) for key in ("num_attention_heads", "head_dim"))
    groups = size_of([text], ["num_key_value_heads"]) or heads
    if heads and groups and head_size:
        smallest = copy.deepcopy(small)
        text = smallest.get_text_config()
        text.num_key_value_heads = min(groups, 2 if groups < heads else 4)
        text.num_attention_heads = text.num_key_value_heads * min(4, heads // groups)
        text.hidden_size = min(text.hidden_size, MAX_HIDDEN)
        text.head_dim = head_size
        yield smallest
    yield small


def _narrow_feed_forward(config: Any) -> Any:
    small = copy.deepcopy(config)
    text = small.get_text_config()
    experts = max(8, 2 * size_of([text], ["n_group"]), 2 * experts_per_token(text))
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
