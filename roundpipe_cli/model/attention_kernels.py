"""Which attention kernel `scaled_dot_product_attention` takes on a card: torch's published rules as a pure function.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.13 (`can_use_flash_attention`,
`can_use_mem_efficient_attention`, `check_cudnn_*`, `priority_order`). Only rules that arguments of language models can
meet are here; nested tensors, quantised types and complex numbers are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from roundpipe_cli.library_names import library_name

AttentionKernel = Literal["cudnn", "flash", "efficient", "math"]
MAX_FLASH_WIDTH, MAX_CUDNN_WIDTH = 256, 128
MIN_CAPABILITY = {"flash": (8, 0), "cudnn": (8, 0), "efficient": (5, 0)}
MAX_CAPABILITY = {"efficient": (12, 1), "flash": (12, 1), "cudnn": (12, 1)}
NO_WIDE_BACKWARD = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Flash attention has no backward here for widths beyond `WIDE` with dropout: these cards have little shared memory."""
WIDE = 224
ALIGNMENT = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}
"""Elements; widths that are no multiple go to no fused kernel of the efficient kind."""

_least_capability: tuple[int, int] | None = None
"""Compute capability of the cards of this process's run; None: it runs on none."""


@dataclass(frozen=True)
class AttentionArguments:
    """The facts about a call of `scaled_dot_product_attention` that decide on its kernel."""

    dtype: torch.dtype
    heads: int
    key_value_heads: int
    query_tokens: int
    key_tokens: int
    width: int
    value_width: int
    has_mask: bool
    is_causal: bool
    dropout: float = 0.0
    needs_gradient: bool = True

    @staticmethod
    def of(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> AttentionArguments:
        """The facts about a call with these arguments, in torch's names."""
        return AttentionArguments(
            dtype=query.dtype,
            heads=query.shape[1],
            key_value_heads=key.shape[1],
            query_tokens=query.shape[2],
            key_tokens=key.shape[2],
            width=query.shape[3],
            value_width=value.shape[3],
            has_mask=attn_mask is not None,
            is_causal=is_causal,
            dropout=dropout_p,
        )


def choose_attention_kernel(
    arguments: AttentionArguments, capability: tuple[int, int], *, allow_cudnn: bool = False
) -> AttentionKernel:
    """The kernel that a call gets.

    Args:
        capability: of the card, e.g. (8, 9).
        allow_cudnn: torch prefers it on sm90 and sm100 where it is on (`enable_cudnn_sdp`).
    """
    order: list[AttentionKernel] = ["flash", "efficient"]
    if allow_cudnn:
        order = ["cudnn", *order] if capability[0] in (9, 10) else [*order, "cudnn"]
    return next((kernel for kernel in order if not reasons_against(kernel, arguments, capability)), "math")


def reasons_against(kernel: AttentionKernel, arguments: AttentionArguments, capability: tuple[int, int]) -> list[str]:
    """The reasons why a fused kernel does not take the call; empty: it does."""
    one, found = arguments, []
    if not MIN_CAPABILITY[kernel] <= capability <= MAX_CAPABILITY[kernel]:
        found.append(f"not for sm{capability[0]}{capability[1]}")
    if one.has_mask and kernel == "flash":
        found.append("a mask")
    if one.dtype == torch.float32 and kernel != "efficient":
        found.append("float32")
    if one.dtype == torch.bfloat16 and capability < (8, 0):
        found.append("bfloat16 before sm80")
    if kernel == "efficient":
        if one.heads != one.key_value_heads:
            found.append("grouped queries")
        if one.width % ALIGNMENT[one.dtype] or one.value_width % ALIGNMENT[one.dtype]:
            found.append("a width that is not aligned")
    if kernel == "flash" and (one.width > MAX_FLASH_WIDTH or one.width != one.value_width):
        found.append(f"a width of {one.width} and {one.value_width}")
    if kernel == "flash" and one.width > WIDE and one.dropout and one.needs_gradient and capability in NO_WIDE_BACKWARD:
        found.append("dropout at this width")
    if kernel == "cudnn" and (max(one.width, one.value_width) > MAX_CUDNN_WIDTH or one.width % 8):
        found.append(f"a width of {one.width}")
    if kernel != "math" and one.is_causal and one.has_mask:
        found.append("a mask beside is_causal")
    return found


def set_up_attention(least_capability: tuple[int, int]) -> None:
    """Give each query head its own copy of keys and values where no fused kernel takes shared ones.

    transformers shares them wherever there is no mask. Flash attention takes that, the efficient kernel does not, and
    the math kernel, which is left, keeps scores of all pairs of tokens: in float32, and before sm80. One choice for all
    cards of a run, or workers would round gradients of keys differently; what runs on the processor stays as it was.

    Args:
        least_capability: the smallest of the cards that the run uses, e.g. (8, 6).
    """
    from transformers.integrations import sdpa_attention  # late: it imports torch's compiler

    global _least_capability
    _least_capability = least_capability
    if not hasattr(getattr(sdpa_attention, "use_gqa_in_sdpa", None), "__wrapped__"):
        shares_keys = library_name("transformers.integrations.sdpa_attention", "use_gqa_in_sdpa")
        sdpa_attention.use_gqa_in_sdpa = _where_flash_takes_it(shares_keys)


def _where_flash_takes_it(shares_keys: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(shares_keys)
    def decide(attention_mask: torch.Tensor | None, key: torch.Tensor, *rest: Any) -> bool:
        return shares_keys(attention_mask, key, *rest) and takes_shared_keys(key)

    return decide


def takes_shared_keys(key: torch.Tensor) -> bool:
    """Whether a fused kernel takes keys [batch, heads, tokens, width] that several query heads share."""
    return key.device.type == "cpu" or _least_capability is None or has_flash(key.dtype)


def has_flash(dtype: torch.dtype) -> bool:
    """Whether all cards of this process's run have flash attention in `dtype`."""
    has_kernel = _least_capability is not None and _least_capability >= MIN_CAPABILITY["flash"]
    return has_kernel and dtype in (torch.float16, torch.bfloat16)
