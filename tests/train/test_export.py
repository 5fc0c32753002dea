"""Export: the merged model is base and adapter together, whole or not at all, of a finished run or any checkpoint."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import site
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from roundpipe_cli.choices import PackedName
from roundpipe_cli.cli.export import find_adapter_base
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.fingerprint import Fingerprint
from roundpipe_cli.model.load import build_skeleton, load_config, load_tokenizer
from roundpipe_cli.model.router_loss import WANTED
from roundpipe_cli.model.stored.formats import find_stored
from roundpipe_cli.model.stored.tensors import OpenFiles
from roundpipe_cli.model.trained_on import TrainedOn, check_trained_on, trained_on
from roundpipe_cli.recipe.load import load_text
from roundpipe_cli.train.checkpoint.resume import may_ask_for_more
from roundpipe_cli.train.prepare.base_files import BaseFiles, read_base_files
from roundpipe_cli.train.result.export import copy_result, merge_result
from roundpipe_cli.train.result.gguf_file import write_gguf
from roundpipe_cli.train.result.gguf_types import GGUF_NAME
from roundpipe_cli.train.result.model_card import model_card
from tests.support.adapters import ADAPTER, load_whole, random_adapter
from tests.support.e2e import (
    STAGES,
    edit_json,
    finetune,
    forked,
    launch,
    make_model,
    make_tokenizer,
    make_workspace,
    run,
)
from tests.support.published import publish
from tests.support.tiny import logits_of, tiny_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"
EXPORTED = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
"""Sizes of whole blocks of FP8."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A finished LoRA run in `out`; `model` is its base, `other` one of the same shape."""
    work = make_workspace(tmp_path_factory.mktemp("export") / "work", model, max_steps=2, **STAGES)
    make_model(work / "other", seed=1)
    finetune(work).expect(0)
    return work


def adapter_of(work: Path) -> Any:
    """A random adapter of all linear layers of the model in `base`; returns PEFT's model."""
    return random_adapter(work / "base", work / "adapter", target_modules="all-linear")


def greedy(model: Any, num_tokens: int = 16) -> list[int]:
    ids = torch.tensor([[5, 80, 90]])
    output = model.generate(input_ids=ids, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    tokens: list[int] = output[0].tolist()
    return tokens


def test_the_merged_model_answers_as_the_adapter_does(trained: Path) -> None:
    done = run(trained, "export", "out", "--merge", "--to", "merged").expect(0)
    assert done.out.strip() == "merged" and "merged 21 modules" in done.err
    adapted = PeftModel.from_pretrained(load_whole(trained / "model"), str(trained / "out"))
    merged = load_whole(trained / "merged")
    assert torch.allclose(logits_of(merged), logits_of(adapted), rtol=1e-5, atol=1e-5)
    assert greedy(merged) == greedy(adapted)
    names = {path.name for path in (trained / "merged").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md", "Modelfile",
    }  # fmt: skip
    assert (
        load_file(trained / "merged" / "model.safetensors").keys()
        == load_file(trained / "model" / "model.safetensors").keys()
    )
    tokenizer = AutoTokenizer.from_pretrained(trained / "merged")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(trained / "out").chat_template


def test_weights_are_rounded_once(tmp_path: Path) -> None:
    """A bfloat16 base stays bfloat16 unless another dtype is asked for; the sum is made in float32."""
    make_model(tmp_path / "base", dtype="bfloat16", num_hidden_layers=2)
    adapted = adapter_of(tmp_path)
    expected = dict(adapted.merge_and_unload().named_parameters())
    for dtype, words in (("bfloat16", ()), ("float32", ("--dtype", "float32"))):
        run(tmp_path, "export", "adapter", "--merge", "--to", dtype, "--base", "base", *words).expect(0)
        state = load_file(tmp_path / dtype / "model.safetensors")
        assert {tensor.dtype for tensor in state.values()} == {getattr(torch, dtype)}
        assert all(torch.equal(tensor, expected[name].to(tensor.dtype)) for name, tensor in state.items())
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == dtype


def merge_and_measure(base: Path, adapter: Path, target: Path) -> int:
    """How many bytes above its base a process of its own has while merging."""
    torch.set_num_threads(1)
    (torch.ones(64, 64) @ torch.ones(64, 64)).sum()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    merge_result(adapter, ModelSource("base", base), target, None, tell=print)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.parametrize(("model_type", "kind"), [("llama", None), ("qwen3_moe", "fp8_blocks"), ("gpt_oss", "mxfp4")])
def test_a_whole_model_in_another_type(tmp_path: Path, model_type: str, kind: PackedName | None) -> None:
    """Rounded once, by shards, as transformers reads it; of a packed one all that its codes say."""
    model = make_model(tmp_path / "out", model_type, **(EXPORTED if kind else {}))
    if kind is not None:
        publish(model, kind)
    expected = {name: weight.read(OpenFiles()) for name, weight in find_stored(model, torch.float32).items()}
    for dtype in ("bfloat16", "float16"):
        exported = run(tmp_path, "export", "out", "--dtype", dtype, "--to", dtype).expect(0)
        assert f"weights in {dtype}" in exported.err and "merged" not in exported.out
        written = load_file(tmp_path / dtype / "model.safetensors")
        own = getattr(torch, dtype)
        assert expected.keys() == written.keys()
        assert all(torch.equal(one, expected[name].to(own)) for name, one in written.items())
        config = json.loads((tmp_path / dtype / "config.json").read_text())
        assert dtype in (config.get("dtype"), config.get("torch_dtype")) and "quantization_config" not in config
        assert load_whole(tmp_path / dtype).dtype == torch.float32  # which asks for it
    done, _ = merge_result(model, None, tmp_path / "cut", "float16", tell=print, max_shard_bytes=100_000)
    num_shards = len(list((tmp_path / "cut").glob("*.safetensors")))
    assert num_shards > 1 and done.endswith(f" in {num_shards} files")
    copy_result(tmp_path / "cut", tmp_path / "copy", print)
    whole = logits_of(load_whole(tmp_path / "float16"))
    assert all(torch.equal(logits_of(load_whole(tmp_path / name)), whole) for name in ("cut", "copy"))


def test_a_type_that_cannot_hold_a_weight_is_refused_by_name(tmp_path: Path) -> None:
    path = make_model(tmp_path / "out") / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 70000.0
    save_file(tensors, path, {"format": "pt"})
    refused = run(tmp_path, "export", "out", "--dtype", "float16", "--to", "narrow").expect(2)
    assert "overflows in float16" in refused.err and "layers.1.mlp.up_proj" in refused.err
    assert not (tmp_path / "narrow").exists()


def test_memory_stays_below_the_largest_shard(tmp_path: Path) -> None:
    """A float32 model of 95 MB in one shard."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    make_model(tmp_path / "base", **sizes)
    adapter_of(tmp_path)
    above = forked(merge_and_measure, *(tmp_path / name for name in ("base", "adapter", "merged")))
    shard = (tmp_path / "merged" / "model.safetensors").stat().st_size
    assert shard > 90e6 and above < 1.3 * shard, f"{above / 1e6:.0f} MB above, shard {shard / 1e6:.0f} MB"


def test_a_kill_leaves_nothing_under_the_name(trained: Path) -> None:
    words = ("export", "out", "--merge", "--to", "killed")
    assert run(trained, *words, environment={"ROUNDPIPE_FAULT": "export:kill:nth=31"}).code == -9
    assert not (trained / "killed").exists()
    run(trained, *words, environment={"ROUNDPIPE_FAULT": "export:raise=OSError"}).expect(5)
    assert not (trained / "killed").exists() and not (trained / ".tmp-killed").exists()
    run(trained, *words).expect(0)


# --- the settings of the base -----------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    **{"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 90], "pad_token_id": 0},
    **{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"},
}
"""generation_config.json as a chat model has it."""


def give_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Give a model folder a generation_config.json, and a config.json as training leaves it; returns the settings."""
    settings = {**SETTINGS, **changes}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    edit_json(folder / "config.json", use_cache=False)
    return settings


def settings_of(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "generation_config.json").read_text())
    return settings


def test_a_merged_model_ends_where_its_base_does(tmp_path: Path) -> None:
    """It had one end token, no sampling defaults and no cache: chat models talked on after their answers."""
    make_model(tmp_path / "base", num_hidden_layers=2)
    adapted = adapter_of(tmp_path)
    long = greedy(adapted)
    settings = give_settings(tmp_path / "base", eos_token_id=[2, long[5]])
    (tmp_path / "base" / "tokenizer.model").write_bytes(b"sentencepiece")
    run(tmp_path, "export", "adapter", "--merge", "--to", "merged", "--base", "base").expect(0)
    assert settings_of(tmp_path / "merged") == settings
    merged = load_whole(tmp_path / "merged")
    assert merged.config.use_cache and merged.generation_config.temperature == 0.6
    assert greedy(merged) == long[: long.index(long[5], 3) + 1]
    assert (tmp_path / "merged" / "tokenizer.model").read_bytes() == b"sentencepiece"
    lines = (tmp_path / "merged" / "Modelfile").read_text().splitlines()
    end = make_tokenizer().convert_ids_to_tokens(long[5])
    values = ['stop "</s>"', f"stop {json.dumps(end, ensure_ascii=False)}", "temperature 0.6", "top_k 20", "top_p 0.95"]
    assert lines[-5:] == [f"PARAMETER {value}" for value in values]


def test_a_whole_result_keeps_the_settings_and_so_does_its_copy(trained: Path, tmp_path: Path) -> None:
    """Also the files that tokenizers of transformers do not save, templates by name, and the best weights."""
    full = {"method": "full", "max_steps": 1, "val_set_size": 2}
    work = make_workspace(tmp_path / "work", trained / "model", **full, **STAGES)
    settings = give_settings(work / "model")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "T" + tokenizer.chat_template}
    tokenizer.save_pretrained(str(work / "model"))
    (work / "model" / "tokenizer.model").write_bytes(b"sentencepiece")
    finetune(work, "load_best_model_at_end=true").expect(0)
    assert run(work, "export", "out").expect(0).out.strip() == "out/exported"
    assert torch.equal(logits_of(load_whole(work / "out" / "exported")), logits_of(load_whole(work / "out")))
    done = run(work, "export", "out", "--merge", "--to", "again", "--json").expect(0)  # the same command for both kinds
    assert json.loads(done.out)["merged"] is False
    assert "nothing to merge" in done.err and (work / "again" / "model.safetensors").is_file()
    for folder in (work / "out", work / "out" / "exported"):
        assert settings_of(folder) == settings
        assert json.loads((folder / "config.json").read_text())["use_cache"] is True
        assert (folder / "tokenizer.model").read_bytes() == b"sentencepiece"
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
        assert (folder / "additional_chat_templates").stat().st_mode & 0o777 == 0o755
    assert not list((work / "out").glob(".tmp-*"))


def test_end_tokens_of_training_are_added_to_the_base_s() -> None:
    """A base model is trained to end its turns with a token at which its own settings do not stop."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ eos_token }}", "<end>")
    files, added = BaseFiles({}, {}, {"eos_token_id": 2, "top_p": 0.9}).ending_as_trained(tokenizer)
    assert added == ["<end>"]
    assert files.generation == {"eos_token_id": [2, len(tokenizer) - 1], "top_p": 0.9}
    same, added = files.ending_as_trained(tokenizer)
    assert same is files and not added
    complete = BaseFiles({}, {}, {"eos_token_id": 2})
    assert complete.ending_as_trained(make_tokenizer())[0].generation == {"eos_token_id": 2}


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        ({}, None, {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}),
        ({"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.3}, None, {"eos_token_id": [2, 7]}),
        ({"do_sample": True, "temperature": 0.3}, None, {"do_sample": True, "temperature": 0.3}),
        ({"temperature": 0.3}, {"eos_token_id": 5, "use_cache": False}, {"eos_token_id": 5, "use_cache": True}),
        ({}, {"do_sample": False, "temperature": 0.3}, {"do_sample": False, "temperature": 0.3}),
    ],
)
def test_the_settings_of_a_base_are_read_as_transformers_reads_them(
    tmp_path: Path, in_config: dict[str, Any], in_generation: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    """A base may have no generation_config.json, or settings in an old config.json, or ones that contradict."""
    config = json.loads(json.dumps(tiny_config("qwen3_moe", output_router_logits=True).to_dict()))
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_cache": False} | in_config))
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    source = ModelSource("base", tmp_path)
    loaded = load_config(source)
    files = read_base_files(source, loaded)
    assert files.generation.items() >= expected.items() and files.generation.get("use_cache") is not False
    made = json.loads(files.contents(build_skeleton(loaded, torch.float32), torch.float32)["config.json"])
    assert made["use_cache"] is True and made["output_router_logits"] is True and WANTED not in made


def test_the_settings_of_a_gguf_base(tmp_path: Path) -> None:
    source = ModelSource("base", make_model(tmp_path), write_gguf(tmp_path, "f32")[0].name)
    files = read_base_files(source, load_config(source))
    files, added = files.ending_as_trained(load_tokenizer(source))
    assert files.generation["eos_token_id"] == 2 and files.config.get("use_cache", True) and not added


def test_what_cannot_be_exported_is_told(trained: Path, tmp_path: Path) -> None:
    assert "--dtype is for whole weights" in run(trained, "export", "out", "--dtype", "float32").expect(2).err
    narrow = str(make_model(tmp_path / "narrow", hidden_size=32))
    done = run(trained, "export", "out", "--merge", "--base", narrow, "--allow-other-base").expect(2)
    assert "does not fit the base model" in done.err and not (trained / "out" / "merged").exists()


# --- an adapter belongs to the base model that it was trained on ------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("export", "out", "--merge", "--to", "of-other", "--base", "other"),
        ("generate", "out", "one", "--max-new-tokens", "2", "--base", "other"),
        ("finetune", "recipe.yaml", "lora.start_from=out", "output_dir=next", "max_steps=1", "model=other"),
    ],
    ids=lambda words: words[0],
)
def test_another_base_is_refused_unless_it_is_meant(trained: Path, words: tuple[str, ...]) -> None:
    """Story: weights of another model were merged, exit 0, without a word."""
    refused = run(trained, *words).expect(2)
    assert "trained on another base model" in refused.err and "--allow-other-base" in refused.err
    assert words[0] != "export" or not (trained / "of-other").exists()
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


# --- a result from any checkpoint -------------------------------------------------------------------------------------

OTHERS = ("README.md", "adapter_config.json")
"""Files that say the run's figures, and a set of names in any order."""


def loaded_by_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
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
def by_method(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    """Of each of `METHODS` the folder of a finished run of two steps, with two checkpoints."""
    works = {name: tmp_path_factory.mktemp("run") / "work" for name in METHODS}
    for name, changes in METHODS.items():
        finetune(make_workspace(works[name], model, max_steps=2, save_steps=1, **STAGES, **changes)).expect(0)
    return works


@pytest.fixture
def work(tmp_path: Path, by_method: dict[str, Path], method: str) -> Path:
    """A copy of a finished run."""
    return shutil.copytree(by_method[method], tmp_path / "work")


@pytest.mark.parametrize("method", METHODS)
def test_the_last_checkpoint_gives_the_result(by_method: dict[str, Path], method: str) -> None:
    """Byte for byte, from the folder's own name and from a short one; the checkpoint stays as it is."""
    work = by_method[method]
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
    first = logits_of(loaded_by_page(work / "out", monkeypatch))
    second = logits_of(loaded_by_page(work / "copy", monkeypatch))
    assert torch.equal(first, second)
    if method == "lora":
        monkeypatch.chdir(work)
        launch(work, "export", "out", "--merge", "--to", "merged", before=start).finish().expect(0)
        merged = logits_of(loaded_by_page(work / "merged", monkeypatch))
        assert torch.allclose(merged, first, atol=0.05 * float(first.abs().max()))


# --- the card quotes what others wrote: it stays one page of text, and names no place of this machine -----------------


def card(folder: Path, base: str | None, report: dict[str, Any], recipe: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return model_card(folder, base=base, merged=False)


def front(text: str) -> Any:
    return yaml.safe_load(text.split("---")[1])


def test_the_card_escapes_what_it_quotes(tmp_path: Path) -> None:
    """A data set's name with a line break and HTML became a section of the page."""
    recipe = {"datasets": [{"path": "a\n# Owned <script>|x|.jsonl", "type": "text", "split": "[a](http://b)"}]}
    recipe |= {"note": "```\n# Owned\n```", "lora": {"target_modules": "q\n---\nlicense: x"}}
    report = {"model": "x/y", "evaluation": {"<b>|loss": 1}, "num_steps": "<img src=x>", "model_commit": "<b>"}
    report["data"] = {"rows_read": 9, "rows_kept": 7, "trained_tokens": 30}
    text = card(tmp_path / "a<b>", "x/y\n# Owned", report, recipe)
    outside, fence = text.split("## Recipe")
    assert "\n# Owned" not in outside and "<script>" not in outside.replace("\\<script\\>", "")
    assert "\\<img" in outside and "[a]" not in outside.replace("\\[a\\]", "") and "commit" not in outside
    assert "7 rows, 30 trained tokens." in outside, "those that were trained"
    assert fence.strip().startswith("````yaml") and fence.strip().endswith("````")
    assert "base_model" not in front(text)


def test_the_card_leaks_no_absolute_path(tmp_path: Path) -> None:
    recipe = {
        "model": "/home/anna/secret-project/base",
        "adapter": "~/secret-project/one",
        "datasets": [{"path": "/mnt/secret-project/rows.jsonl"}, {"path": "C:\\\\secret-project\\\\rows.csv"}],
        "chat_template": "file:///srv/secret-project/t.jinja",
        "eval_datasets": [str(Path("~/secret-project/x.jsonl").expanduser())],
    }
    text = card(tmp_path / "out", "/home/anna/secret-project/base", {"model": recipe["model"]}, recipe)
    assert "secret-project" not in text and "Fine-tuned from base" in text and "rows.jsonl" in text


def test_base_model_is_a_hub_id_or_nothing(tmp_path: Path) -> None:
    """`models/tiny`, a folder, looks like a hub id; so did `package:NAME` and a Windows path."""
    commit = {"model": "org/name", "model_commit": "0123abc"}
    assert front(card(tmp_path / "o", "org/name", commit, {}))["base_model"] == "org/name"
    for base in ("models/tiny", "package:x", "./a/b", "a/b/c", "C:\\\\a", "a b/c", "org/name\n"):
        assert "base_model" not in front(card(tmp_path / "o", base, {"model": base}, {})), base


def test_odd_values_in_a_result_are_no_bug(tmp_path: Path) -> None:
    for odd in (None, 3, "x", [], [[1]], {"a": {"b": []}}):
        keys = ("loss", "evaluation", "data", "num_steps", "model_commit")
        assert card(tmp_path / "o", None, dict.fromkeys(keys, odd), {"datasets": odd, "model": odd})


def test_the_card_says_whether_the_weights_are_the_best(tmp_path: Path) -> None:
    """`evaluation: result_is_best | False` stood beside the last step's own best loss, since no copy of it was kept."""
    figures = {"best_loss": 1.5, "best_step": 8, "result_is_best": False, "stopped_early": False}
    text = card(tmp_path / "o", None, {"num_steps": 8, "evaluation": figures}, {})
    assert "weights are those of the best evaluation, after step 8." in text
    assert "False" not in text and "training loss" not in text, "a figure that is not known has no row"
    text = card(tmp_path / "o", None, {"num_steps": 9, "evaluation": figures}, {})
    assert "weights are not those of the best evaluation, which was after step 8." in text
    assert "| evaluation: best loss | 1.5000 |" in text


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
        "model: 1" + ":0" * 400_000,
        "model: m\nx:\n" + "- 1\n" * 200_000,
        "model: " + "[" * 5000,
    ],
    ids=["merged keys", "a number to the base of 60", "many values", "deep"],
)
def test_a_recipe_beside_a_result_takes_no_time(tmp_path: Path, text: str) -> None:
    """Story: the recipe of a stranger's result was read by a YAML reader without limits: 40 lines took for ever."""
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "adapter_config.json").write_text("{}")
    before_s = time.process_time()
    assert "## Recipe" not in model_card(tmp_path, base=None, merged=False) or "1:0:0" in text
    with pytest.raises(RefusedError, match="the base model"):
        find_adapter_base(tmp_path, None, offline=True)
    may_ask_for_more(tmp_path, load_text("model: m\ndatasets: [{path: rows.jsonl}]\n", "r.yaml"))
    assert time.process_time() - before_s < 5
