"""NaN, infinity and overflow: a run stops before anything is spoiled, and says where."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.e2e import finetune, make_workspace, metrics, numbers, run

STAGES = "pipeline.forward_stages=[[0,1],[2,3]]", "pipeline.backward_stages=[[4,4],[3,3],[1,2],[0,0]]"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """An uninterrupted run, with a log of its rows."""
    folder = make_workspace(tmp_path_factory.mktemp("whole") / "work", model)
    finetune(folder, environment={"ROUNDPIPE_ROW_LOG": str(folder / "rows.log")}).expect(0)
    return folder


FAULTS = (
    "optimizer:nan:step=3",
    "compute:inf:step=3:nth=1",  # a forward
    "compute:nan:step=3:nth=7",  # a recompute or backward; what comes after may be of the embedding, untrained here
)


def test_not_finite_stops_before_the_update(folder: Path, whole: Path) -> None:
    """Each time that the step is tried again, and then it goes on to the same bits."""
    out = folder / "out"
    rows = json.loads((whole / "rows.log").read_text().splitlines()[3])["rows"]
    lines = sorted(row + 1 for row in rows)
    resume: tuple[str, ...] = ()
    for fault in FAULTS:
        done = finetune(folder, *STAGES, *resume, fault=fault).expect(4)
        assert "error: step 4: the" in done.err and "is not finite: stopped before the update" in done.err, fault
        assert sorted(int(line) for line in re.findall(r"rows\.jsonl:(\d+)", done.err)) == lines, "those of step 4"
        assert len(lines) == 4 and "--resume" in done.err
        assert numbers(out) == numbers(whole / "out")[:3]
        assert sorted(path.name for path in out.glob("step-*")) == ["step-00000002"]
        resume = ("--resume",)
    for name in ("masters", "moments"):
        state = load_file(out / "step-00000002" / f"{name}.safetensors")
        assert state and all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
    again = finetune(folder, "--resume").expect(0)
    assert "resuming after step 2" in again.err
    assert numbers(out) == numbers(whole / "out")


OVERFLOW = "optimizer:inf:step=1"


@pytest.fixture(scope="module")
def overflowed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The results of a run in float16 whose second gradient is infinite."""
    folder = make_workspace(tmp_path_factory.mktemp("overflowed") / "work", model)
    finetune(folder, "dtype=float16", "max_steps=4", fault=OVERFLOW).expect(0)
    return folder / "out"


def test_float16_overflow_skips_and_halves_the_scale(overflowed: Path) -> None:
    """An update whose gradient is infinite is skipped, the scale halved, and training goes on."""
    assert [row["grad_norm"] is None for row in metrics(overflowed)] == [False, True, False, False]
    state = json.loads((overflowed / "step-00000004" / "state.json").read_text())["meta"]
    assert state["loss_scale"] == 2.0**15 and state["num_updates"] == 3


def test_real_float16_overflow(folder: Path) -> None:
    """A head so steep that the scaled gradient leaves float16: halved until it fits, and the loss falls."""
    from safetensors.torch import save_file

    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] *= 300
    save_file(weights, path, metadata={"format": "pt"})
    done = finetune(folder, "dtype=float16", "max_steps=12", "lora.dropout=0", "save_steps=12").expect(0)
    skipped = done.err.count("gradient overflow, update skipped")
    rows = metrics(folder / "out")
    assert 0 < skipped < 9 and sum(row["grad_norm"] is None for row in rows) == skipped
    state = json.loads((folder / "out" / "step-00000012" / "state.json").read_text())["meta"]
    assert state["loss_scale"] == 2.0 ** (16 - skipped) and state["num_updates"] == 12 - skipped
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_weights_beyond_float16_are_refused_when_they_load(folder: Path) -> None:
    """Story: `the loss is not finite ... look at these rows, or lower learning_rate`, for weights that are infinite in
    this type; and `export --dtype float16` wrote them as infinities."""
    from safetensors.torch import save_file

    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 3] = 1e5
    save_file(weights, path, metadata={"format": "pt"})
    refused = finetune(folder, "dtype=float16").expect(2)
    assert name in refused.err and "dtype=bfloat16" in refused.err and "learning_rate" not in refused.err
    finetune(folder, "max_steps=1").expect(0)
    words = ("export", "out", "--merge", "--to")
    refused = run(folder, *words, "half", "--dtype", "float16").expect(2)
    assert name in refused.err and "overflows in float16" in refused.err
    assert not (folder / "half").exists()
    run(folder, *words, "whole", "--dtype", "bfloat16").expect(0)


def test_float16_overflow_and_resume_give_the_same_bits(folder: Path, overflowed: Path) -> None:
    faults, words = f"{OVERFLOW},optimizer:kill:step=3", ("dtype=float16", "max_steps=4")
    assert finetune(folder, *words, fault=faults).code == -9
    finetune(folder, *words, "--resume").expect(0)
    assert numbers(folder / "out") == numbers(overflowed)


def test_out_of_host_memory_is_exit_5(folder: Path) -> None:
    done = finetune(folder, fault="compute:raise=MemoryError:step=1").expect(5)
    assert "out of memory on a worker" in done.err and "micro_batch_size" in done.err
    done = finetune(folder, "--resume", fault="export:raise=MemoryError")
    assert done.code == 6  # step 1 was not saved: save_steps is 2
    done = finetune(folder, "max_steps=2", fault="export:raise=MemoryError").expect(5)
    assert "out of host memory" in done.err
    finetune(folder, "--resume", "max_steps=2").expect(0)
