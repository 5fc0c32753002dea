"""Arguments of attention, of every shipped recipe's model, through torch's rules of choice for five kinds of card.

Source of the rules: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.13 (`can_use_flash_attention`,
`can_use_mem_efficient_attention`, `priority_order`). Only those that arguments of language models can meet are here;
cuDNN's kernel, which the engine turns off, is not.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

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
    *(*FAMILIES.values(), "mistralai/Mistral-7B-v0.3", "HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-3-1b-pt"),
    *("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3-Next-80B-A3B"),
)
"""One of each shipped family, and those of other widths; further sizes differ in the number of heads."""
MASKED_PACKED = "rows of a packed sequence are kept apart by a dense mask until variable-length attention is used"


class Call(NamedTuple):
    """The facts about a call of `scaled_dot_product_attention` that decide on its kernel."""

    heads: int
    key_value_heads: int
    width: int
    value_width: int
    has_mask: bool
    is_causal: bool


class Noted(TorchFunctionMode):
    """Notes calls of attention and lets one operator stand for each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            found = inspect.signature(_arguments).bind(*args, **(kwargs or {})).arguments
            query, key, value = (found[name] for name in ("query", "key", "value"))
            widths, mask = (query.shape[3], value.shape[3]), found.get("attn_mask")
            self.calls.append(
                Call(query.shape[1], key.shape[1], *widths, mask is not None, found.get("is_causal", False))
            )
        return func(*args, **(kwargs or {}))


def _arguments(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False, **_: Any
) -> None:
    """The names of attention's arguments."""


@functools.cache
def attention_of(hub_id: str, packed: bool, shared: bool) -> tuple[Call, ...]:
    """Calls of one block of each kind, forward on meta tensors, at the model's own heads and widths."""
    set_up_attention((8, 0) if shared else (7, 5))
    layers = 6 if "gemma" in hub_id else 4 if hub_id.startswith(("Qwen/Qwen3.5", "Qwen/Qwen3-Next")) else 2
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
def test_no_shipped_model_attends_by_the_math_kernel(hub_id: str, packed: bool, monkeypatch: Any) -> None:
    """It keeps scores of all pairs. A dense mask only where `MASKED` says why; the flash kernel where it can be had."""
    model_type = shipped(hub_id)["model_type"]
    for card, dtype in ON_CARDS:
        monkeypatch.setattr(attention, "_least_capability", card)
        calls = attention_of(hub_id, packed, takes_shared_keys(torch.empty(1, dtype=dtype, device=META)))
        assert calls
        for one in calls:
            assert one.has_mask != one.is_causal
            assert not one.has_mask or packed or model_type in MASKED, MASKED_PACKED
            if card >= FLASH_CAPABILITY and dtype == torch.bfloat16 and not one.has_mask:
                assert one.width <= MAX_FLASH_WIDTH and one.width == one.value_width, "not by flash attention"
            else:  # by the efficient kernel
                assert one.heads == one.key_value_heads and one.width % 8 == one.value_width % 8 == 0


def test_keys_are_shared_where_a_fused_kernel_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor, and before a run has taken cards, as transformers decides."""
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    for card, dtype, shared in (((9, 0), bf16, True), ((8, 6), f16, True), ((7, 5), f16, False), ((9, 0), f32, False)):
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
