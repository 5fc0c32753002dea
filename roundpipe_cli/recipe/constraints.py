"""Conditions beside the type that a value of a recipe must meet; they stand in the annotations of `schema.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roundpipe_cli.choices import OptimizerKind

MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """A closed interval of numbers; `above` and `below` exclude the border."""

    low: float = 0
    high: float = MAX_INTEGER
    above: bool = False
    below: bool = False

    def accepts(self, value: Any) -> bool:
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        return bool(over and under)

    def describe(self, noun: str) -> str:
        low = f"{'above' if self.above else 'of at least'} {self.low:g}"
        if self.high >= MAX_INTEGER:
            return f"{noun} {low}"
        if not self.above and not self.below:
            return f"{noun} from {self.low:g} to {self.high:g}"
        return f"{noun} {low} and {'below' if self.below else 'at most'} {self.high:g}"


@dataclass(frozen=True)
class Matching:
    """Text of a certain form."""

    pattern: str
    form: str

    def accepts(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, value) is not None

    def describe(self, noun: str) -> str:
        return self.form


@dataclass(frozen=True, eq=False)
class Explained:
    """One of a table's names; the list of keys shows their meanings behind the key's own."""

    table: Mapping[Any, OptimizerKind]

    def accepts(self, value: Any) -> bool:
        return value in self.table

    def describe(self, noun: str) -> str:
        return noun

    @property
    def meanings(self) -> str:
        return "; ".join(f"{name} {kind.meaning}" for name, kind in self.table.items()) + "."


@dataclass(frozen=True)
class NotEmpty:
    """At least one item, or one character that is not white space."""

    def accepts(self, value: Any) -> bool:
        return bool(value.strip()) if isinstance(value, str) else len(value) > 0

    def describe(self, noun: str) -> str:
        return f"{noun} that is not empty"


@dataclass(frozen=True)
class InclusiveRange:
    """`[first, last]`, both inclusive; `[a, a - 1]` is an empty stage."""

    def accepts(self, value: Any) -> bool:
        return len(value) == 2 and value[0] >= 0 and value[1] >= value[0] - 1

    def describe(self, noun: str) -> str:
        return "an inclusive range of layers such as [0, 6]"
