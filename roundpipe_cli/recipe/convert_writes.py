"""Collects the values of a converted recipe, each checked alone, and the defaults of the other tool."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from roundpipe_cli.errors import RecipeError
from roundpipe_cli.recipe.aliases import ALIASES, Writes, value_alias
from roundpipe_cli.recipe.convert_result import Conversion, dump, short
from roundpipe_cli.recipe.convert_rules import RULES
from roundpipe_cli.recipe.load import load_text
from roundpipe_cli.recipe.schedules import NEEDED_SCHEDULE_KEYS, SCHEDULE_KEYS
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.recipe.sections import MAX_LEARNING_RATE, LoraConfig
from roundpipe_cli.recipe.together import NEEDS_EVALUATION

_NOT_TRAINING = frozenset(
    ("output_dir", "logging_steps", "save_steps", "save_total_limit", "report_to", "eval_steps", "eval_samples")
    + ("eval_max_new_tokens", "resume_from_checkpoint", "watchdog_s", "hardware", "pipeline")
)
"""Recipe keys that do not change what is trained: without them, the recipe's first line says nothing."""


class RecipeWrites:
    """Values for dotted recipe keys, each with the key of the file that it comes from."""

    def __init__(self, result: Conversion) -> None:
        self.values: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        """Keys that come from the other tool's defaults."""
        self._sources: dict[str, tuple[str, Any]] = {}
        self.result = result
        self.refused: set[str] = set()
        """Recipe keys that the file speaks of with a value that is not accepted: no default comes in its place."""

    def put(self, target: str, value: Any, key: str, written: Any) -> None:
        """Write `value`, or list the file's line as left out: it contradicts another, or a recipe refuses it."""
        known, meant = value_alias(target, value)
        value = meant if known else value
        if target in self.values and self.values[target] != value:
            other = self._sources[target][0]
            self.result.leave_out(key, written, f"{other} says otherwise", change=f"{other} decides")
            return
        reason = _mistake(target, value)
        if reason is not None:
            self.refuse(target, key, written, reason)
            return
        self.values[target] = value
        self.result.written.add(key)
        self._sources.setdefault(target, (key, written))

    def refuse(self, target: str, key: str, written: Any, reason: str) -> None:
        """List a line whose value no recipe can have, with what the recipe does instead."""
        self.refused.add(target)
        change = None
        if target.partition(".")[0] not in _NOT_TRAINING:
            change = f"not {short(written)}, but {target}: {_ours(target)}"
        self.result.leave_out(key, written, reason, change=change)

    def default(self, key: str, value: Any) -> None:
        """A default of the other tool, where its file says nothing about the same thing."""
        for target, meant in self._meaning(key, value).items():
            if target not in self.values and target not in self.refused:
                self.values[target] = meant
                self._sources[target] = (f"{key} (default of {self.result.tool})", value)
                self.defaults[target] = meant

    def _meaning(self, key: str, value: Any) -> Writes:
        if key in RULES:
            return RULES[key](value, {})
        return ALIASES[key](value) if key in ALIASES else {key: value}

    def drop(self, section: str, why: str) -> None:
        """Take a section out of the recipe again; its lines are listed as left out."""
        for target in [key for key in self.values if key.startswith(f"{section}.")]:
            key, written = self._sources.pop(target)
            del self.values[target]
            if self.defaults.pop(target, None) is None:
                self.result.leave_out(key, written, why)


def _ours(target: str) -> Any:
    """A recipe key's own default, as a note shows it."""
    schema = LoraConfig if target.startswith("lora.") else Recipe
    default = {entry.name: entry.default for entry in fields(schema)}.get(target.rpartition(".")[2], MISSING)
    return "what it is without that line" if default is MISSING else short(default)


def _mistake(target: str, value: Any) -> str | None:
    """Why a recipe with this value is refused, or None."""
    data: dict[str, Any] = {"model": "some/model", "datasets": [{"path": "rows.jsonl"}]}
    section = data
    *outer, last = target.split(".")
    for part in outer:
        section = section.setdefault(part, {})
    section[last] = value
    for key, needed in _together(target, value).items():
        data.setdefault(key, needed)
    try:
        load_text(dump(data), "recipe.yaml")
    except RecipeError as error:
        problem = error.problems[0]
        return problem.what + (f" (expected: {problem.expected})" if problem.expected else "")
    return None


def _together(target: str, value: Any) -> dict[str, Any]:
    """Keys that a recipe needs beside a key so that it makes sense."""
    if target == "lr_scheduler_kwargs" and isinstance(value, dict):
        fitting = [name for name, keys in SCHEDULE_KEYS.items() if set(value) <= set(keys)]
        return {"lr_scheduler_type": fitting[-1], "learning_rate": MAX_LEARNING_RATE} if fitting else {}
    if target == "lr_scheduler_type" and isinstance(value, str):
        return {"lr_scheduler_kwargs": dict.fromkeys(NEEDED_SCHEDULE_KEYS.get(value, ())[-1:], 1)}
    if target in dict(NEEDS_EVALUATION):
        return {"val_set_size": 0.1}
    if target == "eval_datasets" and any(entry.get("type") == "preference" for entry in value):
        return {"objective": "orpo"}
    if target == "frozen_parameters":
        return {"method": "full"}
    return {"optim": "sgd"} if target == "sgd_momentum" else {}
