"""`micro_batch_tokens: auto`: from the recipe and the smallest card, never from the number of workers."""

from __future__ import annotations

import pytest

from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.question import PlanRequest, ask
from roundpipe_cli.planning.solve import solve
from roundpipe_cli.recipe.load import load_recipe

AUTO = "micro_batch_tokens=auto"


def asked(recipe: str, hardware: str, *words: str) -> PlanRequest:
    return ask(load_recipe(recipe, [AUTO, *words]), hardware)


def budget(recipe: str, hardware: str, *words: str) -> int | None:
    return asked(recipe, hardware, *words).loaded.recipe.token_budget


@pytest.mark.parametrize("recipe", ["qwen3-8b", "qwen3-30b-a3b", "smollm2-1.7b", "gpt-oss-20b"])
def test_the_number_of_cards_does_not_count(recipe: str) -> None:
    found = {
        budget(recipe, f"{count}x3090,host_memory_gib=256", "gradient_accumulation_steps=64") for count in (1, 2, 3, 8)
    }
    assert len(found) == 1 and None not in found
    smallest = budget(recipe, "1x4060ti-16gb,host_memory_gib=256", "gradient_accumulation_steps=64")
    mixed = budget(recipe, "1x4090+1x4060ti-16gb,host_memory_gib=256", "gradient_accumulation_steps=64")
    assert mixed == smallest


def test_8192_tokens_and_more_where_memory_allows() -> None:
    assert budget("qwen3-8b", "2x3090,host_memory_gib=64") == 8192
    assert budget("qwen3/235b-a22b_lora_8x24gb", "8x4090,host_memory_gib=1024") == 16384, "experts take more"
    rows = "gradient_accumulation_steps=128"
    assert budget("qwen3/235b-a22b_qlora_8x24gb", "8x4090,host_memory_gib=160", rows) == 4096, (
        "short of host memory, and 5 GB of a card are a block unpacked"
    )
    assert budget("qwen3-8b", "1x3090,host_memory_gib=64", "max_seq_length=16384") == 16384, "a row at least"


def test_a_card_that_need_not_compute_twice_keeps_it_so() -> None:
    """By LoRA a 16 GiB card holds all of the weights and activations of 2,048 tokens, but not of 8,192."""
    assert budget("qwen3-1.7b", "1x4060ti-16gb,host_memory_gib=16") == 2048
    assert budget("qwen3-1.7b", "1x4060ti-16gb,host_memory_gib=16", "pipeline.weight_cache=0") == 8192


@pytest.mark.parametrize("rows, tokens", [(16, 8192), (8, 4096), (12, 6144), (7, 2048), (4, 2048), (1, 2048)])
def test_a_step_keeps_four_microbatches_of_equal_rows(rows: int, tokens: int) -> None:
    words = ("micro_batch_size=1", f"gradient_accumulation_steps={rows}")
    question = asked("qwen3-8b", "2x3090,host_memory_gib=64", *words)
    assert question.loaded.recipe.token_budget == tokens
    settings = question.settings
    assert settings.num_microbatches * settings.tokens_per_microbatch == rows * 2048, "the plan counts the same rows"
    assert rows < 4 or settings.num_microbatches >= 4


def test_a_plan_says_what_was_chosen_and_predicts_for_it() -> None:
    plan = make_plan(load_recipe("qwen3-8b", [AUTO]), "2x3090,host_memory_gib=64")
    assert "micro_batch_tokens (auto): 8,192: 4 rows of 2,048 tokens" in plan.assumptions
    fixed = make_plan(
        load_recipe("qwen3-8b", ["micro_batch_tokens=null", "micro_batch_size=4", "gradient_accumulation_steps=4"]),
        "2x3090,host_memory_gib=64",
    )
    assert plan.step_s == fixed.step_s and plan.verdict.device == fixed.verdict.device


def test_a_budget_that_does_not_fit_is_lowered_by_its_own_key() -> None:
    words = ["micro_batch_tokens=131072", "gradient_accumulation_steps=64"]
    plan = make_plan(load_recipe("qwen3-8b", words), "1x3060,host_memory_gib=128")
    assert not plan.verdict.fits
    found = solve(plan).changes
    changes = [override for change in found for override in change.overrides]
    assert any(override.startswith("micro_batch_tokens=") for override in changes)
    assert not any(override.startswith("micro_batch_size=") for override in changes)
    again = make_plan(load_recipe("qwen3-8b", [*words, *found[0].overrides]), "1x3060,host_memory_gib=128")
    assert again.verdict.fits, found[0]
