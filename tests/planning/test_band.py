"""How far a predicted step may be off: by what it rests on, and whether a run's report says so."""

from __future__ import annotations

import json

import pytest

from roundpipe_cli.cli.plan import plan_document
from roundpipe_cli.dashboard.html import range_note
from roundpipe_cli.planning import choose
from roundpipe_cli.planning.predict import (
    EXPERTS,
    EXPERTS_BY_OWN_KERNELS,
    FULL,
    FULL_ELSEWHERE,
    LORA,
    MEASURED,
    ON_CPU,
    make_plan,
)
from roundpipe_cli.recipe.load import load_text

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
    ],
)
def test_a_band_by_model_method_and_gpu(
    model: str, method: str, hardware: str, expected: object, monkeypatch: pytest.MonkeyPatch
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


def test_a_processor_is_hardly_known() -> None:
    """Machines of one kind differ by three times from day to day."""
    plan = make_plan(
        load_text(RECIPE.format("HuggingFaceTB/SmolLM2-135M", "lora") + "pipeline: {devices: [cpu, cpu]}\n", "r.yaml")
    )
    assert plan.band is ON_CPU


def test_bands_are_no_wider_than_promised() -> None:
    assert MEASURED.factor <= 1.15
    assert max(LORA.factor, FULL.factor, FULL_ELSEWHERE.factor, EXPERTS.factor) <= 1.3


def test_experts_may_be_far_slower_than_predicted_and_plan_says_why() -> None:
    """No GPU has run their kernels; the range was as wide as if one had."""
    plan = make_plan(load_text(RECIPE.format("Qwen/Qwen3-30B-A3B", "lora"), "r.yaml"), "8x4090")
    least_s, most_s = plan.band.around(plan.step_s)
    assert most_s / plan.step_s == 4.0 and plan.step_s / least_s == 1.5
    assert "run on no GPU" in plan.band.why


def test_python_binds_small_models_on_many_fast_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One interpreter issues for all: a step takes as long as that, beside which the devices compute."""
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # any cut will do
    text = RECIPE.format("HuggingFaceTB/SmolLM2-135M", "lora") + "gradient_accumulation_steps: 16\n"
    small = make_plan(load_text(text, "r.yaml"), "8xh100")
    assert small.step_s == small.host_s > small.device_step_s
    large = make_plan(load_text(RECIPE.format("Qwen/Qwen3-8B", "full"), "r.yaml"), "8x4090")
    assert large.step_s == large.device_step_s > large.host_s > 0


@pytest.mark.parametrize(
    ("measured_s", "said"), [(1.0, "inside"), (1.14, "inside"), (1.16, "OUTSIDE"), (0.8, "OUTSIDE"), (None, "")]
)
def test_a_report_says_whether_the_measurement_lay_inside(measured_s: float | None, said: str) -> None:
    least_s, most_s = MEASURED.around(1.0)
    predicted = {"step_s": 1.0, "least_step_s": least_s, "most_step_s": most_s}
    note = range_note({"predicted": predicted, "measured": {"pipeline_s": measured_s}})
    assert (said in note) if said else not note
