"""Arguments of attention, of every shipped recipe's model, through torch's rules of choice for five kinds of card.

Source of the rules: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.13 (`can_use_flash_attention`,
`can_use_mem_efficient_attention`, `check_cudnn_*`, `priority_order`). Only those that arguments of language models can
meet are here; nested tensors, quantised types and complex numbers are not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.integrations import sdpa_attention

from roundpipe_cli.costs.find_model import shipped_figures
from roundpipe_cli.model import attention
from roundpipe_cli.model.attention import FLASH_CAPABILITY, MAX_FLASH_WIDTH, set_up_attention, takes_shared_keys
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.split import split_model
from scripts.gpu_checks.models import FAMILIES, configuration, shipped
from tests.support.launches import META, FusedFunctions, worker_on_meta

CARDS = ((7, 5), (8, 6), (8, 9), (9, 0), (12, 0))
TOKENS = 48
MASKED = {
    "gemma3_text": "sliding windows come as a dense mask where rows are longer than the window",
    "gpt_oss": "sinks are a key beside the mask, which the kernel for whole rows has no place for",
}
"""Model types that attend with a dense mask today though rows are not packed, and why."""
MODELS = (
    *FAMILIES.values(),
    "mistralai/Mistral-7B-v0.3",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "google/gemma-3-1b-pt",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.5-35B-A3B",
)
"""One of each shipped family, and those of other widths; further sizes differ in the number of heads."""
MASKED_PACKED = "rows of a packed sequence are kept apart by a dense mask until variable-length attention is used"


MIN_CAPABILITY = {"flash": FLASH_CAPABILITY, "efficient": (5, 0)}
MAX_CAPABILITY = (12, 1)
ALIGNMENT = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}
"""Elements; widths that are no multiple go to no fused kernel of the efficient kind."""


@dataclass(frozen=True)
class AttentionArguments:
    """The facts about a call of `scaled_dot_product_attention` that decide on its kernel."""

    dtype: torch.dtype
    heads: int
    key_value_heads: int
    width: int
    value_width: int
    has_mask: bool
    is_causal: bool

    @staticmethod
    def of(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> AttentionArguments:
        """The facts about a call with these arguments, in torch's names."""
        heads, key_value_heads = query.shape[1], key.shape[1]
        widths = query.shape[3], value.shape[3]
        return AttentionArguments(query.dtype, heads, key_value_heads, *widths, attn_mask is not None, is_causal)


def chosen_kernel(arguments: AttentionArguments, capability: tuple[int, int]) -> str:
    """The kernel that a call gets on a card such as (8, 9); cuDNN's, which the engine turns off, is none of them."""
    return next((one for one in ("flash", "efficient") if not reasons_against(one, arguments, capability)), "math")


def reasons_against(kernel: str, one: AttentionArguments, capability: tuple[int, int]) -> list[str]:
    """The reasons why a fused kernel does not take the call; empty: it does."""
    reasons = {
        "another card": not MIN_CAPABILITY[kernel] <= capability <= MAX_CAPABILITY,
        "bfloat16 before sm80": one.dtype == torch.bfloat16 and capability < (8, 0),
        "a mask beside is_causal": one.is_causal and one.has_mask,
    }
    if kernel == "flash":
        reasons |= {"a mask": one.has_mask, "float32": one.dtype == torch.float32}
        reasons["its width"] = one.width > MAX_FLASH_WIDTH or one.width != one.value_width
    else:
        aligned = one.width % ALIGNMENT[one.dtype] == one.value_width % ALIGNMENT[one.dtype] == 0
        reasons |= {"grouped queries": one.heads != one.key_value_heads, "a width that is not aligned": not aligned}
    return [reason for reason, holds in reasons.items() if holds]


class Noted(TorchFunctionMode):
    """Notes calls of attention and lets one operator stand for each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionArguments] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.calls.append(AttentionArguments.of(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


@functools.cache
def attention_of(hub_id: str, packed: bool, shared: bool) -> tuple[AttentionArguments, ...]:
    """Calls of one block of each kind, forward on meta tensors, at the model's own heads and widths."""
    set_up_attention((8, 0) if shared else (7, 5))
    layers = 6 if "gemma" in hub_id else 4 if "Qwen3.5" in hub_id else 2
    figures = shipped(hub_id, num_hidden_layers=layers, vocab_size=64)
    if figures["model_type"] in MASKED:
        figures["sliding_window"] = TOKENS // 4
    model = build_skeleton(configuration(figures), torch.bfloat16)
    split = split_model(model)
    worker = worker_on_meta(model, split)
    positions = torch.cat([torch.arange(TOKENS // 2)] * 2)[None] if packed else None
    prologue = worker.prologue(torch.zeros((1, TOKENS), dtype=torch.long), None, positions)
    hidden = prologue.hidden.detach().to(META)
    with torch.no_grad(), FusedFunctions(), Noted() as noted:
        for index, call in enumerate(prologue.calls):
            worker.run_block(index, call.map_tensors(lambda tensor: tensor.to(META)), hidden)
    return tuple(dict.fromkeys(noted.calls))


ON_CARDS = [
    (card, dtype) for card in CARDS for dtype in (torch.bfloat16 if card >= (8, 0) else torch.float16, torch.float32)
]
"""What runs take: cards before sm80 have no bfloat16."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("hub_id", MODELS)
def test_no_shipped_model_attends_by_the_math_kernel(
    hub_id: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps scores of all pairs. A dense mask only where `MASKED` says why; the flash kernel where it can be had."""
    model_type = shipped(hub_id)["model_type"]
    for card, dtype in ON_CARDS:
        monkeypatch.setattr(attention, "_least_capability", card)
        calls = attention_of(hub_id, packed, takes_shared_keys(torch.empty(1, dtype=dtype, device=META)))
        assert calls
        for one in (replace(call, dtype=dtype) for call in calls):
            if one.has_mask:
                assert packed or model_type in MASKED, MASKED_PACKED
            else:
                assert one.is_causal
            fused = "flash" if dtype == torch.bfloat16 and not one.has_mask else "efficient"
            assert chosen_kernel(one, card) == fused, reasons_against(fused, one, card)


@pytest.mark.parametrize(
    ("card", "dtype", "shared"),
    [
        *(((9, 0), torch.bfloat16, True), ((8, 6), torch.float16, True)),
        *(((7, 5), torch.float16, False), ((9, 0), torch.float32, False)),
    ],
)
def test_keys_are_shared_where_a_fused_kernel_takes_it(
    card: tuple[int, int], dtype: torch.dtype, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the processor, and before a run has taken cards, as transformers decides."""
    monkeypatch.setattr(attention, "_least_capability", None)
    on_card, on_cpu = torch.empty(1, 2, 4, 8, dtype=dtype, device=META), torch.empty(1, 2, 4, 8, dtype=dtype)
    assert sdpa_attention.use_gqa_in_sdpa(None, on_card, on_card)
    set_up_attention(card)
    assert sdpa_attention.use_gqa_in_sdpa(None, on_card, on_card) is shared
    assert sdpa_attention.use_gqa_in_sdpa(None, on_cpu, on_cpu)
    assert not sdpa_attention.use_gqa_in_sdpa(torch.empty(1), on_card, on_card)


def test_every_family_of_the_shipped_recipes_is_tried() -> None:
    families = {figures["model_type"] for figures in shipped_figures().values()}
    assert families == {shipped(hub_id)["model_type"] for hub_id in MODELS}
