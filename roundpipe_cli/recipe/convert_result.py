"""The result of a conversion, and its recipe as text, whose header begins with what trains differently."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field
from typing import Any

import yaml

from roundpipe_cli.recipe.convert_tables import Tool


@dataclass(frozen=True, slots=True)
class UnusedLine:
    """A line of the file that the recipe does not have."""

    key: str
    value: Any
    reason: str


@dataclass(slots=True)
class Conversion:
    """The result of converting one file."""

    tool: Tool
    recipe: dict[str, Any] = field(default_factory=dict)
    """Nested, as it is written."""
    changes: list[str] = field(default_factory=list)
    """Differences between what recipe and file train, a clause each; they stand in the recipe's first line."""
    left_out: list[UnusedLine] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    """Keys that change nothing here."""
    written: set[str] = field(default_factory=set)
    """Keys of the file that set a value of the recipe."""
    notes: list[str] = field(default_factory=list)
    """Notes for users of the other tool."""

    def leave_out(self, key: str, value: Any, reason: str, *, change: str | None = None) -> None:
        """List a line as left out; `change` says what training does instead, where that is not the same."""
        self.left_out.append(UnusedLine(key, value, reason))
        if change is not None:
            self.change(key, change)

    def change(self, key: str, what: str) -> None:
        """Name in the first line what training does in place of `key`."""
        sentence = f"{key}: {what}"
        if sentence not in self.changes:
            self.changes.append(sentence)

    def text(self, source: str) -> str:
        """The recipe's file: a header that says what happened, then the keys."""
        lines = []
        if self.changes:
            changes = "; ".join(self.changes).replace("\n", " ")
            lines.append(f"# Not the same training as {source}: {changes}.")  # one line, however long
        lines += _comment(f"Converted from {source}, a file of {self.tool}.", *self.notes)
        if self.left_out:
            lines += ["#", "# Left out:"]
            for entry in self.left_out:
                lines += textwrap.wrap(
                    f"{entry.key}: {short(entry.value)} - {entry.reason}",
                    width=116,
                    initial_indent="#   ",
                    subsequent_indent="#     ",
                    break_on_hyphens=False,
                )
        return "\n".join([*lines, "", dump(self.recipe)])


class _Dumper(yaml.SafeDumper):
    """Numbers such as 2.0e-05 as YAML 1.2 reads them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(recipe: dict[str, Any]) -> str:
    """A recipe's keys as YAML, in their order."""
    return yaml.dump(recipe, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def short(value: Any) -> str:
    """A value as JSON, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _comment(*sentences: str) -> list[str]:
    return textwrap.wrap(" ".join(sentences), 118, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
