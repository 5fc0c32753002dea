"""Checkpoints of released formats stay readable: `tests/golden/checkpoint-vN` is one of format version N.

Each holds the step 4 of a run of 6, made by `python -m tests.reliability.test_reliability_golden FOLDER`; the losses
of the uninterrupted run are in `losses.json` beside it. A new format version gets a new folder, and the old ones stay.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli.errors import NoCheckpointError
from roundpipe_cli.train.checkpoint.reading import FORMAT_VERSION, Checkpoint, load_newest
from roundpipe_cli.train.checkpoint.resume import check_state, check_tensors
from tests.support.e2e import edit_json, finetune, make_model, make_workspace, metrics

GOLDEN = Path(__file__).parents[1] / "golden"
CURRENT = GOLDEN / f"checkpoint-v{FORMAT_VERSION}"
RECIPE = {"kernels": "reference", "lora": {"r": 1, "alpha": 2, "dropout": 0.1, "target_modules": ["q_proj"]}}
LIBRARIES = ("--allow-changed", "model", "--allow-changed", "tokenizer")
"""Another release of transformers writes the same weights and tokenizer as other files."""


@pytest.mark.parametrize("golden", sorted({*GOLDEN.glob("checkpoint-v*"), CURRENT}), ids=lambda path: path.name)
def test_an_old_checkpoint_goes_on_to_the_stored_losses(golden: Path, tmp_path: Path) -> None:
    work = make_workspace(tmp_path / "work", make_model(tmp_path / "model"), **RECIPE)
    shutil.copytree(golden / "out", work / "out")
    warnings: list[str] = []
    assert load_newest(work / "out", warn=warnings.append).step == 4 and not warnings
    refused = finetune(work, "--resume", *LIBRARIES, "kernels=auto").expect(2)  # a run keeps the code that it began by
    assert 'kernels: changed since the checkpoint was written\n  found: "auto"\n  expected: "reference"' in refused.err
    other = finetune(work, "--resume", *LIBRARIES, "--allow-changed", "lora.r", "lora.r=2").expect(6)
    assert "of shape [1, " in other.err and "of shape [2, " in other.err and "masters.safetensors" in other.err
    finetune(work, "--resume", *LIBRARIES).expect(0)
    losses = {row["step"]: row["loss"] for row in metrics(work / "out")}
    expected = json.loads((golden / "losses.json").read_text())
    assert [losses[step] for step in (5, 6)] == pytest.approx([expected["5"], expected["6"]], rel=1e-4)


def test_a_checkpoint_of_a_newer_release_or_without_a_tensor(tmp_path: Path) -> None:
    """Exit 6 with both versions, or the name; nothing is passed over silently."""
    out = Path(shutil.copytree(CURRENT / "out", tmp_path / "out"))
    for wanted, found in (
        ({"masters": {"none": torch.ones(1)}}, "no tensor none"),
        ({"x": {"a": torch.ones(1)}}, "no such file"),
    ):
        with pytest.raises(NoCheckpointError, match=found):
            check_tensors(load_newest(out), wanted)
    edit_json(out / "step-00000004" / "manifest.json", format_version=FORMAT_VERSION + 1)
    with pytest.raises(NoCheckpointError, match=f"(?s)version {FORMAT_VERSION + 1}.*version {FORMAT_VERSION} or older"):
        load_newest(out)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_steps", [4]), ("recipe.max_steps", {}), ("recipe.num_train_epochs", "x"), ("recipe.packing", 3)),
        *(("skipped_steps", -1), ("fit", {"micro_batch_size": 0, "first_step": 1}), ("fit", [1]), ("loss_scale", None)),
        *(("evaluation.best_step", [1]), ("training_s", 10**400), ("data_position.epoch", True)),
        *(("num_updates", None), ("num_updates", -1), ("loss_scale", "high"), ("data_position", None)),
        *(("evaluation", [1]), ("recipe", [])),
        *(("data_position.offset", -1), ("data_position.offset", 2**63)),  # the sampler looked for rows for ever
    ],
)
def test_a_state_with_values_of_other_kinds(key: str, value: Any) -> None:
    """Story: fuzzing found one such value after the other, each a bug of ours."""
    folder = CURRENT / "out" / "step-00000004"
    meta = json.loads((folder / "state.json").read_text())["meta"]
    check_state(Checkpoint(folder, 4, meta, {}))
    part, _, name = key.rpartition(".")
    (meta[part] if part else meta)[name] = value
    with pytest.raises(NoCheckpointError, match=f"found: {key} (has a value that is not accepted|is no mapping)"):
        check_state(Checkpoint(folder, 4, meta, {}))


def make(folder: Path) -> None:
    """Write a golden checkpoint of the current format version; `folder` is scratch."""
    work = make_workspace(folder / "work", make_model(folder / "model"), **RECIPE)
    finetune(work).expect(0)
    shutil.copytree(work / "out" / "step-00000004", CURRENT / "out" / "step-00000004")
    losses = {row["step"]: row["loss"] for row in metrics(work / "out")}
    (CURRENT / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
