"""Every recipe key as a row of a table and as a JSON Schema, all read from `schema.py`."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from roundpipe_cli.recipe.aliases import NAMES, VALUE_ALIASES
from roundpipe_cli.recipe.check import defaults_of, describe_type, hints_of, section_of
from roundpipe_cli.recipe.foreign import tables
from roundpipe_cli.recipe.schema import (
    DEFAULT_LEARNING_RATES,
    InclusiveRange,
    Matching,
    Named,
    NotEmpty,
    Range,
    Recipe,
    with_lists,
)

DERIVED = {
    "output_dir": "outputs/<name of the recipe file>",
    "learning_rate": ", ".join(f"{rate:.1e} for {kind}" for kind, rate in DEFAULT_LEARNING_RATES.items()),
}
"""Keys without a default in the schema that are nevertheless optional: `load.py` derives them."""


@dataclass(frozen=True, slots=True)
class RecipeKey:
    """One key of a recipe."""

    name: str
    """With dots, and `[]` for the items of a list: `lora.r`, `datasets[].path`."""
    type: str
    default: str | None
    """As YAML; None where the key is required or holds other keys."""
    is_required: bool
    meaning: str


def recipe_keys() -> list[RecipeKey]:
    """All keys in the order of the schema, the keys of a section directly after the section."""
    return list(_keys(Recipe, ""))


def find_keys(words: Sequence[str]) -> list[RecipeKey]:
    """The keys whose name has all of the words, then those that other trainers spell so; where no name has them, those
    whose meaning has them too."""
    keys, others = recipe_keys(), _spellings()
    wanted = [word.lower() for word in words]

    def place(key: RecipeKey) -> int | None:
        texts = (key.name, " ".join(others.get(key.name, ())), key.meaning)
        return next((n for n, text in enumerate(texts) if all(word in text.lower() for word in wanted)), None)

    places = [place(key) for key in keys]
    num_kinds = 2 if 0 in places else 3
    return [key for n in range(num_kinds) for key, found in zip(keys, places, strict=True) if found == n]


def _keys(schema: type, prefix: str) -> Iterator[RecipeKey]:
    defaults, meanings = defaults_of(schema), field_docstrings(schema)
    for key, hint in hints_of(schema).items():
        section, is_list = section_of(hint)
        name = prefix + key
        has_own = key in defaults and not is_dataclass(defaults[key])
        explanations = (one.meanings for one in get_args(hint) if isinstance(one, Named) and one.meanings)
        yield RecipeKey(
            name=name,
            type=_type_of(hint, section, is_list),
            default=_as_yaml(defaults[key]) if has_own else DERIVED.get(name),
            is_required=key not in defaults and name not in DERIVED,
            meaning=" ".join([meanings[key], *explanations]),
        )
        if section is not None:
            yield from _keys(section, f"{name}{'[]' if is_list else ''}.")


def _type_of(hint: object, section: type | None, is_list: bool) -> str:
    if section is None:
        return describe_type(hint).replace("text that is not empty", "text")
    return "a list of mappings with the keys below" if is_list else "a mapping with the keys below"


def _as_yaml(value: object) -> str:
    """A default as a recipe would write it: YAML reads 1e-08 as text, 1.0e-08 as a number."""
    if isinstance(value, str):
        return value
    return re.sub(r"^(\d+)e", r"\1.0e", json.dumps(with_lists(value)))


@functools.cache
def field_docstrings(schema: type) -> dict[str, str]:
    """Field of a dataclass -> the docstring under it, on one line.

    Raises:
        KeyError: a field has no docstring.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def as_text(keys: list[RecipeKey], width: int = 100) -> Iterator[str]:
    """Lines of a plain text table: key and default, then type and meaning, indented and wrapped."""
    indent = max((len(key.name) for key in keys), default=0) + 2
    for key in keys:
        yield f"{key.name:<{indent}}{_default(key)}".rstrip()
        for text in (f"Type: {key.type}.", key.meaning):
            yield from textwrap.wrap(
                text, width, initial_indent="    ", subsequent_indent="    ", break_long_words=False,
                break_on_hyphens=False,
            )  # fmt: skip


def as_markdown(keys: list[RecipeKey]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in keys:
        default = f"`{key.default}`" if key.default is not None else _default(key)
        yield f"| `{key.name}` | {_escaped(key.type)} | {default} | {_escaped(key.meaning)} |"


def _default(key: RecipeKey) -> str:
    return "required" if key.is_required else key.default or ""


def _escaped(text: str) -> str:
    """Text for a cell: what Markdown would read as markup is escaped, outside code spans."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if index % 2 else re.sub(r"([*<>|])", r"\\\1", part) for index, part in enumerate(parts))


# The recipe's schema as a JSON Schema (draft 2020-12), which editors complete and check YAML by.

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}

JsonSchema = dict[str, Any]


def recipe_json_schema() -> JsonSchema:
    """The whole document. Spellings of other tools, which a recipe may have too, are not in it."""
    return {"$schema": DIALECT, "title": "RoundPipe CLI recipe", **_mapping_with_keys(Recipe)}


def _mapping_with_keys(schema: type) -> JsonSchema:
    hints, defaults, meanings = hints_of(schema), defaults_of(schema), field_docstrings(schema)
    properties = {key: {"description": meanings[key], **_described(hint)} for key, hint in hints.items()}
    for key, default in defaults.items():
        if not is_dataclass(default):
            properties[key]["default"] = with_lists(default)
    required = [key for key in hints if key not in defaults and key not in DERIVED]
    document: JsonSchema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**document, "required": required} if required else document


def _described(hint: Any) -> JsonSchema:
    """The values that an annotation of `schema.py` allows."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return {**_described(args[0]), **_limited(args[0], args[1:])}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_described(arg) for arg in args]}
    if origin is tuple:
        return {"type": "array", "items": _described(args[0])}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "propertyNames": _described(args[0]), "additionalProperties": _described(args[1])}
    if is_dataclass(hint):
        return _mapping_with_keys(hint)  # type: ignore[arg-type]
    return {"type": _PLAIN[hint]}


def _limited(hint: Any, constraints: Sequence[Any]) -> JsonSchema:
    limits: JsonSchema = {}
    for constraint in constraints:
        if isinstance(constraint, Range):
            limits["exclusiveMinimum" if constraint.above else "minimum"] = constraint.low
            limits["exclusiveMaximum" if constraint.below else "maximum"] = constraint.high
        elif isinstance(constraint, Named):
            limits["enum"] = list(constraint.table)
        elif isinstance(constraint, Matching):
            limits["pattern"] = f"^(?:{constraint.pattern})$"
        elif isinstance(constraint, InclusiveRange):
            limits |= {"minItems": 2, "maxItems": 2, "prefixItems": [{"type": "integer", "minimum": 0}]}
        elif isinstance(constraint, NotEmpty):
            limits |= {"pattern": r"\S"} if hint is str else {"minItems": 1}
    return limits


def _spellings() -> dict[str, list[str]]:
    """Recipe key -> the words of other trainers that mean it: keys, and values of keys."""
    found: dict[str, list[str]] = {target: names.split() for target, names in NAMES.items()}
    for key, names in VALUE_ALIASES.items():
        found[key] = [*found.get(key, ()), *(name for name in names if isinstance(name, str))]
    for key, words in tables()["words"].items():
        found[key] = [*found.get(key, ()), *words.split()]
    return found
