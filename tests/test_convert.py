"""`roundpipe convert`: five files of each tool become recipes that validate; what was left out is listed, all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.convert import convert
from roundpipe_cli.recipe.load import load_recipe, load_text
from roundpipe_cli.recipe.strict_yaml import parse_bytes
from roundpipe_cli.recipe.supported import NOT_YET
from tests.convert_files import EXAMPLES
from tests.e2e import fresh, run

NOT_LANDED = {entry.key for entry in NOT_YET}
UNTIL_LANDED = {
    **{"adapter": "load_in_4bit", "load_in_4bit": "load_in_4bit", "quantization_bit": "load_in_4bit"},
    **{"optimizer": "optim", "report_to": "report_to", "chat_template": "chat_template"},
}
"""Keys that may stay once the feature behind them is there."""


def look_up(data: dict[str, Any], dotted: str) -> Any:
    value: Any = data
    for part in dotted.split("."):
        value = value[part]
    return value


def test_five_files_of_each_tool() -> None:
    counts = [
        sum(example.tool == tool for example in EXAMPLES.values()) for tool in ("axolotl", "llama-factory", "trl")
    ]
    assert counts == [5, 5, 5]


@pytest.mark.parametrize("name", EXAMPLES)
def test_file_becomes_a_recipe_that_validates(name: str) -> None:
    example = EXAMPLES[name]
    result = convert(example.text.encode(), f"{name}.yaml", num_gpus=example.num_gpus)
    assert result.tool == example.tool
    loaded = load_text(result.text(f"{name}.yaml"), "converted.yaml")
    assert {key: look_up(result.recipe, key) for key in example.expected} == example.expected
    listed = {entry.key for entry in result.left_out}
    may_have_landed = {key for key in example.left_out if UNTIL_LANDED.get(key, "load_in_4bit") not in NOT_LANDED}
    assert listed | may_have_landed == example.left_out
    written = parse_bytes(example.text.encode(), name).data
    rows = int(written.get("micro_batch_size", written.get("per_device_train_batch_size", 0)) or 0)
    rows = rows or {"axolotl": 1}.get(example.tool, 8)
    rows *= int(written.get("gradient_accumulation_steps", 1)) * example.num_gpus
    assert loaded.recipe.micro_batch_size * loaded.recipe.gradient_accumulation_steps == rows
    assert f"A step has {rows} rows" in " ".join(result.notes)


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_key_of_a_file_is_lost(name: str) -> None:
    """Each is in the recipe, changes nothing here, or is left out with a reason that its header states."""
    example = EXAMPLES[name]
    result = convert(example.text.encode(), f"{name}.yaml", num_gpus=example.num_gpus)
    text = result.text(f"{name}.yaml")
    assert all(entry.reason and f"#   {entry.key}: " in text for entry in result.left_out)
    named = {entry.key.partition("[")[0].partition(".")[0] for entry in result.left_out} | set(result.without_effect)
    for key, value in parse_bytes(example.text.encode(), name).data.items():
        alone = EXAMPLES[name].text.replace(f"\n{key}:", "\nx_unknown_key:", 1)
        if key in named or key in ("datasets", "dataset", "dataset_name", "dataset_mixture"):
            continue
        try:
            other = convert(alone.encode(), f"{name}.yaml", tool=result.tool, num_gpus=example.num_gpus)
        except RefusedError:
            continue  # the model, which a recipe cannot do without
        said = [entry.key for entry in other.left_out]
        assert "x_unknown_key" in said or "x_unknown_key" in other.without_effect, (key, value)


def test_only_supervised_fine_tuning_is_converted() -> None:
    base = "model_name_or_path: a/b\ndataset: x\ntemplate: default\n"
    for line in ("stage: dpo", "finetuning_type: freeze", "pref_loss: simpo", "stage: pt"):
        with pytest.raises(RefusedError, match="another job"):
            convert(f"{base}{line}\n".encode(), "a.yaml")
    with pytest.raises(RefusedError, match="another job"):
        convert(b"base_model: a/b\nrl: dpo\nsequence_len: 3\n", "a.yaml")
    with pytest.raises(RefusedError, match="no training file"):
        convert(b"model: a/b\ndatasets: [{path: x}]\n", "a.yaml")


def test_table_of_datasets_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = {"sales": {"file_name": "s.jsonl", "formatting": "sharegpt"}, "web": {"hf_hub_url": "org/web"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(table))
    text = "model_name_or_path: a/b\ntemplate: x\ndataset: sales, web, other\n"
    result = convert(text.encode(), str(tmp_path / "a.yaml"))
    paths = [(entry["path"], entry["type"]) for entry in result.recipe["datasets"]]
    assert paths == [("data/s.jsonl", "sharegpt"), ("org/web", "auto"), ("data/other.json", "auto")]
    assert sum("check the path" in note for note in result.notes) == 1


def test_command(tmp_path: Path) -> None:
    (tmp_path / "axolotl.yaml").write_text(EXAMPLES["axolotl_qlora"].text)
    done = fresh(tmp_path, "convert", "axolotl.yaml", "--gpus", "4", "--output", "mine.yaml").expect(0)
    assert done.out == "" and "next: roundpipe plan mine.yaml" in done.err and "left out: special_tokens" in done.err
    assert load_recipe(tmp_path / "mine.yaml").recipe.gradient_accumulation_steps == 16
    run(tmp_path, "recipes", "validate", "mine.yaml").expect(0)
    again = run(tmp_path, "convert", "axolotl.yaml", "--output", "mine.yaml").expect(2)
    assert "not overwritten" in again.err
    document = json.loads(run(tmp_path, "convert", "axolotl.yaml", "--json").expect(0).out)
    assert list(document) == ["tool", "recipe", "left_out", "without_effect", "notes"]
    shown = run(tmp_path, "convert", "axolotl.yaml").expect(0)
    assert load_text(shown.out, "a.yaml").recipe.lora.r == 32
    missing = run(tmp_path, "convert", "nope.yaml").expect(2)
    assert "cannot be read" in missing.err
    wrong = run(tmp_path, "convert", "axolotl.yaml", "--from", "axolot").expect(2)
    assert "did you mean --from axolotl?" in wrong.err
