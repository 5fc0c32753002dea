"""`roundpipe recipes keys` lists the whole schema, recipes/README.md shows what it lists, and unknown keys are refused.

Every known key at every depth with one edit is refused by its full path, and the right key is suggested nearly always
(reliability test 35).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from roundpipe_cli.cli.recipes import recipes
from roundpipe_cli.errors import RecipeError, RefusedError, num_edits
from roundpipe_cli.recipe.aliases import ALIASES
from roundpipe_cli.recipe.check import known_keys
from roundpipe_cli.recipe.foreign import answer_of
from roundpipe_cli.recipe.keys import as_markdown, as_text, find_keys, recipe_keys
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import RATE_SCHEDULES, RATE_SETTINGS, DatasetConfig, Recipe, plain_data
from roundpipe_cli.recipe.shipped import shipped_recipes
from roundpipe_cli.recipe.strict_yaml import parse_text
from scripts.recipe_pages import KEPT_FOR, PAGE, rare_keys, updated


def listed(*words: str) -> str:
    """Standard output of `roundpipe recipes keys WORDS`."""
    done = CliRunner().invoke(recipes, ["keys", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_page_shows_the_schema_and_the_headers_as_they_are() -> None:
    """A key that is added, removed or explained otherwise must change the page; so must a recipe or its header."""
    page = PAGE.read_text(encoding="utf-8")
    assert updated(page) == page, "python scripts/recipe_pages.py --write"


def test_a_key_that_stands_nowhere_has_a_reason() -> None:
    """A key ships with a recipe that uses it, a passage, a field's standard name or a gain, and the page says which."""
    told = [name for names in KEPT_FOR.values() for name in names.split()]
    assert len(told) == len(set(told)) > 20 and set(told) == rare_keys()


def test_every_key_is_listed_once() -> None:
    keys = recipe_keys()
    assert [key.name for key in keys] == list(known_keys(Recipe))
    assert [key.name for key in keys if key.is_required] == [
        "model", "datasets", "datasets[].path", "eval_datasets[].path",
    ]  # fmt: skip


def test_defaults_are_yaml_for_the_defaults_of_the_schema() -> None:
    """1e-08 is text for YAML: a user who copies the default must get the number."""
    defaults = {key.name: key.default for key in recipe_keys()}
    values = {name: parse_text(f"x: {text}\n", name).data["x"] for name, text in defaults.items() if text is not None}
    assert values["adam_epsilon"] == 1e-8 and values["lora.alpha"] == 32.0 and values["report_to"] == []
    assert values["method"] == "lora" and values["packing"] == "auto" and values["max_steps"] is None
    assert defaults["model"] is None and defaults["output_dir"] == "outputs/<name of the recipe file>"


def test_the_command_prints_text_json_and_markdown() -> None:
    keys = recipe_keys()
    assert listed().splitlines() == list(as_text(keys))
    assert listed("--markdown").splitlines() == list(as_markdown(keys))
    assert [key["name"] for key in json.loads(listed("--json"))] == [key.name for key in keys]
    rates = r"2\.0e-04 for LoRA, 1\.0e-05 for full fine-tuning, 5\.0e-06 for preference pairs, "
    rates += r"5\.0e-06 for labelled answers"
    assert re.search(rf"^learning_rate +{rates}\n    Type: a number above 0 and at most 10\.\n    Peak", listed(), re.M)
    assert {line.split(".")[0] for line in listed("lora.").splitlines() if line[0] != " "} == {"lora"}
    assert max(map(len, listed("lora").splitlines())) <= 100
    assert listed("no-such-key") == ""


def test_the_json_schema_takes_what_the_loader_takes(tmp_path: Path) -> None:
    """Every shipped recipe and every default; and it refuses a slip of each kind where the loader does."""
    schema = json.loads(CliRunner().invoke(recipes, ["schema"]).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for shipped in shipped_recipes():
        assert not list(validator.iter_errors(parse_text(shipped.path.read_text(encoding="utf-8"), "x").data)), shipped
    resolved = plain_data(Recipe(model="m", datasets=(DatasetConfig(path="a"),), output_dir="o", learning_rate=1e-4))
    assert not list(validator.iter_errors(resolved))
    good = "model: m\ndatasets: [{path: a}]\n"
    for line in (
        *("learning_rat: 1", "learning_rate: 0", "learning_rate: 11", "lora: {r: 1.5}", "lora: {rank2: 1}"),
        *("method: dora", "packing: 1", "model: 7", "pipeline: {devices: [gpu]}", "pipeline: {devices: []}"),
        *("pipeline: {forward_stages: [[0]], backward_stages: [[0]]}", "datasets: [{}]", "save_total_limit: 1"),
        *("lr_scheduler_kwargs: {no_such: 1}", "weight_decay: -1", "max_steps: 0", "report_to: [nobody]"),
    ):
        text = line + "\n" + "".join(one + "\n" for one in good.splitlines() if one.split(":")[0] != line.split(":")[0])
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(RefusedError):
            load_recipe(tmp_path / "recipe.yaml")
        assert list(validator.iter_errors(parse_text(text, "x").data)), line


def test_every_setting_of_a_learning_rate_schedule_has_its_range() -> None:
    """One without a range ended in a KeyError, one that no schedule takes could not be used."""
    assert RATE_SETTINGS.keys() == {key for keys in RATE_SCHEDULES.values() for key in keys}


@pytest.mark.parametrize(
    ("word", "first"),
    [("qlora", "method"), ("context", "max_seq_length"), ("sequence_len", "max_seq_length"), ("NF4", "load_in_4bit")],
)
def test_keys_are_found_by_other_words(word: str, first: str) -> None:
    """By the words of other trainers, then by their meanings; a key's own name comes first."""
    assert find_keys([word])[0].name == first
    assert find_keys(["lora", "alpha"])[0].name == "lora.alpha" and not find_keys(["nonsense"])


KNOWN = [key for key in known_keys(Recipe) if not key.startswith("eval_datasets[]")]
LAST = {key: key.rpartition(".")[2] for key in KNOWN}


def single_edits(word: str) -> set[str]:
    """Every drop, doubling, swap of neighbours and change of separators of a key."""
    places = range(len(word))
    edits = {word.replace("_", "-"), word.replace("_", ""), word.upper(), word.title(), word + "s"}
    edits |= {word[:i] + word[i + 1 :] for i in places} | {word[:i] + word[i] + word[i:] for i in places}
    return edits | {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in places[:-1]}


def refusal(file: Path, section: str, key: str) -> str | None:
    """The hint about an unknown key in a section (`""`, `lora`, `pipeline`, `datasets[]`) of a good recipe; asserts
    that it is refused by its full path."""
    dataset = f"{{path: rows.jsonl, ? {key!r} : 1}}" if section == "datasets[]" else "{path: rows.jsonl}"
    extra = f"{section}:\n  {key!r}: 1\n" if section else f"{key!r}: 1\n"
    text = f"model: some/model\ndatasets:\n  - {dataset}\n{'' if section == 'datasets[]' else extra}"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as raised:
        load_recipe(file)
    (problem,) = raised.value.problems
    path = {"": "", "datasets[]": "datasets[0]."}.get(section, f"{section}.") + key
    assert problem.what == f"unknown key {path}"
    assert problem.where == f"{file}:{3 if section == 'datasets[]' else 5 if section else 4}: {path}"
    return problem.hint


def is_accepted(section: str, key: str) -> bool:
    full = f"{section}.{key}".lstrip(".")
    return full in KNOWN or full in ALIASES or answer_of(key) is not None


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.sweep), 12])
def test_every_single_edit_is_refused_and_nearly_always_explained(tmp_path: Path, every: int) -> None:
    num_tried, wrong = 0, list[str]()
    for full, last in LAST.items():
        section = full.rpartition(".")[0]
        tried = [word for word in sorted(single_edits(last))[::every] if word and not is_accepted(section, word)]
        hints = {word: refusal(tmp_path / "a.yaml", section, word) for word in tried}
        right = f"did you mean {full.replace('[]', '[0]')}?"
        num_tried += len(tried)
        wrong += [f"{section}.{word}: {hint}" for word, hint in hints.items() if hint != right]
    assert num_tried > 800 / every and len(wrong) <= 0.05 * num_tried, (num_tried, wrong)


def test_a_key_in_the_wrong_section_is_found(tmp_path: Path) -> None:
    right = []
    for full, last in LAST.items():
        others = {"", "lora", "pipeline", "datasets[]"} - {full.rpartition(".")[0]}
        tried = [section for section in others if not is_accepted(section, last)]
        right += [refusal(tmp_path / "a.yaml", section, last) == f"did you mean {full}?" for section in tried]
    assert len(right) > 100 and sum(right) >= 0.9 * len(right), (sum(right), len(right))


@given(word=st.text("abc_", min_size=1, max_size=8), position=st.integers(0, 7), letter=st.sampled_from("abc_"))
def test_words_one_edit_apart(word: str, position: int, letter: str) -> None:
    position %= len(word)
    assert num_edits(word, word[:position] + letter + word[position + 1 :]) <= 1
    assert num_edits(word, word[:position] + letter + word[position:]) == 1
    assert num_edits(word[:position] + word[position + 1 :], word) == 1
    assert num_edits(word, word + "xy") == num_edits(word, "x" + word + "y") == 2
