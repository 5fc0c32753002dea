"""How a step's rows are put into microbatches: the loss is that of the rows one by one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.e2e import STAGES_OF_TWO, finetune, make_workspace, metrics, run

TOLERANCE = 1e-5
"""Relative, of a loss in float32 without dropout."""
STEP_ROWS = 8
PLAIN = {"num_train_epochs": 1, "lora__dropout": 0.0, "save_steps": 1}


def write_uneven_rows(path: Path, num_rows: int = 20) -> None:
    """Rows of 20 to 120 tokens, in no order of length."""
    lengths = [7 * index % num_rows * 5 + 1 for index in range(num_rows)]
    rows = [{"prompt": f"Say {index}: ", "completion": "x" * length} for index, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def workspace(folder: Path, two_blocks: Path, **changes: Any) -> Path:
    make_workspace(folder, two_blocks, **{"max_seq_length": 128, **PLAIN, **changes})
    write_uneven_rows(folder / "rows.jsonl")
    return folder


def trained(folder: Path) -> tuple[list[float], list[list[int]]]:
    """Losses and rows of a run's steps."""
    stages = (f"{key.replace('__', '.')}={value}" for key, value in STAGES_OF_TWO.items())
    finetune(folder, *stages, environment={"ROUNDPIPE_ROW_LOG": "rows.log"}).expect(0)
    rows = [sorted(json.loads(line)["rows"]) for line in (folder / "rows.log").read_text().splitlines()]
    return [row["loss"] for row in metrics(folder / "out")], rows


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory, two_blocks: Path) -> tuple[list[float], list[list[int]]]:
    folder = workspace(
        tmp_path_factory.mktemp("one"), two_blocks, micro_batch_size=1, gradient_accumulation_steps=STEP_ROWS
    )
    return trained(folder)


BY_TOKENS = {"micro_batch_size": 1, "gradient_accumulation_steps": STEP_ROWS}


def test_any_microbatches_keep_rows_and_loss(
    tmp_path: Path, two_blocks: Path, one_by_one: tuple[list[float], list[list[int]]]
) -> None:
    """Of rows of like length, or packed ones filled by tokens; those that run out of memory do the same, see below."""
    packed = {"packing": True, "micro_batch_size": 1, "gradient_accumulation_steps": 4}
    packed_alone = trained(workspace(tmp_path / "alone", two_blocks, **packed))
    for name, (expected, expected_rows), shape in (
        ("like", one_by_one, {"micro_batch_size": 8, "gradient_accumulation_steps": 1}),
        ("packed", packed_alone, {**packed, "micro_batch_tokens": 1024}),
    ):
        losses, rows = trained(workspace(tmp_path / name, two_blocks, **shape))
        assert rows == expected_rows, "the rows of each step are those that they were"
        assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_auto_is_resolved_once_whatever_the_number_of_workers(tmp_path: Path, two_blocks: Path) -> None:
    shape = {**BY_TOKENS, "micro_batch_tokens": "auto"}
    found = []
    for count in (1, 3):
        folder = workspace(tmp_path / str(count), two_blocks, pipeline__devices=["cpu"] * count, max_steps=1, **shape)
        done = finetune(folder).expect(0)
        assert "micro_batch_tokens=256: 2 rows of 128, for processors, whatever the number of workers" in done.err
        found.append((resolved(folder)["micro_batch_tokens"], [row["loss_hex"] for row in metrics(folder / "out")]))
    assert found[0] == found[1] and found[0][0] == 256
    again = finetune(folder, "--resume", "max_steps=2").expect(0)
    assert "micro_batch_tokens=256: " not in again.err, "decided once"
    assert resolved(folder)["micro_batch_tokens"] == 256
    changed = finetune(folder, "--resume", "max_steps=3", "micro_batch_tokens=512").expect(2)
    assert "micro_batch_tokens: changed" in changed.err


def test_short_rows_keep_several_workers_busy(tmp_path: Path, two_blocks: Path) -> None:
    """The budget joined all rows of a step into one microbatch, and all workers but one had nothing to do."""
    shape = {**BY_TOKENS, "micro_batch_tokens": "auto"}
    folder = workspace(tmp_path, two_blocks, pipeline__devices=["cpu"] * 3, max_steps=1, **shape)
    rows = [{"prompt": "Say ", "completion": "x" * (1 + index % 3)} for index in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said = " ".join(finetune(folder).expect(0).err.split())
    assert "a step has 4 microbatches for 3 workers, which will wait " in said
    assert re.search(r"predicted: .* for 1 step \(40 rows an epoch\), each \d+ tokens in 4 microbatches", said)
    remedy = ["micro_batch_tokens=null", "micro_batch_size=1", "gradient_accumulation_steps=12"]
    assert f"{' '.join(remedy)} makes them wait less, with 12 rows a step in place of 8" in said
    again = finetune(folder, *remedy, "output_dir=again").expect(0)
    assert "which will wait" not in again.err


def test_a_device_that_runs_out_of_memory_gets_smaller_microbatches(
    tmp_path: Path, two_blocks: Path, one_by_one: tuple[list[float], list[list[int]]]
) -> None:
    shape = {**BY_TOKENS, "micro_batch_tokens": 512}
    folder = workspace(tmp_path / "adapts", two_blocks, **shape)
    twice = ",".join(f"compute:raise=MemoryError:step=1:nth={count}" for count in (1, 2))
    done = finetune(folder, "on_oom=adapt", fault=twice).expect(0)
    assert "write micro_batch_tokens: 256, pipeline.recompute: layer" in done.err
    adapted = [row["loss"] for row in metrics(folder / "out")]
    assert adapted == pytest.approx(one_by_one[0], rel=TOLERANCE)


# --- packing: auto ----------------------------------------------------------------------------------------------------


def resolved(folder: Path) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load((folder / "out" / "recipe.yaml").read_text())
    return recipe


def test_auto_packs_short_rows_and_a_resumed_run_keeps_to_it(tmp_path: Path, two_blocks: Path) -> None:
    shape = {"max_seq_length": 256, "micro_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2}
    folder = workspace(tmp_path / "auto", two_blocks, packing="auto", **shape)
    done = finetune(folder, "max_steps=1").expect(0)
    assert "packing (auto): on: rows have" in done.err and "packing: 20 rows in" in done.err
    assert resolved(folder)["packing"] is True
    again = finetune(folder, "--resume").expect(0)
    assert "packing (auto)" not in again.err, "decided once"
    tokens = [row["tokens"] for row in metrics(folder / "out")]
    assert len(tokens) == 2 and min(tokens) > 2 * 120, "two rows that are not packed have fewer"
    for words in ("data recipe.yaml", "plan recipe.yaml -v max_seq_length=512"):
        assert "packing (auto): on: rows have" in run(folder, *words.split()).expect(0).out


def test_a_resumed_run_keeps_its_number_of_chunks(tmp_path: Path, two_blocks: Path) -> None:
    """Which decides the last bits, and is written down, as `auto` is where whole rows fit."""
    shape = {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2, "packing": "auto"}
    folder = workspace(tmp_path / "chunks", two_blocks, micro_batch_tokens="auto", **shape)
    finetune(folder, "max_steps=1", "pipeline.sequence_chunks=2").expect(0)
    finetune(folder, "--resume").expect(0)
    recipe = resolved(folder)
    assert (recipe["pipeline"]["sequence_chunks"], recipe["micro_batch_tokens"]) == (2, None)
    finetune(folder, "max_steps=1", f"output_dir={tmp_path / 'whole'}").expect(0)
    assert yaml.safe_load((tmp_path / "whole" / "recipe.yaml").read_text())["pipeline"]["sequence_chunks"] == 1
