"""`roundpipe plan` for GPUs that differ: stages for the smallest, work by speed, small ones left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundpipe_cli.choices import SCHEDULES
from roundpipe_cli.cli.bench_schedules import as_planned, request_of
from roundpipe_cli.cli.plan import plan_text
from roundpipe_cli.cli.training import ask_on_cards_worth_using
from roundpipe_cli.costs.find_model import shipped_figures
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.costs.memory import device_need, usable_device_bytes
from roundpipe_cli.errors import ResourceError
from roundpipe_cli.events import Event, Notice
from roundpipe_cli.planning.predict import Plan, make_plan
from roundpipe_cli.planning.question import ask, without_small_cards
from roundpipe_cli.planning.run_plan import check_fits
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe
from roundpipe_cli.schedule.timeline import busy_s

RECIPE = """
model: {}/model
datasets: [{{path: rows.jsonl}}]
max_seq_length: 2048
packing: false
micro_batch_size: 1
gradient_accumulation_steps: 12
"""
FIGURES = {**shipped_figures()["Qwen/Qwen3-0.6B"], **{"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 7}}
"""Of the widths of Qwen3-0.6B, and of so few layers that a search takes a moment."""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedRecipe:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 10)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(FIGURES))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(tmp_path))
    return load_recipe(tmp_path / "recipe.yaml", [f"output_dir={tmp_path / 'out'}"])


def with_keys(loaded: LoadedRecipe, *overrides: str) -> LoadedRecipe:
    return load_recipe(loaded.path, [*overrides, f"output_dir={loaded.folder / 'out'}"])


def check_limits(answer: Plan) -> None:
    """Every stage may land on every worker that the plan uses."""
    smallest = min(answer.question.hardware.devices, key=lambda device: device.memory_bytes)
    need = device_need(answer.question, answer.cut.forward_stages, answer.cut.backward_stages)
    assert answer.verdict.fits and need.total_bytes <= usable_device_bytes(smallest)


def test_a_slower_card_takes_proportionally_less(loaded: LoadedRecipe) -> None:
    # two cards that hold all weights are as fast as all three
    loaded = with_keys(loaded, "pipeline.weight_cache=0", "max_seq_length=8192")
    answer = make_plan(loaded, "2x3090+4060ti:memory_gib=8:pcie_lanes=16")
    check_limits(answer)
    speeds = answer.question.costs.worker_speed
    assert speeds is not None and 0.4 < speeds[2] < 0.8 and len(speeds) == 3
    work = [seconds * speed for seconds, speed in zip(busy_s(answer.timeline), speeds, strict=True)]
    assert [part / sum(work) for part in work] == pytest.approx([speed / sum(speeds) for speed in speeds], abs=0.05)
    text = "\n".join(plan_text(answer, None))
    assert "stages are sized for the smallest, rtx-4060-ti-16gb: 8 GiB" in text
    assert f"1 x rtx-4060-ti-16gb: speed {speeds[2]:.2f}, does" in text and "2 x rtx-3090: speed 1.00, does" in text
    assert "earliest-free dispatch" in text
    alone = make_plan(loaded, "2x3090")
    assert answer.step_s <= alone.step_s * 1.001


def test_a_card_that_would_hold_the_others_up_is_said_to_be_idle() -> None:
    """`plan -v` ended in an error: the simulated step knew only the cards that get stages."""
    answer = make_plan(load_recipe("qwen3-14b", ["micro_batch_tokens=8192"]), "2x4090+3060")
    assert answer.cut.workers == (0, 1) and answer.timeline.num_workers == 3
    *others, idle = busy_s(answer.timeline)
    assert idle == 0 < min(others)
    text = "\n".join(plan_text(answer, None))
    assert "1 x rtx-3060: speed 0.19, stays idle: faster so" in text
    assert answer.bubble_ratio > 1 / 3, "it counts"


def test_cards_that_hold_no_stage_are_left_out(loaded: LoadedRecipe) -> None:
    answer = make_plan(loaded, SMALL_CARDS)
    check_limits(answer)
    assert [device.name for device in answer.question.hardware.devices] == ["rtx-3090"] * 2
    text = "\n".join(plan_text(answer, None))
    assert text.startswith("FITS")
    assert "2 x custom left out: no stage fits its memory (pipeline.devices: [cuda:0, cuda:3])" in text
    assert answer.step_s == pytest.approx(make_plan(loaded, "2x3090").step_s)


SMALL_CARDS = "3090+2xcustom:memory_gib=1:acc32_tflops=70+3090"


@pytest.fixture
def with_small_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has two GPUs that hold no stage, between two that do."""
    devices = parse_hardware(SMALL_CARDS).devices
    monkeypatch.setattr("roundpipe_cli.planning.question.visible_gpus", lambda: (devices, ()))


def test_a_run_and_bench_leave_out_what_plan_leaves_out(
    loaded: LoadedRecipe, with_small_cards: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run was refused where plan said that it fits, and bench compared schedules on all four cards."""
    told: list[Event] = []
    asked = ask_on_cards_worth_using(loaded, told.append)
    assert asked is not None and asked.given is not None
    alone = asked.given
    assert alone.recipe.pipeline.devices == ("cuda:0", "cuda:3")
    anew = ask(alone, here=True)
    assert (asked.settings, asked.costs, asked.unpacking) == (anew.settings, anew.costs, anew.unpacking)
    assert asked.hardware.devices == anew.hardware.devices and asked.loaded == anew.loaded
    check_fits(asked)
    assert [event.text for event in told if isinstance(event, Notice)] == [
        "devices: cuda:0, cuda:3: faster, or only so within memory, than with GPUs of less memory; "
        "pipeline.devices=[cuda:0,cuda:1,cuda:2,cuda:3] takes all"
    ]
    planned, again = make_plan(loaded), make_plan(alone)
    assert planned.cut == again.cut and planned.step_s == pytest.approx(again.step_s)
    request = request_of(str(loaded.path), ["pipeline.weight_cache=0"], SMALL_CARDS)
    assert "note: as in `plan`, on 2 of 4 GPUs" in capsys.readouterr().err
    found, _ = as_planned(request, None)
    assert {case.num_workers for _, _, case in found} == {2} and len(found) == len(SCHEDULES)


def test_cards_that_are_listed_are_all_used(loaded: LoadedRecipe, with_small_cards: None) -> None:
    loaded = with_keys(loaded, "pipeline.devices=[cuda:3,cuda:1]")
    told: list[Event] = []
    asked = ask_on_cards_worth_using(loaded, told.append)
    assert asked is not None and asked.given is loaded and not told
    with pytest.raises(ResourceError) as caught:
        check_fits(asked)
    better = "better without 1 x custom: no stage fits its memory; write pipeline.devices: [cuda:3]"
    assert better in str(caught.value)
    answer = make_plan(loaded)
    assert not answer.verdict.fits and better in "\n".join(plan_text(answer, None))


def test_machines_of_equal_memory_are_not_planned_first(loaded: LoadedRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = parse_hardware("2x3090+2x4090").devices
    monkeypatch.setattr("roundpipe_cli.planning.question.visible_gpus", lambda: (devices, ()))
    monkeypatch.setattr("roundpipe_cli.planning.predict._plan", pytest.fail)
    asked = ask_on_cards_worth_using(loaded, pytest.fail)
    assert asked is not None and asked.given is loaded


def test_only_memory_that_differs_makes_smaller_machines(loaded: LoadedRecipe) -> None:
    counts = {"4x3090+2x4090": [], "2x3090+4060ti": [2], "2x4060ti+3090+2xcustom:memory_gib=48:acc32_tflops=70": [3, 2]}
    for words, expected in counts.items():
        found = [fewer.num_workers for fewer in without_small_cards(ask(loaded, words))]
        assert found == expected


def test_what_is_left_open_is_decided_for_the_cards_that_are_left() -> None:
    """Rows that one card trains in chunks did not fit with a smaller one beside it."""
    long = load_recipe("gpt-oss-20b", ["max_seq_length=131072"])
    both, alone = (ask(long, f"{cards},host_memory_gib=128") for cards in ("5090+4070", "1x5090"))
    (fewer,) = without_small_cards(both)
    assert both.settings.sequence_chunks == 1 < alone.settings.sequence_chunks
    assert (fewer.settings, fewer.choices) == (alone.settings, alone.choices)
