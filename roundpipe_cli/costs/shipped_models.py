"""The figures of the shipped recipes' models (models.json), so that planning them needs no network."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib.resources import files
from typing import Any

from roundpipe_cli.costs.models import Architecture, parse_config


@lru_cache(maxsize=1)
def shipped_figures() -> dict[str, dict[str, Any]]:
    """config.json figures of the models that the shipped recipes name, by hub id."""
    text = files("roundpipe_cli.costs").joinpath("models.json").read_text(encoding="utf-8")
    return {re.sub(r" \(text\)$", "", name): figures for name, figures in json.loads(text).items()}


def figures_of(hub_id: str) -> tuple[dict[str, Any], str] | None:
    """A shipped model's figures and their source; a fine-tuned sibling (`-Instruct`, `-it`, ...) has the same."""
    by_family = {_family(name): name for name in shipped_figures()}
    name = by_family.get(_family(hub_id))
    if name is None:
        return None
    note = "" if name == hub_id else f" (those of {name})"
    return shipped_figures()[name], f"figures shipped with the tool{note}"


def shipped_architecture(hub_id: str) -> Architecture | None:
    """A shipped model's architecture."""
    found = figures_of(hub_id)
    return None if found is None else parse_config(found[0], name=hub_id, source=found[1])


def _family(hub_id: str) -> str:
    return re.sub(r"-(instruct|it|pt|base|chat|instruct-2507|thinking-2507)(?=-v[\d.]+$|$)", "", hub_id.lower())
