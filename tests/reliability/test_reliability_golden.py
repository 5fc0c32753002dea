"""Checkpoints of released formats stay readable: `tests/golden/checkpoint-vN` is one of format version N.

Each holds the step 4 of a run of 6, made by `python -m tests.reliability.test_reliability_golden FOLDER`; the losses
of the uninterrupted run are in `losses.json` beside it. A new format version gets a new folder, and the old ones stay.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.errors import NoCheckpointError
from roundpipe_cli.train.checkpoint.reading import FORMAT_VERSION, Checkpoint, load_newest
from roundpipe_cli.train.checkpoint.resume import check_state
from tests.support.e2e import finetune, make_model, make_workspace, metrics

GOLDEN = Path(__file__).parents[1] / "golden"
RECIPE = {"kernels": "reference", "lora": {"r": 1, "alpha": 2, "dropout": 0.1, "target_modules": ["q_proj"]}}
LIBRARIES = ("--allow-changed", "model", "--allow-changed", "tokenizer")
"""Another release of transformers writes the same weights and tokenizer as other files."""


def versions() -> list[Path]:
    return sorted(GOLDEN.glob("checkpoint-v*"))


def test_there_is_one_of_the_current_version() -> None:
    assert f"checkpoint-v{FORMAT_VERSION}" in [path.name for path in versions()]


@pytest.mark.parametrize("golden", versions(), ids=lambda path: path.name)
def test_an_old_checkpoint_goes_on_to_the_stored_losses(golden: Path, tmp_path: Path) -> None:
    work = make_workspace(tmp_path / "work", make_model(tmp_path / "model"), **RECIPE)
    shutil.copytree(golden / "out", work / "out")
    warnings: list[str] = []
    assert load_newest(work / "out", warn=warnings.append).step == 4 and not warnings
    refused = finetune(work, "--resume", *LIBRARIES, "kernels=auto").expect(2)  # a run keeps the code that it began by
    assert 'kernels: changed since the checkpoint was written\n  found: "auto"\n  expected: "reference"' in refused.err
    finetune(work, "--resume", *LIBRARIES).expect(0)
    losses = {row["step"]: row["loss"] for row in metrics(work / "out")}
    expected = json.loads((golden / "losses.json").read_text())
    assert [losses[step] for step in (5, 6)] == pytest.approx([expected["5"], expected["6"]], rel=1e-4)


def test_a_checkpoint_of_a_newer_release(tmp_path: Path) -> None:
    """Exit 6 with both versions; nothing is passed over silently."""
    work = make_workspace(tmp_path / "work", make_model(tmp_path / "model"), **RECIPE)
    shutil.copytree(GOLDEN / f"checkpoint-v{FORMAT_VERSION}" / "out", work / "out")
    path = work / "out" / "step-00000004" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": FORMAT_VERSION + 1}))
    done = finetune(work, "--resume").expect(6)
    assert f"version {FORMAT_VERSION + 1}" in done.err and f"version {FORMAT_VERSION} or older" in done.err


def test_a_state_that_lacks_something(tmp_path: Path) -> None:
    """Every byte is as the manifest says, but another program wrote them: one error, no KeyError."""
    work = _foreign(tmp_path, lambda state: {**state, "meta": {**state["meta"], "recipe": []}})
    done = finetune(work, "--resume", *LIBRARIES).expect(6)
    assert "recipe is no mapping" in done.err
    assert done.err.count("error: ") == 1 and "state.json" in done.err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_steps", [4]), ("recipe.max_steps", {}), ("recipe.num_train_epochs", "x"), ("recipe.packing", 3)),
        *(("skipped_steps", -1), ("fit", {"micro_batch_size": 0, "first_step": 1}), ("fit", [1]), ("loss_scale", None)),
        *(("evaluation.best_step", [1]), ("training_s", 10**400), ("data_position.epoch", True)),
        *(("num_updates", None), ("num_updates", -1), ("loss_scale", "high"), ("data_position", None)),
        ("evaluation", [1]),
        *(("data_position.offset", -1), ("data_position.offset", 2**63)),  # the sampler looked for rows for ever
    ],
)
def test_a_state_with_values_of_other_kinds(key: str, value: Any) -> None:
    """Story: fuzzing found one such value after the other, each a bug of ours."""
    folder = GOLDEN / f"checkpoint-v{FORMAT_VERSION}" / "out" / "step-00000004"
    meta = json.loads((folder / "state.json").read_text())["meta"]
    check_state(Checkpoint(folder, 4, meta, ()))
    part, _, name = key.rpartition(".")
    (meta[part] if part else meta)[name] = value
    with pytest.raises(NoCheckpointError, match=f"found: {key} (has a value that is not accepted|is no mapping)"):
        check_state(Checkpoint(folder, 4, meta, ()))


def test_tensors_of_other_shapes_are_refused_even_where_the_recipe_may_change(tmp_path: Path) -> None:
    work = _foreign(tmp_path, lambda state: state)
    done = finetune(work, "--resume", *LIBRARIES, "--allow-changed", "lora.r", "lora.r=2").expect(6)
    assert "of shape [1, " in done.err and "of shape [2, " in done.err and "masters.safetensors" in done.err
    extra = ("--allow-changed", "lora.target_modules", "lora.target_modules=[k_proj]")
    done = finetune(work, "--resume", *LIBRARIES, *extra).expect(6)
    assert "found:" in done.err and "no tensor" in done.err


def _foreign(tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A run with a checkpoint whose state another program has changed, manifest included."""
    work = make_workspace(tmp_path / "work", make_model(tmp_path / "model"), **RECIPE)
    shutil.copytree(GOLDEN / f"checkpoint-v{FORMAT_VERSION}" / "out", work / "out")
    folder = work / "out" / "step-00000004"
    state = json.dumps(change(json.loads((folder / "state.json").read_text()))).encode()
    (folder / "state.json").write_bytes(state)
    manifest = json.loads((folder / "manifest.json").read_text())
    for record in manifest["files"]:
        if record["name"] == "state.json":
            record |= {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return work


def make(folder: Path) -> None:
    """Write a golden checkpoint of the current format version; `folder` is scratch."""
    work = make_workspace(folder / "work", make_model(folder / "model"), **RECIPE)
    finetune(work).expect(0)
    golden = GOLDEN / f"checkpoint-v{FORMAT_VERSION}"
    (golden / "out").mkdir(parents=True)
    shutil.copytree(work / "out" / "step-00000004", golden / "out" / "step-00000004")
    losses = {row["step"]: row["loss"] for row in metrics(work / "out")}
    (golden / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
