"""`plan --compare`: a row for each combination of values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from roundpipe_cli.cli.plan import comparison_lines, plan_document, row_document, show_comparison, verdict_lines
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning import choose
from roundpipe_cli.planning.predict import make_plan, priced
from roundpipe_cli.planning.what_if import MAX_COMBINATIONS, axes_of, compare_plans, summary_of
from roundpipe_cli.recipe.load import load_recipe
from tests.planning.test_plan_refusals import FIGURES, STAGES


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**FIGURES, "model_type": "llama"}))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {tmp_path}/model\ndatasets: [{{path: rows.jsonl}}]\noutput_dir: out\nmax_seq_length: 64\n")
    return str(path)


def quiet(*_: object) -> None:
    pass


def test_every_combination_has_a_row_with_its_verdict(recipe: str) -> None:
    wanted = ["hardware=1x4090,1x4090,host_memory_gib=0.5", "method=lora,full", "load_in_4bit=false,true"]
    rows = compare_plans(recipe, [*STAGES, *wanted], None, None, tell=quiet)
    documents = [row_document(row) for row in rows]
    assert len(rows) == 8
    order = ["FITS", "SLOW", "DOES NOT FIT", "REFUSED"]
    places = [max(1, order.index(document["verdict"])) for document in documents]
    assert places == sorted(places) and places.count(3) == 2
    speeds = [document["tokens_per_s"] for document in documents if document["tokens_per_s"]]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) >= 2
    short = next(document for document in documents if document["verdict"] == "DOES NOT FIT")
    assert short["values"]["hardware"] == "1x4090,host_memory_gib=0.5"
    assert "too little" in short["reasons"][0] and short["host_bytes"] > 2**29
    refused = documents[-1]
    assert refused["values"]["method"] == "full" and "full fine-tuning trains them" in refused["reasons"][0]
    lines = comparison_lines(rows)
    assert lines[0].split()[:4] == ["hardware", "method", "load_in_4bit", "verdict"]
    assert lines[-1].startswith("    such weights are frozen")


def test_values_are_split_at_commas_outside_brackets_and_machines() -> None:
    fixed, axes = axes_of(
        ["lora.r=8", "pipeline.devices=[cpu,cpu],auto", "hardware=2x3090:pcie_lanes=8,host_memory_gib=64,4x4090"]
    )
    assert fixed == ["lora.r=8"]
    assert axes == {
        "pipeline.devices": ["[cpu,cpu]", "auto"],
        "hardware": ["2x3090:pcie_lanes=8,host_memory_gib=64", "4x4090"],
    }


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["lora.r=8"], "nothing to compare"),
        (["lora.r=8", "lora.r=4,8"], "lora.r is given twice"),
        (["lora.r=8,8"], "empty or alike"),
        ([f"lora.r={','.join(str(n) for n in range(1, 10))}", "seed=1,2,3,4,5,6,7,8"], "too many combinations"),
        (["hardware=1x4090,1x9999"], "unknown GPU"),
        (["lorar=1,2"], "unknown key"),
        (["method=full", "load_in_4bit=true", "lora.r=8,16"], "full fine-tuning trains them"),
    ],
)
def test_bad_input_is_one_error(recipe: str, overrides: list[str], said: str) -> None:
    with pytest.raises(RefusedError, match=said) as caught:
        compare_plans(recipe, [*STAGES, *overrides], None, None, tell=quiet)
    assert caught.value.exit_code == 2
    assert MAX_COMBINATIONS == 64


def test_json_holds_the_rows(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_comparison(recipe, [*STAGES, "max_seq_length=32,64"], "1x4090", as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["values"]["max_seq_length"] for row in rows] in (["32", "64"], ["64", "32"])
    assert set(rows[0]) == {
        *("values", "verdict", "reasons", "rests_on", "device_bytes", "host_bytes", "step_s", "tokens_per_s"),
        "dollars_per_billion_tokens",
    }
    with pytest.raises(RefusedError, match="hardware is given twice"):
        compare_plans(recipe, ["hardware=1x4090,2x4090"], "1x4090", None, tell=quiet)


@pytest.mark.parametrize(
    ("words", "machine", "word", "rests_on"),
    [
        ("qwen3-32b", "1x3090,host_memory_gib=48", "SLOW", {"disk_gb_per_s": "1"}),
        ("llama3.3-70b dtype=float32", "1x3090", "SLOW", {"disk_gb_per_s": "1", "host_memory_gib": "128"}),
        ("qwen3-32b method=full", "1x3090", "DOES NOT FIT", {"host_memory_gib": "128"}),
        ("qwen3-8b method=full", "8xh100,host_memory_gib=999", "SLOW", {"host_memory_gb_per_s": "100"}),
        ("qwen3-8b method=full", "4x4090:pcie_lanes=1", "SLOW", {"pcie_gb_per_s": "1.56"}),
        ("qwen3-8b method=full", "4x4090:pcie_gb_per_s=1", "SLOW", {}),
        ("qwen3-8b", "1x4090", "FITS", {}),
    ],
)
def test_a_verdict_names_the_assumed_figures_that_it_rests_on(
    words: str, machine: str, word: str, rests_on: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: SLOW by a disk of 1 GB/s, which only the notes below called assumed."""
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)
    recipe, *overrides = words.split()
    plan = make_plan(load_recipe(recipe, overrides), machine)
    summary, document = summary_of(plan), plan_document(plan, None)
    text = " ".join(summary.reasons)
    assert (document["verdict"], document["verdict_reasons"]) == (word, list(summary.reasons))
    assert document["verdict_rests_on"].keys() == rests_on.keys()
    assert all(f"{figure}: set {option}=" in text for option, figure in document["verdict_rests_on"].items())
    assert summary.word == word and text.count("ASSUMED") == len(rests_on)
    for option, value in rests_on.items():
        assert re.search(rf"ASSUMED {value} G\w+(/s)?: set {option}=", text), text
        given = f"{machine}:{option}={value}" if option.startswith("pcie") else f"{machine},{option}={value}"
        again = summary_of(make_plan(load_recipe(recipe, overrides), given))
        assert again.word == word and f"set {option}=" not in " ".join(again.reasons), "the same figure, given"


def test_a_price_gives_costs_of_the_run_and_a_billion_tokens(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*STAGES, "hardware=1x4090,price=0.5,2x4090"]
    first, second = sorted(compare_plans(recipe, words, None, None, tell=quiet), key=lambda row: str(row.values))
    assert first.plan is not None and second.plan is not None and first.values["hardware"] == "1x4090,price=0.5"
    dollars = 0.5 / 3600 * 1e9 / first.plan.tokens_per_s
    assert row_document(first)["dollars_per_billion_tokens"] == pytest.approx(dollars)
    assert row_document(second)["dollars_per_billion_tokens"] is None
    heading, *lines = comparison_lines([first, second])
    assert heading.endswith("$/B tokens") and lines[0].endswith(f" {dollars:,.0f}") and lines[1].endswith(" -")
    show_comparison(recipe, words, None, price=2.0, as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["dollars_per_billion_tokens"] * row["tokens_per_s"] == pytest.approx(2 / 3600 * 1e9) for row in rows)
    plan = priced(first.plan, None)
    predicted = plan_document(plan, None)["predicted"]
    assert predicted["dollars_of_run"] == pytest.approx(0.5 / 3600 * predicted["run_s"])
    assert predicted["dollars_per_billion_tokens"] == pytest.approx(dollars)
    said = f"  cost            ${predicted['dollars_of_run']:,.2f} for the run, ${dollars:,.0f} for a billion tokens"
    assert f"{said}, at $0.5 an hour" in verdict_lines(plan)
    assert any(line.endswith("at $2 an hour") for line in verdict_lines(priced(plan, 2.0))), "it was $2.0"
    assert not any("cost " in line for line in verdict_lines(second.plan))
