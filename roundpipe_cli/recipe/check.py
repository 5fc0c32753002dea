"""Checks plain data against the annotations of `schema.py`: unknown keys, types, ranges, missing keys; all at once."""

from __future__ import annotations

import math
import re
import shlex
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from roundpipe_cli.errors import Problem, closest, one_edit_apart
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.recipe.strict_yaml import KeyPath, Place, format_key, parse_scalar, shown_value

MAX_SHOWN = 30
"""Problems shown one by one; the rest are counted."""

REFUSED: Any = object()
"""Stands for a refused value; its problem is among the findings."""
NAMED_KEYS = 6
"""Most keys of a mapping that an error names."""


class Findings:
    """Collects problems with their places, so that all can be shown at once in the order of the file."""

    def __init__(self, places: dict[KeyPath, Place], parent: Findings | None = None) -> None:
        self.places = places
        self._parent = parent
        self.refused: set[KeyPath] = set()
        """Key paths that already have a problem, or depend on one: not looked at again."""
        self._found: list[tuple[int, Problem]] = []

    def add(
        self,
        path: KeyPath,
        what: str,
        *,
        found: str | None = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.refused.add(path)
        place = self.place(path)
        written = f" (written {place.written})" if place.written else ""
        where = f"{place.origin}: {format_key(path)}{written}" if path else place.origin
        self._found.append((place.line, Problem(what, where, found, expected, hint)))

    def add_problem(self, problem: Problem, line: int) -> None:
        """A problem that already names its place; `line` is for sorting."""
        self._found.append((line, problem))

    def place(self, path: KeyPath) -> Place:
        """The place of `path`, or of the nearest section around it that was written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place("recipe", 0))

    def trial(self) -> Findings:
        """Empty findings about the same data, for trying one type of a value."""
        return Findings(self.places, self)

    def is_refused(self, path: KeyPath) -> bool:
        return path in self.refused or (self._parent is not None and self._parent.is_refused(path))

    def take(self, other: Findings) -> None:
        self._found += other._found
        self.refused |= other.refused

    @property
    def num_found(self) -> int:
        return len(self._found)

    @property
    def problems(self) -> list[Problem]:
        """In the order of the file, the overrides last, at most MAX_SHOWN and a line about the rest."""
        problems = [problem for _, problem in sorted(self._found, key=lambda entry: entry[0])]
        if len(problems) > MAX_SHOWN:
            problems[MAX_SHOWN:] = [Problem(f"and {len(problems) - MAX_SHOWN} more mistakes", hint="fix these first")]
        return problems


@cache
def hints_of(schema: type) -> dict[str, Any]:
    """Key -> annotation of a schema dataclass, constraints included."""
    return get_type_hints(schema, include_extras=True)


@cache
def known_keys(schema: type, prefix: str = "") -> tuple[str, ...]:
    """Every key path of a schema with dots, list items as `[]`: `lora.r`, `datasets[].path`."""
    paths: list[str] = []
    for key, hint in hints_of(schema).items():
        paths.append(prefix + key)
        section, is_list = section_of(hint)
        if section is not None:
            paths += known_keys(section, f"{prefix}{key}{'[]' if is_list else ''}.")
    return tuple(paths)


def section_of(hint: Any) -> tuple[type | None, bool]:
    """(the schema dataclass that a key holds, whether in a list), or (None, False)."""
    if get_origin(hint) is Annotated:
        return section_of(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return section_of(get_args(hint)[0])[0], True
    return (hint, False) if isinstance(hint, type) and is_dataclass(hint) else (None, False)


def remove_unknown_keys(
    data: dict[str, Any], schema: type, findings: Findings, *, also_known: list[str], path: KeyPath = ()
) -> None:
    """Delete the keys that `schema` does not have from `data`, each with a problem and the nearest known key.

    `also_known` are dotted keys that are accepted as other spellings; they may be suggested.
    """
    hints = hints_of(schema)
    for key in [key for key in data if key not in hints]:
        if (*path, key) not in findings.refused:
            _report_unknown(key, path, schema, findings, also_known)
        del data[key]
    for key, value in data.items():
        section, is_list = section_of(hints[key])
        if section is None:
            continue
        items = enumerate(value) if is_list and isinstance(value, list) else [(None, value)]
        for index, item in items:
            if isinstance(item, dict):
                inner = (*path, key) if index is None else (*path, key, index)
                remove_unknown_keys(item, section, findings, also_known=also_known, path=inner)


def check(value: Any, hint: Any, path: KeyPath, findings: Findings) -> Any:
    """The value as the annotation wants it (tuples for lists, dataclasses for sections), or REFUSED with findings."""
    if findings.is_refused(path):
        return REFUSED
    origin = get_origin(hint)
    if origin is Annotated:
        base, *constraints = get_args(hint)
        is_list = get_origin(base) is tuple and isinstance(value, list)
        result = check(value, base, path, findings) if is_list else _scalar(value, base)
        if result is REFUSED and is_list:
            return REFUSED  # an item is wrong and was reported
        if result is REFUSED or not all(constraint.accepts(result) for constraint in constraints):
            return _refuse(value, hint, path, findings)
        return result
    if origin in (Union, types.UnionType):
        return _check_union(value, hint, path, findings)
    if origin is tuple and isinstance(value, list):
        items = [check(item, get_args(hint)[0], (*path, i), findings) for i, item in enumerate(value)]
        return REFUSED if REFUSED in items else tuple(items)
    if origin is Mapping and isinstance(value, dict):
        return _check_mapping(value, hint, path, findings)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return _check_section(value, hint, path, findings)
    result = _scalar(value, hint)
    return _refuse(value, hint, path, findings) if result is REFUSED else result


def describe_type(hint: Any) -> str:
    """The type that a key expects, in words: `an integer of at least 1`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        text = describe_type(arguments[0])
        for constraint in arguments[1:]:
            text = constraint.describe(text)
        return text
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(member) for member in arguments)
    if origin is Literal:
        words = [str(choice) for choice in arguments]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if origin is tuple:
        return f"a list (each item {describe_type(arguments[0])})"
    if origin is Mapping:
        known = _choices(arguments[0])
        keys = f"keys among {', '.join(known)}" if known else f"keys that are {describe_type(arguments[0])}"
        return f"a mapping with {keys}"
    if is_dataclass(hint):
        named = list(hints_of(hint))[:NAMED_KEYS] if isinstance(hint, type) else []
        return f"a mapping with keys such as {', '.join(named)}"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}
    return names[hint]


def _scalar(value: Any, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        same = [choice for choice in get_args(hint) if type(choice) is type(value) and choice == value]
        return same[0] if same else REFUSED
    if hint is types.NoneType:
        return None if value is None else REFUSED
    if hint is bool:
        return value if isinstance(value, bool) else REFUSED
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            return REFUSED
        return number if math.isfinite(number) else REFUSED
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else REFUSED
    return value if hint is str and isinstance(value, str) else REFUSED


def _check_union(value: Any, hint: Any, path: KeyPath, findings: Findings) -> Any:
    """The first member that accepts the value; a list or mapping is reported by the member of its own kind."""
    for member in get_args(hint):
        trial = findings.trial()
        result = check(value, member, path, trial)
        if result is not REFUSED:
            return result
        if isinstance(value, list) and _is_list(member):
            findings.take(trial)
            return REFUSED
    return _refuse(value, hint, path, findings)


def _is_list(hint: Any) -> bool:
    return _is_list(get_args(hint)[0]) if get_origin(hint) is Annotated else get_origin(hint) is tuple


def _check_mapping(value: dict[str, Any], hint: Any, path: KeyPath, findings: Findings) -> Any:
    key_hint, value_hint = get_args(hint)
    known = _choices(key_hint)
    result: dict[str, Any] = {}
    for key, item in value.items():
        here = (*path, key)
        if key in known if known else check(key, key_hint, here, findings.trial()) is not REFUSED:
            result[key] = check(item, value_hint, here, findings)
        else:
            findings.add(
                here, f"unknown key {format_key(here)}", expected=describe_type(key_hint), hint=_mean(key, known)
            )
    return REFUSED if len(result) < len(value) or REFUSED in result.values() else result


def _check_section(value: dict[str, Any], schema: type, path: KeyPath, findings: Findings) -> Any:
    """A schema dataclass from a mapping; unknown keys are left out, and reported elsewhere."""
    hints = hints_of(schema)
    arguments = {key: check(item, hints[key], (*path, key), findings) for key, item in value.items() if key in hints}
    missing = [f.name for f in fields(schema) if f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
    missing = [key for key in missing if key not in value]
    for key in missing:
        here = (*path, key)
        example = {"model": "model: Qwen/Qwen3-32B", "datasets": "datasets: [{path: data/train.jsonl}]"}.get(key)
        findings.add(
            here,
            f"the key {format_key(here)} is missing",
            expected=describe_type(hints[key]),
            hint=f"add a line such as `{example or 'path: data/train.jsonl'}`",
        )
    return REFUSED if missing or any(item is REFUSED for item in arguments.values()) else schema(**arguments)


def _refuse(value: Any, hint: Any, path: KeyPath, findings: Findings) -> Any:
    findings.add(
        path,
        f"{format_key(path) or 'the recipe'} has a value that is not accepted",
        found=shown_value(value),
        expected=describe_type(hint),
        hint=_advice(value, hint, findings.place(path).origin) or _where_it_is_told(path),
    )
    return REFUSED


def _where_it_is_told(path: KeyPath) -> str | None:
    return f"`roundpipe recipes keys {path[0]}` says what it means and its default" if path else None


def _advice(value: Any, hint: Any, origin: str) -> str | None:
    """A hint for the traps of YAML and of the field."""
    wanted = describe_type(hint)
    section, is_list = section_of(hint)
    if value is None:
        return "delete the line to get the default"
    if section is not None and is_list:
        path = value.get("path") if isinstance(value, dict) else value
        item = path if isinstance(path, str) else "data/train.jsonl"
        return f"write a list of mappings: [{{path: {shown_value(item).strip(chr(39))}}}]"
    if section is not None and "path" in hints_of(section):
        return f"write {{path: {shown_value(value).strip(chr(39))}}}"
    if isinstance(value, str):
        if "true or false" in wanted and value.lower() in ("yes", "no", "on", "off", "y", "n", "true", "false"):
            return f"write {'true' if value.lower() in ('yes', 'on', 'y', 'true') else 'false'}, without quotes"
        is_short = len(value) <= 20
        if is_short and "number" in wanted and re.fullmatch(r"-?\d+,\d+(e[-+]?\d+)?", value):
            return f"write {value.replace(',', '.')}: a point, not a comma, stands before decimals"
        if (
            is_short
            and ("integer" in wanted or "number" in wanted)
            and value.replace("_", "").replace(".", "", 1).isdigit()
        ):
            return f"write {value.replace('_', '')}, without quotes or underscores"
        choices = [choice for choice in _choices(hint) if isinstance(choice, str)]
        if "cuda:N" in wanted and not choices:  # an item of `devices`
            choices = ["cpu", *(f"cuda:{index}" for index in range(8))]
        if "lora" in choices and value.lower() == "qlora":  # what other tools call a method is two keys here
            return "write `method: lora`, and `load_in_4bit: true` on a line below"
        items = [item.strip() for item in value.split(",")]
        is_a_list_without_brackets = check(items, hint, (), Findings({})) is not REFUSED
        return _mean(value, choices) or (f"write [{value}]" if is_a_list_without_brackets else None)
    if isinstance(value, float) and "integer" in wanted and math.isfinite(value) and value == int(value) < 2**31:
        return f"write {int(value)}"
    if isinstance(value, (bool, int, float)) and "text" in wanted:
        key, _, written = origin.removeprefix("override ").partition("=")
        if written and parse_scalar(written) == value:  # the shell takes one pair of quotes away
            quoted = shlex.quote(f'{key}="{written}"')
            return f"write {quoted} if it is meant as text"
        return "put it in quotes if it is meant as text"
    return None


def _choices(hint: Any) -> list[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return list(arguments)
    if origin is Annotated:
        return _choices(arguments[0])
    if origin in (Union, types.UnionType):
        return [choice for member in arguments for choice in _choices(member)]
    return []


def _mean(word: str, candidates: list[str]) -> str | None:
    near = closest(word[:100], candidates)
    return f"did you mean {near}?" if near else None


def _report_unknown(key: str, path: KeyPath, schema: type, findings: Findings, also_known: list[str]) -> None:
    here = (*path, key)
    hint: str | None = None
    name, colon, value = key.partition(":")
    if key == "<<":
        hint = "merge keys are refused: write the values out"
    elif colon and name in hints_of(schema):
        hint = f"write a space after the colon: {name}: {value}"
    elif findings.num_found < MAX_SHOWN:  # a suggestion takes about a millisecond
        near = suggest(key, path, list(hints_of(schema)), also_known)
        hint = f"did you mean {near}?" if near else "`roundpipe recipes keys` lists all keys"
    findings.add(here, f"unknown key {format_key(here)}", hint=hint)


def suggest(key: str, path: KeyPath, siblings: list[str], also_known: list[str]) -> str | None:
    """The known key that was probably meant: one edit away in this section, the same name in another section, or the
    nearest by similarity here, then anywhere. Keys of other sections come with their path."""
    section = "".join("[]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    prefix = f"{section}." if section else ""
    word = key.strip().lower().replace("-", "_").replace(" ", "_")[:100]
    shown = format_key(path) + "." if path else ""
    spellings = [alias.removeprefix(prefix) for alias in also_known if alias.startswith(prefix)]
    for candidates in (siblings, [name for name in spellings if "." not in name]):
        for name in candidates:
            if one_edit_apart(word, name):
                return shown + name
    everywhere = list(known_keys(Recipe))
    for full in everywhere:
        if full.rpartition(".")[2] == word.rpartition(".")[2] or full == word:
            return full
    near = closest(word, siblings)
    if near:
        return shown + near
    by_last = {full.rpartition(".")[2]: full for full in reversed(everywhere + also_known)}
    near = closest(word, list(by_last))
    return by_last[near] if near else None
