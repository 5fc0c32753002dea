"""Plans of one recipe under every combination of some keys' values, side by side. No torch."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from roundpipe_cli.costs.hardware import Hardware, parse_hardware
from roundpipe_cli.costs.machine import is_large_for_cpu
from roundpipe_cli.errors import ContradictionError, RecipeError, RefusedError, ResourceError
from roundpipe_cli.planning.predict import Plan, make_plan, what_binds
from roundpipe_cli.planning.question import Build
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe
from roundpipe_cli.watchdog import watching

# The verdict on a plan in one word, and its reason.

WAITING_SHARE = 0.5
"""A plan is SLOW if workers wait for more than this share of the time."""
Word = Literal["FITS", "SLOW", "DOES NOT FIT"]


@dataclass(frozen=True, slots=True)
class Summary:
    """The verdict on a plan."""

    word: Word
    reasons: tuple[str, ...] = ()
    """Why the plan is slow, or which memory is short by how much."""
    rests_on: Mapping[str, str] = field(default_factory=dict)
    """Assumed figures that the reasons name: the option of a machine that sets one -> the figure."""


RATE_OF = {
    "links to the workers": "pcie_gb_per_s",
    **dict.fromkeys(("memory of the host", "updates before backward"), "host_memory_gb_per_s"),
}
"""Name in `Plan.needs_s` -> the option of a machine that sets the rate of it."""


def summary_of(plan: Plan) -> Summary:
    """FITS, DOES NOT FIT, or SLOW if the machine mostly waits. A reason names the assumed figures that it rests on."""
    hardware = plan.question.hardware
    if not plan.verdict.fits:
        by_reason = {
            reason: ("host_memory_gib",) if reason.startswith("host memory:") else ()
            for reason in plan.verdict.short_reasons
        }
        return _resting("DOES NOT FIT", by_reason, hardware)
    rate = f"{plan.tokens_per_s:,.0f} tokens/s"
    question = plan.question
    if is_large_for_cpu(hardware, question.architecture.parameters):
        needs = "; `finetune` needs pipeline.devices=[cpu,cpu] for it" if question.is_for_lack_of_gpus else ""
        return Summary("SLOW", (f"a model of this size on the CPU: {rate}{needs}",))
    if question.reads_disk:
        reason = f"weights come from disk in every round: {rate}"
        return _resting("SLOW", {reason: ("disk_gb_per_s", "host_memory_gib")}, hardware)
    if plan.bubble_ratio > WAITING_SHARE:
        waits = f"workers wait {100 * plan.bubble_ratio:.0f} % of the time"
        busy_s = plan.needs_s["arithmetic"] + plan.launches_s  # a wait for launches is not in the bubble
        most = what_binds({**plan.needs_s, "arithmetic": busy_s, "launches": 0.0}, 0.0)
        reason = f"{waits}, most for the {most}: {rate}" if most != "arithmetic" else f"{waits}: {rate}"
        return _resting("SLOW", {reason: filter(None, [RATE_OF.get(most)])}, hardware)
    return Summary("FITS")


def _resting(word: Word, by_reason: Mapping[str, Iterable[str]], hardware: Hardware) -> Summary:
    """Each reason with those of its options' figures that are assumed, and how to set them."""
    reasons, rests_on = list[str](), dict[str, str]()
    for reason, options in by_reason.items():
        assumed = {option: hardware.assumed[option] for option in options if option in hardware.assumed}
        reasons.append("; ".join([reason, *(f"{figure}: set {option}=" for option, figure in assumed.items())]))
        rests_on |= assumed
    return Summary(word, tuple(reasons), rests_on)


MAX_COMBINATIONS = 64
_FIGURE = re.compile(r"\s*[a-z_]+=")
"""Continues a machine: `host_memory_gib=64` after `2x3090`."""
_CLOSING = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Combination:
    """One combination of values: its plan, or the reason why there is none."""

    values: Mapping[str, str]
    plan: Plan | None
    summary: Summary | None
    refused: str | None = None

    @property
    def order(self) -> tuple[int, float]:
        """Order of rows: fastest first, then what does not fit, then what is refused."""
        if self.plan is None or self.summary is None:
            return 2, 0.0
        return int(self.summary.word == "DOES NOT FIT"), -self.plan.tokens_per_s


def axes_of(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Overrides of one value, and the values of each key that has several: `key=1,2,4`.

    Raises:
        RefusedError: no key has several values, one is given twice or left empty, or there are too many combinations.
    """
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        values = _values(key, value) if equals else []
        if len(values) < 2:
            fixed.append(text)
            continue
        if key in axes or any(one.startswith(f"{key}=") for one in fixed):
            raise RefusedError(f"{key} is given twice", where="--compare", hint=f"{key}={','.join([*values, '...'])}")
        if "" in values or len(set(values)) < len(values):
            raise RefusedError("values to compare are empty or alike", where="--compare", found=text)
        axes[key] = values
    total = math.prod(map(len, axes.values()))
    if not axes or total > MAX_COMBINATIONS:
        raise RefusedError(
            "too many combinations to compare" if axes else "nothing to compare: no key has several values",
            where="--compare",
            found=f"{total} combinations" if axes else " ".join(overrides) or "no key",
            expected=f"at most {MAX_COMBINATIONS}" if axes else "values with commas between them",
            hint="--compare hardware=1x4090,2x4090 load_in_4bit=true,false",
        )
    return fixed, axes


def _values(key: str, text: str) -> list[str]:
    """The parts of `text` between commas that are in no bracket or quotes, nor inside the words for one machine."""
    parts: list[str] = []
    open_brackets: list[str] = []
    start, quote = 0, ""
    for index, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in _CLOSING:
            open_brackets.append(_CLOSING[letter])
        elif open_brackets and letter == open_brackets[-1]:
            open_brackets.pop()
        elif letter == "," and not open_brackets and not (key == "hardware" and _FIGURE.match(text[index + 1 :])):
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def compare_plans(
    recipe: str,
    overrides: Sequence[str],
    hardware: str | None,
    build: Build | None,
    *,
    tell: Callable[[int, int, Mapping[str, str]], None],
    load: Callable[[str, list[str]], LoadedRecipe] = load_recipe,
) -> list[Combination]:
    """A row for every combination, the fastest first.

    Args:
        overrides: `key=value` and `key=value,value`; `hardware` is one of the keys.
        hardware: of all combinations; None: the recipe's.
        tell: called with (rows that are done, all rows, the values of the next).

    Raises:
        RefusedError: a key or value that no recipe has, or a refusal that all combinations share.
    """
    fixed, axes = axes_of(overrides)
    if hardware is not None and "hardware" in axes:
        raise RefusedError("the hardware is given twice", where="--compare", found=f"--hardware {hardware}")
    for words in axes.get("hardware", ()):
        parse_hardware(words, where=f"hardware: {words}")
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    rows: list[Combination] = []
    first_refusal: RefusedError | ResourceError | None = None
    for index, values in enumerate(combinations):
        tell(index, len(combinations), values)
        try:
            loaded = load(recipe, [*fixed, *(f"{key}={value}" for key, value in values.items())])
            with watching(loaded.recipe.watchdog_s):
                plan = make_plan(loaded, hardware, build)
        except (RefusedError, ResourceError) as error:
            if isinstance(error, RecipeError) and not isinstance(error, ContradictionError):
                raise  # a key or value that no recipe has
            first_refusal = first_refusal or error
            rows.append(Combination(values, None, None, error.problems[0].what))
        else:
            rows.append(Combination(values, plan, summary_of(plan)))
    if first_refusal is not None and len({row.refused for row in rows}) == 1:
        raise first_refusal
    return sorted(rows, key=lambda row: row.order)
