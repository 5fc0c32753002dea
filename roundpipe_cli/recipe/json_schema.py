"""The recipe's schema as a JSON Schema (draft 2020-12), which editors complete and check YAML by."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from roundpipe_cli.recipe.check import hints_of
from roundpipe_cli.recipe.constraints import InclusiveRange, Matching, NotEmpty, Range
from roundpipe_cli.recipe.keys import DERIVED, field_docstrings
from roundpipe_cli.recipe.schema import Recipe, with_lists

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}

JsonSchema = dict[str, Any]


def recipe_json_schema() -> JsonSchema:
    """The whole document. Spellings of other tools, which a recipe may have too, are not in it."""
    return {"$schema": DIALECT, "title": "RoundPipe CLI recipe", **_mapping_with_keys(Recipe)}


def _mapping_with_keys(schema: type) -> JsonSchema:
    hints, meanings = hints_of(schema), field_docstrings(schema)
    properties: JsonSchema = {}
    for field in fields(schema):
        entry = {"description": meanings[field.name], **_described(hints[field.name])}
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if default is not MISSING and not is_dataclass(default):
            entry["default"] = with_lists(default)
        properties[field.name] = entry
    required = [
        field.name
        for field in fields(schema)
        if field.default is MISSING and field.default_factory is MISSING and field.name not in DERIVED
    ]
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
        elif isinstance(constraint, Matching):
            limits["pattern"] = f"^(?:{constraint.pattern})$"
        elif isinstance(constraint, InclusiveRange):
            limits |= {"minItems": 2, "maxItems": 2, "prefixItems": [{"type": "integer", "minimum": 0}]}
        elif isinstance(constraint, NotEmpty):
            limits |= {"pattern": r"\S"} if hint is str else {"minItems": 1}
    return limits
