"""A result from any checkpoint: a stopped run is exported and answers, and its page says how to load it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import site
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli.train.result.gguf_file import write_gguf
from roundpipe_cli.train.result.gguf_types import GGUF_NAME
from tests.support.e2e import STAGES, finetune, launch, make_model, make_workspace, run
from tests.support.tiny import logits_of

ADAPTER = "adapter_model.safetensors"
OTHERS = ("README.md", "adapter_config.json")
"""Files that say the run's figures, and a set of names in any order."""


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model that the last Python lines of the folder's README make, in float32."""
    monkeypatch.chdir(folder)
    values: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[-1], values)
    return values["model"].float().eval()


METHODS: dict[str, dict[str, Any]] = {
    "lora": {"lora__use_dora": True, "dtype": "bfloat16"},
    "full": {"method": "full", "frozen_parameters": ["embed_tokens", "layers.0"], "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    """Of each of `METHODS` the folder of a finished run of two steps, with two checkpoints."""
    works = {name: tmp_path_factory.mktemp("run") / "work" for name in METHODS}
    for name, changes in METHODS.items():
        finetune(make_workspace(works[name], model, max_steps=2, save_steps=1, **STAGES, **changes)).expect(0)
    return works


@pytest.fixture
def work(tmp_path: Path, trained: dict[str, Path], method: str) -> Path:
    """A copy of a finished run."""
    return shutil.copytree(trained[method], tmp_path / "work")


@pytest.mark.parametrize("method", METHODS)
def test_the_last_checkpoint_gives_the_result(trained: dict[str, Path], method: str) -> None:
    """Byte for byte, from the folder's own name and from a short one; the checkpoint stays as it is."""
    work = trained[method]
    run(work, "export", "out").expect(0)
    before = sorted(path.name for path in (work / "out" / "step-00000002").iterdir())
    done = run(work, "export", "out/step-2").expect(0)
    assert done.out.strip() == "out/exported-step-00000002" and "step 2" in done.err
    expected, found = work / "out" / "exported", work / "out" / "exported-step-00000002"
    assert sorted(path.name for path in expected.iterdir()) == sorted(path.name for path in found.iterdir())
    for path in expected.iterdir():
        assert path.name in OTHERS or path.read_bytes() == (found / path.name).read_bytes(), path.name
    if method == "lora":
        first, second = (json.loads((folder / OTHERS[1]).read_text()) for folder in (expected, found))
        assert {**first, "target_modules": 0} == {**second, "target_modules": 0}
    assert sorted(path.name for path in (work / "out" / "step-00000002").iterdir()) == before
    assert not list((work / "out").glob(".tmp-*"))


def test_a_stopped_run_is_exported_and_answers(tmp_path: Path, model: Path) -> None:
    """Story: a run of days that was stopped had no result: `export` and `generate` refused its folder."""
    work = make_workspace(tmp_path / "work", model, num_train_epochs=200, save_steps=1000, **STAGES)
    running = launch(work, "finetune", "recipe.yaml", "--no-dashboard")
    running.wait_for_steps(1)
    running.kill(signal.SIGINT)
    done = running.finish().expect(130)
    assert "`roundpipe generate out` tries it" in done.err.splitlines()[-1]
    step = next(path.name for path in (work / "out").glob("step-*"))
    answer = run(work, "generate", "out", "Say 1", "--max-new-tokens", "4", "--json").expect(0)
    assert json.loads(answer.out)["tokens"] > 0 and "taking the checkpoint of step" in answer.err
    run(work, "export", "out", "--to", "whole", "--merge").expect(0)
    assert step in (work / "whole" / "README.md").read_text()
    assert not list((work / "out").glob(".tmp-*"))


@pytest.mark.parametrize("method", ["lora"])
def test_damage_is_passed_over_or_told(work: Path) -> None:
    out = work / "out"
    for name in ("adapter_config.json", "report.json"):  # as a run that was stopped
        (out / name).unlink()
    weights = out / "step-00000002" / "masters.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    done = run(work, "export", "out", "--to", "first").expect(0)
    assert "step-00000002 is damaged" in done.err and "taking the checkpoint of step 1" in done.err
    assert "no valid checkpoint" in run(work, "export", "out/step-2", "--to", "x").expect(6).err
    for folder in out.glob("step-*"):
        (folder / "state.json").write_text("{")
    refused = run(work, "export", "out", "--to", "x").expect(2)
    assert "checkpoints that cannot be read" in refused.err
    assert "no such folder" in run(work, "export", "out/step-9", "--to", "x").expect(2).err


@pytest.mark.parametrize("method", ["full"])
def test_a_moved_base_is_named(work: Path) -> None:
    """Another base than the one that was trained is refused where its weights are part of the result."""
    (work / "model").rename(work / "moved")
    assert "not to be found" in run(work, "export", "out/step-2", "--to", "x").expect(2).err
    run(work, "export", "out/step-2", "--base", "moved", "--to", "y").expect(0)
    make_model(work / "other", seed=1)
    refused = run(work, "export", "out/step-2", "--base", "other", "--to", "x").expect(2)
    assert "this is another one" in refused.err


@pytest.mark.parametrize(
    ("kind", "method"),
    [("folder", "lora"), pytest.param("folder", "full", marks=pytest.mark.sweep), ("package", "lora")],
)
def test_the_page_of_a_result_loads_it(work: Path, kind: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: `AutoPeftModelForCausalLM` found no base of an adapter on a GGUF file or a relative path."""
    start = partial(site.addsitedir, str(work))
    if kind != "folder":
        shutil.rmtree(work / "out")
        (work / "carrier").mkdir()
        (work / "carrier" / "__init__.py").touch()
        write_gguf(work / "model", "f32")[0].rename(work / "carrier" / GGUF_NAME)
        words = ("finetune", "recipe.yaml", "model=package:carrier", "max_steps=1")
        launch(work, *words, before=start).finish().expect(0)
        monkeypatch.syspath_prepend(work)
    launch(work, "export", "out", "--to", "copy", before=start).finish().expect(0)
    first = logits_of(loaded(work / "out", monkeypatch))
    second = logits_of(loaded(work / "copy", monkeypatch))
    assert torch.equal(first, second)
    if method == "lora":
        monkeypatch.chdir(work)
        launch(work, "export", "out", "--merge", "--to", "merged", before=start).finish().expect(0)
        merged = logits_of(loaded(work / "merged", monkeypatch))
        assert torch.allclose(merged, first, atol=0.05 * float(first.abs().max()))
