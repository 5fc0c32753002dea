"""A result that is streamed answers as the one that is loaded whole, whatever its adapter and its base are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli.events import Event, Notice
from roundpipe_cli.model.files.source import ModelSource, resolve_model
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.stored.packed_weights import dequantize, packed_bytes, quantizable_names, quantize
from roundpipe_cli.train.result.generate import Prompt, WholeAnswer, answer_prompts, load_result
from roundpipe_cli.train.streamed import opened_model
from tests.support.adapters import random_adapter
from tests.support.e2e import make_model, write_recipe

PROMPTS = [Prompt("Say x1: ", max_new_tokens=8), Prompt("Say something else, and longer: ", max_new_tokens=8)]


def source_of(folder: Path) -> ModelSource:
    return resolve_model(str(folder), revision=None, recipe_folder=folder, offline=True)


def streamed_answers(result: Path, base: Path, cache_bytes: int) -> tuple[list[WholeAnswer], list[str]]:
    """The answers of a result whose layers fetch their weights, and notices."""
    said: list[Event] = []
    how: dict[str, Any] = {"is_adapter": result != base, "stream": True, "folder": base, "tell": said.append}
    with opened_model(result, source_of(base), "float32", cache_bytes=cache_bytes, **how) as (model, tokenizer, _):
        found = answer_prompts(model, tokenizer, PROMPTS, is_shown=False)
    return found, [event.text for event in said if isinstance(event, Notice)]


def whole_answers(result: Path, base: Path) -> list[WholeAnswer]:
    """The answers of a result that is loaded whole, one after the other."""
    model, tokenizer = load_result(result, source_of(base), "float32", is_adapter=result != base)
    return [answer_prompts(model, tokenizer, [one], is_shown=False)[0] for one in PROMPTS]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("qwen3", {"target_modules": "all-linear", "use_dora": True}),
        ("llama", {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
        ("llama", {"modules_to_save": ["lm_head"], "target_modules": ["v_proj"]}),
        ("gemma3_text", {"trainable_token_indices": [5, 9]}),
        ("qwen3_moe", {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": ["q_proj"]}),
        ("llama", {"init_lora_weights": "pissa"}),
        ("llama", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value or ["merged"])),
)
def test_a_streamed_result_answers_as_the_whole_one(
    model_type: str, options: dict[str, Any] | None, tmp_path: Path
) -> None:
    result = base = make_model(tmp_path / "base", model_type)
    (base / "generation_config.json").write_text('{"repetition_penalty": 1.3, "eos_token_id": [2, 3], "top_k": 7}')
    if options is not None:
        result = tmp_path / "adapter"
        random_adapter(base, result, **options)
    expected = whole_answers(result, base)
    assert any(one.num_tokens > 2 for one in expected)
    for cache_bytes in (0, 150_000, 1 << 30):
        found, said = streamed_answers(result, base, cache_bytes)
        assert found == expected
        assert any("come past from disk" in text for text in said) == (cache_bytes < 1 << 30)
    assert not list(base.glob(".tmp*"))


def test_the_base_lies_packed_as_in_the_run(tmp_path: Path) -> None:
    """In 4 bit by the result's recipe; the reference has the unpacked weights."""
    base = make_model(tmp_path / "base", "llama")
    random_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    write_recipe(tmp_path / "adapter" / "recipe.yaml", load_in_4bit=True)
    plain, tokenizer = load_result(base, source_of(base), "float32", is_adapter=False)
    skeleton = build_skeleton(load_config(source_of(base)), torch.float32).requires_grad_(False)
    names = quantizable_names(skeleton, split_model(skeleton).blocks_path)
    assert len(names) > 10
    for name in names:
        weight = plain.get_parameter(name)
        packed = torch.zeros(packed_bytes(weight.shape, "4bit"), dtype=torch.uint8)
        quantize(weight.data, packed, "4bit")
        weight.data = dequantize(packed, weight.shape, torch.float32, "4bit")
    plain.save_pretrained(str(tmp_path / "unpacked"))
    tokenizer.save_pretrained(str(tmp_path / "unpacked"))
    expected = whole_answers(tmp_path / "adapter", tmp_path / "unpacked")
    assert expected != whole_answers(tmp_path / "adapter", base)
    for cache_bytes in (0, 1 << 30):
        assert streamed_answers(tmp_path / "adapter", base, cache_bytes)[0] == expected
