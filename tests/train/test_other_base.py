"""An adapter belongs to the base model that it was trained on: another one is refused unless it is meant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.fingerprint import Fingerprint
from roundpipe_cli.model.trained_on import TrainedOn, check_trained_on, trained_on
from tests.support.e2e import STAGES, edit_json, finetune, make_model, make_workspace, run

ADAPTER = "adapter_model.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished LoRA run in `out`; `model` is its base, `other` one of the same shape."""
    folder = tmp_path_factory.mktemp("other-base")
    work = make_workspace(folder / "work", make_model(folder / "tiny"), **STAGES)
    make_model(work / "other", seed=1)
    finetune(work, "max_steps=1").expect(0)
    return work


@pytest.mark.parametrize(
    "words",
    [
        ("export", "out", "--merge", "--to", "merged", "--base", "other"),
        ("generate", "out", "one", "--max-new-tokens", "2", "--base", "other"),
        ("finetune", "recipe.yaml", "lora.start_from=out", "output_dir=next", "max_steps=1", "model=other"),
    ],
    ids=lambda words: words[0],
)
def test_another_base_is_refused_unless_it_is_meant(trained: Path, words: tuple[str, ...]) -> None:
    """Story: weights of another model were merged, exit 0, without a word."""
    refused = run(trained, *words).expect(2)
    assert "trained on another base model" in refused.err and "--allow-other-base" in refused.err
    assert words[0] != "export" or not (trained / "merged").exists()
    done = run(trained, *words, "--allow-other-base").expect(0)
    assert "was trained on a base model of other weights than" in done.err


def test_the_fingerprint_goes_with_a_copy_of_the_adapter(trained: Path) -> None:
    run(trained, "export", "out", "--to", "copy").expect(0)
    found = trained_on(trained / "copy")
    assert found is not None and found.weights == Fingerprint(ModelSource("model", trained / "model")).result()
    assert "another base model" in run(trained, "generate", "copy", "x", "--base", "other").expect(2).err
    own = run(trained, "export", "copy", "--merge", "--to", "own", "--base", "model").expect(0)
    assert "base model of other" not in own.err


def test_another_config_json_is_another_base(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "model", tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", rms_norm_eps=0.1)
    source = ModelSource("model", tmp_path / "model")
    with pytest.raises(RefusedError, match="another base model") as caught:
        check_trained_on(trained / "out", source, allowed=False, weights=Fingerprint(source).result, where="w")
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("commit", "text"), [(COMMIT, None), (COMMIT[::-1], "other weights"), (None, "they were not compared")]
)
def test_commits_are_compared_with_commits(tmp_path: Path, commit: str | None, text: str | None) -> None:
    """Of a hub model the commit is the fingerprint; local files of it cannot be told apart from others'."""
    config = {"peft_type": "LORA", "r": 4, "revision": COMMIT}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / ADAPTER)
    assert trained_on(tmp_path) == TrainedOn(COMMIT, "")
    source = ModelSource("me/model", tmp_path, commit=commit)
    found = check_trained_on(tmp_path, source, allowed=True, weights=lambda: commit or "", where="w")
    assert (found is None) == (text is None) and (text or "") in (found or "")
