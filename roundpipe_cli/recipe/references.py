"""`${key}` in a recipe: only other keys of the same recipe, never the environment or anything else.

OmegaConf does the replacing; before it sees a text, everything but plain references to single values is refused here,
cycles and texts that would grow without bound included. `\\${` stands for a literal `${`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from roundpipe_cli.recipe.check import Findings
from roundpipe_cli.recipe.strict_yaml import KeyPath, format_key, shown_value

MAX_CHARACTERS = 65_536
"""Longest text after its references are replaced."""

MAX_CHAIN = 20
"""References that may lead from one to the next."""

MISSING: Any = object()
"""Stands for an item that does not exist."""

_OPENING = re.compile(r"(\\*)\$\{")
_VARIABLE = re.compile(r"\$([A-Z_][A-Z0-9_]*)(?=/|$)")
"""A path such as `$HOME/rows.jsonl`, which would name a folder called `$HOME`."""
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*|\[\d{1,5}\])*)\}")


_LONG_CHAIN = f"is part of a chain of more than {MAX_CHAIN} references"


class _Size(NamedTuple):
    length: int
    """Characters after replacing."""
    chain: int
    """References that lead from one to the next."""


def escape(text: str) -> str:
    """`text` written so that it is read back literally."""
    return _OPENING.sub(lambda match: match[1] * 2 + "\\${", text)


def refuse_bad_references(value: Any, path: KeyPath, findings: Findings) -> Any:
    """`value` with every text that holds something else than `${key}` replaced by None, each with a finding."""
    if isinstance(value, dict):
        return {key: refuse_bad_references(item, (*path, key), findings) for key, item in value.items()}
    if isinstance(value, list):
        return [refuse_bad_references(item, (*path, i), findings) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    if value == "???":
        findings.add(path, f"{format_key(path)} is a placeholder, not a value", found="???", hint="write a value")
        return None
    if named := _VARIABLE.match(value):
        findings.add(
            path,
            f"{format_key(path)} begins with an environment variable, which is not read",
            found=shown_value(value),
            expected="a path without variables",
            hint=f"write ~{value[named.end() :]}" if named[1] == "HOME" else "write the whole path",
        )
        return None
    for opening in _openings(value):
        if not _REFERENCE.match(value, opening):
            findings.add(
                path,
                f"{format_key(path)} holds a reference that is refused",
                found=shown_value(value[opening:]),
                expected="${key} with another key of the recipe, for instance ${output_dir} or ${lora.r}",
                hint="environment variables and resolvers are never read; for a literal `${` write `\\${`",
            )
            return None
    return value


def resolve_references(data: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """`data` with every `${key}` replaced by the value of that key; texts with a finding become None.

    Expects texts that passed `refuse_bad_references`.
    """
    texts = {path: text for path, text in _texts(data, ()) if "${" in text}
    if not texts:
        return data
    sizes: dict[KeyPath, _Size] = {}
    for path in texts:
        _measure(path, data, sizes, [], findings)
    for path in texts:
        if path in findings.refused:
            _replace(data, path, None)
    from omegaconf import OmegaConf  # imported late: it takes longer than reading a recipe, and few recipes need it

    plain = OmegaConf.to_container(OmegaConf.create(data), resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def look_up(data: Any, path: KeyPath) -> Any:
    """The item of nested dictionaries and lists at `path`, or MISSING."""
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return MISSING
    return data


def _openings(text: str) -> list[int]:
    """Where a `${` begins that is not escaped by a backslash."""
    return [match.end() - 2 for match in _OPENING.finditer(text) if len(match[1]) % 2 == 0]


def _texts(value: Any, path: KeyPath) -> list[tuple[KeyPath, str]]:
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in _texts(item, (*path, key))]
    if isinstance(value, list):
        return [found for i, item in enumerate(value) for found in _texts(item, (*path, i))]
    return [(path, value)] if isinstance(value, str) else []


def _measure(
    path: KeyPath, data: dict[str, Any], sizes: dict[KeyPath, _Size], open_paths: list[KeyPath], findings: Findings
) -> _Size:
    """Size of the text at `path` after replacing; a finding where it cannot be replaced. Nothing is expanded."""
    value = look_up(data, path)
    if path in sizes or not isinstance(value, str):
        return sizes.get(path, _Size(len(shown_value(value)), 0))
    length, chain = len(value), 0
    for opening in _openings(value):
        match = _REFERENCE.match(value, opening)
        assert match is not None, "refuse_bad_references comes first"
        target = _parse(match[1])
        problem = _problem_of(target, data, [*open_paths, path])
        if problem is None:
            size = _measure(target, data, sizes, [*open_paths, path], findings)
            length, chain = length + size.length, max(chain, size.chain + 1)
            if length > MAX_CHARACTERS:
                problem = f"makes the text grow to more than {MAX_CHARACTERS} characters"
            elif chain > MAX_CHAIN:
                problem = _LONG_CHAIN
        if target in findings.refused:
            findings.refused.add(path)
        elif problem is not None and path not in findings.refused:
            findings.add(
                path,
                f"{format_key(path)}: the reference {match[0]} {problem}",
                found=shown_value(value),
                expected="${key} with another key of the recipe",
                hint="`roundpipe recipes keys` lists the keys",
            )
        if path in findings.refused:
            break
    sizes[path] = _Size(length, chain)
    return sizes[path]


def _problem_of(target: KeyPath, data: dict[str, Any], open_paths: list[KeyPath]) -> str | None:
    if target in open_paths:
        return "leads back to itself"
    if len(open_paths) > MAX_CHAIN:
        return _LONG_CHAIN
    value = look_up(data, target)
    if value is MISSING:
        return "names a key that the recipe does not have"
    if isinstance(value, (dict, list)):
        return "names a section; only single values can be referred to"
    return None


def _parse(text: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", text))


def _replace(data: Any, path: KeyPath, value: Any) -> None:
    look_up(data, path[:-1])[path[-1]] = value
