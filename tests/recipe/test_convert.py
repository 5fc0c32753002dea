"""`roundpipe convert`: files of each tool become recipes that validate; what was left out is listed, all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from roundpipe_cli.choices import OBJECTIVES, objectives_of
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.aliases import ALIASES, NAMES
from roundpipe_cli.recipe.check import NEEDS_EVALUATION, known_keys
from roundpipe_cli.recipe.convert import convert_file
from roundpipe_cli.recipe.convert_rules import RULES, Conversion, Tool
from roundpipe_cli.recipe.foreign import answer_of, names_of
from roundpipe_cli.recipe.load import load_recipe, load_text
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.recipe.strict_yaml import parse_bytes
from roundpipe_cli.units import counted
from tests.cli.test_terminal_text import said
from tests.support.convert_files import EXAMPLES

TABLES = json.loads((Path(__file__).parents[1] / "golden_data" / "convert.json").read_text(encoding="utf-8"))
"""Short training files, and what becomes of each; the table of LLaMA-Factory's data sets. `OF_PAIRS` and `LIKED` stand
for those below."""


def look_up(data: dict[str, Any], dotted: str) -> Any:
    """The value of a key with dots; None where there is none."""
    value: Any = data
    for part in dotted.split("."):
        value = value[int(part)] if isinstance(value, list) else value.get(part)
    return value


@pytest.mark.parametrize("name", EXAMPLES)
def test_file_becomes_a_recipe_that_validates(name: str) -> None:
    example = EXAMPLES[name]
    result = convert_file(example.text.encode(), f"{name}.yaml", num_gpus=example.num_gpus)
    assert result.tool == example.tool
    loaded = load_text(result.text(f"{name}.yaml"), "converted.yaml")
    assert {key: look_up(result.recipe, key) for key in example.expected} == example.expected
    assert sorted({entry.key for entry in result.left_out}) == example.left_out
    written = parse_bytes(example.text.encode(), name).data
    rows = int(written.get("micro_batch_size", written.get("per_device_train_batch_size", 0)) or 0)
    rows = rows or {"axolotl": 1}.get(example.tool, 8)
    rows *= int(written.get("gradient_accumulation_steps", 1)) * example.num_gpus
    assert loaded.recipe.micro_batch_size * loaded.recipe.gradient_accumulation_steps == rows
    assert f"A step has {counted(rows, 'row')}" in " ".join(result.notes)
    text = result.text(f"{name}.yaml")
    assert all(entry.reason and f"#   {entry.key}: " in text for entry in result.left_out)


BASES = {
    "axolotl": "base_model: a/b\nlearning_rate: 1e-4\ndatasets: [{path: x.jsonl, type: completion}]\n",
    "llama-factory": "model_name_or_path: a/b\ntemplate: qwen3\ndataset: x\nstage: sft\ndo_train: true\n",
    "trl": "model_name_or_path: a/b\ndataset_name: x.jsonl\ndataset_text_field: text\n",
}
"""The shortest training file of each tool."""


def converted(tool: str, lines: str = "") -> Conversion:
    """A short file of `tool`, whose keys `lines` replaces or adds to."""
    data = {**parse_bytes(BASES[tool].encode(), "a.yaml").data, **parse_bytes(lines.encode() or b"{}", "a.yaml").data}
    return convert_file(json.dumps(data).encode(), "a.yaml", tool=cast("Tool", tool))


def test_a_text_that_would_read_as_a_reference_stays_text() -> None:
    text = converted("axolotl", "output_dir: 'out/${run}'").text("a.yaml")
    assert load_text(text, "recipe.yaml").recipe.output_dir == "out/${run}"


COLUMNS: dict[str, dict[str, str]] = {
    "liked": {"prompt": "q", "query": "c", "chosen": "good", "rejected": "bad"},
    "talks": {"messages": "talk", "chosen": "chosen", "rejected": "rejected"},
    "judged": {"prompt": "q", "response": "a", "kto_tag": "good"},
    "judged_talks": {"messages": "talk", "kto_tag": "good"},
    "texts": {"prompt": "text"},
}
TABLE_OF_PAIRS = {
    name: {"file_name": f"{name}.jsonl", "columns": columns, "ranking": "rejected" in columns}
    | ({"formatting": "sharegpt"} if "messages" in columns else {})
    for name, columns in COLUMNS.items()
}
_OF_PAIRS = f"dataset_dir: {json.dumps(TABLE_OF_PAIRS)}"


def with_pairs(lines: str) -> str:
    """The lines of a case with the data sets that their words stand for."""
    words = {"OF_PAIRS": "", "LIKED": ", dataset: liked", "JUDGED": ", dataset: judged"}
    for word, dataset in words.items():
        lines = lines.replace(word, _OF_PAIRS + dataset)
    return lines


@pytest.mark.parametrize("case", TABLES["cases"], ids=lambda case: f"{case['tool']}, {case['lines']}")
def test_what_becomes_of_a_file(case: dict[str, Any]) -> None:
    """Each key is in one list, and the recipe loads; `story` says what a case is for, its other keys what to expect."""
    tool, lines = case["tool"], with_pairs(case["lines"])
    if "refused" in case:
        with pytest.raises(RefusedError, match=case["refused"]) as refused:
            converted(tool, lines)
        problem = refused.value.problems[0]
        assert str(problem.where).startswith("a.yaml") and case.get("found", "") in str(problem.found)
        return
    result = converted(tool, lines)
    text, lacks = result.text("a.yaml"), [entry.key for entry in result.left_out]
    assert load_text(text, "b.yaml") and len({*lacks, *result.without_effect}) == len(lacks + result.without_effect)
    for key, value in case.get("recipe", {}).items():
        assert look_up(result.recipe, key) == value, key
    assert sorted(lacks) == sorted(case.get("left_out", lacks)) and {*case.get("lacks", ())} <= {*lacks}
    assert {*case.get("told", ())} <= {*lacks, *result.without_effect}
    idle = {*result.without_effect}
    assert {*case.get("idle", ())} <= idle and not {*case.get("not_idle", ())} & idle
    said = " ".join((*result.notes, *result.changes))
    assert all(re.search(one, said) for one in case.get("said", ()))
    assert not any(re.search(one, said) for one in case.get("unsaid", ()))
    first = text.splitlines()[0]
    assert "first" not in case or re.search(f"Not the same training as a.yaml: .*{case['first']}", first), first


@pytest.mark.parametrize(("tool", "lines", "expected"), TABLES["objectives"])
def test_pairs_and_texts_are_converted(tool: str, lines: str, expected: dict[str, Any]) -> None:
    """Such files were refused, as was any file with a stray `pref_beta`; the recipe loads, nothing is left out."""
    result = converted(tool, with_pairs(lines))
    recipe = load_text(result.text("a.yaml"), "a.yaml").recipe
    assert recipe.scores_answers is ("objective" in result.recipe)
    for key, value in expected.items():
        section, _, rest = key.partition("].")
        found = look_up(result.recipe["datasets"][0], rest) if rest else look_up(result.recipe, key)
        assert found == value, key
    assert {entry.key for entry in result.left_out} <= {"template"}
    stray = {"pref_beta", "ppo_epochs", "rl_beta", "simpo_gamma"} & set(re.findall(r"\w+", lines))
    assert recipe.scores_answers or stray <= set(result.without_effect)


def test_gpus_that_share_rows_do_not_multiply_them() -> None:
    """Four GPUs, two of which hold parts of the same sequences, train two sets of rows at a time."""
    text = BASES["axolotl"] + "micro_batch_size: 2\ngradient_accumulation_steps: 3\ncontext_parallel_size: 2\n"
    result = convert_file(text.encode(), "a.yaml", num_gpus=4)
    assert result.recipe["gradient_accumulation_steps"] == 6
    assert "x 4 GPUs / 2 that share their rows" in " ".join(result.notes)


def test_each_key_of_transformers_trainer_is_known() -> None:
    """A key in no table may change training, so the first line names it; none of the trainer's own is such a key."""
    from transformers.training_args import TrainingArguments

    changes = converted("trl", json.dumps(dict.fromkeys(TrainingArguments.__dataclass_fields__, 0.5))).changes
    assert changes and not any("no key that is known" in change for change in changes), changes


@pytest.mark.parametrize(("tool", "model", "template", "is_own"), TABLES["templates"])
def test_template_of_the_models_own_family_is_no_loss(tool: str, model: str, template: str, is_own: bool) -> None:
    """Every file names its template, so all were listed as left out; another family's still is."""
    keys = {"axolotl": ("base_model", "chat_template"), "llama-factory": ("model_name_or_path", "template")}[tool]
    result = converted(tool, json.dumps(dict(zip(keys, (model, template), strict=True))))
    assert (keys[1] in [entry.key for entry in result.left_out]) is not is_own
    assert (f"The template {template} is the model's own" in " ".join(result.notes)) is is_own


@pytest.mark.parametrize("tool", sorted(BASES))
@pytest.mark.parametrize(("steps", "ratio", "expected"), [(7, 0.1, 7), (7, 0, 7), (7, None, 7), (0, 0.1, 0.1)])
def test_warmup_steps_go_before_a_ratio(tool: str, steps: int, ratio: float | None, expected: float) -> None:
    """The first of both won, so that a ratio of 0 before 7 steps was a run without warmup."""
    for lines in ({"warmup_steps": steps, "warmup_ratio": ratio}, {"warmup_ratio": ratio, "warmup_steps": steps}):
        result = converted(tool, json.dumps(lines))
        assert result.recipe["warmup_steps"] == expected
        assert ["warmup_ratio" in entry.key for entry in result.left_out].count(True) == bool(steps and ratio)
        assert not any(entry.key == "warmup_steps" for entry in result.left_out)


@pytest.mark.parametrize("tool", sorted(BASES))
def test_null_is_no_value_and_not_false(tool: str) -> None:
    """All known keys in one file, but two whose null means something: no largest length, a switch that is refused."""
    own = {*parse_bytes(BASES[tool].encode(), "a.yaml").data, "max_length", "use_peft"}
    nothing = {
        key: None
        for key in {*ALIASES, *RULES, *names_of("idle"), *names_of("other")} - own
        if not set(".~*") & set(key)
    }
    plain, found = converted(tool), converted(tool, json.dumps(nothing))
    assert len(nothing) > 50 and found.recipe == plain.recipe
    assert found.left_out == plain.left_out and found.notes == plain.notes


SAMPLES: dict[str, Any] = {
    **{"revision": "main", "load_in_4bit": True, "load_in_8bit": True, "val_set_size": 10, "max_seq_length": 64},
    **{"packing": True, "shuffle": False, "train_on_inputs": True, "long_rows": "error", "on_bad_row": "skip"},
    **{"chat_template": "x.jinja", "eval_datasets": [{"path": "y"}], "micro_batch_size": 2, "max_steps": 5},
    **{"gradient_accumulation_steps": 2, "num_train_epochs": 2, "learning_rate": 0.1, "lr_scheduler_type": "linear"},
    **{"lr_scheduler_kwargs": {}, "warmup_steps": 5, "optim": "sgd", "adam_beta1": 0.8, "adam_beta2": 0.8},
    **{"adam_epsilon": 1e-6, "sgd_momentum": 0.5, "weight_decay": 0.1, "frozen_parameters": ["a"]},
    **{"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5, "max_grad_norm": 0.5, "dtype": "float32", "seed": 1},
    **{"head_chunk_tokens": 8, "mlp_chunk_tokens": 8, "output_dir": "out", "logging_steps": 2, "eval_steps": 2},
    **{"eval_samples": 2, "eval_max_new_tokens": 2, "load_best_model_at_end": True, "early_stopping_patience": 2},
    **{"save_steps": 2, "save_total_limit": 2, "report_to": ["wandb"], "on_oom": "adapt", "on_nonfinite": "skip"},
    **{"watchdog_s": 5, "weights": "mmap", "hardware": "8x4090", "kernels": "reference", "deterministic": True},
    **{"lora.r": 2, "lora.alpha": 2, "lora.dropout": 0.1, "lora.target_modules": ["q"], "lora.use_dora": True},
    **{"lora.modules_to_save": ["a"], "lora.use_rslora": True, "lora.init": "gaussian", "lora.loraplus_lr_ratio": 2},
    **{"lora.start_from": "adapter", "hub_model_id": "me/mine", "chat_template_kwargs": {"enable_thinking": False}},
    "add_tokens": ["<a>"],
}
"""A value for each recipe key that a training file of another tool may have, under its own or another name."""
NEEDS_ADAPTERS = {"load_in_4bit", "load_in_8bit", "weights"}
"""Their weights are frozen."""
NOT_OF_PEERS = {
    *("on_device_loss", "model", "micro_batch_tokens", "float16_accumulation", "load_in_fp8", "method", "objective"),
    *("dpo", "orpo", "simpo", "ipo", "lora", "lora.expert_r", "datasets", "pipeline", "nodes", "lr_above_peak"),
    *("resume_from_checkpoint", "long_rows_overlap", "check_longest_rows", "load_in_16bit"),
}
"""Sections, keys that no other tool has, what every file has, and the checkpoint, whose value decides: another
program's is not read."""


def test_no_key_that_a_recipe_has_is_called_unsupported() -> None:
    """Reasons outlived their features: early stopping, the best weights and chat templates were all refused once."""
    sections = ("lora", *OBJECTIVES, "pipeline", "nodes")
    keys = {key for key in known_keys(Recipe) if "[]" not in key and key.partition(".")[0] not in sections[1:]}
    assert keys - NOT_OF_PEERS == set(SAMPLES)
    for name in (*known_keys(Recipe), *ALIASES):
        answer = answer_of(name, ("advice", "other", "idle"))
        assert answer is None or (answer.kind == "idle" and name in ALIASES), name
    spellings = {alias: target for target, names in NAMES.items() for alias in names.split() if target in SAMPLES}
    assert "lora_rank" in spellings
    for key, target in {**{key: key for key in SAMPLES}, **spellings}.items():
        if "." in key or key == "label_smoothing":
            continue  # sections are the recipe's own; label_smoothing is of TRL's DPO
        value = SAMPLES[target]
        has_adapters = target.startswith("lora.") or target in NEEDS_ADAPTERS
        together = {"use_peft": has_adapters, key: value, "dataset_test_split": "test"}
        together |= {"push_to_hub": target == "hub_model_id"}
        together |= {"optim": "sgd"} if target == "sgd_momentum" else {}
        together |= {"eval_strategy": "steps"} if target in NEEDS_EVALUATION else {}
        result = converted("trl", json.dumps(together))
        assert not result.left_out, (key, result.left_out)
        if key != "shuffle_dataset" and value not in ({}, []):
            assert look_up(result.recipe, target) == value, key


@pytest.mark.parametrize(("dataset", "expected"), TABLES["datasets"])
def test_table_of_datasets_beside_the_file(tmp_path: Path, dataset: str, expected: Any) -> None:
    """Columns, tags, ranking, subset and split of `dataset_info.json` are carried or refused by name."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(TABLES["dataset_info"]))
    file = f"model_name_or_path: a/b\ntemplate: x\ndo_train: true\ndataset: {dataset}\n"
    if isinstance(expected, str):
        with pytest.raises(RefusedError, match=expected) as refused:
            convert_file(file.encode(), str(tmp_path / "a.yaml"))
        assert dataset in str(refused.value)
        return
    result = convert_file((file + f"eval_dataset: {dataset}\n").encode(), str(tmp_path / "a.yaml"))
    assert result.recipe["datasets"] == result.recipe["eval_datasets"] == [expected]
    assert not [entry.key for entry in result.left_out if "columns" in entry.key]


@pytest.mark.parametrize("objective", objectives_of("pair"))
def test_the_objective_of_a_trl_file_may_be_named(tmp_path: Path, objective: str) -> None:
    """TRL's trainers share most keys: a file for DPOTrainer with a beta was refused, one without was taken for SFT."""
    file = "model_name_or_path: a/b\ndataset_name: org/pairs\nuse_peft: true\nlora_target_modules: all-linear\n"
    recipe = convert_file(file.encode(), "trl.yaml", objective=objective).recipe  # type: ignore[arg-type]
    assert recipe["objective"] == objective and recipe["datasets"][0]["type"] == "preference"
    named = convert_file(f"{file}beta: 0.3\n".encode(), "trl.yaml", objective=objective)  # type: ignore[arg-type]
    assert named.recipe[objective]["beta"] == 0.3 and not named.left_out
    assert load_text(named.text("trl.yaml"), "mine.yaml").recipe.objective == objective
    judged = convert_file(f"{file}eval_strategy: epoch\n".encode(), "trl.yaml", objective=objective)  # type: ignore[arg-type]
    assert judged.recipe["eval_datasets"][0]["split"] == "test" and not judged.left_out
    with pytest.raises(RefusedError, match="--objective dpo"):
        convert_file(f"{file}beta: 0.3\n".encode(), "trl.yaml")
    path = tmp_path / "trl.yaml"
    path.write_text(file + "beta: 0.3\n")
    out, err = said("convert", str(path), "--objective", objective)
    assert f"objective: {objective}" in out and "(objective)" not in out + err
    assert "did you mean --objective dpo" in said("convert", str(path), "--objective", "dop", code=2)[1]
    assert "no objective distill" in said("convert", str(path), "--objective", "distill", code=2)[1]
    with pytest.raises(RefusedError, match="says for itself"):
        convert_file(EXAMPLES["axolotl_qlora"].text.encode(), "a.yaml", objective=objective)  # type: ignore[arg-type]


def test_endless_values_are_no_bug(tmp_path: Path) -> None:
    """Story: fuzzing found a number of 5,000 digits, and a folder's name of 1,000 letters, called a bug of ours."""
    text = "model_name_or_path: a/b\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: one\n"
    for line, code, expected in (
        (f"cutoff_len: {'9' * 5000}_0", 0, "left out: cutoff_len"),
        (f"dataset_dir: {'x' * 300}", 2, "a path is longer than any can be"),
        (f"dataset_dir: {'x/' * 2040}", 2, "the table of datasets cannot be read"),
    ):
        (tmp_path / "a.yaml").write_text(f"{text}{line}\n")
        assert expected in said("convert", str(tmp_path / "a.yaml"), "--from", "LLaMA_Factory", code=code)[1]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("axolotl.yaml").write_text(EXAMPLES["axolotl_qlora"].text)
    out, err = said("convert", "axolotl.yaml", "--gpus", "4", "--output", "mine.yaml")
    assert out == "" and "next: roundpipe plan mine.yaml" in err and "left out: " not in err
    assert "not the same training" not in err
    assert load_recipe("mine.yaml").recipe.gradient_accumulation_steps == 16
    assert "not overwritten" in said("convert", "axolotl.yaml", "--output", "mine.yaml", code=2)[1]
    document = json.loads(said("convert", "axolotl.yaml", "--json")[0])
    assert list(document) == ["tool", "recipe", "changes", "left_out", "without_effect", "notes"]
    assert load_text(said("convert", "axolotl.yaml")[0], "a.yaml").recipe.lora.r == 32
    Path("chat.yaml").write_text("model_name_or_path: a/b\ntemplate: qwen3\ninfer_backend: huggingface\n")
    out, err = said("convert", "chat.yaml", "--output", "chat-recipe.yaml", code=2)
    assert "inference" in err and "expected: " in err and out == "" and not Path("chat-recipe.yaml").exists()
    assert "cannot be read" in said("convert", "nope.yaml", code=2)[1]
    assert "did you mean --from axolotl?" in said("convert", "axolotl.yaml", "--from", "axolot", code=2)[1]


UNSLOTH = """
model: unsloth/Qwen3-0.6B
data: {local_dataset: [rows.jsonl, more.jsonl], format_type: alpaca}
training: {max_seq_length: 4096, load_in_4bit: false, num_epochs: 1, warmup_steps: 5, train_on_completions: true,
  max_steps: 0, gradient_checkpointing: unsloth}
lora: {lora_r: 16, target_modules: "q_proj,k_proj", use_loftq: true, finetune_mlp_modules: true}
logging: {enable_wandb: true, hf_token: hf_abcdefghijklmnop}
surprise: 1
seed: 5
beta: 0.1
"""


def test_sections_of_unsloth_become_a_recipe() -> None:
    """Story: a file of Unsloth's command line was no training file of any tool. Missing keys get Unsloth's defaults."""
    result = convert_file(UNSLOTH.encode(), "unsloth.yaml")
    recipe = load_text(result.text("unsloth.yaml"), "converted.yaml").recipe
    assert recipe.lora.target_modules == ("q_proj", "k_proj") and (recipe.lora.r, recipe.lora.alpha) == (16, 16)
    assert [entry.path for entry in recipe.datasets] == ["rows.jsonl", "more.jsonl"]
    assert recipe.max_seq_length == 4096 and not recipe.train_on_inputs and not recipe.load_in_4bit
    assert (recipe.micro_batch_size, recipe.gradient_accumulation_steps, recipe.seed) == (2, 4, 3407)
    assert recipe.warmup_steps == 5 and recipe.max_steps is None and recipe.report_to == ("wandb",)
    assert {line.key for line in result.left_out} == {"lora.use_loftq", "surprise", "seed", "beta"}
    assert len(result.changes) == 4
    assert set(result.without_effect) == {
        *("data.format_type", "training.gradient_checkpointing", "lora.finetune_mlp_modules", "logging.hf_token")
    }
    assert "hf_abcdefghijklmnop" not in result.text("unsloth.yaml")
    full = b"model: a/b\ndata: {dataset: c/d}\ntraining: {training_type: full, load_in_4bit: true}\nlora: {lora_r: 8}\n"
    all_weights = convert_file(full, "full.yaml")
    assert [line.key for line in all_weights.left_out] == ["lora_r"]
    assert all_weights.without_effect == ["training.load_in_4bit"]
    whole = all_weights.recipe
    assert whole["method"] == "full" and "lora" not in whole and not whole.get("load_in_4bit")
    assert whole["train_on_inputs"] is True and whole["num_train_epochs"] == 3


@pytest.mark.parametrize(
    ("kinds", "packing"), [(["conv", "full_attention"], "auto"), (["full_attention"] * 2, True), (None, True)]
)
def test_packing_is_left_to_the_run_where_the_model_may_not(
    tmp_path: Path, kinds: list[str] | None, packing: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`packing: true` was written for any model, and `finetune` refused it. `kinds`: of the blocks; None: not here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    if kinds:
        config = {"model_type": "lfm2", "layer_types": kinds}
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    lines = {"base_model": "model", "sample_packing": True, "sequence_len": 512}
    data = {**parse_bytes(BASES["axolotl"].encode(), "a.yaml").data, **lines}
    (tmp_path / "a.yaml").write_text(json.dumps(data))
    found = json.loads(said("convert", "a.yaml", "--json")[0])
    assert found["recipe"]["packing"] == packing
    assert ("carries state from token to token" in str(found["changes"])) == (packing == "auto")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.ipynb", '{"cells": [], "nbformat": 4}', "write the arguments of its configuration"),
        ("a.yaml", '{"cells": [], "nbformat": 4}', "a notebook"),
        ("train.py", "from trl import SFTConfig", "a Python script"),
        ("a.yaml", "{model: {_component_: torchtune.models.llama3.llama3_8b}, batch_size: 2}", "torchtune's"),
        ("ds.json", '{"zero_optimization": {"stage": 3}}', "DeepSpeed's"),
        ("a.yaml", "{compute_environment: LOCAL_MACHINE, num_machines: 1}", "accelerate's"),
        ("adapter_config.json", '{"peft_type": "LORA", "r": 8}', "lora.start_from continues the adapter"),
        ("config.json", '{"architectures": ["LlamaForCausalLM"]}', "a model's configuration"),
        ("a.yaml", "{model: a/b, train_dataset: x}", "newer form"),
        ("a.yaml", "{model: a/b, seed: 1}", "a recipe needs no conversion"),
        ("a.yaml", "{hello: 1}", "roundpipe init"),
    ],
)
def test_a_file_of_another_kind_is_told_what_it_is(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    err = said("convert", str(tmp_path / name), code=2)[1]
    assert "no training file" in err and told in err and "hint: " in err


def test_each_key_is_told_once(tmp_path: Path) -> None:
    """`1 keys`; a key left out was told twice, and so was a column of rows that are trained and evaluated on."""
    (tmp_path / "a.yaml").write_text(BASES["axolotl"] + "fp8: true\nstrict: false\n")
    err = said("convert", str(tmp_path / "a.yaml"))[1]
    assert "1 key without effect here: strict" in err and len(re.findall("fp8:", err)) == 1
    assert "not the same training: products are computed in the recipe's dtype" in err
