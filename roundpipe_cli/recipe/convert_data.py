"""`datasets` and `eval_datasets` of a recipe, from those of axolotl, LLaMA-Factory and TRL."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from roundpipe_cli.choices import CHAT_ROLES, SHAREGPT_ROLES
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.recipe.convert_rules import LABELLED, PAIRED, TABLES, Conversion
from roundpipe_cli.recipe.foreign import TEMPLATED, answer_of, is_off
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.recipe.strict_yaml import MAX_BYTES, shown_value
from roundpipe_cli.regular_files import named_path, read_json_of_ours

Entry = dict[str, Any]

_LOADERS = ("json", "csv", "parquet", "text", "arrow")
"""Paths that name a reader of the files in `data_files`."""
_HARMLESS = ("ds_type", "conversation", "preprocess_shards", "message_field_role", "message_field_content")
WITHOUT_IT = "rows are read without it"
"""Reason to leave out a setting that is not known here: it may change which rows there are, and what they say."""


def read_datasets(result: Conversion) -> tuple[list[Entry], list[Entry]]:
    """The recipe's `datasets` and `eval_datasets`.

    Raises:
        RefusedError: the file names no rows, or such as are not trained or cannot be read here.
    """
    data, tool = result.data, result.tool
    more: Entry = {}
    if tool == "axolotl":
        wanted = "pretraining_dataset" if result.job == "pretraining" else "datasets"
        if wanted != "datasets" and data.get("datasets"):  # which axolotl does not read then
            result.drop("datasets")
        elif wanted != "datasets" and "datasets" in data:
            result.notes.append("datasets names no rows; those of pretraining_dataset are trained.")
        both = _axolotl_datasets(wanted, result), _axolotl_datasets("test_datasets", result)
    elif tool == "llama-factory":
        wanted = "dataset"
        both = _factory_datasets("dataset", result), _factory_datasets("eval_dataset", result)
        more = {"turns_to_train": "last"} if result.job == Recipe.objective and data.get("mask_history") is True else {}
    else:
        wanted = "dataset_name or dataset_mixture"
        both = _trl_datasets(result), _trl_eval_datasets(result)
        more = {"type": "preference"} if result.job in PAIRED else {}
    if not both[0]:
        found = f"{wanted}: {shown_value(data[wanted])}" if wanted in data else f"no {wanted}"
        what, hint = "this file names no rows to train on", f"write into the file: {TABLES['examples'][wanted]}"
        raise RefusedError(what, where=result.name, found=found, expected=wanted, hint=hint)
    return [entry | more for entry in both[0]], [entry | more for entry in both[1]]


def _with_paths(items: Any, key: str, result: Conversion) -> Iterator[tuple[str, Entry]]:
    """(place, copy) of each item of the list `key`."""
    for index, item in enumerate(items if isinstance(items, list) else [items]):
        where = f"{key}[{index}]"
        if not isinstance(item, dict) or not isinstance(item.get("path"), str):
            hint = "give it a file, a folder or the id of a hub dataset: path: data/train.jsonl"
            place, found = f"{result.name}: {where}", shown_value(item)
            raise RefusedError("this dataset has no path", where=place, found=found, hint=hint)
        yield where, dict(item)


def _finished(
    entry: Entry, item: Entry, where: str, result: Conversion, *, columns: dict[str, str], known: Mapping[str, str]
) -> list[Entry]:
    """The entry with what `item` says beside, once for each of its files; what has no counterpart is left out.

    Args:
        columns: ours to theirs, as far as they are found.
        known: the item's keys with names of columns -> ours.
    """
    files = item.pop("data_files", None)
    for key, value in item.items():
        if key in ("name", "split") and isinstance(value, str):
            entry[key] = value
        elif key in known and isinstance(value, str) and value:
            columns[known[key]] = value
        elif not (is_off(value) or key in _HARMLESS or value in TABLES["usual"].get(key, ())):
            answer = answer_of(key, ("changed row",))
            change = answer.text if answer else WITHOUT_IT
            result.leave_out(f"{where}.{key}", value, "the rows' own form decides", change=change)
    if renamed := {ours: theirs for ours, theirs in columns.items() if ours != theirs}:
        entry["columns"] = renamed
    path = entry["path"]
    names = [path] if is_off(files) else files if isinstance(files, list) else [files]
    if not all(isinstance(file, str) for file in names):
        what, hint = "files by split cannot be read", "name the files of the split: data_files: [train.jsonl]"
        place, found = f"{result.name}: {where}", shown_value(files)
        raise RefusedError(what, where=place, found=found, expected="a list of files", hint=hint)
    is_whole = is_off(files) or path in _LOADERS
    return [{**entry, "path": name if is_whole else f"{path}/{name}"} for name in names]


def _message_type(role: Any, content: Any, where: str, *, roles: Iterable[tuple[str, Any, str]]) -> str:
    """`chat` or `sharegpt`, by the keys of a message.

    Args:
        roles: (place, name of a role, its meaning).

    Raises:
        RefusedError: rows of neither type have such keys, or such a role.
    """
    kind = {("role", "content"): "chat", ("from", "value"): "sharegpt"}.get((str(role), str(content)))
    if kind is None:
        what, hint = "messages with such keys cannot be read", "rename the keys in the file of the rows"
        found, expected = f"{role} and {content}", "role and content, or from and value"
        raise RefusedError(what, where=where, found=found, expected=expected, hint=hint)
    known: Mapping[str, str] = SHAREGPT_ROLES if kind == "sharegpt" else CHAT_ROLES
    for place, spelling, meant in roles:
        if known.get(str(spelling)) != meant:
            what = f"messages of the {meant} with such a role cannot be read"
            hint = "rename the roles in the file of the rows"
            expected = ", ".join(name for name, role in known.items() if role == meant)
            raise RefusedError(what, where=place, found=shown_value(spelling), expected=expected, hint=hint)
    return kind


# axolotl's datasets. Of preference pairs, the `type` names the columns of a row.

_PLAIN = ("", "default", "argilla", "argilla_chat")
"""Shapes whose answers are whole conversations, or whose columns are found by their names."""
_FAMILIES = ("chatml", "llama3", "zephyr")
"""Templates that such a `type` writes out, whatever the tokenizer's own is."""
_DECIDES = "the rows' columns decide how"


def _axolotl_datasets(key: str, result: Conversion) -> list[Entry]:
    items = result.data.get(key) or []
    if key == "pretraining_dataset":  # texts, whose type need not be said
        listed = items if isinstance(items, list) else [items]
        named = [{"path": item} if isinstance(item, str) else item for item in listed]
        items = [{**one, "type": one.get("type") or "pretrain"} if isinstance(one, dict) else one for one in named]
    return [entry for where, item in _with_paths(items, key, result) for entry in _axolotl_entries(item, where, result)]


def _axolotl_entries(item: Entry, where: str, result: Conversion) -> list[Entry]:
    entry: Entry = {"path": item.pop("path")}
    kind = item.pop("type", None)
    columns: dict[str, str] = {}
    if isinstance(kind, dict):  # a format written out: names of columns, and texts around them
        item |= kind
    if result.job in PAIRED:
        entry["type"] = "preference"
        if not isinstance(kind, dict):
            columns = _shape(str(kind or ""), where, result)
        _kind_of_messages(item, f"{result.name}: {where}")
        return _finished(entry, item, where, result, columns=columns, known=TABLES["axolotl columns"]["pair"])
    if result.job in LABELLED:  # prompt, completion and label, whatever the type
        shape = "" if isinstance(kind, dict) else str(kind or "").partition(".")[2]
        entry["type"] = "chat" if shape == "argilla_chat" else "prompt_completion"
        columns = {"prompt": TABLES["axolotl prompts"]["labelled"].get(shape, "prompt"), "completion": "completion"}
        columns = {"messages": "completion"} if shape == "argilla_chat" else columns
        result.change(f"{where}.type", f"rows have {' and '.join(columns.values())}, in the tokenizer's own template")
        return _finished(entry, item, where, result, columns=columns, known=TABLES["axolotl columns"]["labelled"])
    if is_off(kind):
        raise RefusedError(
            "the rows of this dataset are tokens already",
            where=f"{result.name}: {where}",
            found="no type, by which axolotl knows such rows",
            expected="rows of text: a type such as chat_template or alpaca",
            hint="if the rows are texts, give the dataset its type; else name the files that the tokens came from",
        )
    if isinstance(kind, dict):
        entry["type"] = "alpaca"
        result.change(f"{where}.type", TEMPLATED)
    else:
        entry["type"] = _axolotl_type(str(kind), where, result)
        if entry["type"] == "alpaca":  # a text, whatever template the tokenizer has
            entry["as_chat"] = False
    if entry["type"] == "chat":
        entry["type"] = _kind_of_messages(item, f"{result.name}: {where}")
        messages = item.pop("field_messages", None) or "messages"
        columns["conversations" if entry["type"] == "sharegpt" else "messages"] = messages
        _axolotl_rules(item, entry, where, result)
    known = TABLES["axolotl columns"]["text"] | ({"field_system": "system"} if isinstance(kind, dict) else {})
    return _finished(entry, item, where, result, columns=columns, known=known)


def _shape(kind: str, where: str, result: Conversion) -> dict[str, str]:
    """Columns of the rows of a `type` such as chatml.intel."""
    family, _, shape = kind.partition(".")
    prompts = TABLES["axolotl prompts"]["pair"]
    if family in _FAMILIES:
        result.change(f"{where}.type", f"rows are put into the tokenizer's own chat template, not {family}")
    elif family != "chat_template" or shape not in (*_PLAIN, *prompts):
        result.leave_out(f"{where}.type", kind, "read as preference pairs", change=_DECIDES)
    return {"prompt": prompts[shape]} if shape in prompts else {}


def _axolotl_type(kind: str, where: str, result: Conversion) -> str:
    first = kind.partition(".")[0].partition(":")[0]
    known: str | None = TABLES["axolotl types"].get(first)
    if known == "alpaca" and kind not in ("alpaca", "alpaca.default", "alpaca:instruct"):  # this program's prompt
        result.change(f"type: {kind}", "rows are put into the Alpaca prompt, not into axolotl's")
    if known is None or not (kind in (first, f"{first}.default") or known == "alpaca"):
        result.leave_out(f"{where}.type", kind, f"read as {known or 'auto'}", change=_DECIDES)
    return known or "auto"


def _axolotl_rules(item: Entry, entry: Entry, where: str, result: Conversion) -> None:
    """Rules for the trained parts of a chat, moved from `item` to `entry` as far as it can be said here."""
    roles = item.get("roles_to_train")
    if roles == []:
        reason, change = "only turns that say so are trained there", "the assistant's turns are trained"
        result.leave_out(f"{where}.roles_to_train", roles, reason, change=change)
    elif isinstance(roles, list):
        meant = [SHAREGPT_ROLES.get(str(role)) for role in roles]
        if None not in meant:
            del item["roles_to_train"]
            if set(meant) != {"assistant"}:
                entry["roles_to_train"] = list(dict.fromkeys(meant))
    ends, turns = item.get("train_on_eos", item.get("train_on_eot", "turn")), item.get("train_on_eot")
    if ends in ("turn", "last", "all", "none") and turns in (None, ends):
        item.pop("train_on_eos", None)
        item.pop("train_on_eot", None)
        if ends != "turn":
            entry["train_on_eos"] = ends


def _kind_of_messages(item: Entry, where: str) -> str:
    """`chat` or `sharegpt`, by what axolotl says of a row's messages, which is taken out of `item`."""
    given, roles = item.pop("message_property_mappings", None), item.pop("roles", None)
    mapping = given if isinstance(given, dict) else {}
    role, content = (mapping.get(key, item.get(f"message_field_{key}") or key) for key in ("role", "content"))
    named = [
        (where, spelling, meant)
        for meant, names in (roles.items() if isinstance(roles, dict) else ())
        for spelling in (names if isinstance(names, list) else [names])
    ]
    if others := {key: value for key, value in mapping.items() if key not in ("role", "content") and key != value}:
        item["message_property_mappings"] = others
    return _message_type(role, content, where, roles=named)


# TRL's datasets.


def _trl_datasets(result: Conversion) -> list[Entry]:
    """Data sets of `dataset_mixture` or `dataset_name`; the settings beside a mixture go where they belong."""
    data, mixture = result.data, result.data.get("dataset_mixture")
    entries: list[Entry] = []
    if isinstance(mixture, dict):  # TRL reads nothing else then
        for name in data:
            if name in ("dataset_name", "dataset_config", "dataset_train_split"):
                result.drop(name)
        for where, item in _with_paths(mixture.get("datasets") or [], "dataset_mixture.datasets", result):
            entry = {key: item.pop(key) for key in ("path", "name", "split") if isinstance(item.get(key), str)}
            columns = item.get("columns")
            kind = _BY_COLUMNS.get(",".join(sorted(map(str, columns)))) if isinstance(columns, list) else None
            if kind is not None:
                del item["columns"]
                entry["type"] = kind
            entries += _finished(entry, item, where, result, columns={}, known={})
        for key, value in mixture.items():
            name = f"dataset_mixture.{key}"
            if key == "test_split_size" and not is_off(value):
                result.put("val_set_size", value, name, value)
            elif key == "streaming":
                result.drop(name)
            elif key != "datasets" and not is_off(value):
                result.leave_out(name, value, "one seed, the recipe's, is for everything")
    elif isinstance(data.get("dataset_name"), str):
        entries.append(_named(data, "dataset_train_split"))
    column = data.get("dataset_text_field")
    for entry in entries:
        if isinstance(column, str):
            entry |= {"type": "text"} if column == "text" else {"type": "text", "columns": {"text": column}}
        elif entry.get("type") not in ("text", "chat"):  # plain prompts are joined with their answers
            entry["as_chat"] = False
    return entries


_BY_COLUMNS = {"messages": "chat", "completion,prompt": "prompt_completion", "text": "text"}
"""Columns of a row of TRL's -> its type."""


def _named(data: Mapping[str, Any], split: str) -> Entry:
    keys = {"path": "dataset_name", "name": "dataset_config", "split": split}
    return {ours: data[key] for ours, key in keys.items() if isinstance(data.get(key), str)}


def _trl_eval_datasets(result: Conversion) -> list[Entry]:
    """TRL evaluates on the test split where its `eval_strategy` says when."""
    data = result.data
    name = None if isinstance(data.get("dataset_mixture"), dict) else data.get("dataset_name")
    if data.get("eval_strategy") in (None, "no", False) or not isinstance(name, str):
        if "dataset_test_split" in data:
            result.drop("dataset_test_split")
        return []
    entry = _named(data, "dataset_test_split")
    entry.setdefault("split", "test")
    return [entry if isinstance(data.get("dataset_text_field"), str) else {**entry, "as_chat": False}]


# LLaMA-Factory's datasets: the names in a file, and what its table `dataset_info.json` says of each.

_TABLE = "dataset_info.json"
_ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Places of a dataset that are not read."""
_READ = (
    *("hf_hub_url", *_ELSEWHERE, "file_name", "formatting", "ranking", "subset", "split", "folder", "num_samples"),
    *("columns", "tags"),
)
"""Keys of a dataset in the table that this module reads."""


def _factory_datasets(key: str, result: Conversion) -> list[Entry]:
    data, job, base = result.data, result.job, result.data.get("dataset_dir") or "data"
    names = data.get(key) or []
    names = [str(part).strip() for part in (names if isinstance(names, list) else str(names).split(","))]
    table = base if isinstance(base, dict) else None if base == "ONLINE" else _table(result.name, str(base))
    folder, is_online = base if isinstance(base, str) else "data", base == "ONLINE"
    if table is None:  # LLaMA-Factory's own data sets lie so
        paths = names if is_online else [f"{folder}/{dataset}.json" for dataset in names]
        if paths and not is_online:
            result.change("dataset", f"no {_TABLE} was found; check the guessed {', '.join(paths)} and their type")
        plain: Entry = {"type": "alpaca" if is_online else "auto", "alpaca_join": "newline"}
        if job in PAIRED:
            plain["type"] = "preference"
        elif job == "pretraining":
            plain = {"type": "text", **({"columns": {"text": "instruction"}} if is_online else {})}
        return [_limited({"path": path, **plain}, {}, result) for path in paths]
    entries = []
    for dataset in names:
        if not isinstance(table.get(dataset), dict):
            near, what = closest(dataset, list(table)), f"the dataset {dataset} is not in {_TABLE}"
            where, found = f"{result.name}: {key}", ", ".join(list(table)[:8])
            raise RefusedError(what, where=where, found=found, hint=f"did you mean {near}?" if near else None)
        entries.append(_limited(_table_entry(dataset, table[dataset], folder, result), table[dataset], result))
    return _with_weights(entries, data.get("interleave_probs")) if key == "dataset" else entries


def _table(name: str, base: str) -> dict[str, Any] | None:
    """LLaMA-Factory's table of datasets, beside the file or in the working directory; None where there is none."""
    if base.startswith("REMOTE:"):
        raise RefusedError(
            "the table of datasets lies on the hub and is not fetched",
            where=f"{name}: dataset_dir",
            found=base,
            expected=f"a folder with {_TABLE}",
            hint=f"download it with `hf download {base[7:]} --repo-type dataset` and name the folder",
        )
    named_path(base)
    for path in (Path(name).parent / base / _TABLE, Path(base) / _TABLE):
        try:
            table = read_json_of_ours(path, MAX_BYTES)
            if isinstance(table, dict):
                return table
            raise ValueError("no JSON object")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            what, hint = "the table of datasets cannot be read", f"python -m json.tool {shlex.quote(str(path))}"
            raise RefusedError(what, where=str(path), found=str(error), hint=hint) from None
    return None


def _limited(entry: Entry, known: Mapping[str, Any], result: Conversion) -> Entry:
    """The entry with the first rows only, where the file or the table says how many."""
    limits = [limit for limit in (result.data.get("max_samples"), known.get("num_samples")) if isinstance(limit, int)]
    if limits:
        entry["split"] = f"{entry.get('split', 'train')}[:{min(limits)}]"
    if known.get("num_samples"):
        result.change("num_samples", "the first rows are taken, not rows by chance")
    return entry


def _with_weights(entries: list[Entry], given: Any) -> list[Entry]:
    """Shares of datasets that LLaMA-Factory interleaves."""
    with suppress(ValueError):
        weights = [float(share) for share in (given if isinstance(given, list) else str(given or "").split(","))]
        if len(weights) == len(entries) and min(weights) > 0:
            return [{**entry, "weight": weight} for entry, weight in zip(entries, weights, strict=True)]
    return entries


def _table_entry(dataset: str, known: Mapping[str, Any], folder: str, result: Conversion) -> Entry:
    """One dataset of the table."""
    where, job, has_pairs = f"{result.name}: dataset {dataset}", result.job, result.job in PAIRED
    given = known.get("columns")
    columns = {key: column for key, column in given.items() if not is_off(column)} if isinstance(given, dict) else None
    for what, key, expected in _faults(known, columns, result):
        value: Any = known
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found, hint = f"{key}: {shown_value(value)}", f"change its entry in {_TABLE}, or leave it out of `dataset`"
        raise RefusedError(what, where=where, found=found, expected=expected, hint=hint)
    if job == "pretraining":
        kind = "text"
    elif (known.get("formatting") or "alpaca") != "alpaca":
        kind = _kind_of_tags(dataset, known.get("tags"), where, result)
    else:  # LLaMA-Factory reads no column `input` where none is named
        kind = "alpaca" if has_pairs or columns is None or "query" in columns else "prompt_completion"
    entry: Entry = {"path": str(known.get("hf_hub_url") or f"{folder}/{known['file_name']}")}
    entry["type"] = "preference" if has_pairs else kind
    if kind == "alpaca":
        entry["alpaca_join"] = "newline"
    for key, target, usual in (("subset", "name", None), ("split", "split", "train")):
        if isinstance(known.get(key), str) and known[key] != usual:
            entry[target] = known[key]
    names = dict(TABLES["factory columns"][kind])
    if has_pairs:
        names.pop("response", None)
        names |= {"chosen": "chosen", "rejected": "rejected"}
    if job in LABELLED:
        names["kto_tag"] = "label"
    said = {**TABLES["factory columns unsaid"].get(kind, {}), **(columns or {})}
    for key in (key for key in said if key not in names):
        where, why = f"{dataset}.columns.{key}", "rows of this type have no such column"
        if job == "pretraining":
            result.leave_out(where, said[key], why, change="it is not read")
        else:  # LLaMA-Factory does not read it either
            result.drop(where)
    rest = {key: value for key, value in known.items() if key not in _READ}
    ours = {names[key]: str(column) for key, column in said.items() if key in names}
    (finished,) = _finished(entry, rest, dataset, result, columns=ours, known={})
    return finished


def _faults(
    known: Mapping[str, Any], columns: Mapping[str, Any] | None, result: Conversion
) -> Iterator[tuple[str, str, str]]:
    """(what, key, what is expected) of all for which a dataset of the table is not trained, or cannot be read here."""
    is_pretraining, has_pairs, named = result.job == "pretraining", result.job in PAIRED, columns or {}
    formatting = known.get("formatting") or "alpaca"
    for media in [key for key in ("images", "videos", "audios") if key in named]:
        yield "this dataset has images, video or sound", f"columns.{media}", "rows of text"
    signs = [f"columns.{key}" for key in ("chosen", "rejected", "kto_tag") if key in named]
    signs = ["ranking", *signs] if known.get("ranking") else signs
    if has_pairs and signs[:3] != ["ranking", "columns.chosen", "columns.rejected"]:
        expected = "ranking: true, columns.chosen, columns.rejected"
        yield "this dataset has no pairs of answers", "ranking", expected
    if result.job in LABELLED:
        if signs != ["columns.kto_tag"]:
            yield "this dataset has no labels of its answers", "columns.kto_tag", "columns.kto_tag, and no pairs"
    elif signs and not has_pairs:
        what = "this dataset has preferences, which supervised fine-tuning does not train"
        yield what, signs[0], "rows with one answer; `stage: dpo` trains pairs"
    places = "hf_hub_url or file_name"
    if known.get("hf_hub_url"):
        if known.get("folder"):
            yield "a folder of a hub dataset cannot be named", "folder", "the whole dataset"
    elif elsewhere := [key for key in _ELSEWHERE if known.get(key)]:
        yield "this dataset cannot be fetched from there", elsewhere[0], places
    elif not isinstance(known.get("file_name"), str):
        yield "this dataset has no place", "file_name", places
    if formatting not in ("alpaca", "sharegpt", "openai"):
        yield "rows of this format cannot be read", "formatting", "alpaca, sharegpt or openai"
    if formatting != "alpaca":
        if is_pretraining:
            yield "chats are no texts to pretrain on", "formatting", "alpaca, with columns.prompt"
    elif columns is not None and not (has_pairs or is_pretraining or {"prompt", "response"} <= columns.keys()):
        yield "the rows of this dataset have no prompt or no answer", "columns", "prompt, response"


def _kind_of_tags(dataset: str, given: Any, where: str, result: Conversion) -> str:
    """`chat` or `sharegpt`, by LLaMA-Factory's `tags`."""
    tags: Mapping[str, Any] = given if isinstance(given, dict) else TABLES["factory tags"]
    place = f"{where}: tags"
    roles = [
        (f"{place}.{tag}", tags[tag], meant)
        for tag, meant in TABLES["factory roles"].items()
        if not is_off(tags.get(tag))
    ]
    kind = _message_type(tags.get("role_tag"), tags.get("content_tag"), place, roles=roles)
    if isinstance(given, dict) and tags.get("function_tag") not in (None, "", "function_call"):
        reason = "calls are read in turns of function_call; rows with this role are refused when they are read"
        result.leave_out(f"{dataset}.tags.function_tag", tags["function_tag"], reason)
    return kind
