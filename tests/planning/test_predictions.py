"""What a plan predicts: how far it may be off, long steps, short host memory, and values of `auto`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from roundpipe_cli.cli.plan import plan_document
from roundpipe_cli.dashboard.html import range_note
from roundpipe_cli.planning import choose, predict
from roundpipe_cli.planning.predict import (
    EXPERTS,
    EXPERTS_BY_OWN_KERNELS,
    FULL,
    FULL_ELSEWHERE,
    LORA,
    MEASURED,
    ON_CPU,
    make_plan,
    simulate_step,
)
from roundpipe_cli.planning.question import PlanRequest, ask
from roundpipe_cli.planning.solve import solve
from roundpipe_cli.recipe.load import load_recipe, load_text
from tests.support.covering import swept

RECIPE = "model: {}\nmethod: {}\ndatasets: [{{path: rows.jsonl}}]\nmax_seq_length: 512\n"


@pytest.mark.parametrize(
    ("model", "method", "hardware", "expected"),
    [
        ("Qwen/Qwen3-8B", "lora", "1x4090", LORA),
        ("Qwen/Qwen3-8B", "full", "4x4090", FULL),
        ("Qwen/Qwen3-8B", "full", "4x3090", FULL_ELSEWHERE),
        ("Qwen/Qwen3-30B-A3B", "lora", "2x4090", EXPERTS_BY_OWN_KERNELS),
        ("Qwen/Qwen3-30B-A3B", "lora", "2xh100", EXPERTS),
        ("Qwen/Qwen3-30B-A3B", "lora", "1xh100+1xa100", EXPERTS_BY_OWN_KERNELS),
        ("HuggingFaceTB/SmolLM2-135M", "lora\npipeline: {devices: [cpu, cpu]}", None, ON_CPU),
    ],
)
def test_a_band_by_model_method_and_gpu(
    model: str, method: str, hardware: str | None, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # any cut will do
    plan = make_plan(load_text(RECIPE.format(model, method), "r.yaml"), hardware)
    assert plan.band is expected
    predicted = plan_document(plan, None)["predicted"]
    least, most = predicted["step_s_range"]
    assert least < predicted["step_s"] < most
    assert most / predicted["step_s"] == pytest.approx(plan.band.slower or plan.band.factor)
    tokens = predicted["step_s"] * predicted["tokens_per_s"]
    assert predicted["tokens_per_s_range"] == pytest.approx([tokens / most, tokens / least])
    assert json.dumps(predicted["range_rests_on"])


def test_python_binds_small_models_on_many_fast_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One interpreter issues for all: a step takes as long as that, beside which the devices compute."""
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # any cut will do
    text = RECIPE.format("HuggingFaceTB/SmolLM2-135M", "lora") + "gradient_accumulation_steps: 16\n"
    small = make_plan(load_text(text, "r.yaml"), "8xh100")
    assert small.step_s == small.host_s > small.device_step_s
    large = make_plan(load_text(RECIPE.format("Qwen/Qwen3-8B", "full"), "r.yaml"), "8x4090")
    assert large.step_s == large.device_step_s > large.host_s > 0


def test_the_forward_of_the_reference_of_pairs_is_a_part_of_the_step() -> None:
    """A step of LoRA with recompute takes about three forwards; the reference's is one more."""
    text = RECIPE.format("Qwen/Qwen3-8B", "lora") + "objective: dpo\ngradient_accumulation_steps: 16\n"
    plan = make_plan(load_text(text, "r.yaml"), "2x4090")
    step_s = simulate_step(plan.question, plan.cut).step_s
    assert plan.device_step_s == plan.step_s == step_s + predict.reference_s(plan.question, plan.cut)
    assert plan.device_step_s / step_s == pytest.approx(4 / 3, abs=0.05)


@pytest.mark.parametrize(
    ("measured_s", "said"), [(1.0, "inside"), (1.14, "inside"), (1.16, "OUTSIDE"), (0.8, "OUTSIDE"), (None, "")]
)
def test_a_report_says_whether_the_measurement_lay_inside(measured_s: float | None, said: str) -> None:
    least_s, most_s = MEASURED.around(1.0)
    predicted = {"step_s": 1.0, "least_step_s": least_s, "most_step_s": most_s}
    note = range_note({"predicted": predicted, "measured": {"pipeline_s": measured_s}})
    assert (said in note) if said else not note


@pytest.mark.parametrize(
    ("schedule", "machine", "tolerance"),
    [("roundpipe", "2x3090,host_memory_gib=64", 1e-3), ("1f1b", "8x4090,host_memory_gib=128", 3e-3)],
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


def test_given_stages_get_rounds_for_which_the_host_has_room() -> None:
    """All microbatches in one round need 40 GiB, two rounds 30; `plan` said that the former do not fit."""
    forward = [[0, 1], *([block, block] for block in range(2, 37))]
    stages = {"forward_stages": forward, "backward_stages": [[37, 37], *reversed(forward)]}
    words = [f"pipeline.{key}={value}".replace(" ", "") for key, value in stages.items()]
    loaded = load_recipe("qwen3/8b_lora_4x24gb", words)
    plans = [make_plan(loaded, f"4x3090,host_memory_gib={memory}") for memory in (64, 40)]
    assert [plan.cut.microbatches_per_round for plan in plans] == [8, 4]
    assert all(plan.verdict.fits for plan in plans)


AUTO = "micro_batch_tokens=auto"


def asked(recipe: str, hardware: str, *words: str) -> PlanRequest:
    return ask(load_recipe(recipe, [AUTO, *words]), hardware)


def budget(recipe: str, hardware: str, *words: str) -> int | None:
    return asked(recipe, hardware, *words).loaded.recipe.token_budget


@pytest.mark.parametrize("recipe", ["qwen3-30b-a3b", *swept(["qwen3-8b", "smollm2-1.7b", "gpt-oss-20b"])])
def test_the_number_of_cards_does_not_count(recipe: str) -> None:
    def of(cards: str) -> int | None:
        return budget(recipe, f"{cards},host_memory_gib=256", "gradient_accumulation_steps=64")

    found = {of(f"{count}x3090") for count in (1, 3, 8)}
    assert len(found) == 1 and None not in found
    assert of("1x4090+1x4060ti-16gb") == of("1x4060ti-16gb")


def test_8192_tokens_and_more_where_memory_allows() -> None:
    assert budget("qwen3-8b", "2x3090,host_memory_gib=64") == 8192
    assert budget("qwen3/235b-a22b_lora_8x24gb", "8x4090,host_memory_gib=1024") == 16384, "experts take more"
    short = budget("qwen3/235b-a22b_qlora_8x24gb", "8x4090,host_memory_gib=160", "gradient_accumulation_steps=128")
    assert short == 4096, "short of host memory, and 5 GB of a card are a block unpacked"
    assert budget("qwen3-8b", "1x3090,host_memory_gib=64", "max_seq_length=16384") == 16384, "a row at least"


def test_a_card_that_need_not_compute_twice_keeps_it_so() -> None:
    """By LoRA a 16 GiB card holds all of the weights and activations of 2,048 tokens, but not of 8,192."""
    assert budget("qwen3-1.7b", "1x4060ti-16gb,host_memory_gib=16") == 2048
    assert budget("qwen3-1.7b", "1x4060ti-16gb,host_memory_gib=16", "pipeline.weight_cache=0") == 8192


@pytest.mark.parametrize("rows, tokens", [(16, 8192), (12, 6144), (7, 2048), (1, 2048)])
def test_a_step_keeps_four_microbatches_of_equal_rows(rows: int, tokens: int) -> None:
    words = ("micro_batch_size=1", f"gradient_accumulation_steps={rows}")
    question = asked("qwen3-8b", "2x3090,host_memory_gib=64", *words)
    assert question.loaded.recipe.token_budget == tokens
    settings = question.settings
    assert settings.num_microbatches * settings.tokens_per_microbatch == rows * 2048, "the plan counts the same rows"
    assert rows < 4 or settings.num_microbatches >= 4


def test_a_plan_says_what_was_chosen_and_predicts_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # any cut will do
    plan = make_plan(load_recipe("qwen3-8b", [AUTO]), "2x3090,host_memory_gib=64")
    assert "micro_batch_tokens (auto): 8,192: 4 rows of 2,048 tokens" in plan.assumptions
    words = ["micro_batch_tokens=null", "micro_batch_size=4", "gradient_accumulation_steps=4"]
    fixed = make_plan(load_recipe("qwen3-8b", words), "2x3090,host_memory_gib=64")
    assert plan.step_s == fixed.step_s and plan.verdict.device == fixed.verdict.device


def test_a_budget_that_does_not_fit_is_lowered_by_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)
    words = ["micro_batch_tokens=131072", "gradient_accumulation_steps=64"]
    plan = make_plan(load_recipe("qwen3-8b", words), "1x3060,host_memory_gib=128")
    assert not plan.verdict.fits
    found = solve(plan).changes
    changes = [override for change in found for override in change.overrides]
    assert any(override.startswith("micro_batch_tokens=") for override in changes)
    assert not any(override.startswith("micro_batch_size=") for override in changes)
    again = make_plan(load_recipe("qwen3-8b", [*words, *found[0].overrides]), "1x3060,host_memory_gib=128")
    assert again.verdict.fits, found[0]
