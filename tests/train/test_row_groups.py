"""How a step's rows are put into microbatches: the loss is that of the rows one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.e2e import finetune, make_model, make_workspace, metrics, run

TOLERANCE = 1e-5
"""Relative, of a loss in float32 without dropout."""
STEP_ROWS = 8
PLAIN = {"num_train_epochs": 2, "lora__dropout": 0.0, "save_steps": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=2)


def write_uneven_rows(path: Path, num_rows: int = 20) -> None:
    """Rows of 20 to 120 tokens, in no order of length."""
    lengths = [7 * index % num_rows * 5 + 1 for index in range(num_rows)]
    rows = [{"prompt": f"Say {index}: ", "completion": "x" * length} for index, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def workspace(folder: Path, model: Path, **changes: Any) -> Path:
    make_workspace(folder, model, **{"max_seq_length": 128, **PLAIN, **changes})
    write_uneven_rows(folder / "rows.jsonl")
    return folder


def row_sets(folder: Path) -> list[list[int]]:
    return [sorted(json.loads(line)["rows"]) for line in (folder / "rows.log").read_text().splitlines()]


def trained(folder: Path, *words: str) -> tuple[list[float], list[list[int]]]:
    """Losses and rows of a run's steps."""
    finetune(folder, *words, environment={"ROUNDPIPE_ROW_LOG": "rows.log"}).expect(0)
    return [row["loss"] for row in metrics(folder / "out")], row_sets(folder)


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[list[float], list[list[int]]]:
    folder = workspace(tmp_path_factory.mktemp("one"), model, micro_batch_size=1, gradient_accumulation_steps=STEP_ROWS)
    return trained(folder)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_rows_of_like_length_meet_and_the_loss_stays(
    tmp_path: Path, model: Path, one_by_one: tuple[list[float], list[list[int]]], size: int
) -> None:
    folder = workspace(tmp_path, model, micro_batch_size=size, gradient_accumulation_steps=STEP_ROWS // size)
    losses, rows = trained(folder)
    assert rows == one_by_one[1], "the rows of each step are those that they were"
    assert losses == pytest.approx(one_by_one[0], rel=TOLERANCE)


# --- packing: auto ----------------------------------------------------------------------------------------------------


def resolved(folder: Path) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load((folder / "out" / "recipe.yaml").read_text())
    return recipe


def test_auto_packs_short_rows_and_a_resumed_run_keeps_to_it(tmp_path: Path, model: Path) -> None:
    shape = {"max_seq_length": 256, "micro_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 4}
    whole = workspace(tmp_path / "whole", model, packing=True, **shape)
    finetune(whole).expect(0)
    folder = workspace(tmp_path / "auto", model, packing="auto", **shape)
    done = finetune(folder, "max_steps=2").expect(0)
    assert "packing (auto): on: rows have" in done.err and "packing: 20 rows in" in done.err
    assert resolved(folder)["packing"] is True
    again = finetune(folder, "--resume").expect(0)
    assert "packing (auto)" not in again.err, "decided once"
    rows = [row["tokens"] for row in metrics(folder / "out")]
    assert rows == [row["tokens"] for row in metrics(whole / "out")] and len(rows) == 4


def test_auto_does_not_pack_long_rows_nor_where_rows_would_mix(tmp_path: Path, model: Path) -> None:
    folder = workspace(tmp_path / "long", model, packing="auto", max_steps=1)
    assert "packing (auto): off: rows have" in finetune(folder).expect(0).err
    assert resolved(folder)["packing"] is False
    bloom = make_model(tmp_path / "b" / "model", "bloom", num_hidden_layers=2)
    other = workspace(tmp_path / "bloom", bloom, packing="auto", max_steps=1, max_seq_length=256)
    done = finetune(other).expect(0)
    assert "packing (auto): off: this model cannot train on packed rows: they would see each other" in done.err
    assert resolved(other)["packing"] is False


def test_data_and_plan_say_what_auto_does(tmp_path: Path, model: Path) -> None:
    folder = workspace(tmp_path, model, packing="auto", max_seq_length=256, max_steps=2)
    assert "packing (auto): on: rows have" in run(folder, "data", "recipe.yaml").expect(0).out
    document = json.loads(run(folder, "data", "recipe.yaml", "--json").expect(0).out)
    assert document["packing"]["auto"]["packs"] is True
    assert "packing (auto): short rows will be packed" in run(folder, "plan", "recipe.yaml", "-v").expect(0).out
