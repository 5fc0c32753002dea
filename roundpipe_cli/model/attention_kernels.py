"""Attention on cards whose kernels take no keys that several query heads share: each head gets its own copy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from roundpipe_cli.library_names import library_name

FLASH_CAPABILITY = (8, 0)
"""Compute capability from which cards have flash attention."""
MAX_FLASH_WIDTH = 256
"""The widest heads that it takes."""
_least_capability: tuple[int, int] | None = None
"""Compute capability of the cards of this process's run; None: it runs on none."""


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
    has_kernel = _least_capability is not None and _least_capability >= FLASH_CAPABILITY
    return has_kernel and dtype in (torch.float16, torch.bfloat16)
