"""Arguments of attention, of every shipped recipe's model, through torch's rules of choice for five kinds of card."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from roundpipe_cli.costs.models import shipped_figures
from roundpipe_cli.model.attention_kernels import AttentionArguments, choose_attention_kernel, reasons_against
from roundpipe_cli.model.block_launches import META, FusedFunctions, worker_on_meta
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.split import split_model
from scripts.gpu_checks.models import FAMILIES, configuration, shipped

CARDS = ((7, 5), (8, 6), (8, 9), (9, 0), (12, 0))
TOKENS = 48
MASKED = {
    "gemma3_text": "sliding windows come as a dense mask where rows are longer than the window",
    "gpt_oss": "sinks are a key beside the mask, which the kernel for whole rows has no place for",
}
"""Model types that attend with a dense mask today though rows are not packed, and why."""
TURING = "the efficient kernel takes no grouped queries, and before sm80 there is no flash kernel: scores are kept"
"""Known, on sm75 alone: models that share keys between heads attend by the math kernel where there is no mask."""
MODELS = (
    *FAMILIES.values(),
    "mistralai/Mistral-7B-v0.3",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "google/gemma-3-1b-pt",
)
"""One of each shipped family, and those of other widths; further sizes differ in the number of heads."""
MASKED_PACKED = "rows of a packed sequence are kept apart by a dense mask until variable-length attention is used"


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
def attention_of(hub_id: str, packed: bool) -> tuple[AttentionArguments, ...]:
    """Calls of one block of each kind, forward on meta tensors, at the model's own heads and widths."""
    layers = 6 if "gemma" in hub_id else 2
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


def dtype_on(card: tuple[int, int]) -> torch.dtype:
    """What a run takes: cards before sm80 have no bfloat16."""
    return torch.bfloat16 if card >= (8, 0) else torch.float16


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("hub_id", MODELS)
def test_no_shipped_model_attends_by_the_math_kernel(hub_id: str, packed: bool) -> None:
    """It keeps scores of all pairs; `TURING` alone is known to. A dense mask only where `MASKED` says why."""
    model_type = shipped(hub_id)["model_type"]
    for card in CARDS:
        calls = attention_of(hub_id, packed)
        assert calls
        for one in (replace(call, dtype=dtype_on(card)) for call in calls):
            kernel = choose_attention_kernel(one, card)
            if one.has_mask:
                assert packed or model_type in MASKED, MASKED_PACKED
                assert kernel == "efficient", reasons_against("efficient", one, card)
            elif card >= (8, 0):
                assert one.is_causal and kernel == "flash", reasons_against("flash", one, card)
            else:
                grouped = one.heads != one.key_value_heads
                assert kernel == ("math" if grouped else "efficient"), TURING


def test_every_family_of_the_shipped_recipes_is_tried() -> None:
    families = {figures["model_type"] for figures in shipped_figures().values()}
    assert families == {shipped(hub_id)["model_type"] for hub_id in MODELS}


def call(**changes: Any) -> AttentionArguments:
    values: dict[str, Any] = {"dtype": torch.bfloat16, "heads": 32, "key_value_heads": 32, "query_tokens": 64}
    values |= {"key_tokens": 64, "width": 128, "value_width": 128, "has_mask": False, "is_causal": True}
    return AttentionArguments(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "card", "kernel"),
    [
        ({}, (8, 9), "flash"),
        ({"has_mask": True, "is_causal": False}, (8, 9), "efficient"),
        ({"has_mask": True, "is_causal": False, "key_value_heads": 8}, (9, 0), "math"),
        ({"dtype": torch.float16}, (7, 5), "efficient"),
        ({"dtype": torch.float16, "key_value_heads": 8}, (7, 5), "math"),
        ({}, (7, 5), "math"),
        ({"dtype": torch.float32}, (9, 0), "efficient"),
        ({"width": 257, "value_width": 257}, (9, 0), "math"),
        ({"width": 256, "value_width": 256, "dropout": 0.1}, (8, 6), "efficient"),
        ({"width": 256, "value_width": 256, "dropout": 0.1}, (9, 0), "flash"),
    ],
)
def test_the_rules(changes: dict[str, Any], card: tuple[int, int], kernel: str) -> None:
    assert choose_attention_kernel(call(**changes), card) == kernel


def test_cudnn_is_preferred_where_it_is_on() -> None:
    """On sm90 and sm100; it builds a plan for every shape, so the engine turns it off."""
    assert choose_attention_kernel(call(), (9, 0), allow_cudnn=True) == "cudnn"
    assert choose_attention_kernel(call(), (8, 9), allow_cudnn=True) == "flash"
    assert choose_attention_kernel(call(), (9, 0)) == "flash"
