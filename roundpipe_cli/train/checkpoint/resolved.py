"""Keys that a run decides once, at its start: a resumed run keeps to what the checkpoint's recipe holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from roundpipe_cli.recipe.schema import Recipe

DECIDED_ONCE: Mapping[str, Any] = {"packing": False, "micro_batch_tokens": None}
"""Keys whose `auto` depends on rows, model or machine, with the value of releases without the key."""


def as_decided(recipe: Recipe, saved: Mapping[str, Any]) -> Recipe:
    """The recipe with the saved recipe's value for each key that is `auto`.

    Args:
        saved: recipe of the checkpoint.
    """
    open_keys = [key for key in DECIDED_ONCE if getattr(recipe, key) == "auto"]
    return replace(recipe, **{key: saved.get(key, DECIDED_ONCE[key]) for key in open_keys})


def begun_with(saved: Mapping[str, Any], recipe: Recipe, allowed: Sequence[str]) -> str | None:
    """The revision of the base model for a run that continues: the commit that it began with, whatever the hub has now.

    Args:
        saved: meta of the checkpoint.
        allowed: keys that the user allows to differ; `model` asks for the hub's newest again.
    """
    before = saved.get("recipe")
    commit = saved.get("model_commit")
    if not isinstance(before, dict) or not isinstance(commit, str) or "model" in {key.split(" ")[0] for key in allowed}:
        return recipe.revision
    is_same = before.get("model") == recipe.model and before.get("revision") == recipe.revision
    return commit if is_same else recipe.revision
