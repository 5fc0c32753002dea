"""A step of the longest rows before the first one: it changes no bit, and a lack of memory shows there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from roundpipe_cli.data.batching import Grouping
from roundpipe_cli.train.loop import longest_batches
from tests.support.e2e import finetune, make_model, make_workspace, metrics, numbers

FIRST = {"ROUNDPIPE_FAULT": "compute:raise=MemoryError:step=0:nth=1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=2)


def test_the_longest_rows_come_first() -> None:
    lengths = np.array([3, 9, 5, 9, 1, 7], dtype=np.int64)
    assert longest_batches(Grouping(lengths, 2), 4) == [[(1,), (3,)], [(5,), (2,)]]
    assert longest_batches(Grouping(lengths, 4), 8) == [[(1,), (3,), (5,), (2,)], [(0,), (4,)]]
    assert longest_batches(Grouping(lengths, 4), 4) == [[(1,), (3,), (5,), (2,)]]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), marks=pytest.mark.sweep),
        ("max_grad_norm=0",),
        ("method=full", "neftune_noise_alpha=5", "pipeline.schedule=gpipe"),
        ("dtype=float16",),
    ],
    ids=["lora", "early", "full", "float16"],
)
def test_a_run_is_the_same_to_the_bit(tmp_path: Path, model: Path, words: tuple[str, ...]) -> None:
    """Dropout is on, and a layer is updated early where nothing needs the norm."""
    folder = make_workspace(tmp_path / "work", model, num_train_epochs=1)
    plain = finetune(folder, *words, "output_dir=plain", "--no-dashboard").expect(0)
    done = finetune(folder, *words, "check_longest_rows=true", "--no-dashboard").expect(0)
    assert "longest rows" not in plain.err
    assert "the longest rows (48 tokens) fit" in done.err
    assert numbers(folder / "out") == numbers(folder / "plain")
    tensors = [(folder / name / "adapter_model.safetensors") for name in ("out", "plain")]
    if tensors[0].exists():
        assert tensors[0].read_bytes() == tensors[1].read_bytes()


def test_a_lack_of_memory_ends_the_run_before_its_first_step(tmp_path: Path, model: Path) -> None:
    folder = make_workspace(tmp_path / "work", model)
    done = finetune(folder, "check_longest_rows=true", "--no-dashboard", environment=FIRST).expect(5)
    assert "computing a step of the longest rows" in done.err and "out of memory" in done.err
    assert "fit: a step" not in done.err and metrics(folder / "out") == []


def test_on_oom_adapt_has_less_from_the_first_step_on(tmp_path: Path, model: Path) -> None:
    folder = make_workspace(tmp_path / "work", model)
    words = ("check_longest_rows=true", "on_oom=adapt", "--no-dashboard")
    done = finetune(folder, *words, environment=FIRST).expect(0)
    assert "write pipeline.recompute: layer" in done.err and "fit: a step" in done.err
    assert metrics(folder / "out")[0]["segment"] == {"micro_batch_size": 2, "recompute": "layer", "first_step": 1}


def test_it_is_said_where_nothing_is_tried(tmp_path: Path, model: Path) -> None:
    folder = make_workspace(tmp_path / "work", model)
    done = finetune(folder, "check_longest_rows=true", "packing=true", "max_steps=1", "--no-dashboard").expect(0)
    assert "no step is tried before the first one, since packed sequences" in done.err
