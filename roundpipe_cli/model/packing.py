"""Proof that a model keeps packed rows apart, by the arguments of its blocks; other models are refused.

Packed rows are told apart by position ids that restart, with no mask and no cache. From that, the model's own code
makes masks like this one for rows of 3 and 2 tokens (1: may see), which `packed_attention.py` does without:

    1 . . . .      A mask of ones, or a cache, would let the second row see the first. So would a block that carries
    1 1 . . .      state from token to token without a mask: recurrent (Mamba, linear attention, RWKV) and
    1 1 1 . .      convolution blocks are refused.
    . . . 1 .
    . . . 1 1
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from roundpipe_cli.model.architectures import MASK_OF_ONE, NO_MASK, check_mask_bytes, packing_refusal, scaled_by_length
from roundpipe_cli.model.block_calls import BlockCall, install_stubs
from roundpipe_cli.model.packed_attention import in_rows
from roundpipe_cli.model.split import ModelSplit, materialised_copy

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
    """(where, class) of modules within blocks that carry more from token to token than attention does."""
    for index, block in enumerate(model.get_submodule(split.blocks_path).children()):
        for name, module in block.named_modules():
            kind = type(module).__name__
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
    masks = [tensor for tensor in _tensors([*call.args, *call.kwargs.values()]) if _is_mask(tensor)]
    if not masks:
        raise packing_refusal(f"block.{index}", NO_MASK)
    for mask in masks:
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if bool((allowed & ~visible).any()):
            raise packing_refusal(f"block.{index}", MASK_OF_ONE)


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tuple(tensor.shape[-2:]) == (len(PROBE_POSITIONS), len(PROBE_POSITIONS))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
