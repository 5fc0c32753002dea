"""`datasets` of preference pairs in axolotl's files, whose `type` names the columns of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundpipe_cli.recipe.aliases import is_off
from roundpipe_cli.recipe.convert_data import (
    WITHOUT_IT,
    Entry,
    check_role,
    file_paths,
    items_with_path,
    message_type,
)
from roundpipe_cli.recipe.convert_result import Conversion

_PROMPTS: Mapping[str, str] = {"intel": "question", "icr": "input", "prompt_pairs": "prompt", "ultra": "prompt"}
"""axolotl's shapes of rows, the second word of a `type`, whose prompt has a column of its own."""
_WHOLE = ("argilla", "argilla_chat")
"""Shapes whose answers are whole conversations, or whose columns are found by their names."""
_FAMILIES = ("chatml", "llama3", "zephyr")
"""Templates that such a `type` writes out, whatever the tokenizer's own is."""
_COLUMNS: Mapping[str, str] = {
    **{"field_prompt": "prompt", "field_system": "system", "field_messages": "messages"},
    **{"field_chosen": "chosen", "field_rejected": "rejected"},
}
_FORMATS = ("prompt_format", "chosen_format", "rejected_format")
_HARMLESS = ("ds_type", "message_field_role", "message_field_content")
_TEMPLATED = "rows are put into the chat template where the tokenizer has one"


def axolotl_pairs(items: Any, key: str, name: str, result: Conversion) -> list[Entry]:
    """The entries of axolotl's `datasets` or `test_datasets` in a file with `rl`.

    Raises:
        RefusedError: an entry without a path, or with messages that are not read here.
    """
    return [entry for where, item in items_with_path(items, key, name) for entry in _entries(item, where, name, result)]


def _entries(item: Entry, where: str, name: str, result: Conversion) -> list[Entry]:
    entry: Entry = {"path": item.pop("path"), "type": "preference"}
    kind, files = item.pop("type", None), item.pop("data_files", None)
    columns: dict[str, str] = {}
    if isinstance(kind, dict):  # a format written out: names of columns, and texts around them
        item |= {setting: value for setting, value in kind.items() if setting not in _FORMATS}
        if any(not is_off(kind.get(setting)) for setting in _FORMATS):
            result.change(f"{where}.type", _TEMPLATED)
    else:
        columns = _shape(str(kind or ""), where, result)
    _check_messages(item, f"{name}: {where}")
    for key, value in item.items():
        if key in ("name", "split") and isinstance(value, str):
            entry[key] = value
        elif key in _COLUMNS and isinstance(value, str):
            if value != _COLUMNS[key]:
                columns[_COLUMNS[key]] = value
        elif not (is_off(value) or key in _HARMLESS):
            result.leave_out(f"{where}.{key}", value, "the rows' own form decides", change=WITHOUT_IT)
    if columns:
        entry["columns"] = columns
    return [{**entry, "path": path} for path in file_paths(str(entry["path"]), files, f"{name}: {where}")]


def _shape(kind: str, where: str, result: Conversion) -> dict[str, str]:
    """Columns of the rows of a `type` such as chatml.intel."""
    family, _, shape = kind.partition(".")
    if family in _FAMILIES:
        change = f"rows are put into the tokenizer's own chat template, not {family}"
        result.change(f"{where}.type", change)
    elif family != "chat_template" or shape not in ("", "default", *_PROMPTS, *_WHOLE):
        result.leave_out(f"{where}.type", kind, "read as preference pairs", change="the rows' columns decide how")
    prompt = _PROMPTS.get(shape)
    return {} if prompt in (None, "prompt") else {"prompt": str(prompt)}


def _check_messages(item: Entry, where: str) -> None:
    """
    Raises:
        RefusedError: the keys of a message, or the names of its roles, are none that are read here.
    """
    given = item.pop("message_property_mappings", None)
    mapping = given if isinstance(given, dict) else {}
    role = mapping.get("role", item.get("message_field_role") or "role")
    content = mapping.get("content", item.get("message_field_content") or "content")
    kind = message_type(role, content, where)
    roles = item.pop("roles", None)
    for meant, names in roles.items() if isinstance(roles, dict) else ():
        for spelling in names if isinstance(names, list) else [names]:
            check_role(spelling, meant, kind, where)
