"""One sequence in chunks: a cache lets a chunk's attention see the keys and values of earlier chunks.

To the model's own code a chunk is what a prompt's continuation is in generation: tokens behind a cache of `start`
earlier ones. So it makes masks and positions itself, and each block gives its keys and values to the cache's `update`:

                 keys  0 1 | 2 3 | 4 5
    chunk 0      0     1 . | . . | . .        chunk c computes its rows of the mask (1: sees); the columns before its
                 1     1 1 | . . | . .        own are the earlier chunks' keys and values
    chunk 1      2     1 1 | 1 . | . .
                 3     1 1 | 1 1 | . .

Shapes: B sequences, K key heads, T tokens of the chunk, S tokens before it, D width of a head.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe_cli.model.architectures import chunk_refusal
from roundpipe_cli.model.block_calls import CACHE, BlockCall, install_stubs
from roundpipe_cli.model.packing import scaled_positions, stateful_modules
from roundpipe_cli.model.split import ModelSplit, materialised_copy

KeyValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, [B, K, tokens, D] each; the widths of the two may differ."""

CACHE_ARGUMENTS = ("past_key_values", "cache")
"""Names that a backbone may have for it; transformers has the second from 5.24 on."""
PROBE_TOKENS, PROBE_START = 9, 5
"""Tokens of the probe's sequence: all, and those before its second chunk."""


@dataclass(eq=False)
class ChunkCache:
    """Stands for transformers' cache in the call of one block, and in the call of the model that makes the masks."""

    start: int
    """S: tokens of the sequence before the chunk."""
    num_blocks: int
    earlier: KeyValues | None = None
    """Keys and values of the earlier chunks, [B, K, S, D]; None for the first chunk."""
    own: list[KeyValues] = field(default_factory=list)
    """Keys and values that the block gave to `update`."""

    is_compileable = False

    @property
    def is_sliding(self) -> list[bool]:
        """No block's keys are thrown away: those outside its window are masked."""
        return [False] * self.num_blocks

    is_linear = is_dummy = is_sliding

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(number of keys that a query may see, position of the first key)."""
        return self.start + query_length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> KeyValues:
        """Note the chunk's own keys and values [B, K, T, D]; returns them behind the earlier ones."""
        self.own.append((key_states, value_states))
        if self.earlier is None:
            return key_states, value_states
        keys, values = self.earlier
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)

    def only(self, block: str) -> KeyValues:
        """The chunk's own keys and values.

        Raises:
            RefusedError: the block did not hand over one pair of tensors.
        """
        if len(self.own) == 1 and all(tensor.dim() == 4 for tensor in self.own[0]):
            return self.own[0]
        raise chunk_refusal(block, f"a block that hands keys and values to its cache {len(self.own)} times", "once")


def check_sequence_chunks(model: nn.Module, split: ModelSplit, *, max_seq_length: int) -> None:
    """Prove that a chunk of `model`'s sequence (parameters on the meta device or real) gets its rows of every argument.

    Raises:
        RefusedError: it does not, or a block carries more from token to token than keys and values.
    """
    if split.shared:
        raise chunk_refusal(split.blocks_path, "blocks that read keys and values of other blocks")
    if split.handed:
        raise chunk_refusal(split.blocks_path, "blocks that read results of the block before")
    for where, kind in stateful_modules(model, split):
        raise chunk_refusal(where, f"{kind}, which carries state from token to token", "blocks of attention")
    for where, found in scaled_positions(model, max_seq_length):
        raise chunk_refusal(where, found, "positions that do not depend on the length of the sequence")
    probe = materialised_copy(model, split.blocks_path)
    backbone = probe.get_submodule(split.backbone_path)
    name = cache_argument(backbone)
    if name is None:
        raise chunk_refusal(split.backbone_path, f"{type(backbone).__name__} takes no past_key_values", "a cache")
    recorder = split.recorder()
    install_stubs(probe, split.blocks_path, recorder)
    ids = torch.ones(2, PROBE_TOKENS, dtype=torch.long)
    with torch.no_grad():
        backbone(input_ids=ids, use_cache=False)
        whole = recorder.calls
        recorder.reset()
        recorder.cache = ChunkCache(PROBE_START, split.num_blocks)
        backbone(input_ids=ids[:, PROBE_START:], use_cache=True, **{name: recorder.cache})
    for index, (expected, call) in enumerate(zip(whole, recorder.calls, strict=True)):
        _check_call(f"block.{index}", expected, call)


def cache_argument(backbone: nn.Module) -> str | None:
    """The name by which `backbone` takes its cache; None: it takes none."""
    parameters = inspect.signature(backbone.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def _check_call(block: str, whole: BlockCall, chunk: BlockCall) -> None:
    """Refuse a block whose call for the second chunk is not made of the rows of that for the whole sequence."""
    if CACHE not in (*chunk.args, *chunk.kwargs.values()):
        raise chunk_refusal(block, "a block that is given no cache", "the keys and values of earlier tokens")
    pairs = [(f"argument {place}", *values) for place, values in enumerate(zip(whole.args, chunk.args, strict=False))]
    pairs += [(name, whole.kwargs.get(name), value) for name, value in chunk.kwargs.items()]
    masks = 0
    for name, expected, found in pairs:
        for row_of, row in zip(_flat(expected), _flat(found), strict=False):
            if not isinstance(row, torch.Tensor):
                continue
            is_mask = row.dim() == 4 and tuple(row.shape[-2:]) == (PROBE_TOKENS - PROBE_START, PROBE_TOKENS)
            masks += is_mask
            if row_of is None and is_mask:
                row_of = torch.ones(PROBE_TOKENS, PROBE_TOKENS, dtype=torch.bool).tril().expand(*row.shape[:2], -1, -1)
                row = row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2
            if not isinstance(row_of, torch.Tensor) or not _is_part(row_of, row):
                raise chunk_refusal(f"{block}, {name}", "other values for a chunk than for the whole", "the same rows")
    if not masks:
        raise chunk_refusal(
            block, "a block that is given no mask for a chunk", "a mask of its tokens by all before them"
        )


def _is_part(whole: torch.Tensor, chunk: torch.Tensor) -> bool:
    """Whether `chunk` is `whole` from the probe's start on, along its dimension of tokens."""
    if whole.shape == chunk.shape:
        return torch.equal(whole, chunk)
    for dim in range(whole.dim()):
        part = whole.narrow(dim, PROBE_START, PROBE_TOKENS - PROBE_START) if whole.shape[dim] == PROBE_TOKENS else None
        if part is not None and part.shape == chunk.shape and torch.allclose(part, chunk.to(part.dtype)):
            return True
    return False


def _flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, tuple) else [value]
