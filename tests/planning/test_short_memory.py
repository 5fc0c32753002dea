"""Plans where the host's memory is short: more of it never makes a step slower."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.recipe.load import load_recipe


@pytest.mark.parametrize("machine", ["4x4090", pytest.param("2x3090", marks=pytest.mark.sweep)])
def test_more_host_memory_never_makes_a_step_slower(tmp_path: Path, machine: str) -> None:
    """Where weights come from disk the search chose cuts that upload more: with 14 GiB 8 % slower than with 12."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: Qwen/Qwen3-8B\ndatasets: [{path: rows.jsonl}]\noutput_dir: out\nmicro_batch_size: 4\n"
        "max_seq_length: 2048\n"
    )
    plans = [make_plan(load_recipe(recipe), f"{machine},host_memory_gib={memory}") for memory in (12, 14, 64)]
    assert all(plan.verdict.fits for plan in plans)
    assert plans[0].question.settings.weights_on_disk and not plans[-1].question.settings.weights_on_disk
    for less, more in zip(plans, plans[1:], strict=False):
        assert more.step_s <= less.step_s * 1.01


@pytest.mark.sweep
def test_longer_rounds_of_coarser_stages_are_tried_where_the_finest_wait() -> None:
    """Stages of one layer fit in short rounds, and wait 6 % of a step; stages of two fit in longer ones."""
    recipe = load_recipe("qwen3/235b-a22b_qlora_8x24gb", ["gradient_accumulation_steps=128"])
    plans = [make_plan(recipe, f"8x3090,host_memory_gib={memory}") for memory in (192, 216)]
    assert all(plan.verdict.fits for plan in plans)
    assert plans[1].microbatches_per_round > plans[0].microbatches_per_round
    assert plans[0].step_s > 1.01 * plans[1].step_s


def test_given_stages_get_rounds_for_which_the_host_has_room() -> None:
    """All microbatches in one round need 40 GiB, two rounds 30; `plan` said that the former do not fit."""
    forward = [[0, 1], *([block, block] for block in range(2, 37))]
    stages = {"forward_stages": forward, "backward_stages": [[37, 37], *reversed(forward)]}
    words = [f"pipeline.{key}={value}".replace(" ", "") for key, value in stages.items()]
    loaded = load_recipe("qwen3/8b_lora_4x24gb", words)
    plans = [make_plan(loaded, f"4x3090,host_memory_gib={memory}") for memory in (64, 40)]
    assert [plan.cut.microbatches_per_round for plan in plans] == [8, 4]
    assert all(plan.verdict.fits for plan in plans)
