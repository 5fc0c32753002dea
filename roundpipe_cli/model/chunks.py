"""Rows packed into one sequence, and one sequence in chunks: proven by what a model's blocks are given, or refused.

To the model's own code a chunk is what a prompt's continuation is in generation: tokens behind a cache of `start`
earlier ones. So it makes masks and positions itself, and each block gives its keys and values to the cache's `update`:

                 keys  0 1 | 2 3 | 4 5
    chunk 0      0     1 . | . . | . .        chunk c computes its rows of the mask (1: sees); the columns before its
                 1     1 1 | . . | . .        own are the earlier chunks' keys and values
    chunk 1      2     1 1 | 1 . | . .        A gated delta rule gives its state after the chunk instead, and the last
                 3     1 1 | 1 1 | . .        inputs of its convolution: the next chunk begins with them.

Shapes: B sequences, K key heads, T tokens of the chunk, S tokens before it, D width of a head.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe_cli.model.attention import in_rows, recurrent_modules
from roundpipe_cli.model.block_calls import CACHE, BlockCall, install_stubs
from roundpipe_cli.model.files.supported import check_mask_bytes, chunk_refusal, packing_refusal, scaled_by_length
from roundpipe_cli.model.module_copies import materialised_copy
from roundpipe_cli.model.split import ModelSplit

# Proof that a model keeps packed rows apart, by the arguments of its blocks; other models are refused.
#
# Packed rows are told apart by position ids that restart, with no mask and no cache. From that, the model's own code
# makes masks like this one for rows of 3 and 2 tokens (1: may see), which `attention.py` does without:
#
#     1 . . . .      A mask of ones, or a cache, would let the second row see the first. So would a block that carries
#     1 1 . . .      state from token to token without a mask: recurrent (Mamba, linear attention, RWKV) and
#     1 1 1 . .      convolution blocks are refused. Gated delta rules (Qwen3-Next, Qwen3.5, OLMo hybrid) are told
#     . . . 1 .      where rows lie and compute each of them alone (`restart_at_rows`).
#     . . . 1 1

PROBE_POSITIONS = [0, 1, 2, 0, 1, 0, 1, 2, 3]
STATEFUL = re.compile(
    r"Compressor|Mamba|SSM|Recurrent|R(wkv|WKV)|DeltaNet|LinearAttention|Lightning|Retention|ShortConv|LSTM"
)
"""Classes of blocks, in transformers' names."""


def check_packing(model: nn.Module, split: ModelSplit, *, max_seq_length: int, micro_batch_size: int) -> None:
    """Prove that `model` (parameters on the meta device or real) keeps packed rows apart.

    Raises:
        RefusedError: it does not, or its masks would be too large.
    """
    for where, kind in stateful_modules(model, split):
        raise packing_refusal(where, f"{kind}, which carries state from token to token")
    for where, found in scaled_positions(model, max_seq_length):
        raise packing_refusal(where, found)
    for index, call in enumerate(_probe_calls(model, split, as_masks=True)):
        _check_masks(index, call)
    if not all(call.holds_rows for call in _probe_calls(model, split)):
        check_mask_bytes(max_seq_length=max_seq_length, micro_batch_size=micro_batch_size)


def stateful_modules(model: nn.Module, split: ModelSplit) -> Iterator[tuple[str, str]]:
    """(where, class) of modules within blocks that carry more from token to token than attention does, and are none of
    `recurrent_modules`."""
    for index, block in enumerate(model.get_submodule(split.blocks_path).children()):
        known = tuple(f"{path}." for path, _ in recurrent_modules(block))
        for name, module in block.named_modules():
            kind = type(module).__name__
            if known and (not name or f"{name}.".startswith(known)):
                continue
            if isinstance(module, (nn.Conv1d, nn.Conv2d)) or STATEFUL.search(kind):
                yield f"block.{index}.{name}", kind


def scaled_positions(model: nn.Module, max_seq_length: int) -> Iterator[tuple[str, str]]:
    """(where, what) of position scaling that looks at the longest row of a batch, so that rows depend on others."""
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", "")
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        found = scaled_by_length(set(map(str, kinds)), getattr(module, "original_max_seq_len", None), max_seq_length)
        if found:
            yield name, found


def _probe_calls(model: nn.Module, split: ModelSplit, *, as_masks: bool = False) -> list[BlockCall]:
    """The blocks' calls for two equal packed sequences, with the places of rows or with masks."""
    probe = materialised_copy(model, split.blocks_path)
    backbone = probe.get_submodule(split.backbone_path)
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        raise packing_refusal(split.backbone_path, f"{type(backbone).__name__} takes no position ids")
    recorder = split.recorder()
    install_stubs(probe, split.blocks_path, recorder)
    positions = torch.tensor([PROBE_POSITIONS] * 2)
    with torch.no_grad(), in_rows(positions, as_masks=as_masks):
        backbone(input_ids=torch.ones_like(positions), position_ids=positions, use_cache=False)
    return recorder.calls


def _check_masks(index: int, call: BlockCall) -> None:
    starts = torch.tensor(PROBE_POSITIONS) == 0
    rows = starts.cumsum(0)
    visible = (rows[:, None] == rows[None]).tril()
    if call.holds_rows:  # where it was asked for masks: a recurrent block
        return
    size = (len(PROBE_POSITIONS), len(PROBE_POSITIONS))
    given = [one for one in _flat((*call.args, *call.kwargs.values())) if isinstance(one, torch.Tensor)]
    masks = [one for one in given if one.dim() == 4 and tuple(one.shape[-2:]) == size]
    if not masks:
        raise packing_refusal(f"block.{index}", "a block that is given no mask for packed rows")
    for mask in masks:
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if bool((allowed & ~visible).any()):
            raise packing_refusal(f"block.{index}", "a mask that lets a row see the row before it")


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
    """Keys and values of the earlier chunks, [B, K, S, D], or a recurrent block's states; None for the first chunk."""
    own: list[KeyValues] = field(default_factory=list)
    """Keys and values that the block gave to `update`, or its states after the chunk."""
    _convolved: torch.Tensor | None = None
    """[B, C, W]: the last W inputs of a recurrent block's convolution of that width."""

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
        pairs = zip(self.earlier, (key_states, value_states), strict=True)
        # token by token, as variable-length attention reads them
        keys, values = (torch.cat([one.transpose(1, 2) for one in pair], dim=1).transpose(1, 2) for pair in pairs)
        return keys, values

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, so that a chunk of one token is convolved like any other: the step of generation works in place."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return None if self.earlier is None else self.earlier[1]

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *, conv_kernel_size: int, **_: Any
    ) -> torch.Tensor:
        """Note the convolution's last inputs; returns the chunk's own [B, C, T] behind the earlier ones."""
        whole = conv_states if self.earlier is None else torch.cat([self.earlier[0], conv_states], dim=-1)
        last = whole[..., -conv_kernel_size:]
        self._convolved = nn.functional.pad(last, (conv_kernel_size - last.shape[-1], 0))
        return whole

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        """Note the recurrent state [B, heads, key width, value width] after the chunk."""
        assert self._convolved is not None
        self.own.append((self._convolved, recurrent_states))
        return recurrent_states

    def of_row(self, sequence: int, *, goes_on: bool) -> ChunkCache:
        """The recurrent cache of one row of a sequence; `goes_on`: it began in an earlier chunk."""
        if self.earlier is None or not goes_on:
            return ChunkCache(self.start, self.num_blocks)
        convolved, state = (tensor[sequence : sequence + 1] for tensor in self.earlier)
        return ChunkCache(self.start, self.num_blocks, (convolved, state))

    def end_with(self, last: Sequence[ChunkCache]) -> None:
        """Note the states after the last row of each sequence."""
        self._convolved, state = (torch.cat(parts) for parts in zip(*(one.only("") for one in last), strict=True))
        self.own.append((self._convolved, state))

    def only(self, block: str) -> KeyValues:
        """The chunk's own keys and values, or states.

        Raises:
            RefusedError: the block did not hand over one pair of tensors.
        """
        if len(self.own) == 1 and (self._convolved is not None or all(tensor.dim() == 4 for tensor in self.own[0])):
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
        _check_call(f"block.{index}", expected, call, has_mask=index not in recorder.recurrent)


def cache_argument(backbone: nn.Module) -> str | None:
    """The name by which `backbone` takes its cache; None: it takes none."""
    parameters = inspect.signature(backbone.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def _check_call(block: str, whole: BlockCall, chunk: BlockCall, *, has_mask: bool) -> None:
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
    if has_mask and not masks:
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
