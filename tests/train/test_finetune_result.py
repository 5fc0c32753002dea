"""The main job from a recipe to a result that the libraries of the field load, or one clear message."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from roundpipe_cli.costs.block_work import lora_params
from roundpipe_cli.costs.models import parse_config
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.events import Event, Notice
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.checkpoint.output_dir import OutputDir
from roundpipe_cli.train.loop import Trainer
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare
from roundpipe_cli.train.signals import Reporting, StopSignals
from tests.support.e2e import (
    METRIC_KEYS,
    STAGES,
    STAGES_OF_TWO,
    Outcome,
    edit_json,
    finetune,
    launch,
    make_model,
    make_workspace,
    metrics,
    numbers,
    run,
    tree,
)
from tests.support.os_calls import mounted
from tests.support.tiny import logits_of, plain_copy


@pytest.fixture
def folder(tmp_path: Path, two_blocks: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a user, for this process too. Torch's thread count is put back."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(make_workspace(tmp_path / "work", two_blocks, **STAGES_OF_TWO))
    yield tmp_path / "work"
    torch.set_num_threads(threads)


Runs = dict[str, tuple[Path, Outcome]]
OVERRIDES = ("lora.r=2", "learning_rate=1.5e-2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Runs:
    """For each method the folder of a run and what it said."""
    made = {}
    for method, words in (("lora", OVERRIDES), ("full", ("method=full", "dtype=bfloat16"))):
        folder = make_workspace(tmp_path_factory.mktemp(method) / "work", model, **STAGES)
        made[method] = (folder, finetune(folder, *words).expect(0))
    return made


EXPERTS = "mlp.experts"


def train_here(folder: Path, *overrides: str, told: list[str] | None = None) -> Setup:
    """Train in this process; the model and weights that were trained come back. `told` gets the notices."""
    events: list[Event] = []
    loaded = load_recipe(folder / "recipe.yaml", overrides)
    output_dir = Path(loaded.recipe.output_dir)
    with StopSignals() as signals, OutputDir(output_dir):
        setup = prepare(loaded, offline=True, tell=events.append)
        Trainer(setup, output_dir, signals, Reporting(events.append)).run()
    if told is not None:
        told += [event.text for event in events if isinstance(event, Notice)]
    return setup


def base_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_leaves_the_documented_files(runs: Runs, method: str) -> None:
    folder, done = runs[method]
    out = folder / "out"
    rows = metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(list(row) == METRIC_KEYS for row in rows)
    assert all(float.fromhex(row["loss_hex"]) == row["loss"] for row in rows)
    assert all(len(row["utilization"]) == 2 and all(0 < share <= 1 for share in row["utilization"]) for row in rows)
    assert all(0 <= row["bubble_ratio"] < 1 and row["tokens_per_s"] > 0 and row["step_s"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    report = json.loads((out / "report.json").read_text())
    assert report["num_steps"] == report["measured"]["steps"] == 6
    assert report["loss"]["first"] == rows[0]["loss"] and report["loss"]["last"] == rows[-1]["loss"]
    assert report["data"]["rows_kept"] == 10 and report["devices"] == ["cpu", "cpu"]
    files = {path.name for path in out.iterdir()}
    result = {"adapter_config.json", "adapter_model.safetensors"} if method == "lora" else {"model.safetensors"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert files >= result | tokenizer | {"recipe.yaml", "metrics.jsonl", "report.json"}
    assert sorted(name for name in files if name.startswith("step-")) == ["step-00000004", "step-00000006"]
    assert not [name for name in files if name.startswith((".tmp", ".del"))]
    assert ("PeftModel.from_pretrained" in (out / "README.md").read_text()) == (method == "lora")
    assert len(done.out.splitlines()) == 6  # one line a step on stdout, words on stderr
    assert "the result is in out" in done.err


def test_the_saved_recipe_says_everything(runs: Runs) -> None:
    folder, _ = runs["lora"]
    saved = load_recipe(folder / "out" / "recipe.yaml")
    assert saved.recipe.lora.r == 2 and saved.recipe.learning_rate == 1.5e-2
    asked = load_recipe(folder / "recipe.yaml", OVERRIDES).recipe
    decided = replace(asked, head_chunk_tokens=1024, pipeline=replace(asked.pipeline, sequence_chunks=1))
    assert saved.recipe == decided, "rules of the vocabulary and of memory, which may be others later"


MOE_TYPES = [
    *("qwen3_moe", "gpt_oss", "glm4_moe"),
    *(pytest.param(name, marks=pytest.mark.sweep) for name in ("qwen2_moe", "mixtral", "olmoe")),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("expert_r", ["auto", 3])
@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_one_rule_adapts_experts_and_never_a_router(folder: Path, model_type: str, expert_r: object) -> None:
    """PEFT adapted Qwen3's router, too. A run's first lines, `plan` and PEFT find what the file holds."""
    make_model(folder / "moe", model_type, num_hidden_layers=2)
    told: list[str] = []
    words = ("model=moe", "lora.dropout=0", "lora.r=8", f"lora.expert_r={expert_r}", "max_steps=1", "warmup_steps=0")
    setup = train_here(folder, *words, told=told)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*_pattern keys did not.*")  # PEFT looks for modules of that name
        loaded = PeftModel.from_pretrained(base_model(folder / "moe"), str(folder / "out"))
    state = load_file(folder / "out" / "adapter_model.safetensors")
    assert get_peft_model_state_dict(loaded).keys() == state.keys()
    assert not [name for name in state if ".gate." in name or ".router." in name or "shared_expert_gate" in name]
    (said,) = (text for text in told if "routers are never adapted" in text)
    places = {re.sub(r"^.*?\.layers\.\d+\.|\.lora_A.*", "", name) for name in state if ".lora_A." in name}
    places = {{EXPERTS: f"{EXPERTS}.down_proj", f"{EXPERTS}.base_layer": f"{EXPERTS}.gate_up_proj"}.get(name, name)
              for name in places}  # fmt: skip
    assert set(re.findall(r"[\w.]+_proj", said)) == places and f"{EXPERTS}.gate_up_proj" in places
    rank = max(1, 8 // setup.model.config.num_experts_per_tok) if expert_r == "auto" else expert_r
    assert f"experts at rank {rank}:" in said
    architecture = parse_config(setup.model.config.to_dict(), name=model_type, source="tiny")
    settings = TrainingSettings(64, lora_r=8, expert_r=None if expert_r == "auto" else 3)
    counted = sum(lora_params(architecture, block, settings) for block in architecture.blocks)
    assert counted == sum(tensor.numel() for tensor in state.values())
    assert any(".experts." in name and bool(tensor.any()) for name, tensor in state.items() if "lora_B" in name)
    ours, theirs = logits_of(plain_copy(setup.model, setup.store)), logits_of(loaded)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def test_the_full_model_is_the_trained_one(runs: Runs) -> None:
    out = runs["full"][0] / "out"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded, info = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    weights, masters = dict(loaded.named_parameters()), load_file(out / "step-00000006" / "masters.safetensors")
    assert weights.keys() == masters.keys()
    assert all(torch.equal(weights[name], master.bfloat16()) for name, master in masters.items())
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_the_balancing_loss_is_trained_not_evaluated_and_resumes_to_the_bit(tmp_path: Path) -> None:
    changes = {"output_router_logits": True, "num_hidden_layers": 2}
    routed = make_model(tmp_path / "model", "qwen3_moe", router_aux_loss_coef=0.5, **changes)
    recipe = {"method": "full", "lora": None, "learning_rate": 1e-3, "val_set_size": 2, "eval_steps": 1}
    whole, parted, without = (
        make_workspace(tmp_path / name, routed, **recipe, **STAGES_OF_TWO) for name in ("whole", "parted", "without")
    )
    told = finetune(whole).expect(0)
    assert "balancing loss is trained with its router_aux_loss_coef 0.5" in told.out + told.err
    assert finetune(parted, "save_steps=1", fault="optimizer:kill:step=3").code < 0
    finetune(parted, "--resume", "pipeline.devices=[cpu]").expect(0)
    assert numbers(parted / "out") == numbers(whole / "out")
    chunked = finetune(parted, "mlp_chunk_tokens=4", "max_steps=1", "output_dir=chunked").expect(0)
    assert "trains no balancing loss" in chunked.out + chunked.err, "its gradient passes no chunks of an MLP"
    config = json.loads((whole / "out" / "config.json").read_text())
    assert config["output_router_logits"] is True and config["router_aux_loss_coef"] == 0.5
    assert not [key for key in config if "trains" in key]
    loaded = AutoModelForCausalLM.from_pretrained(whole / "out")
    output = loaded(input_ids=torch.arange(3, 20)[None], labels=torch.arange(3, 20)[None])
    assert float(output.aux_loss.detach()) > 0

    edit_json(without / "model" / "config.json", router_aux_loss_coef=0.0)
    finetune(without, "max_steps=1").expect(0)
    losses = [metrics(folder / "out")[0]["loss"] for folder in (whole, without)]
    assert losses[0] > losses[1] + 0.4, "balanced routers have a loss of their number of chosen experts"
    rows = [(folder / "out" / "eval.jsonl").read_text().splitlines()[0] for folder in (whole, without)]
    evaluated, expected = (json.loads(row)["loss"] for row in rows)
    assert evaluated == pytest.approx(expected, rel=1e-6), "the first step is one of warmup: the same weights"


# --- whatever a person gets wrong: one clear message, the documented exit code, no traceback, nothing left behind -----

TORCH = "loading torch"
"""A wrong name is told before the seconds that it takes."""


def refused(folder: Path, *words: str, code: int = 2) -> Outcome:
    """Run, expect a refusal, and see that the working directory is as it was."""
    before = tree(folder)
    done = finetune(folder, *words).expect(code)
    assert done.out == "" and "error: " in done.err
    assert tree(folder) == before, "something was left behind"
    return done


def says(done: Outcome, *texts: str) -> None:
    for text in texts:
        assert text in done.err, done.err


def test_what_is_no_model(folder: Path) -> None:
    """Others: tests/golden/mistakes.txt."""
    says(refused(folder, "model=rows.jsonl"), "this file is no model", "rows.jsonl", ".gguf")
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text("{")
    says(refused(folder, "model=empty"), "config.json cannot be read")
    shutil.copytree(folder / "model", folder / "cut")
    whole = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    says(refused(folder, "model=cut"), "a file of the weights cannot be read", "cut/model.safetensors")


def test_fewer_rows_than_a_step_takes(folder: Path) -> None:
    done = refused(folder, "gradient_accumulation_steps=100")
    says(done, "fewer rows than one step takes", "found: 10 rows", "hint: gradient_accumulation_steps=5\n")
    assert "of weights" not in done.err, "said before anything large is loaded"
    done = refused(folder, "micro_batch_size=16")
    says(done, "hint: gradient_accumulation_steps=1 micro_batch_size=10\n")


def test_tokens_that_the_model_has_no_embedding_for(folder: Path) -> None:
    """Story: words added to the tokenizer only; the run failed in the middle of a step, inside torch."""
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    words = [{"id": 259 + n, "content": f"<w{n}>", **dict.fromkeys(flags, False)} for n in range(60)]
    path.write_text(json.dumps({**tokenizer, "added_tokens": [*tokenizer["added_tokens"], *words]}))
    rows = [{"prompt": "Say: ", "completion": f"<w{n}>"} for n in range(0, 60, 6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "out").mkdir()  # it was there, and stays
    done = finetune(folder).expect(2)
    says(done, "tokens that the model has no embedding for", "found: token 313, '<w54>'", "expected: ids below 300")
    assert (folder / "out").is_dir()


def test_output_directories_that_cannot_be(folder: Path) -> None:
    """Others: tests/golden/mistakes.txt, tests/train/test_checkpoint_output_dir.py."""
    foreign = refused(folder, "output_dir=model")
    says(foreign, "the folder holds a model", "model.safetensors", "output_dir=")
    assert "--resume" not in foreign.err and TORCH not in foreign.err, "there is nothing to resume"


def test_folders_that_were_made_go_again_and_others_stay(folder: Path) -> None:
    (folder / "here").mkdir()
    done = refused(folder, "output_dir=here/a/b", "model=model", "lora.target_modules=[nope]")
    says(done, "LoRA finds nothing to adapt", "nope", "all-linear")


def test_a_disk_that_is_too_small(folder: Path) -> None:
    """Told at once, before anything is loaded."""
    (folder / "disk").mkdir()
    with mounted(folder / "disk", "size=64k"):
        done = finetune(folder, "output_dir=disk/out").expect(5)
        says(done, "disk: needs", "has 64 KiB")
        assert not (folder / "disk" / "out").exists()


def test_without_a_command_there_is_help(folder: Path) -> None:
    """Typing errors: tests/golden/mistakes.txt."""
    says(run(folder).expect(2), "Usage: roundpipe", "finetune")


def test_an_output_directory_that_is_moved_during_a_run_ends_it_with_one_error(folder: Path) -> None:
    """Nothing of the run is made anew under the old name."""
    slow = {"ROUNDPIPE_FAULT": "optimizer:slow=2:step=1"}  # so that there is time to move it
    running = launch(folder, "finetune", "recipe.yaml", environment=slow)
    running.wait_for_steps(1)
    (folder / "out").rename(folder / "elsewhere")
    done = running.finish().expect(5)
    assert done.err.count("error: ") == 1 and "removed or moved" in done.err
    assert not (folder / "out").exists()
