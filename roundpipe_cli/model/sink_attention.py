"""Attention with sinks (gpt-oss) by torch's fused kernels, which keep no scores.

A sink is one number a head that takes part in the softmax and contributes no value. transformers computes that with
scores of every pair of tokens: 2 bytes x heads x T^2 a layer in 16 bit, half a gigabyte at 2048 tokens of gpt-oss-20b,
kept for backward. But a sink s is also a key that every query has the product s with, of value 0:

    query  (q, 1)      keys  (k_1, 0) ... (k_T, 0), (0, s / scale)      values  v_1 ... v_T, 0

so that `scaled_dot_product_attention` gives the same numbers, and gradients of the sinks too. Keys and widths are
filled up to multiples of 8, which fused kernels want, with keys that are masked out.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from roundpipe_cli.model.attention import PackedRows, attend_rows, rows_or_causal_mask

NAME = "roundpipe_sinks"
"""Name of the implementation in transformers' registry."""
MODEL_TYPES = frozenset({"gpt_oss"})
"""Types whose attention has sinks, passes them as `s_aux`, and computes all scores in transformers."""
STEP = 8


def register() -> None:
    """Make the implementation known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(**kwargs: Any) -> Any:
    """Always a mask, [B, 1, T, S], true where a query sees a key: that of the sink comes beside it; `PackedRows` within
    `in_rows`. The models of transformers 5.23 make theirs without the position ids, which tell rows apart."""
    from transformers.masking_utils import sdpa_mask

    return rows_or_causal_mask(sdpa_mask, **{**kwargs, "allow_is_causal_skip": False})


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **more: Any
) -> tuple[torch.Tensor, None]:
    if not isinstance(attention_mask, PackedRows):
        return sink_attention(module, query, key, value, attention_mask, **more)
    return attend_rows(functools.partial(_attend_row, module), query, key, value, rows=attention_mask, more=more)


def _attend_row(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """One row of several; a causal mask where none is given, as `sdpa` takes that."""
    if mask is None:
        length = query.shape[2]
        mask = torch.ones((1, 1, length, length), dtype=torch.bool, device=query.device).tril()
    return sink_attention(module, query, key, value, mask, **more)


def sink_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        query: [B, heads, T, D].
        key: [B, key-value heads, S, D].
        value: the same shape.
        attention_mask: [B, 1, T, S], true where a query sees a key; None: everywhere.
        scaling: of the products; None: 1 / sqrt(D).
        s_aux: the sinks, [heads].

    Returns:
        [B, T, heads, D], and no scores.
    """
    assert s_aux is not None, "this attention is for models with sinks"
    batch, heads, length, width = query.shape
    scale = width**-0.5 if scaling is None else scaling
    seen = key.shape[2]
    more_width, more_keys = STEP - width % STEP, STEP - seen % STEP
    one = functional.pad(query.new_ones(1), (0, more_width - 1))  # `x[0] = 1` would upload the number and wait for it
    query = torch.cat((query, one.expand(batch, heads, length, more_width)), dim=-1)
    groups = heads // key.shape[1]
    key, value = (
        functional.pad(part.repeat_interleave(groups, dim=1), (0, more_width, 0, more_keys)) for part in (key, value)
    )
    sink = functional.pad((s_aux / scale).to(key.dtype)[:, None], (width, more_width - 1))
    key = torch.cat((key[:, :, :seen], sink[:, None].expand(batch, -1, -1, -1), key[:, :, seen + 1 :]), dim=2)
    if attention_mask is None:
        attention_mask = query.new_ones((batch, 1, length, seen), dtype=torch.bool)
    mask = functional.pad(functional.pad(attention_mask, (0, 1), value=True), (0, more_keys - 1), value=False)
    result = functional.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=scale)
    return result[..., :width].transpose(1, 2).contiguous(), None
