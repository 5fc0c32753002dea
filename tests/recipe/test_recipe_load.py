"""Loading a good recipe: defaults, overrides, aliases, references, shipped recipes, and the resolved text."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.cli.recipes import resolve
from roundpipe_cli.errors import RecipeError, RefusedError
from roundpipe_cli.recipe import schema
from roundpipe_cli.recipe.aliases import ALIASES, REMOVED
from roundpipe_cli.recipe.check import known_keys
from roundpipe_cli.recipe.foreign import answer_of
from roundpipe_cli.recipe.load import load_recipe, resolve_path, resolved_yaml
from roundpipe_cli.recipe.schema import DatasetConfig, LoraConfig, Recipe, plain_data
from roundpipe_cli.recipe.shipped import find_recipe
from roundpipe_cli.regular_files import tried_paths

REPOSITORY = Path(__file__).resolve().parents[2]
SMALLEST = "model: some/model\ndatasets:\n  - {path: rows.jsonl}\n"
CONTRACT_KEYS = {
    *("model", "revision", "method", "lora", "load_in_4bit", "datasets", "val_set_size", "max_seq_length"),
    *("packing", "shuffle", "train_on_inputs", "long_rows", "on_bad_row", "chat_template", "eval_datasets"),
    *("micro_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs", "learning_rate"),
    *("lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm", "dtype", "seed"),
    *("output_dir", "logging_steps", "eval_steps", "save_steps", "save_total_limit", "report_to"),
    *("resume_from_checkpoint", "on_oom", "weights", "pipeline"),
}
PIPELINE_KEYS = {"devices", "schedule", "forward_stages", "backward_stages", "threads_per_worker", "recompute"}


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_the_smallest_recipe_has_every_default(tmp_path: Path) -> None:
    loaded = load_recipe(write(tmp_path, SMALLEST))
    dataset = DatasetConfig(path="rows.jsonl")
    expected = Recipe(model="some/model", datasets=(dataset,), output_dir="outputs/mine", learning_rate=2e-4)
    assert loaded.recipe == expected
    assert loaded.folder == tmp_path and loaded.notices == ()
    fixed = {"r": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": "all-linear"}
    assert {key: plain_data(loaded.recipe)["lora"][key] for key in fixed} == fixed


def test_every_key_of_the_contract_is_in_the_schema() -> None:
    """Keys that other programs rely on: a release may add keys, and never renames one of these."""
    assert CONTRACT_KEYS - {field.name for field in dataclasses.fields(Recipe)} == set()
    assert PIPELINE_KEYS - {field.name for field in dataclasses.fields(schema.PipelineConfig)} == set()


def test_the_shipped_example_loads_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_recipe(REPOSITORY / "recipes" / "qwen3-32b.yaml")
    assert loaded.recipe.model == "Qwen/Qwen3-32B" and loaded.recipe.pipeline.devices == "auto"
    monkeypatch.chdir(tmp_path)
    for name in ("recipes/qwen3-32b.yaml", "qwen3-32b.yaml", "qwen3-32b", "recipes/qwen3-32b"):
        shipped = load_recipe(name)
        assert shipped.recipe == loaded.recipe
        assert "using the shipped recipe" in shipped.notices[0]
    with pytest.raises(RefusedError, match=r"did you mean recipes/qwen3-32b\.yaml"):
        find_recipe("recipes/qwen3-32.yaml")
    for name in ("../recipes/qwen3-32b.yaml", "recipes/../qwen3-32b.yaml", "/recipes/qwen3-32b.yaml", ".", ""):
        with pytest.raises(RefusedError):
            find_recipe(name)


def test_a_missing_recipe_names_the_places_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, SMALLEST)
    with pytest.raises(RefusedError) as raised:
        load_recipe("mien.yaml")
    text = str(raised.value)
    assert str(tmp_path / "mien.yaml") in text and str(REPOSITORY / "recipes") in text
    assert "did you mean mine.yaml?" in text and raised.value.exit_code == 2


def test_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, SMALLEST + "lora: {alpha: 64}\n")
    words = "lora.r=32", "pipeline.devices=[cpu,cpu]", "datasets[0].path=a=b.jsonl", "datasets.0.split=train[:5]"
    words += "learning_rate=1e-5", "warmup_steps=7", "datasets[0].columns={prompt: question, completion: answer}"
    words += "seed=1", "seed=2", "lora={dropout: 0.5}", "pipeline.forward_stages=[[0, 3], [4, 7]]"
    recipe = load_recipe(file, [*words, "pipeline.backward_stages=[[8, 9], [4, 7], [0, 3]]"]).recipe
    assert recipe.lora == LoraConfig(r=32, alpha=64.0, dropout=0.5)
    assert recipe.pipeline.devices == ("cpu", "cpu")
    columns = {"prompt": "question", "completion": "answer"}
    assert recipe.datasets == (DatasetConfig(path="a=b.jsonl", split="train[:5]", columns=columns),)
    assert recipe.learning_rate == 1e-5 and recipe.warmup_steps == 7 and recipe.seed == 2
    assert recipe.pipeline.forward_stages == ((0, 3), (4, 7))


AS_TYPED = [
    *("out/my run #1", "#1", "a: b", "x:", "- a", "? a", "| a", ">a", "&a", "*.jsonl", "!a", "%d", "@a", "`a", "a "),
    *(" a", "[ab]*.jsonl", "[a] b", "{name}/x", "it's", "'it's", '"a" b', '"a" and "b"', '"a', "a, b", "---"),
    *("...", "yes", "~/data", "null/x", "out/[1]", "C:\\new", "a\tb"),
]


@pytest.mark.parametrize("typed", AS_TYPED)
def test_an_override_is_taken_as_it_was_typed(tmp_path: Path, typed: str) -> None:
    """`output_dir=out/my run #1` wrote to `out/my run`, and `a: b` was a mapping; a run saves what it was given."""
    recipe = load_recipe(write(tmp_path, SMALLEST), [f"output_dir={typed}"]).recipe
    assert recipe.output_dir == typed
    assert load_recipe(write(tmp_path, resolved_yaml(recipe), "again.yaml")).recipe == recipe


@pytest.mark.parametrize(("override", "expected"), [
    ("seed=3 ", 3), ("seed = 3", 3), ("learning_rate=3e-4\r", 3e-4), ("revision=null", None), ("revision=a\r", "a"),
    ("revision='null'", "null"), ('revision="a: b"', "a: b"), ("report_to= [tensorboard] ", ("tensorboard",)),
    ("lora={r: 4}", LoraConfig(r=4)),
])  # fmt: skip
def test_lists_words_and_quoted_texts_of_overrides_are_yaml(tmp_path: Path, override: str, expected: Any) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST), [override]).recipe
    assert getattr(recipe, override.partition("=")[0].strip()) == expected


def test_a_key_is_removed_by_a_tilde(tmp_path: Path) -> None:
    """Its default is in force again; what is wrong with a removed key is no mistake, and lists close up."""
    datasets = "datasets:\n  - {path: rows.jsonl}\n  - {path: other.jsonl, typ: chat}\n  - {path: last.jsonl}\n"
    file = write(tmp_path, f"model: some/model\n{datasets}lora: {{r: 3, rr: 4}}\nnum_epochs: 3\nseed: x\n")
    words = "~datasets[1]", "datasets[1].split=test", "~lora.rr", "~num_train_epochs", "~seed"
    recipe = load_recipe(file, words).recipe
    assert [(entry.path, entry.split) for entry in recipe.datasets] == [("rows.jsonl", "train"), ("last.jsonl", "test")]
    assert recipe.lora.r == 3 and recipe.num_train_epochs == 1 and recipe.seed == 42
    assert load_recipe(file, ["~datasets[1]", "~lora", "~seed"]).recipe.lora == LoraConfig()
    with pytest.raises(RecipeError) as raised:
        load_recipe(file, ["~lora.rr", "~seed", "~datasets[0]"])
    (problem,) = raised.value.problems
    assert (problem.where, problem.what) == (f"{file}:4: datasets[0].typ", "unknown key datasets[0].typ")
    assert problem.hint == "did you mean datasets[0].type?"


def test_a_resolved_recipe_is_printed_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, SMALLEST + "num_epochs: 3\n")
    resolve(str(file), ["lora.r=3"], json_=False)
    shown = capsys.readouterr()
    assert "num_epochs is read as num_train_epochs" in shown.err
    expected = load_recipe(file, ["lora.r=3"]).recipe
    assert load_recipe(write(tmp_path, shown.out, "again.yaml")).recipe == expected
    resolve(str(file), ["lora.r=3"], json_=True)
    assert json.loads(capsys.readouterr().out) == plain_data(expected)


def test_aliases_are_accepted_with_a_notice(tmp_path: Path) -> None:
    text = """
base_model: some/model
dataset_name: rows.jsonl
per_device_train_batch_size: 2
lora_r: 8
lora_target_modules: [q_proj, v_proj]
num_epochs: 3.0
bf16: true
fp16: false
adapter: lora
optim: adamw_torch
report_to: none
warmup_ratio: 0.1
stage: sft
deepspeed: null
dataset_prepared_path: last_run_prepared
wandb_project:
"""
    loaded = load_recipe(write(tmp_path, text))
    recipe = loaded.recipe
    assert (recipe.model, recipe.datasets[0].path) == ("some/model", "rows.jsonl")
    assert recipe.lora == LoraConfig(r=8, target_modules=("q_proj", "v_proj"))
    assert (recipe.micro_batch_size, recipe.num_train_epochs, recipe.warmup_steps) == (2, 3, 0.1)
    assert (recipe.dtype, recipe.method, recipe.optim, recipe.report_to) == ("bfloat16", "lora", "adamw", ())
    assert len(loaded.notices) == text.count("\n")  # one a line, and one more for `3.0` epochs
    assert any("per_device_train_batch_size is read as micro_batch_size" in notice for notice in loaded.notices)
    assert all("mine.yaml:" in notice for notice in loaded.notices)


def test_words_of_other_trainers_are_read(tmp_path: Path) -> None:
    for line, expected in {
        **dict.fromkeys(
            ("method: qlora", "method: QLoRA\nload_in_4bit: true"), {"method": "lora", "load_in_4bit": True}
        ),
        **{
            "use_liger_kernel: true": {"kernels": "auto"},
            "freeze_vision_tower: true": {},
            "stage: pt": {"objective": "sft"},
        },
        "rl: dpo": {"objective": "dpo", "learning_rate": 5e-6},
    }.items():
        loaded = load_recipe(write(tmp_path, SMALLEST + line + "\n"))
        assert {key: getattr(loaded.recipe, key) for key in expected} == expected
        assert loaded.notices and all("mine.yaml:4: " in notice for notice in loaded.notices)
        assert load_recipe(write(tmp_path, SMALLEST), line.replace(": ", "=").split()).recipe == loaded.recipe


def test_the_learning_rate_is_that_of_what_is_trained(tmp_path: Path) -> None:
    """Story: `method=full` under a recipe without a rate trained all weights at 2e-4, and pairs too."""
    rates = {
        **{"": (2e-4, "LoRA"), "method=lora load_in_4bit=true": (2e-4, "LoRA")},
        **{"method=full": (1e-5, "full fine-tuning"), "objective=dpo": (5e-6, "preference pairs")},
        "objective=orpo method=full": (5e-6, "preference pairs"),
    }
    for words, (rate, kind) in rates.items():
        loaded = load_recipe(write(tmp_path, SMALLEST), words.split())
        assert loaded.recipe.learning_rate == rate
        assert loaded.rate_note == f"learning_rate {rate:g}: the default for {kind}"
        text = resolved_yaml(loaded.recipe)
        assert re.search(rf"^learning_rate: \S+  # the default for {kind}$", text, re.MULTILINE)
        again = load_recipe(write(tmp_path, text, "again.yaml"))
        assert again.recipe == loaded.recipe and again.rate_note is None
        given = load_recipe(write(tmp_path, SMALLEST), [*words.split(), "lr=3e-3"])
        assert given.recipe.learning_rate == 3e-3 and given.rate_note is None
        assert "#" not in resolved_yaml(given.recipe)
    reference = load_recipe(write(tmp_path, SMALLEST + "method: full\noutput_dir: out-${learning_rate}\n")).recipe
    assert reference.output_dir == "out-1e-05"
    reference = load_recipe(write(tmp_path, SMALLEST + "output_dir: full\nmethod: ${output_dir}\n")).recipe
    assert reference.method == "full" and reference.learning_rate == 1e-5


def test_microbatches_are_filled_unless_their_rows_are_given(tmp_path: Path) -> None:
    for words, tokens, packing in (
        *(("", "auto", "auto"), ("micro_batch_size=1", None, "auto")),
        *(("pipeline.sequence_chunks=4", "auto", "auto"), ("pipeline.sequence_chunks=1", "auto", "auto")),
        ("per_device_train_batch_size=2 packing=false", None, False),
        ("micro_batch_size=2 micro_batch_tokens=8192", 8192, "auto"),
    ):
        recipe = load_recipe(write(tmp_path, SMALLEST), words.split()).recipe
        assert (recipe.micro_batch_tokens, recipe.packing) == (tokens, packing)
        assert load_recipe(write(tmp_path, resolved_yaml(recipe), "again.yaml")).recipe == recipe


def test_an_override_wins_over_an_alias_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, SMALLEST + "lr: 1e-4\nlora: {r: 4}\n")
    assert load_recipe(file, ["learning_rate=1e-3"]).recipe.learning_rate == 1e-3
    loaded = load_recipe(file, ["lr=1e-2", "lora_r=8"])
    assert loaded.recipe.learning_rate == 1e-2 and loaded.recipe.lora.r == 8
    assert "override lora_r=8: lora_r is read as lora.r" in loaded.notices


def test_references_to_other_keys(tmp_path: Path) -> None:
    text = SMALLEST + "output_dir: out/${model}-r${lora.r}-s${seed}\nrevision: ${datasets[0].path}\n"
    recipe = load_recipe(write(tmp_path, text), ["lora={r: 4, alpha: '${lora.r}'}"])
    assert recipe.recipe.output_dir == "out/some/model-r4-s42" and recipe.recipe.revision == "rows.jsonl"
    assert recipe.recipe.lora.alpha == 4.0
    literal = load_recipe(write(tmp_path, SMALLEST + "output_dir: 'a\\${seed}'\n")).recipe
    assert literal.output_dir == "a${seed}"


def test_the_resolved_text_loads_to_an_equal_recipe(tmp_path: Path) -> None:
    text = """
model: "1e-5"
revision: "no"
datasets:
  - {path: "a: b # c", name: "null", split: "train[:10%]", columns: {prompt: "é\\u0085\\e", completion: "0o10"}}
  - {path: 'x\\\\\\${y}$z', name: "~", split: " lead"}
output_dir: 'C:\\out\\${seed}'
learning_rate: 3e-7
warmup_steps: 100
lora: {target_modules: ["on", "12:30", "0x1F", "- a", "multi\\nline"]}
pipeline: {forward_stages: [[0, 3], [4, 3]], backward_stages: [[4, 5], [0, 3]], devices: ["cuda:0", "cuda:0"]}
"""
    first = load_recipe(write(tmp_path, text)).recipe
    again = load_recipe(write(tmp_path, resolved_yaml(first), "again.yaml"))
    assert again.recipe == first and again.notices == ()
    assert first.output_dir == "C:\\out${seed}" and first.datasets[0].name == "null"


def test_paths_are_tried_from_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, recipes = tmp_path / "work", tmp_path / "recipes"
    work.mkdir()
    recipes.mkdir()
    monkeypatch.chdir(work)
    assert tried_paths("rows.jsonl", recipes) == (work / "rows.jsonl", recipes / "rows.jsonl")
    assert resolve_path("rows.jsonl", recipes) is None
    (recipes / "rows.jsonl").touch()
    assert resolve_path("rows.jsonl", recipes) == recipes / "rows.jsonl"
    (work / "rows.jsonl").touch()
    assert resolve_path("rows.jsonl", recipes) == work / "rows.jsonl"
    monkeypatch.setenv("HOME", str(recipes))
    assert resolve_path("~/rows.jsonl", work) == recipes / "rows.jsonl"
    assert resolve_path("a\0b", work) is None
    with pytest.raises(RefusedError, match="longer than any can be"):
        resolve_path("x" * 5000, work)


def test_keys_that_do_nothing_are_noticed(tmp_path: Path) -> None:
    """Adapters' with full fine-tuning; and one that recipes once had, where it is off."""
    for lines, said in (
        ("method: full\nlora: {r: 8}", "lora: not used, since method is full"),
        ("fp8_products: false", "fp8_products: false changes nothing here"),
        ("pipeline: {optimizer_staleness: 0}", "pipeline.optimizer_staleness: 0 changes nothing here"),
    ):
        (notice,) = load_recipe(write(tmp_path, f"{SMALLEST}{lines}\n")).notices
        assert said in notice
    assert not set(REMOVED) & {*known_keys(Recipe), *ALIASES} and not any(map(answer_of, REMOVED))


def test_loading_imports_no_torch() -> None:
    """A recipe without overrides and references needs no omegaconf, which takes longer to import than it to read."""
    code = (
        "import sys; from roundpipe_cli.recipe.load import load_recipe\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'rich', 'typer'}\n"
        "for overrides, more in ([], {'omegaconf'}), (['lora.r=4'], set()):\n"
        "    load_recipe('recipes/qwen3-32b.yaml', overrides)\n"
        "    assert not (heavy | more) & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
