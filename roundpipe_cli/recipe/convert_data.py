"""`datasets` and `eval_datasets` of a recipe, from those of axolotl and TRL (LLaMA-Factory: `convert_factory.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.aliases import is_off
from roundpipe_cli.recipe.convert_result import Conversion
from roundpipe_cli.recipe.convert_tables import CHAT_ROLES, DATASET_TYPES, FIELD_COLUMNS, SHAREGPT_ROLES
from roundpipe_cli.recipe.strict_yaml import shown_value

NAME_PATH = "give it a file, a folder or the id of a hub dataset: path: data/train.jsonl"
Entry = dict[str, Any]

_ALPACA = "rows are put into the Alpaca prompt, not into axolotl's"
_ALPACA_KINDS = ("alpaca", "alpaca.default", "alpaca:instruct")
"""Names of axolotl's own Alpaca prompt, which is the same as this program's."""
_LOADERS = ("json", "csv", "parquet", "text", "arrow")
"""Paths that name a reader of the files in `data_files`."""
_HARMLESS = ("ds_type", "conversation", "preprocess_shards", "message_field_role", "message_field_content")
_CHANGES = {
    "shards": "all rows are trained, not a shard",
    "shards_idx": "all rows are trained, not a shard",
    "revision": "the dataset's newest revision is read",
    "roles_to_train": "the assistant's turns are trained",
    "train_on_eos": "the end of each answer is trained",
    "train_on_eot": "the end of each answer is trained",
    "drop_system_message": "system messages stay",
    "field_system": "system prompts in a column are not used",
    "system_prompt": "no system prompt is added",
    "format": "rows are put into the chat template where the tokenizer has one",
    "no_input_format": "rows are put into the chat template where the tokenizer has one",
    "message_field_training_detail": "answers are trained whole",
    "split_thinking": "thoughts stay as the rows have them",
    "data_dir": "the dataset's own folder is read",
    "skip": "the first rows are trained too",
    "fraction": "all rows are trained",
}
"""Settings of a dataset that are left out, and what happens instead."""
WITHOUT_IT = "rows are read without it"
"""The same for settings that are not known here: any of them may change which rows there are, and what they say."""
_USUAL: dict[str, tuple[Any, ...]] = {
    "message_field_training": ("train",),
    "field_thinking": ("reasoning_content", "thinking", "reasoning"),
    "template_thinking_key": ("reasoning_content", "thinking", "reasoning"),
    "field_tools": ("tools",),
    "chat_template": ("tokenizer_default",),
}
"""Values that ask for what is always done here."""


def axolotl_datasets(items: Any, key: str, name: str, result: Conversion) -> list[Entry]:
    """The entries of axolotl's `datasets` or `test_datasets`.

    Raises:
        RefusedError: an entry without a path, of rows that are tokens already, or with messages that are not read here.
    """
    found = items_with_path(items, key, name)
    return [entry for where, item in found for entry in _axolotl_entries(item, where, name, result)]


def items_with_path(items: Any, key: str, name: str) -> Iterator[tuple[str, Entry]]:
    """(place, copy) of each item of axolotl's list `key`.

    Raises:
        RefusedError: an item without a path.
    """
    for index, item in enumerate(items if isinstance(items, list) else [items]):
        where = f"{key}[{index}]"
        if not isinstance(item, dict) or not isinstance(item.get("path"), str):
            raise RefusedError(
                "this dataset has no path", where=f"{name}: {where}", found=shown_value(item), hint=NAME_PATH
            )
        yield where, dict(item)


def axolotl_texts(items: Any, name: str, result: Conversion) -> list[Entry]:
    """The entries of axolotl's `pretraining_dataset`: texts.

    Raises:
        RefusedError: an entry without a path.
    """
    listed = items if isinstance(items, list) else [items]
    named = [{"path": item} if isinstance(item, str) else item for item in listed]
    kinds = [{**item, "type": item.get("type") or "pretrain"} if isinstance(item, dict) else item for item in named]
    return axolotl_datasets(kinds, "pretraining_dataset", name, result)


def _axolotl_entries(item: Entry, where: str, name: str, result: Conversion) -> list[Entry]:
    """One entry, or one for each of its files."""
    entry: Entry = {"path": item.pop("path")}
    kind = item.pop("type", None)
    files = item.pop("data_files", None)
    if is_off(kind):
        raise RefusedError(
            "the rows of this dataset are tokens already",
            where=f"{name}: {where}",
            found="no type, by which axolotl knows such rows",
            expected="rows of text: a type such as chat_template or alpaca",
            hint="if the rows are texts, give the dataset its type; else name the files that the tokens came from",
        )
    if isinstance(kind, dict):  # a format written out: names of columns, and texts around them
        item |= kind
        entry["type"] = "alpaca"
        result.change(f"{where}.type", "rows are put into the chat template where the tokenizer has one")
    else:
        entry["type"] = _axolotl_type(str(kind), where, result)
        if entry["type"] == "alpaca":  # a text, whatever template the tokenizer has
            entry["as_chat"] = False
    columns: dict[str, str] = {}
    if entry["type"] == "chat":
        _axolotl_messages(item, entry, columns, f"{name}: {where}")
        _axolotl_rules(item, entry, where, result)
    for key, value in item.items():
        if key in ("name", "split") and isinstance(value, str):
            entry[key] = value
        elif key in FIELD_COLUMNS and isinstance(value, str):
            _rename(columns, FIELD_COLUMNS[key], value)
        elif not (is_off(value) or key in _HARMLESS or value in _USUAL.get(key, ())):
            result.leave_out(
                f"{where}.{key}", value, "the rows' own form decides", change=_CHANGES.get(key, WITHOUT_IT)
            )
    if columns:
        entry["columns"] = columns
    paths = file_paths(entry["path"], files, f"{name}: {where}")
    return [{**entry, "path": path} for path in paths]


def _axolotl_type(kind: str, where: str, result: Conversion) -> str:
    first = kind.partition(".")[0].partition(":")[0]
    known = DATASET_TYPES.get(first)
    if known == "alpaca" and kind not in _ALPACA_KINDS:
        result.change(f"type: {kind}", _ALPACA)
    if known is not None and (kind == first or kind == f"{first}.default" or known == "alpaca"):
        return known
    result.leave_out(f"{where}.type", kind, f"read as {known or 'auto'}", change="the rows' columns decide how")
    return known or "auto"


def _axolotl_rules(item: Entry, entry: Entry, where: str, result: Conversion) -> None:
    """Rules for the trained parts of a chat, moved from `item` to `entry` as far as it can be said here."""
    roles = item.get("roles_to_train")
    if isinstance(roles, list) and roles:
        meant = [SHAREGPT_ROLES.get(str(role)) for role in roles]
        if all(role in ("system", "user", "assistant", "tool") for role in meant):
            del item["roles_to_train"]
            if set(meant) != {"assistant"}:
                entry["roles_to_train"] = list(dict.fromkeys(meant))
    if roles == []:
        reason, change = "only turns that say so are trained there", "the assistant's turns are trained"
        result.leave_out(f"{where}.roles_to_train", roles, reason, change=change)
    ends, turns = item.get("train_on_eos", item.get("train_on_eot", "turn")), item.get("train_on_eot")
    if ends in ("turn", "last", "all", "none") and turns in (None, ends):
        item.pop("train_on_eos", None)
        item.pop("train_on_eot", None)
        if ends != "turn":
            entry["train_on_eos"] = ends


def _axolotl_messages(item: Entry, entry: Entry, columns: dict[str, str], where: str) -> None:
    """Which keys a message of the rows has: `role` and `content`, or `from` and `value`; others are refused."""
    given = item.pop("message_property_mappings", None)
    mapping = given if isinstance(given, dict) else {}
    role = mapping.get("role", item.get("message_field_role") or "role")
    content = mapping.get("content", item.get("message_field_content") or "content")
    entry["type"] = kind = message_type(role, content, where)
    if kind == "sharegpt":
        _rename(columns, "conversations", item.pop("field_messages", None) or "messages")
    elif not is_off(item.get("field_messages")):
        _rename(columns, "messages", item.pop("field_messages"))
    others = {key: value for key, value in mapping.items() if key not in ("role", "content") and key != value}
    if others:
        item["message_property_mappings"] = others
    roles = item.pop("roles", None) or {}
    for meant, names in roles.items() if isinstance(roles, dict) else ():
        for spelling in names if isinstance(names, list) else [names]:
            check_role(spelling, meant, kind, where)


def message_type(role: Any, content: Any, where: str) -> str:
    """`chat` or `sharegpt`, by the keys of a message.

    Raises:
        RefusedError: keys that no type of rows has here.
    """
    if (role, content) == ("role", "content"):
        return "chat"
    if (role, content) == ("from", "value"):
        return "sharegpt"
    raise RefusedError(
        "messages with such keys cannot be read",
        where=where,
        found=f"{role} and {content}",
        expected="role and content, or from and value",
        hint="rename the keys in the file of the rows",
    )


def check_role(spelling: Any, meant: str, kind: str, where: str) -> None:
    """
    Raises:
        RefusedError: rows of this type that name a role so are not read here.
    """
    known = dict(SHAREGPT_ROLES if kind == "sharegpt" else CHAT_ROLES)
    if known.get(str(spelling)) != meant:
        raise RefusedError(
            f"messages of the {meant} with such a role cannot be read",
            where=where,
            found=shown_value(spelling),
            expected=", ".join(name for name, role in known.items() if role == meant),
            hint="rename the roles in the file of the rows",
        )


def _rename(columns: dict[str, str], ours: str, theirs: str) -> None:
    if ours != theirs:
        columns[ours] = theirs


def file_paths(path: str, files: Any, where: str) -> list[str]:
    """The paths of a dataset, which may name its files apart.

    Raises:
        RefusedError: files by split, or within a dataset of the hub.
    """
    if is_off(files):
        return [path]
    names = files if isinstance(files, list) else [files]
    if not all(isinstance(file, str) for file in names):
        raise RefusedError(
            "files by split cannot be read",
            where=where,
            found=shown_value(files),
            expected="a list of files",
            hint="name the files of the split to train on: data_files: [train.jsonl]",
        )
    if path in _LOADERS:
        return [str(file) for file in names]
    return [f"{path}/{file}" for file in names]


def trl_datasets(data: Mapping[str, Any], name: str, result: Conversion) -> list[Entry]:
    """The entries of TRL's `dataset_mixture` or `dataset_name`.

    Raises:
        RefusedError: a part of a mixture without a path.
    """
    mixture = data.get("dataset_mixture")
    entries: list[Entry] = []
    if isinstance(mixture, dict):  # TRL reads nothing else then
        items = mixture.get("datasets")
        for index, item in enumerate(items if isinstance(items, list) else []):
            where = f"dataset_mixture.datasets[{index}]"
            if not isinstance(item, dict) or not isinstance(item.get("path"), str):
                raise RefusedError(
                    "this dataset has no path", where=f"{name}: {where}", found=shown_value(item), hint=NAME_PATH
                )
            entries += _trl_entries(dict(item), where, name, result)
    elif isinstance(data.get("dataset_name"), str):
        entry: Entry = {"path": data["dataset_name"]}
        for key, target in (("dataset_config", "name"), ("dataset_train_split", "split")):
            if isinstance(data.get(key), str):
                entry[target] = data[key]
        entries.append(entry)
    column = data.get("dataset_text_field")
    for entry in entries:
        if isinstance(column, str):
            entry["type"] = "text"
            if column != "text":
                entry["columns"] = {"text": column}
        elif entry.get("type") not in ("text", "chat"):  # plain prompts are joined with their answers
            entry["as_chat"] = False
    return entries


def _trl_entries(item: Entry, where: str, name: str, result: Conversion) -> list[Entry]:
    entry = {key: item.pop(key) for key in ("path", "name", "split") if isinstance(item.get(key), str)}
    kinds = {("messages",): "chat", ("completion", "prompt"): "prompt_completion", ("text",): "text"}
    columns = item.get("columns")
    if isinstance(columns, list) and tuple(sorted(map(str, columns))) in kinds:
        entry["type"] = kinds[tuple(sorted(map(str, item.pop("columns"))))]
    paths = file_paths(entry["path"], item.pop("data_files", None), f"{name}: {where}")
    for key, value in item.items():
        if not is_off(value):
            result.leave_out(
                f"{where}.{key}", value, "the rows' own form decides", change=_CHANGES.get(key, WITHOUT_IT)
            )
    return [{**entry, "path": path} for path in paths]


def trl_eval_datasets(data: Mapping[str, Any]) -> list[Entry]:
    """TRL evaluates on the test split where its `eval_strategy` says when."""
    if data.get("eval_strategy") in (None, "no", False) or not isinstance(data.get("dataset_name"), str):
        return []
    entry: Entry = {"path": data["dataset_name"], "split": data.get("dataset_test_split") or "test"}
    if isinstance(data.get("dataset_config"), str):
        entry["name"] = data["dataset_config"]
    if not isinstance(data.get("dataset_text_field"), str):
        entry["as_chat"] = False
    return [entry]
