"""Keys and values of other trainers without a counterpart here, each with its answer: for recipes and for `convert`.

The trainers: axolotl, LLaMA-Factory, TRL, Unsloth, torchtune, transformers' and PEFT's arguments, DeepSpeed, FSDP and
accelerate. The answers are in `foreign.json`; spellings that a recipe takes are in `aliases.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

from roundpipe_cli.choices import OBJECTIVES, OPTIMIZERS, SCORING_OBJECTIVES, objectives_of
from roundpipe_cli.units import either

AnswerKind = Literal["write", "media", "advice", "other", "job", "idle", "row", "changed row", "topic"]
"""`idle`: decided by the program itself, so a file loses nothing; `other`: training is another without it, and the text
says what is done instead, in the first line of a converted recipe; `advice`: what to know where nothing else is
trained; `write`: what to write, where the value decides what `convert` makes of it; `job` and `media`: it asks for a
job that no recipe does, `media` whatever its value, so that `convert` refuses the file, unless its own job does not
read the key. `row` and `changed row` are settings of data sets: advice, and what is done instead. `topic`: what a key
is about by its words alone."""
OF_KEYS: tuple[AnswerKind, ...] = ("write", "media", "advice", "other", "job", "idle")
OF_ROWS: tuple[AnswerKind, ...] = ("row", "changed row")
_BEFORE = {"idle": "not needed here: ", **dict.fromkeys(("other", "job", "changed row"), "not offered: ")}

SHARING_KEYS = (
    *("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size", "tensor_model_parallel_size"),
    "pipeline_model_parallel_size",
)
"""Settings for several GPUs that work on the same rows: those GPUs do not multiply the rows of a step."""
CROSS_ENTROPY = "the ordinary cross-entropy is trained"
TEMPLATED = "rows are put into the chat template where the tokenizer has one"
REINFORCEMENT, PREFERENCES, REWARD = "reinforcement learning", "training on preferences", "training of a reward model"
EVALUATION, MULTIMODAL = "evaluation or prediction", "training on images, video or sound"


class Answer(NamedTuple):
    """The answer to a key of another trainer."""

    kind: AnswerKind
    text: str

    @property
    def hint(self) -> str:
        """The sentence for a recipe that has the key."""
        return _BEFORE.get(self.kind, "") + self.text


@cache
def tables() -> dict[str, Any]:
    """The tables: for each kind of answer its texts, each with the names that it answers. `values`: the same for values
    of recipe keys. `jobs of values`: for keys of other trainers, patterns of values that ask for another job.

    A name `name_*` stands for every name that begins so, where none is listed whole, and `~word`, for recipes alone,
    for every name with a word of that pattern that no key of ours is near to: `convert` names such keys as unknown.
    """
    text = files("roundpipe_cli.recipe").joinpath("foreign.json").read_text(encoding="utf-8")
    listed = {"pairs": either(objectives_of("pair")), "objectives": either(OBJECTIVES)}
    listed["optimizers"] = ", ".join(OPTIMIZERS)
    for name, choices in listed.items():
        text = text.replace(f"@{name}", choices)
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@cache
def names_of(kind: AnswerKind) -> Mapping[str, Answer]:
    """Name, as the tables have it -> its answer of this kind."""
    return {name: Answer(kind, text) for text, names in tables()[kind].items() for name in names.split()}


def answer_of(key: str, kinds: tuple[AnswerKind, ...] = OF_KEYS, *, begins: bool = False) -> Answer | None:
    """The answer to a key of another trainer in the first of these tables that has it by its whole name, or where
    `begins` says so, by its beginning."""
    names = [name for kind in kinds for name in names_of(kind).items()]
    whole = (found for name, found in names if name == key and key.strip("~*") == key)
    longer = (found for name, found in names if begins and name[-1] == "*" and key.startswith(name[:-1]))
    return next(chain(whole, longer), None)


def is_off(value: object) -> bool:
    """Whether a line asks for nothing."""
    return value is None or value is False or value in ("", [], {}) or value == "none"


def other_job(key: str, value: object) -> str | None:
    """The job that no recipe does for which a line of another trainer's file asks."""
    if value is None:
        return None
    if asked := [job for pattern, job in _of_key("jobs of values", key) if re.search(pattern, str(value))]:
        return asked[0]
    if answer_of(key, ("media",)):
        return MULTIMODAL
    found = None if is_off(value) else answer_of(key, ("job",), begins=True)
    return found and found.text


def hint_for(key: str) -> str | None:
    """The answer to a key that is near no key of ours: by its name, its beginning, or the words in it."""
    if found := answer_of(key) or answer_of(key, ("job", "idle"), begins=True):
        return found.hint
    words = re.split(r"[^a-z0-9]+", key.lower())
    names = ((name, found) for kind in get_args(AnswerKind) for name, found in names_of(kind).items() if name[0] == "~")
    found_by_words = {found for name, found in names if any(re.fullmatch(name[1:], word) for word in words)}
    if len(found_by_words) == 1:
        return found_by_words.pop().text
    return next((found.text for found in found_by_words if found.kind == "media"), None)  # else it may mean either


def answer_to(key: str, value: object) -> str | None:
    """The advice for a value of another trainer that a recipe key does not take."""
    lowered = value.lower() if isinstance(value, str) else ""
    if key == "method" and lowered in SCORING_OBJECTIVES:
        return f"write `objective: {lowered}`"
    return next((text for text, values in _of_key("values", key) if lowered in values.split()), None)


def _of_key(table: str, key: str) -> list[tuple[str, str]]:
    """The entries of a table for each key among those that it names."""
    return [entry for keys, entries in tables()[table].items() if key in keys.split() for entry in entries.items()]
