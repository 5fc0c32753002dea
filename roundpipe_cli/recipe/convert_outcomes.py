"""The outcomes of a rule for one line of another tool's file: values to write, a part of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roundpipe_cli.recipe.aliases import Writes

Data = Mapping[str, Any]


class LeaveOutError(ValueError):
    """This line is left out, for the reason given; `change` says what training does instead, where that differs."""

    def __init__(self, reason: str, change: str | None = None) -> None:
        super().__init__(reason)
        self.change = change


class Partly(dict[str, Any]):
    """Writes that do nearly what the line says; `change` names the difference."""

    def __init__(self, writes: Writes, change: str) -> None:
        super().__init__(writes)
        self.change = change


ConversionRule = Callable[[Any, Data], Writes]
"""(value, the whole file) -> dotted recipe key to value; nothing where the line changes nothing."""
