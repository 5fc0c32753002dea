"""Unknown keys (reliability test 35): every known key at every depth with one edit is refused by its full path, and the
right key is suggested nearly always."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roundpipe_cli.errors import RecipeError, one_edit_apart
from roundpipe_cli.recipe.aliases import ALIASES, NO_COUNTERPART
from roundpipe_cli.recipe.check import known_keys
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import Recipe

KNOWN = [key for key in known_keys(Recipe) if not key.startswith("eval_datasets[]")]
LAST = {key: key.rpartition(".")[2] for key in KNOWN}


def single_edits(word: str) -> set[str]:
    """Every drop, doubling, swap of neighbours and change of separators of a key."""
    drops = {word[:i] + word[i + 1 :] for i in range(len(word))}
    doubles = {word[:i] + word[i] + word[i:] for i in range(len(word))}
    swaps = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
    styles = {word.replace("_", "-"), word.replace("_", ""), word.upper(), word.title(), word + "s"}
    return drops | doubles | swaps | styles


def recipe_with(section: str, key: str, value: str = "1") -> str:
    """A good recipe with one more key in a section (`""`, `lora`, `pipeline`, `datasets[]`)."""
    dataset, extra = "{path: rows.jsonl}", ""
    if section == "datasets[]":
        dataset = f"{{path: rows.jsonl, ? {key!r} : {value}}}"
    elif section:
        extra = f"{section}:\n  {key!r}: {value}\n"
    else:
        extra = f"{key!r}: {value}\n"
    return f"model: some/model\ndatasets:\n  - {dataset}\n{extra}"


def refusal(file: Path, section: str, key: str) -> str | None:
    """The hint about an unknown key; asserts that it is refused by its full path."""
    file.write_text(recipe_with(section, key), encoding="utf-8")
    with pytest.raises(RecipeError) as raised:
        load_recipe(file)
    (problem,) = raised.value.problems
    path = {"": "", "datasets[]": "datasets[0]."}.get(section, f"{section}.") + key
    assert problem.what == f"unknown key {path}"
    assert problem.where == f"{file}:{3 if section == 'datasets[]' else 5 if section else 4}: {path}"
    return problem.hint


def is_accepted(section: str, key: str) -> bool:
    full = f"{section}.{key}".lstrip(".")
    return full in KNOWN or full in ALIASES or full in NO_COUNTERPART


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.sweep), 6])
def test_every_single_edit_is_refused_and_nearly_always_explained(tmp_path: Path, every: int) -> None:
    num_tried = num_right = 0
    wrong: list[str] = []
    for full, last in LAST.items():
        section = full.rpartition(".")[0]
        for edited in sorted(single_edits(last))[::every]:
            if not edited or is_accepted(section, edited):
                continue
            hint = refusal(tmp_path / "a.yaml", section, edited)
            shown = full.replace("[]", "[0]")
            num_tried += 1
            if hint == f"did you mean {shown}?":
                num_right += 1
            else:
                wrong.append(f"{section}.{edited}: {hint}")
    assert num_tried > 800 / every
    assert num_right / num_tried >= 0.95, (num_right, num_tried, wrong)


def test_a_key_in_the_wrong_section_is_found(tmp_path: Path) -> None:
    num_tried = num_right = 0
    for full, last in LAST.items():
        home = full.rpartition(".")[0]
        for section in ("", "lora", "pipeline", "datasets[]"):
            if section == home or is_accepted(section, last):
                continue
            hint = refusal(tmp_path / "a.yaml", section, last)
            num_tried += 1
            num_right += hint == f"did you mean {full}?"
    assert num_tried > 100 and num_right / num_tried >= 0.9, (num_right, num_tried)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    full=st.sampled_from(KNOWN),
    position=st.integers(0, 40),
    letter=st.sampled_from(string.ascii_letters + string.digits + "_- ."),
    insert=st.booleans(),
)
def test_any_changed_letter_is_refused(tmp_path: Path, full: str, position: int, letter: str, insert: bool) -> None:
    section, _, last = full.rpartition(".")
    position %= len(last)
    edited = last[:position] + letter + last[position + (not insert) :]
    if not is_accepted(section, edited):
        refusal(tmp_path / "a.yaml", section, edited)


@given(word=st.text("abc_", min_size=1, max_size=8), position=st.integers(0, 7), letter=st.sampled_from("abc_"))
def test_one_edit_apart(word: str, position: int, letter: str) -> None:
    position %= len(word)
    assert one_edit_apart(word, word[:position] + letter + word[position + 1 :])
    assert one_edit_apart(word, word[:position] + letter + word[position:])
    assert one_edit_apart(word[:position] + word[position + 1 :], word)
    assert not one_edit_apart(word, word + "xy") and not one_edit_apart(word, "x" + word + "y")
