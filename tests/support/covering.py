"""Few of a test's combinations that still hold every value of every parameter, or every pair of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = Mapping[str, int]  # parameter's name -> which value it has


def covering(cases: Sequence[Case], strength: int) -> set[int]:
    """Numbers of `cases` in which every combination of `strength` values that `cases` have occurs.
    Greedy: the case with most that is new comes next. Of equal ones the first; for single values that whose other
    values were chosen least often, so that these take turns."""
    parts = [_parts(case, strength) for case in cases]
    missing = set().union(*parts)
    used: Counter[tuple[str, int]] = Counter()
    chosen: set[int] = set()
    while missing:
        rest = [number for number in range(len(cases)) if number not in chosen]
        best = max(
            rest,
            key=lambda number: (len(parts[number] & missing), -_uses(cases[number], used) * (strength == 1), -number),
        )
        chosen.add(best)
        missing -= parts[best]
        used.update(cases[best].items())
    return chosen


def swept(values: Iterable[object]) -> list[Any]:
    """Cases of one parameter that run by `scripts/test -m sweep` only."""
    return [pytest.param(value, marks=pytest.mark.sweep) for value in values]


def _parts(case: Case, strength: int) -> set[tuple[tuple[str, int], ...]]:
    return set(combinations(sorted(case.items()), min(strength, len(case))))


def _uses(case: Case, used: Counter[tuple[str, int]]) -> int:
    return sum(used[value] for value in case.items())
