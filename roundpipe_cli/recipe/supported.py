"""Keys that the schema has but whose feature has not landed: refused unless they stand at their off value.

When a feature lands, delete its line here (and change the default in `schema.py` where the contract says so).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roundpipe_cli.errors import Problem
from roundpipe_cli.recipe.check import Findings
from roundpipe_cli.recipe.schema import Recipe, plain_data
from roundpipe_cli.recipe.strict_yaml import KeyPath, format_key, shown_value


@dataclass(frozen=True)
class NotYet:
    """One key whose feature is missing."""

    key: str
    """Dotted path, list items as `[]`."""
    feature: str
    """What the user asked for, in words."""
    off: Any
    """The value to write instead."""
    refused: tuple[Any, ...] = ()
    """Only these values are refused; empty: every value but `off` is."""


NOT_YET: tuple[NotYet, ...] = (
    NotYet("pipeline.devices", "training on emulated devices", "auto", refused=("emulated",)),
)


def unsupported_problems(recipe: Recipe) -> list[Problem]:
    """One problem for each key that asks for a feature that has not landed."""
    findings = Findings({})
    find_unsupported(plain_data(recipe), findings)
    return findings.problems


def find_unsupported(data: dict[str, Any], findings: Findings) -> None:
    """The same for a recipe's plain data, which may have other mistakes: keys with a finding are left alone."""
    for entry in NOT_YET:
        for path, value in _values(data, entry.key.replace("[]", ".[]").split("."), ()):
            asks = value in entry.refused if entry.refused else value != entry.off
            if asks and path not in findings.refused:
                written = entry.off if isinstance(entry.off, str) else shown_value(entry.off)
                findings.add(
                    path,
                    f"not yet supported: {entry.feature}",
                    found=shown_value(value),
                    expected=f"{format_key(path)}: {written}",
                    hint=f"delete the line, or write `{path[-1]}: {written}`",
                )


def _values(value: Any, parts: list[str], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every (path, value) under `value` that the pattern `parts` names."""
    if not parts:
        yield path, value
    elif parts[0] == "[]":
        for index, item in enumerate(value if isinstance(value, list) else []):
            yield from _values(item, parts[1:], (*path, index))
    elif isinstance(value, dict) and parts[0] in value:
        yield from _values(value[parts[0]], parts[1:], (*path, parts[0]))
