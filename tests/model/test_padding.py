"""Prompts of unequal lengths in one batch get what each gets alone, of every type that transformers makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from roundpipe_cli.model import padding
from roundpipe_cli.model.padding import each_as_alone
from roundpipe_cli.model.reduced import random_weights
from roundpipe_cli.train.result.generate import continued
from tests.support.every_type import tiny_config_of

PROMPTS = [[5, 80, 90, 11, 7, 33, 9, 55, 44, 12, 18, 61, 23], [17, 4, 100, 3, 64], [21, 9, 8], [40, 41, 77, 6, 19]]


def lively(model_type: str) -> Any:
    model = AutoModelForCausalLM.from_config(tiny_config_of(model_type)).float().eval()
    model.load_state_dict(random_weights(model), strict=False)
    return model


@pytest.mark.parametrize(
    ("model_type", "is_together"),
    [
        *((name, True) for name in ("llama", "gemma3_text", "opt", "bloom", "qwen3_next", "mamba", "gpt_oss")),
        *((name, False) for name in ("bart", "git", "trocr", "deepseek_v4", "minimax", "dots3_note_text")),
    ],
)
def test_unequal_prompts_are_answered_as_alone(model_type: str, is_together: bool) -> None:
    """Story: padding moved the positions of eleven types, or the groups of tokens that they compress."""
    model, sizes = lively(model_type), list[int]()

    def answer(some: Sequence[list[int]]) -> list[list[int]]:
        sizes.append(len(some))
        return continued(model, some, 0, max_new_tokens=6, do_sample=False, eos_token_id=None)

    together = each_as_alone(model, PROMPTS, answer)
    assert sorted(sizes) == ([4] if is_together else [1, 1, 2])
    assert continued(model, PROMPTS, 0, max_new_tokens=6, do_sample=False, eos_token_id=None) == together
    assert together == [answer([one])[0] for one in PROMPTS]


def test_what_cannot_be_tried_is_answered_by_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively("qwen2")
    padding._ignores_padding.cache_clear()
    monkeypatch.setattr(padding, "MAX_PARAMETERS", 10)
    sizes: list[int] = []
    each_as_alone(model, PROMPTS, lambda some: [sizes.append(len(some))] * len(some))
    padding._ignores_padding.cache_clear()
    assert sorted(sizes) == [1, 1, 2]


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    padding._ignores_padding.cache_clear()
    model = lively("llama")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    each_as_alone(model, PROMPTS, lambda some: some)
    assert torch.equal(before, torch.get_rng_state())
