"""Keys of other trainers in a recipe: each is read, or answered by what there is or by what is not offered.

Story: of 21 keys and values that people paste, 14 were refused without direction, some towards another meaning:
`num_labels` to num_epochs, `vision` to revision. `scripts/convert_fields.py` sweeps every field of three trainers.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

import peft
import pytest
from transformers.training_args import TrainingArguments

from roundpipe_cli.errors import RecipeError
from roundpipe_cli.recipe import foreign
from roundpipe_cli.recipe.aliases import ALIASES
from roundpipe_cli.recipe.check import NO_SUCH_KEY, known_keys, near_spelling
from roundpipe_cli.recipe.foreign import answer_of, hint_for
from roundpipe_cli.recipe.load import load_text
from roundpipe_cli.recipe.schema import Recipe

SMALLEST = "model: some/model\ndatasets: [{path: rows.jsonl}]\n"


def answer(line: str) -> str:
    """The hint that a recipe with one more line is refused with; empty where the line is read."""
    try:
        load_text(SMALLEST + line + "\n", "mine.yaml")
    except RecipeError as error:
        (problem,) = error.problems
        assert problem.hint is not None, line
        return problem.hint
    return ""


def test_each_argument_of_transformers_and_peft_has_its_answer() -> None:
    """By name, or by a near spelling of the same word; those of a recipe's own and aliases are read."""
    names = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    names |= {field.name for field in dataclasses.fields(peft.LoraConfig) if field.init}
    keys = known_keys(Recipe)
    asked = sorted(name for name in names if name not in keys and name not in ALIASES)
    assert len(asked) > 90
    for name in asked:
        same = next((f"did you mean {key}?" for key in keys if key.rpartition(".")[2] == name), None)
        hint = answer(f"{name}: other")
        assert hint and hint != NO_SUCH_KEY and (hint == same or "did you mean" not in hint), (name, hint)
        assert load_text(f"{SMALLEST}{name}: null\n", "a.yaml").notices if answer_of(name) else same or hint_for(name)


def test_only_another_spelling_of_the_same_words_is_suggested() -> None:
    """A key that shares its beginning or some of its words is another key."""
    near = {"learning_rte": "learning_rate", "steps_eval": "eval_steps", "maxSeqLength": "max_seq_length"}
    near["gradient_acumulation_step"] = "gradient_accumulation_steps"
    far = dict.fromkeys(("num_labels", "vision", "train_epochs", "lora_beta", "eval_batch"))
    for word, expected in {**near, **far}.items():
        assert near_spelling(word, [*known_keys(Recipe), *ALIASES]) == expected, word


@pytest.mark.parametrize("word", ["rang", "rnak", "ran", "ranks", "r_ank"])
def test_a_slip_in_a_short_word_is_found(word: str) -> None:
    """Story: of `rang`, one letter off, there was no word of `rank`."""
    assert answer(f"lora: {{{word}: 8}}") == "did you mean lora.rank?"
    assert "did you mean" not in answer("mora: true") + answer("lora: {gain: 8}")


def test_a_key_has_one_answer() -> None:
    """No table has a key twice, and none a key that a recipe has or reads; those of rows are a data set's."""
    kinds = get_args(foreign.AnswerKind)
    assert {*foreign.tables()} == {*kinds, "about", "values", "jobs of values", "spellings", "words"}
    for kind in kinds:
        words = [word for names in foreign.tables()[kind].values() for word in names.split()]
        assert len(words) == len(set(words)) > 10, kind
        assert kind in foreign.OF_ROWS or not set(words) & set(known_keys(Recipe)), kind
    jobs = {foreign.REINFORCEMENT, foreign.PREFERENCES, foreign.REWARD, foreign.EVALUATION}
    assert jobs <= foreign.tables()["job"].keys() and foreign.CROSS_ENTROPY in foreign.tables()["other"]
    assert foreign.TEMPLATED in foreign.tables()["changed row"] and "@" not in str(foreign.tables())
