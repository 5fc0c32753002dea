"""`roundpipe plan` for GPUs that differ: stages for the smallest, work by speed, small ones left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from roundpipe_cli.cli.plan import plan_text
from roundpipe_cli.costs.memory import device_need, usable_device_bytes
from roundpipe_cli.errors import ResourceError
from roundpipe_cli.planning.fit_check import check_fits
from roundpipe_cli.planning.predict import Plan, make_plan
from roundpipe_cli.planning.unequal import without_small_cards
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe
from roundpipe_cli.schedule.timeline import busy_s

RECIPE = """
model: Qwen/Qwen3-0.6B
datasets: [{path: rows.jsonl}]
max_seq_length: 2048
gradient_accumulation_steps: 12
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedRecipe:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 10)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return load_recipe(tmp_path / "recipe.yaml", [f"output_dir={tmp_path / 'out'}"])


def with_keys(loaded: LoadedRecipe, *overrides: str) -> LoadedRecipe:
    return load_recipe(loaded.path, [*overrides, f"output_dir={loaded.folder / 'out'}"])


def check_limits(answer: Plan) -> None:
    """Every stage may land on every worker that the plan uses."""
    question = answer.question
    smallest = min(question.hardware.devices, key=lambda device: device.memory_bytes)
    need = device_need(
        question.analytic.costs,
        question.architecture,
        question.settings,
        question.hardware,
        answer.forward_stages,
        answer.backward_stages,
    )
    assert answer.verdict.fits and need.total_bytes <= usable_device_bytes(smallest)


def test_a_slower_card_takes_proportionally_less(loaded: LoadedRecipe) -> None:
    loaded = with_keys(loaded, "pipeline.weight_cache=0")  # two cards that hold all weights are as fast as all three
    answer = make_plan(loaded, "2x3090+4060ti:memory_gib=8:pcie_lanes=16")
    check_limits(answer)
    speeds = answer.question.analytic.costs.worker_speed
    assert speeds is not None and 0.4 < speeds[2] < 0.8 and len(speeds) == 3
    work = [seconds * speed for seconds, speed in zip(busy_s(answer.timeline), speeds, strict=True)]
    assert [part / sum(work) for part in work] == pytest.approx([speed / sum(speeds) for speed in speeds], abs=0.05)
    text = "\n".join(plan_text(answer, None))
    assert "stages are sized for the smallest, rtx-4060-ti-16gb: 8 GiB" in text
    assert f"1 x rtx-4060-ti-16gb: speed {speeds[2]:.2f}, does" in text and "2 x rtx-3090: speed 1.00, does" in text
    assert "earliest-free dispatch" in text
    alone = make_plan(loaded, "2x3090")
    assert answer.step_s <= alone.step_s * 1.001


def test_cards_that_hold_no_stage_are_left_out(loaded: LoadedRecipe) -> None:
    machine = "3090+2xcustom:memory_gib=2:acc32_tflops=70+3090"
    answer = make_plan(loaded, machine)
    check_limits(answer)
    assert [device.name for device in answer.question.hardware.devices] == ["rtx-3090"] * 2
    text = "\n".join(plan_text(answer, None))
    assert text.startswith("FITS")
    assert "2 x custom left out: no stage fits its memory; write pipeline.devices: [cuda:0, cuda:3]" in text
    assert answer.step_s == pytest.approx(make_plan(loaded, "2x3090").step_s)


def test_a_run_that_only_the_larger_cards_hold_says_so(loaded: LoadedRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    from roundpipe_cli.planning import fit_check
    from roundpipe_cli.planning.question import PlanRequest, ask

    def here(loaded: LoadedRecipe, hardware: str | None = None, *, here: bool = False) -> PlanRequest:
        question = ask(loaded, "3090+custom:memory_gib=2:acc32_tflops=70")
        return replace(question, hardware=replace(question.hardware, is_here=True))

    monkeypatch.setattr(fit_check, "ask", here)  # this machine has no such GPUs
    with pytest.raises(ResourceError) as caught:
        check_fits(loaded)
    assert "1 x custom left out" in str(caught.value) and "pipeline.devices: [cuda:0]" in str(caught.value)


def test_only_memory_that_differs_makes_smaller_machines(loaded: LoadedRecipe) -> None:
    from roundpipe_cli.planning.question import ask

    counts = {
        "4x3090+2x4090": [],
        "2x3090+4060ti": [2],
        "2x4060ti+3090+2xcustom:memory_gib=48:acc32_tflops=70": [3, 2],
    }
    for words, expected in counts.items():
        found = [fewer.num_workers for fewer in without_small_cards(ask(loaded, words))]
        assert found == expected
