"""Every recipe key as a row of a table: name, type, default and meaning, all read from `schema.py`."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin

from roundpipe_cli.recipe.check import describe_type, hints_of, section_of
from roundpipe_cli.recipe.constraints import Explained
from roundpipe_cli.recipe.schema import Recipe, with_lists

DERIVED = {"output_dir": "outputs/<name of the recipe file>"}
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


def _keys(schema: type, prefix: str) -> Iterator[RecipeKey]:
    hints, meanings = hints_of(schema), field_docstrings(schema)
    for field in fields(schema):
        section, is_list = section_of(hints[field.name])
        name = prefix + field.name
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        derived = DERIVED.get(name)
        has_none = default is MISSING or is_dataclass(default)
        yield RecipeKey(
            name=name,
            type=_type_of(hints[field.name], section, is_list),
            default=derived if has_none else _as_yaml(default),
            is_required=default is MISSING and derived is None,
            meaning=" ".join([meanings[field.name], *_explanations(hints[field.name])]),
        )
        if section is not None:
            yield from _keys(section, f"{name}{'[]' if is_list else ''}.")


def _explanations(hint: Any) -> list[str]:
    constraints = get_args(hint) if get_origin(hint) is Annotated else ()
    return [constraint.meanings for constraint in constraints if isinstance(constraint, Explained)]


def _type_of(hint: object, section: type | None, is_list: bool) -> str:
    if section is None:
        return describe_type(hint).replace("text that is not empty", "text")
    return "a list of mappings with the keys below" if is_list else "a mapping with the keys below"


def _as_yaml(value: object) -> str:
    """A default as a recipe would write it: YAML reads 1e-08 as text, 1.0e-08 as a number."""
    if isinstance(value, str):
        return value
    return re.sub(r"^(\d+)e", r"\1.0e", json.dumps(with_lists(value)))


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
