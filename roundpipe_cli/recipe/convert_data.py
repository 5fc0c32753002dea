"""`datasets` and `eval_datasets` of a recipe, from those of axolotl, LLaMA-Factory and TRL."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roundpipe_cli.choices import CHAT_ROLES, SHAREGPT_ROLES
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.recipe.aliases import is_off
from roundpipe_cli.recipe.convert_rules import Conversion, is_pairs
from roundpipe_cli.recipe.convert_tables import DATASET_TYPES, FIELD_COLUMNS, Tool
from roundpipe_cli.recipe.foreign import DATASET_CHANGES, TEMPLATED
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.recipe.strict_yaml import MAX_BYTES, shown_value
from roundpipe_cli.regular_files import named_path

Entry = dict[str, Any]

DATASET_KEYS: Mapping[Tool, tuple[str, ...]] = {
    "axolotl": ("datasets", "test_datasets", "pretraining_dataset"),
    "llama-factory": ("dataset", "dataset_dir", "max_samples", "eval_dataset", "mask_history"),
    "trl": (
        *("dataset_name", "dataset_config", "dataset_train_split", "dataset_mixture", "dataset_text_field"),
        "dataset_test_split",
    ),
}
"""Keys of a file that are read here."""

_ALPACA = "rows are put into the Alpaca prompt, not into axolotl's"
_ALPACA_KINDS = ("alpaca", "alpaca.default", "alpaca:instruct")
"""Names of axolotl's own Alpaca prompt, which is the same as this program's."""
_LOADERS = ("json", "csv", "parquet", "text", "arrow")
"""Paths that name a reader of the files in `data_files`."""
_HARMLESS = ("ds_type", "conversation", "preprocess_shards", "message_field_role", "message_field_content")
_EXAMPLES = {
    "datasets": "datasets: [{path: data/train.jsonl, type: chat_template}]",
    "pretraining_dataset": "pretraining_dataset: data/texts.jsonl",
    "dataset": "dataset: NAME, one of dataset_info.json in the folder dataset_dir",
    "dataset_name": "dataset_name: org/rows, or a file",
}
WITHOUT_IT = "rows are read without it"
"""The same for settings that are not known here: any of them may change which rows there are, and what they say."""
_USUAL: dict[str, tuple[Any, ...]] = {
    "message_field_training": ("train",),
    **dict.fromkeys(("field_thinking", "template_thinking_key"), ("reasoning_content", "thinking", "reasoning")),
    "field_tools": ("tools",),
    "chat_template": ("tokenizer_default",),
}
"""Values that ask for what is always done here."""


def read_datasets(result: Conversion) -> tuple[list[Entry], list[Entry]]:
    """The recipe's `datasets` and `eval_datasets`.

    Raises:
        RefusedError: the file names no rows, or such as are not trained or cannot be read here.
    """
    if result.tool == "axolotl":
        key = wanted = "pretraining_dataset" if result.job == "pretraining" else "datasets"
        if key != "datasets" and result.data.get("datasets"):  # which axolotl does not read then
            result.drop("datasets")
        elif key != "datasets" and "datasets" in result.data:
            result.notes.append("datasets names no rows; those of pretraining_dataset are trained.")
        datasets, eval_datasets = _axolotl_datasets(key, result), _axolotl_datasets("test_datasets", result)
    elif result.tool == "llama-factory":
        wanted = "dataset"
        datasets, eval_datasets = _factory_datasets("dataset", result), _factory_datasets("eval_dataset", result)
        if result.job == Recipe.objective and result.data.get("mask_history") is True:
            for entry in (*datasets, *eval_datasets):
                entry["turns_to_train"] = "last"
    else:
        wanted = "dataset_name or dataset_mixture"
        datasets, eval_datasets = _trl_datasets(result), _trl_eval_datasets(result)
        if is_pairs(result.job):
            for entry in (*datasets, *eval_datasets):
                entry["type"] = "preference"
    if not datasets:
        raise RefusedError(
            "this file names no rows to train on",
            where=result.name,
            found=f"{wanted}: {shown_value(result.data[wanted])}" if wanted in result.data else f"no {wanted}",
            expected=wanted,
            hint=f"write into the file: {_EXAMPLES[wanted.split()[0]]}",
        )
    return datasets, eval_datasets


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
        elif key in known and isinstance(value, str):
            columns[known[key]] = value
        elif not (is_off(value) or key in _HARMLESS or value in _USUAL.get(key, ())):
            change = DATASET_CHANGES.get(key, WITHOUT_IT)
            result.leave_out(f"{where}.{key}", value, "the rows' own form decides", change=change)
    if renamed := {ours: theirs for ours, theirs in columns.items() if ours != theirs}:
        entry["columns"] = renamed
    return [{**entry, "path": path} for path in _file_paths(entry["path"], files, f"{result.name}: {where}")]


def _file_paths(path: str, files: Any, where: str) -> list[str]:
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
    return names if path in _LOADERS else [f"{path}/{file}" for file in names]


# axolotl's datasets. Of preference pairs, the `type` names the columns of a row.

_PROMPTS: Mapping[str, str] = {"intel": "question", "icr": "input", "prompt_pairs": "prompt", "ultra": "prompt"}
"""axolotl's shapes of rows, the second word of a `type`, whose prompt has a column of its own."""
_WHOLE = ("argilla", "argilla_chat")
"""Shapes whose answers are whole conversations, or whose columns are found by their names."""
_FAMILIES = ("chatml", "llama3", "zephyr")
"""Templates that such a `type` writes out, whatever the tokenizer's own is."""
_PAIR_COLUMNS: Mapping[str, str] = {
    **{"field_prompt": "prompt", "field_system": "system", "field_messages": "messages"},
    **{"field_chosen": "chosen", "field_rejected": "rejected"},
}


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
    if is_pairs(result.job):
        if isinstance(kind, dict):  # a format written out: names of columns, and texts around them
            item |= kind
        else:
            columns = _shape(str(kind or ""), where, result)
        _kind_of_messages(item, f"{result.name}: {where}")
        entry["type"] = "preference"
        return _finished(entry, item, where, result, columns=columns, known=_PAIR_COLUMNS)
    if is_off(kind):
        raise RefusedError(
            "the rows of this dataset are tokens already",
            where=f"{result.name}: {where}",
            found="no type, by which axolotl knows such rows",
            expected="rows of text: a type such as chat_template or alpaca",
            hint="if the rows are texts, give the dataset its type; else name the files that the tokens came from",
        )
    if isinstance(kind, dict):
        item |= kind
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
    return _finished(entry, item, where, result, columns=columns, known=FIELD_COLUMNS)


def _shape(kind: str, where: str, result: Conversion) -> dict[str, str]:
    """Columns of the rows of a `type` such as chatml.intel."""
    family, _, shape = kind.partition(".")
    if family in _FAMILIES:
        result.change(f"{where}.type", f"rows are put into the tokenizer's own chat template, not {family}")
    elif family != "chat_template" or shape not in ("", "default", *_PROMPTS, *_WHOLE):
        result.leave_out(f"{where}.type", kind, "read as preference pairs", change="the rows' columns decide how")
    prompt = _PROMPTS.get(shape)
    return {} if prompt in (None, "prompt") else {"prompt": str(prompt)}


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


def _kind_of_messages(item: Entry, where: str) -> str:
    """`chat` or `sharegpt`, by what axolotl says of a row's messages, which is taken out of `item`."""
    given = item.pop("message_property_mappings", None)
    mapping = given if isinstance(given, dict) else {}
    role = mapping.get("role", item.get("message_field_role") or "role")
    content = mapping.get("content", item.get("message_field_content") or "content")
    kind = _message_type(role, content, where)
    roles = item.pop("roles", None)
    for meant, names in roles.items() if isinstance(roles, dict) else ():
        for spelling in names if isinstance(names, list) else [names]:
            _check_role(spelling, meant, kind, where)
    if others := {key: value for key, value in mapping.items() if key not in ("role", "content") and key != value}:
        item["message_property_mappings"] = others
    return kind


def _message_type(role: Any, content: Any, where: str) -> str:
    """`chat` or `sharegpt`, by the keys of a message."""
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


def _check_role(spelling: Any, meant: str, kind: str, where: str) -> None:
    """Refuse a role by a name that rows of this type do not have here."""
    known: Mapping[str, str] = SHAREGPT_ROLES if kind == "sharegpt" else CHAT_ROLES
    if known.get(str(spelling)) != meant:
        raise RefusedError(
            f"messages of the {meant} with such a role cannot be read",
            where=where,
            found=shown_value(spelling),
            expected=", ".join(name for name, role in known.items() if role == meant),
            hint="rename the roles in the file of the rows",
        )


# TRL's datasets.


def _trl_datasets(result: Conversion) -> list[Entry]:
    """Those of `dataset_mixture` or `dataset_name`; the settings beside a mixture go where they belong."""
    data, mixture = result.data, result.data.get("dataset_mixture")
    entries: list[Entry] = []
    if isinstance(mixture, dict):  # TRL reads nothing else then
        beside = ("dataset_name", "dataset_config", "dataset_train_split")
        for name in [name for name in data if name in beside]:
            result.drop(name)
        for where, item in _with_paths(mixture.get("datasets") or [], "dataset_mixture.datasets", result):
            entries += _trl_entries(item, where, result)
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
            entry["type"] = "text"
            if column != "text":
                entry["columns"] = {"text": column}
        elif entry.get("type") not in ("text", "chat"):  # plain prompts are joined with their answers
            entry["as_chat"] = False
    return entries


def _named(data: Mapping[str, Any], split: str) -> Entry:
    keys = {"path": "dataset_name", "name": "dataset_config", "split": split}
    return {ours: data[key] for ours, key in keys.items() if isinstance(data.get(key), str)}


def _trl_entries(item: Entry, where: str, result: Conversion) -> list[Entry]:
    entry = {key: item.pop(key) for key in ("path", "name", "split") if isinstance(item.get(key), str)}
    kinds = {("messages",): "chat", ("completion", "prompt"): "prompt_completion", ("text",): "text"}
    columns = item.get("columns")
    if isinstance(columns, list) and tuple(sorted(map(str, columns))) in kinds:
        entry["type"] = kinds[tuple(sorted(map(str, item.pop("columns"))))]
    return _finished(entry, item, where, result, columns={}, known={})


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
_BESIDE = {"system": "system", "tools": "tools"}
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "text": {"prompt": "text"},
    "alpaca": {
        **{"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
        **_BESIDE,
    },
    "prompt_completion": {"prompt": "prompt", "response": "completion", "history": "history", **_BESIDE},
    "sharegpt": {"messages": "conversations", **_BESIDE},
    "chat": {"messages": "messages", **_BESIDE},
}
"""Type of rows -> LLaMA-Factory's `columns` -> ours."""
_UNSAID: Mapping[str, Mapping[str, str]] = {
    "text": {"prompt": "instruction"},
    **dict.fromkeys(("sharegpt", "chat"), {"messages": "conversations"}),
}
"""The same for columns that LLaMA-Factory reads where none are named; those of alpaca rows are ours."""
_TAGS = {
    **{"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"},
    **{"observation_tag": "observation", "function_tag": "function_call", "system_tag": "system"},
}
"""LLaMA-Factory's own names, used where a dataset gives no `tags` at all."""
_ROLES = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool"}
_READ = (
    *("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name", "formatting", "ranking"),
    *("subset", "split", "folder", "num_samples", "columns", "tags"),
)
"""Keys of a dataset in the table that this module reads."""


def _factory_datasets(key: str, result: Conversion) -> list[Entry]:
    data, name, job = result.data, result.name, result.job
    names = data.get(key) or []
    names = [str(part).strip() for part in (names if isinstance(names, list) else str(names).split(","))]
    base = data.get("dataset_dir") or "data"
    plain: Entry = {"type": "preference" if is_pairs(job) else "auto", "alpaca_join": "newline"}
    if base == "ONLINE":
        plain = plain if is_pairs(job) else {**plain, "type": "alpaca"}
        plain = {"type": "text", "columns": {"text": "instruction"}} if job == "pretraining" else plain
        return [_limited({"path": dataset, **plain}, {}, result) for dataset in names]
    if isinstance(base, str) and base.startswith("REMOTE:"):
        raise RefusedError(
            "the table of datasets lies on the hub and is not fetched",
            where=f"{name}: dataset_dir",
            found=base,
            expected=f"a folder with {_TABLE}",
            hint=f"download it with `hf download {base[7:]} --repo-type dataset` and name the folder",
        )
    table = base if isinstance(base, dict) else _table(Path(name).parent, str(base))
    folder = base if isinstance(base, str) else "data"
    if table is None:
        paths = [f"{folder}/{dataset}.json" for dataset in names]  # as LLaMA-Factory's own data sets lie
        if paths:
            result.change("dataset", f"no {_TABLE} was found; check the guessed {', '.join(paths)} and their type")
        plain = {"type": "text"} if job == "pretraining" else plain
        return [_limited({"path": path, **plain}, {}, result) for path in paths]
    entries = []
    for dataset in names:
        if not isinstance(table.get(dataset), dict):
            near = closest(dataset, list(table))
            raise RefusedError(
                f"the dataset {dataset} is not in {_TABLE}",
                where=f"{name}: {key}",
                found=", ".join(list(table)[:8]),
                hint=f"did you mean {near}?" if near else None,
            )
        entry = _Dataset(dataset, table[dataset], result).entry(folder)
        entries.append(_limited(entry, table[dataset], result))
    return _with_weights(entries, data.get("interleave_probs")) if key == "dataset" else entries


def _table(folder: Path, base: str) -> dict[str, Any] | None:
    """LLaMA-Factory's table of datasets, beside the file or in the working directory; None where there is none."""
    named_path(base)
    for path in (folder / base / _TABLE, Path(base) / _TABLE):
        try:
            if not path.is_file():
                continue
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            table = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(table, dict):
                raise ValueError("no JSON object")
            return table
        except (OSError, ValueError, RecursionError) as error:
            raise RefusedError(
                "the table of datasets cannot be read",
                where=str(path),
                found=str(error),
                hint="python -m json.tool " + shlex.quote(str(path)),
            ) from None
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
    shares = given if isinstance(given, list) else str(given or "").split(",")
    try:
        weights = [float(share) for share in shares]
    except ValueError:
        return entries
    if len(weights) != len(entries) or min(weights) <= 0:
        return entries
    return [{**entry, "weight": weight} for entry, weight in zip(entries, weights, strict=True)]


class _Dataset:
    """One dataset of the table."""

    def __init__(self, dataset: str, known: Mapping[str, Any], result: Conversion) -> None:
        self._dataset, self._known, self._result, self._job = dataset, known, result, result.job
        self._where = f"{result.name}: dataset {dataset}"
        columns, tags = known.get("columns"), known.get("tags")
        self._has_columns = isinstance(columns, dict)
        given = columns if isinstance(columns, dict) else {}
        self._columns = {key: column for key, column in given.items() if not is_off(column)}
        self._tags: Mapping[str, Any] = tags if isinstance(tags, dict) else _TAGS

    def entry(self, folder: str) -> Entry:
        """Its entry in a recipe, which refuses what cannot be said there, or is not trained."""
        self._refuse_other_rows()
        path, kind = self._path(folder), self._kind()
        entry: Entry = {"path": path, "type": "preference" if is_pairs(self._job) else kind}
        if kind == "alpaca":
            entry["alpaca_join"] = "newline"
        for key, target, usual in (("subset", "name", None), ("split", "split", "train")):
            if isinstance(self._known.get(key), str) and self._known[key] != usual:
                entry[target] = self._known[key]
        names = dict(_COLUMNS[kind])
        if is_pairs(self._job):
            names.pop("response", None)
            names |= {"chosen": "chosen", "rejected": "rejected"}
        given = {**_UNSAID.get(kind, {}), **self._columns}
        columns = {ours: str(given[theirs]) for theirs, ours in names.items() if theirs in given}
        for key in (key for key in given if key not in names):
            where, why = f"{self._dataset}.columns.{key}", "rows of this type have no such column"
            if self._job == "pretraining":
                self._result.leave_out(where, given[key], why, change="it is not read")
            else:  # LLaMA-Factory does not read it either
                self._result.drop(where)
        rest = {key: value for key, value in self._known.items() if key not in _READ}
        (finished,) = _finished(entry, rest, self._dataset, self._result, columns=columns, known={})
        return finished

    def _refuse_other_rows(self) -> None:
        media = next((key for key in ("images", "videos", "audios") if key in self._columns), None)
        if media is not None:
            raise self._refusal("this dataset has images, video or sound", f"columns.{media}", "rows of text")
        pairs = [f"columns.{key}" for key in ("chosen", "rejected", "kto_tag") if key in self._columns]
        signs = ["ranking", *pairs] if self._known.get("ranking") else pairs
        if is_pairs(self._job):
            if signs[:3] != ["ranking", "columns.chosen", "columns.rejected"]:
                expected = "ranking: true, columns.chosen, columns.rejected"
                raise self._refusal("this dataset has no pairs of answers", "ranking", expected)
        elif signs:
            what = "this dataset has preferences, which supervised fine-tuning does not train"
            raise self._refusal(what, signs[0], "rows with one answer; `stage: dpo` trains pairs")

    def _path(self, folder: str) -> str:
        known = self._known
        if known.get("hf_hub_url"):
            if known.get("folder"):
                raise self._refusal("a folder of a hub dataset cannot be named", "folder", "the whole dataset")
            return str(known["hf_hub_url"])
        for key in ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"):
            if known.get(key):
                raise self._refusal("this dataset cannot be fetched from there", key, "hf_hub_url or file_name")
        if not isinstance(known.get("file_name"), str):
            raise self._refusal("this dataset has no place", "file_name", "hf_hub_url or file_name")
        return f"{folder}/{known['file_name']}"

    def _kind(self) -> str:
        """The rows' type; of pairs, that of their prompts."""
        formatting = self._known.get("formatting") or "alpaca"
        if formatting not in ("alpaca", "sharegpt", "openai"):
            raise self._refusal("rows of this format cannot be read", "formatting", "alpaca, sharegpt or openai")
        if self._job == "pretraining":
            if formatting != "alpaca":
                raise self._refusal("chats are no texts to pretrain on", "formatting", "alpaca, with columns.prompt")
            return "text"
        if formatting == "alpaca":
            if is_pairs(self._job) or not self._has_columns:
                return "alpaca"
            if not {"prompt", "response"} <= self._columns.keys():
                what = "the rows of this dataset have no prompt or no answer"
                raise self._refusal(what, "columns", "prompt, response")
            # LLaMA-Factory reads no column `input` where none is named
            return "alpaca" if "query" in self._columns else "prompt_completion"
        kind = _message_type(self._tags.get("role_tag"), self._tags.get("content_tag"), f"{self._where}: tags")
        for tag, meant in _ROLES.items():
            if not is_off(self._tags.get(tag)):
                _check_role(self._tags[tag], meant, kind, f"{self._where}: tags.{tag}")
        if self._tags is not _TAGS and self._tags.get("function_tag") not in (None, "", "function_call"):
            self._result.leave_out(
                f"{self._dataset}.tags.function_tag",
                self._tags["function_tag"],
                "calls are read in turns of function_call; rows with this role are refused when they are read",
            )
        return kind

    def _refusal(self, what: str, key: str, expected: str) -> RefusedError:
        value: Any = self._known
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found, hint = f"{key}: {shown_value(value)}", f"change its entry in {_TABLE}, or leave it out of `dataset`"
        return RefusedError(what, where=self._where, found=found, expected=expected, hint=hint)
