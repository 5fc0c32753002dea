"""How a step's rows are put into microbatches: the loss is that of the rows one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e import finetune, make_model, make_workspace, metrics

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
