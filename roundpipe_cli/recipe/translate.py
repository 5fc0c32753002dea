"""Applies the aliases to what the user wrote, and turns `key=value` and `~key` overrides into writes to the recipe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from roundpipe_cli.errors import Problem, RecipeError, closest
from roundpipe_cli.recipe.aliases import ALIASES, NO_COUNTERPART, REMOVED, Writes, is_off, note, value_alias
from roundpipe_cli.recipe.check import Findings, hints_of
from roundpipe_cli.recipe.references import MISSING, look_up, refuse_bad_references
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.recipe.strict_yaml import (
    MAX_DEPTH,
    KeyPath,
    Place,
    format_key,
    parse_scalar,
    parse_text,
    refuse_characters,
    shown_value,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

_PATH = re.compile(r"[^.\[\]=\s]+(\.[^.\[\]=\s]+|\[\d{1,5}\])*")
_LINE_OF_OVERRIDES = 10**8
"""Line number that sorts problems of overrides behind those of the file."""


def dotted(path: KeyPath) -> str:
    """The key of a path in the tables: `("datasets", 0, "type") -> "datasets[].type"`."""
    return "".join("[]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def translate_file(data: dict[str, Any], findings: Findings, notices: list[str]) -> None:
    """Replace every alias in `data` (keys and values), each with a notice; the places move along."""
    _translate_keys(data, data, (), findings, notices)
    _translate_values(data, (), findings, notices)


def apply_overrides(
    data: dict[str, Any], overrides: Sequence[str], findings: Findings, notices: list[str]
) -> dict[str, Any]:
    """The recipe's data with `key=value` overrides written into it and the keys of `~key` removed, in their order."""
    if not overrides:
        return data
    from omegaconf import DictConfig, OmegaConf  # imported late: it takes longer than reading a recipe

    config = OmegaConf.create(data)
    assert isinstance(config, DictConfig)
    for number, text in enumerate(_without_loose_equals(overrides, findings)):
        place = Place(f"override {shown_value(text)[1:-1]}", _LINE_OF_OVERRIDES + number)
        if text.startswith("~"):
            config = _remove(config, text[1:], place, findings)
            continue
        try:
            path, value = parse_override(text, place.origin)
        except RecipeError as error:
            for problem in error.problems:
                findings.add_problem(problem, place.line)
            continue
        for target, meant, shown in _writes_of(path, value, place, findings, notices):
            _write(config, target, meant, shown, findings)
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _without_loose_equals(overrides: Sequence[str], findings: Findings) -> list[str]:
    """The overrides without those that a space next to `=` cut into several words, each of them a problem."""
    kept, words = [], list(overrides)
    while words:
        loose = _num_loose(words)
        if loose == 1:
            kept.append(words.pop(0))
            continue
        written = " ".join(words[:loose])
        hint = f"write {shlex.quote(''.join(words[:loose]))}"
        problem = Problem("no spaces around `=` in an override", found=written, hint=hint)
        findings.add_problem(problem, _LINE_OF_OVERRIDES + len(kept))
        del words[:loose]
    return kept


def _num_loose(words: Sequence[str]) -> int:
    """How many words one override is: 2 for `r= 8` and `r =8`, 3 for `r = 8`, 1 for what is as it should be."""
    first, second = words[0], words[1] if len(words) > 1 else ""
    if first.startswith("~") or "=" in first[:-1]:
        return 1
    if first.endswith("="):
        return 2 if second and "=" not in second and not second.startswith("~") else 1
    if second == "=":
        return min(3, len(words))
    return 2 if second.startswith("=") else 1


def parse_override(text: str, origin: str) -> tuple[KeyPath, Any]:
    """`lora.r=32 -> (("lora", "r"), 32)`, split at the first `=`.

    Raises:
        RecipeError: no `=`, a key that is no key path, or a value that is refused.
    """
    key, equals, written = text.partition("=")
    if key != key.rstrip():  # `'seed = 3'` in quotes: the blanks belong to the equals sign
        key, written = key.rstrip(), written.lstrip()
    key = key.lstrip()
    if not equals or not _PATH.fullmatch(key):
        raise RecipeError([_no_override(text, key, equals, origin)])
    path = tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key))
    if len(path) > MAX_DEPTH:
        too_deep = f"the key is deeper than {MAX_DEPTH} levels"
        raise RecipeError([Problem(too_deep, where=origin, hint="`roundpipe recipes keys` lists all keys")])
    return path, _value(written, origin)


_BRACKETS = {"[": "]", "{": "}", "'": "'", '"': '"'}
"""First character of a list, a mapping or a quoted text -> its last one."""


def _value(written: str, origin: str) -> Any:
    """The value of an override: a whole list, mapping or quoted text is YAML, a word such as `null` or `3e-4` what YAML
    makes of it, and everything else is the text as it was typed, with every ` #`, `: ` and `&` in it.

    Raises:
        RecipeError: a list or mapping that is not YAML, or a character that no file may have.
    """
    inner = written.strip()
    closing = _BRACKETS.get(inner[:1])
    is_quoted = closing == inner[:1] and bool(inner)
    if closing is not None and (inner[1:].endswith(closing) or not (is_quoted or closing in inner)):
        try:
            document = parse_text(inner, origin, fixed_origin=True)
        except RecipeError:
            if not is_quoted:
                raise
        else:
            if document.problems:
                raise RecipeError([problem for _, problem in document.problems])
            return document.data
    refuse_characters(written, origin, fixed_origin=True)
    value = parse_scalar(inner)
    return written.rstrip("\r\n") if isinstance(value, str) else value  # a script of Windows ends its lines with `\r`


def _remove(config: DictConfig, key: str, place: Place, findings: Findings) -> DictConfig:
    """The recipe without a key or an item of a list that the file has; its default is in force again."""
    from omegaconf import DictConfig, OmegaConf

    plain = OmegaConf.to_container(config, resolve=False)
    path = tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key))
    section: Any = look_up(plain, path[:-1]) if _PATH.fullmatch(key) else MISSING
    if section is MISSING or look_up(plain, path) is MISSING:
        known = sorted(str(name) for name in plain) if isinstance(plain, dict) else []
        near = closest(key, known)
        problem = Problem(
            "there is no such key to remove",
            where=place.origin,
            found=shown_value(key),
            expected="a key of the recipe's file, by the name that it has here",
            hint=f"did you mean ~{near}?" if near else None,
        )
        findings.add_problem(problem, place.line)
        return config
    del section[path[-1]]
    for inner in [known for known in findings.places if known[: len(path)] == path]:
        del findings.places[inner]
    if isinstance(path[-1], int):  # later items of the list have moved up
        _move_up(path, findings)
    findings.refused = {known for known in findings.refused if known[: len(path)] != path}
    left = OmegaConf.create(plain)
    assert isinstance(left, DictConfig)
    return left


def _move_up(path: KeyPath, findings: Findings) -> None:
    """The places of a list's items behind the removed one at `path`."""
    depth = len(path) - 1
    behind = [
        known
        for known in findings.places
        if len(known) > depth and known[:depth] == path[:depth] and int(known[depth]) > int(path[depth])
    ]
    for known in sorted(behind, key=lambda item: int(item[depth])):
        moved = (*known[:depth], int(known[depth]) - 1, *known[depth + 1 :])
        findings.places[moved] = findings.places.pop(known)


def _no_override(text: str, key: str, equals: str, origin: str) -> Problem:
    """The error for an override that is not `key=value`."""
    if equals:
        hint = f"write {shlex.quote(text.lstrip('-'))}" if _PATH.fullmatch(key.lstrip("-")) else None
    elif _PATH.fullmatch(key) and (known := _known_key(key)):
        hint = f"write {known}=VALUE"
    else:
        hint = None
    return Problem(
        "this override is not of the form key=value",
        where=origin,
        expected="lora.r=32 or datasets[0].path=data/train.jsonl",
        hint=hint or "only one recipe is named; every other word is a key, `=` and a value, without spaces",
    )


def _known_key(key: str) -> str | None:
    """A key path that begins with a key of recipes, or with what was probably meant by its first word."""
    first = re.split(r"[.\[]", key)[0]
    known = list(hints_of(Recipe))
    near = first if first in known or first in ALIASES else closest(first, known)
    return near and near + key[len(first) :]


def _translate_keys(
    root: dict[str, Any], mapping: dict[str, Any], path: KeyPath, findings: Findings, notices: list[str]
) -> None:
    for key in list(mapping):
        here = (*path, key)
        name = dotted(here)
        if name in ALIASES:
            value = mapping.pop(key)
            writes = _convert(here, value, findings, notices)
            for target, meant in writes.items():
                _move(root, here, tuple(target.split(".")), meant, findings, plain=len(writes) == 1 and meant is value)
        elif name in NO_COUNTERPART or name in REMOVED:
            _no_counterpart(here, mapping.pop(key), findings, notices)
    for key, value in mapping.items():
        if isinstance(value, dict):
            _translate_keys(root, value, (*path, key), findings, notices)


def _convert(path: KeyPath, value: Any, findings: Findings, notices: list[str]) -> Writes:
    """The keys that an alias means, with its notice; none, with a finding, where its value has no counterpart."""
    alias = dotted(path)
    try:
        writes = ALIASES[alias](value)
    except ValueError as error:
        findings.add(path, f"{alias} has a value without counterpart here", found=shown_value(value), hint=str(error))
        return {}
    origin = findings.place(path).origin
    if not writes:
        notices.append(f"{origin}: {alias}: {shown_value(value)} changes nothing here and is left out")
    else:
        meant = " and ".join(writes)
        notices.append(f"{origin}: {alias} is read as {meant}{note(alias)}")
    return writes


def _no_counterpart(path: KeyPath, value: Any, findings: Findings, notices: list[str]) -> None:
    name = dotted(path)
    if is_off(value):
        notices.append(
            f"{findings.place(path).origin}: {name}: {shown_value(value)} changes nothing here and is left out"
        )
    else:
        what = f"{name} is no longer a key" if name in REMOVED else f"unknown key {name}"
        findings.add(path, what, found=shown_value(value), hint=REMOVED.get(name) or NO_COUNTERPART[name])


def _move(
    root: dict[str, Any], source: KeyPath, target: KeyPath, value: Any, findings: Findings, *, plain: bool
) -> None:
    """Write what stood at the alias `source` to `target`, unless that is given too."""
    section = root
    for part in target[:-1]:
        section = section.setdefault(str(part), {})
        if not isinstance(section, dict):
            return  # `lora: 3`: its own type error says enough
    last = str(target[-1])
    place = findings.place(source)
    if last in section:
        if not plain and section[last] == value:
            return  # `adapter: qlora` beside `load_in_4bit: true`: said twice, meant once
        findings.add(
            source,
            f"{format_key(source)} and {_written(target, findings)} are both given, and mean the same",
            found=f"{shown_value(value)} and {shown_value(section[last])}",
            expected="one of them",
            hint=f"keep {format_key(target)}",
        )
        return
    section[last] = value
    for path in [path for path in findings.places if path[: len(source)] == source]:
        old = findings.places[path]
        written = format_key(source) if path == source else None
        findings.places[target + path[len(source) :]] = Place(old.origin, old.line, written)
    findings.places.setdefault(target, Place(place.origin, place.line, format_key(source)))


def _written(path: KeyPath, findings: Findings) -> str:
    return findings.place(path).written or format_key(path)


def _translate_values(value: Any, path: KeyPath, findings: Findings, notices: list[str]) -> Any:
    """`value` with other trainers' spellings of values replaced."""
    known, meant = value_alias(dotted(path), value) if path else (False, value)
    if known:
        notices.append(
            f"{findings.place(path).origin}: {format_key(path)}: {shown_value(value)} is read as {shown_value(meant)}"
        )
        return meant
    if isinstance(value, dict):
        for key in value:
            value[key] = _translate_values(value[key], (*path, key), findings, notices)
    elif isinstance(value, list):
        value[:] = [_translate_values(item, (*path, i), findings, notices) for i, item in enumerate(value)]
    return value


def _writes_of(
    path: KeyPath, value: Any, place: Place, findings: Findings, notices: list[str]
) -> list[tuple[KeyPath, Any, Place]]:
    """The single values that one override stands for, after aliases; `lora={r: 4, rank: 8}` is read like a file."""
    if any(isinstance(part, int) for part in path):
        return [(path, _translate_values(value, path, Findings({path: place}), notices), place)]
    for part in reversed(path):
        value = {str(part): value}
    inner = Findings({(): place})
    translate_file(value, inner, notices)
    findings.take(inner)
    return [(leaf, meant, inner.place(leaf)) for leaf, meant in _leaves(value, ())]


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if path and not (isinstance(value, dict) and value):
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(item, (*path, key))


def _write(config: DictConfig, path: KeyPath, value: Any, place: Place, findings: Findings) -> None:
    """One override into the merged recipe; mappings are merged, everything else replaced."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(value, dict):
        for inner in [known for known in findings.places if known[: len(path)] == path]:
            del findings.places[inner]
    findings.places[path] = place
    findings.refused -= {known for known in findings.refused if known[: len(path)] == path}
    value = refuse_bad_references(value, path, findings)
    plain = OmegaConf.to_container(config, resolve=False)
    section = next((path[:end] for end in range(len(path) - 1, 0, -1) if look_up(plain, path[:end]) is not MISSING), ())
    try:
        if not isinstance(look_up(plain, section), dict if isinstance(path[len(section)], str) else list):
            raise TypeError("a name needs a section, an index a list")
        if any(isinstance(part, int) for part in path[len(section) + 1 :]):
            raise IndexError("a list is not made by an index into it")
        OmegaConf.update(config, ".".join(str(part) for part in path), value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, IndexError):
        findings.add(
            path,
            f"{format_key(path)} cannot be set: the recipe has no such item",
            found=f"{format_key(section) or 'the recipe'} is {shown_value(look_up(plain, section))}",
            hint="an index names an item that the file has; to set a whole list write key=[...]",
        )
