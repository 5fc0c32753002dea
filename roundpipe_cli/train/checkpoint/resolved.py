"""Keys that a run decides once, at its start: a resumed run keeps to what the checkpoint's recipe holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roundpipe_cli.recipe.schema import Recipe

DECIDED_ONCE: Mapping[str, Any] = {"packing": False, "micro_batch_tokens": None}
"""Keys whose `auto` depends on rows, model or machine, and what a release without the key did."""


def as_decided(recipe: Recipe, saved: Mapping[str, Any]) -> Recipe:
    """The recipe with the saved one's value where it says `auto`.

    Args:
        saved: recipe of the checkpoint.
    """
    open_keys = [key for key in DECIDED_ONCE if getattr(recipe, key) == "auto"]
    return replace(recipe, **{key: saved.get(key, DECIDED_ONCE[key]) for key in open_keys})
