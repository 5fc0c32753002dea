"""A long step is extrapolated from a part of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe_cli.planning import predict
from roundpipe_cli.planning.predict import make_plan, simulate_step
from roundpipe_cli.recipe.load import load_recipe


@pytest.mark.parametrize(
    ("schedule", "machine", "tolerance"),
    [
        ("roundpipe", "2x3090,host_memory_gib=64", 1e-3),
        ("looped_bfs", "4x3090,host_memory_gib=128", 1e-3),
        ("1f1b", "8x4090,host_memory_gib=128", 3e-3),
    ],
)
def test_a_long_step_takes_what_all_its_microbatches_take(
    schedule: str, machine: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("gradient_accumulation_steps=190", f"pipeline.schedule={schedule}")
    plan = make_plan(load_recipe("qwen3/1.7b_lora_1x16gb", words), machine)
    part = simulate_step(plan.question, plan.cut)
    assert len({interval.microbatch for interval in plan.timeline.intervals} - {-1}) <= 64
    monkeypatch.setattr(predict, "MAX_SIMULATED_MICROBATCHES", 10_000)
    whole = simulate_step(plan.question, plan.cut)
    assert plan.question.settings.num_microbatches > 64
    assert part.step_s == pytest.approx(whole.step_s, rel=tolerance)
    assert part.bubble_ratio == pytest.approx(whole.bubble_ratio, abs=0.01)
    assert part.links.up == pytest.approx(whole.links.up, rel=0.01)


def test_a_step_of_few_long_rounds_is_simulated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of 60 and one more microbatch were simulated for a step of 95."""
    words = ("gradient_accumulation_steps=190", "micro_batch_tokens=null", "micro_batch_size=2")
    plan = make_plan(load_recipe("qwen3/1.7b_lora_1x16gb", words), "2x3090,host_memory_gib=64")
    wanted = plan.question.settings.num_microbatches
    cut = replace(plan.cut, microbatches_per_round=wanted - 1)
    part = simulate_step(plan.question, cut)
    monkeypatch.setattr(predict, "MAX_SIMULATED_MICROBATCHES", 10_000)
    assert wanted > 64
    assert part == simulate_step(plan.question, cut)
