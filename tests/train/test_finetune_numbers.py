"""NaN, infinity and overflow: a run stops before anything is spoiled, and says where."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.adapters import random_adapter
from tests.support.e2e import STAGES, finetune, make_workspace, metrics, numbers, run

OTHER_STAGES = "pipeline.forward_stages=[[0,1],[2,3]]", "pipeline.backward_stages=[[4,4],[3,3],[1,2],[0,0]]"


FAULTS = (
    "optimizer:nan:step=3",
    "compute:inf:step=3:nth=1",  # a forward
    "compute:nan:step=3:nth=7",  # a recompute or backward; what comes after may be of the embedding, untrained here
)


def test_not_finite_stops_before_the_update(tmp_path: Path, folder: Path, model: Path) -> None:
    """Each time that the step is tried again, and then it goes on to the same bits."""
    whole = make_workspace(tmp_path / "whole", model, **STAGES)
    finetune(whole, "max_steps=4", environment={"ROUNDPIPE_ROW_LOG": "rows.log"}).expect(0)
    out = folder / "out"
    rows = json.loads((whole / "rows.log").read_text().splitlines()[3])["rows"]
    lines = sorted(row + 1 for row in rows)
    resume: tuple[str, ...] = ()
    for fault in FAULTS:
        done = finetune(folder, "max_steps=4", *OTHER_STAGES, *resume, fault=fault).expect(4)
        assert "error: step 4: the" in done.err and "is not finite: stopped before the update" in done.err, fault
        assert sorted(int(line) for line in re.findall(r"rows\.jsonl:(\d+)", done.err)) == lines, "those of step 4"
        assert len(lines) == 4 and "--resume" in done.err
        assert numbers(out) == numbers(whole / "out")[:3]
        assert sorted(path.name for path in out.glob("step-*")) == ["step-00000002"]
        resume = ("--resume",)
    for name in ("masters", "moments"):
        state = load_file(out / "step-00000002" / f"{name}.safetensors")
        assert state and all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
    again = finetune(folder, "max_steps=4", "--resume").expect(0)
    assert "resuming after step 2" in again.err
    assert numbers(out) == numbers(whole / "out")


def test_float16_overflow_skips_and_halves_the_scale(folder: Path) -> None:
    """A head so steep that the scaled gradient leaves float16: halved until it fits, and the loss falls. That the scale
    is restored: tests/train/test_finetune_resume.py."""
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] *= 10
    save_file(weights, path, metadata={"format": "pt"})
    done = finetune(folder, "dtype=float16", "max_steps=6", "lora.dropout=0").expect(0)
    skipped = done.err.count("gradient overflow, update skipped")
    rows = metrics(folder / "out")
    assert 0 < skipped < 4 and sum(row["grad_norm"] is None for row in rows) == skipped
    state = json.loads((folder / "out" / "step-00000006" / "state.json").read_text())["meta"]
    assert state["loss_scale"] == 2.0 ** (16 - skipped) and state["num_updates"] == 6 - skipped
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_weights_beyond_float16_are_not_written(folder: Path) -> None:
    """Story: `export --dtype float16` wrote them as infinities. That they are not trained: test_weights_io.py."""
    path, name = folder / "model" / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(path)
    weights[name][3, 3] = 1e5
    save_file(weights, path, metadata={"format": "pt"})
    random_adapter(folder / "model", folder / "adapter")
    words = ("export", "adapter", "--base", "model", "--merge", "--to", "half", "--dtype", "float16")
    refused = run(folder, *words).expect(2)
    assert name in refused.err and "overflows in float16" in refused.err
    assert not (folder / "half").exists()
