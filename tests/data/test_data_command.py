"""`roundpipe data`: the report, its samples with and without colours, and its JSON."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_cli.data.describe import fill_with_packing, histogram
from roundpipe_cli.data.tokenized import RowMix
from tests.cli.test_terminal_text import on_a_terminal, said
from tests.data.test_data_dataset import write_rows
from tests.support.e2e import edit_json, make_model, make_workspace

ROWS: list[Any] = [
    *({"prompt": "Say one", "completion": "1"}, {"prompt": "x" * 300, "completion": "beyond the cut"}),
    *({"prompt": "no answer"}, {"prompt": "Say \x1b[31mtwo", "completion": "2 " * 60}),
    {"prompt": "Say three", "completion": "3"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("data")
    folder = make_workspace(base / "work", make_model(base / "model"), max_seq_length=128, on_bad_row="skip")
    write_rows(folder / "rows.jsonl", ROWS)
    for weights in (folder / "model").glob("*.safetensors"):
        weights.unlink()  # the command must not need them
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def test_lengths_of_few_rows_have_a_bar_too(here: Path) -> None:
    write_rows(here / "many.jsonl", [*[ROWS[0]] * 99, ROWS[3]])
    out, _ = said("data", "recipe.yaml", "datasets[0].path=many.jsonl")
    bars = re.findall(r"(?m)^ +\d+ to +\d+  (#*) *(\d+)$", out)
    assert [int(rows) for bar, rows in bars if bar] == [99, 1]


def test_json_has_everything(here: Path) -> None:
    document = json.loads(said("data", "recipe.yaml", "--json")[0])
    assert document["rows"] == {"read": 5, "kept": 3, "bad": 1, "too_long": 2, "truncated": 2, "untrained": 1}
    dropped = json.loads(said("data", "recipe.yaml", "long_rows=drop", "--json")[0])["rows"]
    assert dropped == {"read": 5, "kept": 2, "bad": 1, "too_long": 2, "truncated": 0, "untrained": 0}
    assert document["packing"]["sequences"] == 2
    trained = sum(sum(label != -100 for label in sample["labels"]) for sample in document["samples"])
    assert document["tokens"] == {"total": 190, "trained": trained, "lost": 362, "trained_share": trained / 190}
    assert sum(entry["rows"] for entry in document["lengths"]["histogram"]) == 3
    first = document["samples"][0]
    assert (first["kind"], first["where"]) == ("first", "rows.jsonl:1")
    assert first["pieces"] == [
        {"text": "<s>[user] Say one</s>[assistant] ", "trained": False, "weight": 0.0},
        {"text": "1</s>", "trained": True, "weight": 1.0},
    ]
    assert [label for label in first["labels"] if label != -100] == first["input_ids"][-2:]
    assert document["sources"][0]["bad_rows"][0]["row"] == 3
    assert document["sources_from_cache"] in (0, 1)
    assert not (here / "out").exists()
    again = json.loads(said("data", "recipe.yaml", "--json")[0])
    assert again["sources_from_cache"] == 1
    assert {**again, "sources_from_cache": 0} == {**document, "sources_from_cache": 0}


@pytest.mark.parametrize("no_color", [False, True])
def test_trained_tokens_are_green_on_a_terminal(folder: Path, no_color: bool) -> None:
    text = on_a_terminal(folder, 100, "data", "recipe.yaml", **({"NO_COLOR": "1"} if no_color else {}))
    assert ("\x1b[32m1</s>\x1b[0m" in text) is not no_color
    assert ("[[1</s>]]" in text) is no_color
    assert "\x1b[31mtwo" not in text and "Say \\x1b[31mtwo" in text, "no row steers the terminal"


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 100_000), min_size=1, max_size=50))
def test_histogram_counts_every_row_in_few_bins(lengths: list[int]) -> None:
    bins = histogram(np.array(lengths))
    assert sum(rows for _, _, rows in bins) == len(lengths)
    assert len(bins) <= 12 and bins[0][0] == 0 and bins[-1][0] <= max(lengths) < bins[-1][1]
    for low, high, rows in bins:
        assert rows == sum(low <= length < high for length in lengths)


def test_sequences_are_filled_by_the_rows_that_an_epoch_has() -> None:
    """By their weights short rows come six times, long ones twice: 60 tokens in one sequence, 100 in two."""
    lengths = np.array([10] * 4 + [100] * 4)
    fill = fill_with_packing(RowMix([4, 4], [3.0, 1.0], 0, shuffle=False), lengths, 100, 0, shuffle=False)
    assert (fill.num_sequences, fill.ratio) == (3, pytest.approx(260 / 300))


def test_refusals_have_their_exit_code(here: Path, tmp_path: Path) -> None:
    assert "1 of 5 rows cannot be used" in said("data", "recipe.yaml", "on_bad_row=error", code=2)[1]
    assert "dataset not found" in said("data", "recipe.yaml", "datasets[0].path=missing.jsonl", code=2)[1]
    edit_json(shutil.copytree(here / "model", tmp_path / "bad") / "config.json", auto_map={"AutoConfig": "evil.Config"})
    assert "auto_map" in said("data", "recipe.yaml", f"model={tmp_path}/bad", code=2)[1]
