"""From the name of a recipe to a checked `Recipe`: find the file, read it strictly, apply overrides, check everything.

Loads no torch. Every mistake of the file and of the overrides is reported at once, in one RecipeError (exit code 2).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from roundpipe_cli.errors import ContradictionError, Problem, RecipeError, RefusedError, closest
from roundpipe_cli.recipe.aliases import (
    ALIASES,
    NOTES,
    REMOVED,
    Rule,
    Writes,
    applied,
    conversion_of,
    refusal_of,
    value_alias,
)
from roundpipe_cli.recipe.check import (
    Findings,
    check,
    contradictions,
    defaults_of,
    find_contradictions,
    hints_of,
    known_keys,
    remove_unknown_keys,
)
from roundpipe_cli.recipe.schema import (
    DEFAULT_LEARNING_RATES,
    LENGTH_KEY,
    LoraConfig,
    Recipe,
    plain_data,
    rate_reason,
    trained_kind,
    with_lists,
)
from roundpipe_cli.recipe.shipped import find_recipe, shipped_folder
from roundpipe_cli.recipe.strict_yaml import (
    MAX_BYTES,
    MAX_DEPTH,
    KeyPath,
    Place,
    dotted,
    format_key,
    parse_bytes,
    parse_scalar,
    parse_text,
    refuse_characters,
    shown_value,
)
from roundpipe_cli.regular_files import tried_paths

# `${key}` in a recipe: only other keys of the same recipe, never the environment or anything else.
#
# OmegaConf does the replacing; before it sees a text, everything but plain references to single values is refused here,
# cycles and texts that would grow without bound included. `\${` stands for a literal `${`.

MAX_CHARACTERS = 65_536
"""Longest text after its references are replaced."""

MAX_CHAIN = 20
"""References that may lead from one to the next."""

ABSENT: Any = object()
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
    texts = {path: text for path, text in _leaves(data, (), (dict, list)) if isinstance(text, str) and "${" in text}
    if not texts:
        return data
    sizes: dict[KeyPath, _Size] = {}
    for path in texts:
        _measure(path, data, sizes, [], findings=findings)
    for path in texts:
        if path in findings.refused:
            look_up(data, path[:-1])[path[-1]] = None
    from omegaconf import OmegaConf  # imported late: it takes longer than reading a recipe, and few recipes need it

    plain = OmegaConf.to_container(OmegaConf.create(data), resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def look_up(data: Any, path: KeyPath) -> Any:
    """The item of nested dictionaries and lists at `path`, or ABSENT."""
    for part in path:
        is_index = isinstance(part, int) and isinstance(data, list) and part < len(data)
        if not (is_index or (isinstance(data, dict) and part in data)):
            return ABSENT
        data = data[part]
    return data


def _openings(text: str) -> list[int]:
    """Where a `${` begins that is not escaped by a backslash."""
    return [match.end() - 2 for match in _OPENING.finditer(text) if len(match[1]) % 2 == 0]


def _measure(
    path: KeyPath, data: dict[str, Any], sizes: dict[KeyPath, _Size], open_paths: list[KeyPath], *, findings: Findings
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
            size = _measure(target, data, sizes, [*open_paths, path], findings=findings)
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
    if value is ABSENT:
        return "names a key that the recipe does not have"
    if isinstance(value, (dict, list)):
        return "names a section; only single values can be referred to"
    return None


def _parse(text: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", text))


# Applies the aliases to what the user wrote, and turns `key=value` and `~key` overrides into writes to the recipe.

_PATH = re.compile(r"[^.\[\]=\s]+(\.[^.\[\]=\s]+|\[\d{1,5}\])*")
_LINE_OF_OVERRIDES = 10**8
"""Line number that sorts problems of overrides behind those of the file."""


def translate_file(data: dict[str, Any], findings: Findings) -> None:
    """Replace every alias in `data` (keys and values), each with a notice; the places move along."""
    _translate_keys(data, data, (), findings)
    _translate_values(data, (), findings)


def apply_overrides(data: dict[str, Any], overrides: Sequence[str], findings: Findings) -> dict[str, Any]:
    """The recipe's data with `key=value` overrides written into it and the keys of `~key` removed, in their order."""
    for number, text in enumerate(_without_loose_equals(overrides, findings)):
        place = Place(f"override {shown_value(text)[1:-1]}", _LINE_OF_OVERRIDES + number)
        if text.startswith("~"):
            _remove(data, text[1:], place, findings)
            continue
        try:
            path, value = parse_override(text, place.origin)
        except RecipeError as error:
            for problem in error.problems:
                findings.add_problem(problem, place.line)
            continue
        for target, meant, shown in _writes_of(path, value, place, findings):
            data = _written(data, target, meant, shown, findings=findings)
    return data


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
    path = _parse(key)
    if len(path) > MAX_DEPTH:
        too_deep = f"the key is deeper than {MAX_DEPTH} levels"
        raise RecipeError([Problem(too_deep, where=origin, hint="`roundpipe recipes keys` lists all keys")])
    return path, _value(written, origin)


_BRACKETS = {"[": "]", "{": "}", "'": "'", '"': '"'}
"""First character of a list, a mapping or a quoted text -> its last one."""


def _value(written: str, origin: str) -> Any:
    """The value of an override: a whole list, mapping or quoted text is YAML, a word such as `null` or `3e-4` what YAML
    makes of it, and everything else is the text as it was typed, with every ` #`, `: ` and `&` in it.
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


def _remove(data: dict[str, Any], key: str, place: Place, findings: Findings) -> None:
    """Delete a key or an item of a list that the file has; its default is in force again."""
    path = _parse(key)
    section: Any = look_up(data, path[:-1]) if _PATH.fullmatch(key) else ABSENT
    if section is ABSENT or look_up(data, path) is ABSENT:
        near = closest(key, sorted(data))
        problem = Problem(
            "there is no such key to remove",
            where=place.origin,
            found=shown_value(key),
            expected="a key of the recipe's file, by the name that it has here",
            hint=f"did you mean ~{near}?" if near else None,
        )
        findings.add_problem(problem, place.line)
        return
    del section[path[-1]]
    findings.forget(path)
    if isinstance(path[-1], int):  # later items of the list have moved up
        _move_up(path, findings)


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


def _translate_keys(root: dict[str, Any], mapping: dict[str, Any], path: KeyPath, findings: Findings) -> None:
    for key in list(mapping):
        here = (*path, key)
        name = dotted(here)
        conversion = conversion_of(name, mapping[key])
        if conversion is None and name not in known_keys(Recipe):
            conversion = refusal_of(name, mapping[key])
        if conversion is not None:
            value = mapping.pop(key)
            writes = _convert(here, value, conversion, findings)
            for target, meant in writes.items():
                is_same = len(writes) == 1 and meant is value
                _move(root, here, tuple(target.split(".")), meant, findings=findings, plain=is_same)
    for key, value in mapping.items():
        if isinstance(value, dict):
            _translate_keys(root, value, (*path, key), findings)


def _convert(path: KeyPath, value: Any, conversion: Rule, findings: Findings) -> Writes:
    """The keys that an alias means, with its notice; none, with a finding, where its value has no counterpart."""
    alias = dotted(path)
    try:
        writes = applied(conversion, value)
    except ValueError as error:
        what = f"{alias} has a value without counterpart here" if alias in ALIASES else f"unknown key {alias}"
        what = f"{alias} is no longer a key" if alias in REMOVED else what
        findings.add(path, what, found=shown_value(value), hint=str(error))
        return {}
    if not writes:
        findings.note(path, f"{alias}: {shown_value(value)} changes nothing here and is left out")
    else:
        shown = alias if alias in ALIASES else f"{alias}: {shown_value(value)}"
        findings.note(path, f"{shown} is read as {' and '.join(writes)}{NOTES.get(alias, '')}")
    return writes


def _move(
    root: dict[str, Any], source: KeyPath, target: KeyPath, value: Any, *, findings: Findings, plain: bool
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
        other = findings.place(target).written or format_key(target)
        findings.add(
            source,
            f"{format_key(source)} and {other} are both given, and mean the same",
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


def _translate_values(value: Any, path: KeyPath, findings: Findings) -> Any:
    """`value` with other trainers' spellings of values replaced."""
    known, meant = value_alias(dotted(path), value) if path else (False, value)
    if known:
        findings.note(path, f"{format_key(path)}: {shown_value(value)} is read as {shown_value(meant)}")
        return meant
    if isinstance(value, dict):
        for key in value:
            value[key] = _translate_values(value[key], (*path, key), findings)
    elif isinstance(value, list):
        value[:] = [_translate_values(item, (*path, i), findings) for i, item in enumerate(value)]
    return value


def _writes_of(path: KeyPath, value: Any, place: Place, findings: Findings) -> list[tuple[KeyPath, Any, Place]]:
    """The single values that one override stands for, after aliases; `lora={r: 4, rank: 8}` is read like a file."""
    inner = Findings({(): place})
    if any(isinstance(part, int) for part in path):
        writes = [(path, _translate_values(value, path, inner), place)]
    else:
        for part in reversed(path):
            value = {str(part): value}
        translate_file(value, inner)
        writes = [(leaf, meant, inner.place(leaf)) for leaf, meant in _leaves(value, ())]
    findings.take(inner)
    return writes


def _leaves(value: Any, path: KeyPath, kinds: tuple[type, ...] = (dict,)) -> Iterator[tuple[KeyPath, Any]]:
    """Every item that is of none of these kinds, or empty, with its path."""
    if path and not (isinstance(value, kinds) and value):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, (*path, key), kinds)


def _written(data: dict[str, Any], path: KeyPath, value: Any, place: Place, *, findings: Findings) -> dict[str, Any]:
    """The recipe's data with one override in it; mappings are merged, everything else replaced."""
    from omegaconf import OmegaConf  # imported late: it takes longer than reading a recipe
    from omegaconf.errors import OmegaConfBaseException

    findings.forget(path, with_places=not isinstance(value, dict))
    findings.places[path] = place
    value = refuse_bad_references(value, path, findings)
    section = next((path[:end] for end in range(len(path) - 1, 0, -1) if look_up(data, path[:end]) is not ABSENT), ())
    config = OmegaConf.create(data)
    try:
        if not isinstance(look_up(data, section), dict if isinstance(path[len(section)], str) else list):
            raise TypeError("a name needs a section, an index a list")
        if any(isinstance(part, int) for part in path[len(section) + 1 :]):
            raise IndexError("a list is not made by an index into it")
        OmegaConf.update(config, ".".join(str(part) for part in path), value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, IndexError):
        findings.add(
            path,
            f"{format_key(path)} cannot be set: the recipe has no such item",
            found=f"{format_key(section) or 'the recipe'} is {shown_value(look_up(data, section))}",
            hint="an index names an item that the file has; to set a whole list write key=[...]",
        )
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): item for key, item in plain.items()}


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that passed every check."""

    recipe: Recipe
    path: Path
    """The file it was read from."""
    folder: Path
    """Folder of the file: relative paths are tried from the working directory, then from here."""
    notices: tuple[str, ...]
    """One line each, for stderr: aliases, a shipped recipe in place of a missing file."""
    has_own_rate: bool = True
    """Whether file or overrides give `learning_rate`."""
    length_note: str | None = None
    """A line about the number that `max_seq_length: auto` became; None: the recipe gives one, or it is not known."""

    @property
    def rate_note(self) -> str | None:
        """A line about the learning rate that nobody gave, and why it is that; None where somebody did."""
        return None if self.has_own_rate else f"learning_rate {self.recipe.learning_rate:g}: {rate_reason(self.recipe)}"

    def with_row_tokens(self, tokens: int, why: str) -> LoadedRecipe:
        """The recipe with `max_seq_length: auto` decided; a ContradictionError where other keys do not go with it."""
        recipe = replace(self.recipe, max_seq_length=tokens)
        if problems := contradictions(recipe):
            raise ContradictionError(problems)
        return replace(self, recipe=recipe, length_note=f"{LENGTH_KEY}={tokens} (auto): {why}")


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read, translate, override, resolve and check a recipe.

    `overrides` are `key=value` texts.

    Raises:
        RefusedError: there is no such file, or it cannot be read.
        RecipeError: one or more mistakes in the file or the overrides.
    """
    file, notice = find_recipe(path)
    return _load(_read(file), file, [notice] if notice else [], overrides)


MODEL_NAME = re.compile(r"package:\w+|[A-Za-z0-9][\w.-]*/[\w.-]*[\w-]", re.ASCII)


def load_recipe_or_model(name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe that `name` means; where there is none, one of defaults that trains LoRA on the model of that name.

    Raises:
        RefusedError, RecipeError: see `load_recipe`.
    """
    try:
        return load_recipe(name, overrides)
    except RefusedError as error:
        is_model = (Path(name) / "config.json").is_file() or (name.endswith(".gguf") and Path(name).is_file())
        folder = Path(name).parent
        is_path = name.endswith((".yaml", ".yml")) or folder.is_dir() or folder.parts[:1] == ("recipes",)
        is_path = is_path or (shipped_folder() / folder).is_dir()
        looks_like_one = MODEL_NAME.fullmatch(name) and (name.startswith("package:") or not is_path)
        if isinstance(error, RecipeError) or not (is_model or looks_like_one):
            raise
    notice = f"no recipe is called {name}: this is that model with default settings (`roundpipe init` chooses some)"
    text = f"model: {json.dumps(name)}\nmethod: lora\ndatasets: [{{path: rows.jsonl}}]\n"
    return _load(text.encode(), Path(f"{name.rpartition('/')[2]}.yaml"), [notice], overrides)


def load_text(text: str, name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """`load_recipe` for a recipe that is in no file; `name` is its name in messages, or the file's to be.

    Raises:
        RecipeError: one or more mistakes.
    """
    return _load(text.encode(errors="surrogatepass"), Path(name), [], overrides)


def _load(raw: bytes, file: Path, notices: list[str], overrides: Sequence[str]) -> LoadedRecipe:
    name = str(file)
    document = parse_bytes(raw, name)
    findings = Findings({**document.places, (): Place(name, 0)})
    for line, problem in document.problems:
        findings.add_problem(problem, line)
    data: dict[str, Any] = document.data
    translate_file(data, findings)
    data = refuse_bad_references(data, (), findings)
    data = apply_overrides(data, overrides, findings)
    remove_unknown_keys(data, Recipe, findings)
    has_own_rate = "learning_rate" in data
    _fill_defaults(data, file.stem)
    data = resolve_references(data, findings)
    if not has_own_rate:  # now that a method which refers to another key is known
        data["learning_rate"] = DEFAULT_LEARNING_RATES[trained_kind(data.get("method"), data.get("objective"))]
    recipe = check(data, Recipe, (), findings)
    kind = RecipeError if findings.problems else ContradictionError
    if isinstance(recipe, Recipe):
        find_contradictions(recipe, findings)
    if findings.problems:
        raise kind(findings.problems)
    assert isinstance(recipe, Recipe)
    if recipe.method == "full" and recipe.lora != LoraConfig():
        findings.notices.append("lora: not used, since method is full")
    return LoadedRecipe(recipe, file, file.parent, (*notices, *findings.notices), has_own_rate)


def resolve_path(text: str, folder: Path) -> Path | None:
    """The first of `tried_paths` that exists (file or folder), or None; an error then names all of them."""
    for path in tried_paths(text, folder):
        try:
            if path.exists():
                return path
        except (OSError, ValueError):  # a name that is too long, or holds a NUL
            return None
    return None


def resolved_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out; loading this text gives an equal recipe."""
    why = rate_reason(recipe)
    reason = f"  # {why}" if why else ""
    return re.sub(r"^learning_rate: .*", rf"\g<0>{reason}", values_as_yaml(plain_data(recipe)), flags=re.MULTILINE)


def values_as_yaml(values: Mapping[str, Any], *, width: int = 120) -> str:
    """The text of a recipe with these values, in their order; lines of `width` characters."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


class _Dumper(yaml.SafeDumper):
    """Writes what is read back as it is: no aliases, and quotes wherever a text would read as another value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    stays_text = isinstance(parse_scalar(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", escape(text), style=None if stays_text else "'")


_Dumper.add_representer(str, _represent_text)


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise RefusedError(
            f"the recipe cannot be read: {error.strerror}", where=str(file), hint=f"ls -l {shlex.quote(str(file))}"
        ) from None


def _fill_defaults(data: dict[str, Any], stem: str) -> None:
    """Write the defaults into `data`, so that references to keys that are not given work."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-") or "recipe"
    data.setdefault("output_dir", f"outputs/{safe}")
    if "micro_batch_size" in data:
        data.setdefault("micro_batch_tokens", None)
    kind = trained_kind(data.get("method"), data.get("objective"))
    data.setdefault("learning_rate", DEFAULT_LEARNING_RATES[kind])
    for key, default in defaults_of(Recipe).items():
        value = with_lists(vars(default) if is_dataclass(default) else default)
        given = data.setdefault(key, value)
        if is_dataclass(default) and isinstance(given, dict):
            data[key] = {**given, **{name: inner for name, inner in value.items() if name not in given}}
