"""LLaMA-Factory's datasets: the names in a file, and what its table `dataset_info.json` says of each."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.files import named_path
from roundpipe_cli.recipe.aliases import is_off
from roundpipe_cli.recipe.convert_data import WITHOUT_IT, Entry, check_role, message_type
from roundpipe_cli.recipe.convert_objectives import Job, is_pairs, job_of
from roundpipe_cli.recipe.convert_result import Conversion
from roundpipe_cli.recipe.convert_tables import FACTORY_COLUMNS
from roundpipe_cli.recipe.strict_yaml import MAX_BYTES, shown_value

_OTHER_ENTRY = "change its entry in dataset_info.json, or leave it out of `dataset`"
_TABLE = "dataset_info.json"
_MEDIA = ("images", "videos", "audios")
_SIDES = ("chosen", "rejected")
_PROMPT_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "system": "system",
    "history": "history",
    "tools": "tools",
}
_PAIRS = (*_SIDES, "kto_tag")
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


def factory_datasets(data: Mapping[str, Any], key: str, name: str, result: Conversion) -> list[Entry]:
    """The entries of `dataset` or `eval_dataset`.

    Raises:
        RefusedError: the table cannot be read or lacks a dataset, or one has rows that are not trained here.
    """
    names = data.get(key) or []
    names = [str(part).strip() for part in (names if isinstance(names, list) else str(names).split(","))]
    base, job = data.get("dataset_dir") or "data", job_of(data, "llama-factory")
    if base == "ONLINE":
        known = {"pretraining": {"type": "text", "columns": {"text": "instruction"}}}
        plain: Entry = {"type": "preference" if is_pairs(job) else "alpaca", "alpaca_join": "newline"}
        entry = known.get(str(job), plain)
        return [_limited({"path": dataset, **entry}, data, {}, result) for dataset in names]
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
        return _guesses(names, folder, data, result)
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
        entry = _Dataset(dataset, table[dataset], name, result, job).entry(folder)
        entries.append(_limited(entry, data, table[dataset], result))
    return _with_weights(entries, data) if key == "dataset" else entries


def _table(folder: Path, base: str) -> dict[str, Any] | None:
    """LLaMA-Factory's table of datasets, beside the file or in the working directory; None where there is none.

    Raises:
        RefusedError: it is too large or cannot be read, or its folder has a name that no folder has.
    """
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


def _guesses(names: list[str], folder: str, data: Mapping[str, Any], result: Conversion) -> list[Entry]:
    """Entries where there is no table: LLaMA-Factory's own data sets lie in files of such names."""
    paths = [f"{folder}/{dataset}.json" for dataset in names]
    if paths:
        result.change("dataset", f"no {_TABLE} was found; check the guessed {', '.join(paths)} and their type")
    job = job_of(data, "llama-factory")
    kind = "preference" if is_pairs(job) else "text" if job == "pretraining" else "auto"
    beside = {} if kind == "text" else {"alpaca_join": "newline"}
    return [_limited({"path": path, "type": kind, **beside}, data, {}, result) for path in paths]


def _limited(entry: Entry, data: Mapping[str, Any], known: Mapping[str, Any], result: Conversion) -> Entry:
    """The entry with the first rows only, where the file or the table says how many."""
    limits = [limit for limit in (data.get("max_samples"), known.get("num_samples")) if isinstance(limit, int)]
    if limits:
        entry["split"] = f"{entry.get('split', 'train')}[:{min(limits)}]"
    if known.get("num_samples"):
        result.change("num_samples", "the first rows are taken, not rows by chance")
    return entry


def _with_weights(entries: list[Entry], data: Mapping[str, Any]) -> list[Entry]:
    """Shares of datasets that LLaMA-Factory interleaves."""
    given = data.get("interleave_probs")
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

    def __init__(
        self, dataset: str, known: Mapping[str, Any], name: str, result: Conversion, job: Job | None = "sft"
    ) -> None:
        self._dataset, self._known, self._result, self._job = dataset, known, result, job
        self._where = f"{name}: dataset {dataset}"
        columns, tags = known.get("columns"), known.get("tags")
        self._columns: Mapping[str, Any] | None = columns if isinstance(columns, dict) else None
        self._tags: Mapping[str, Any] = tags if isinstance(tags, dict) else _TAGS

    def entry(self, folder: str) -> Entry:
        """
        Raises:
            RefusedError: what the dataset is cannot be said in a recipe, or is not trained.
        """
        self._refuse_other_rows()
        entry: Entry = {"path": self._path(folder)}
        formatting = self._known.get("formatting") or "alpaca"
        if formatting not in ("alpaca", "sharegpt", "openai"):
            raise self._refusal("rows of this format cannot be read", "formatting", "alpaca, sharegpt or openai")
        if self._job == "pretraining":
            kind, columns = self._texts(str(formatting))
        else:
            kind, columns = self._instructions() if formatting == "alpaca" else self._messages()
        if is_pairs(self._job):
            kind, columns = "preference", self._answers(columns)
        entry["type"] = kind
        if kind == "alpaca" or (kind == "preference" and "instruction" in columns):
            entry["alpaca_join"] = "newline"
        for key, target in (("subset", "name"), ("split", "split")):
            if isinstance(self._known.get(key), str) and (key, self._known[key]) != ("split", "train"):
                entry[target] = self._known[key]
        renamed = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
        if renamed:
            entry["columns"] = renamed
        for key, value in self._known.items():
            if key not in _READ and not is_off(value):
                self._result.leave_out(f"{self._dataset}.{key}", value, "no counterpart here", change=WITHOUT_IT)
        return entry

    def _refuse_other_rows(self) -> None:
        columns = self._columns or {}
        media = next((key for key in _MEDIA if not is_off(columns.get(key))), None)
        if media is not None:
            raise self._refusal("this dataset has images, video or sound", f"columns.{media}", "rows of text")
        pair = next((f"columns.{key}" for key in _PAIRS if not is_off(columns.get(key))), None)
        if is_pairs(self._job):
            if not self._known.get("ranking") or any(is_off(columns.get(key)) for key in _SIDES):
                raise self._refusal(
                    "this dataset has no pairs of answers", "ranking", "ranking: true, columns.chosen, columns.rejected"
                )
        elif self._known.get("ranking") or pair is not None:
            raise self._refusal(
                "this dataset has preferences, which supervised fine-tuning does not train",
                "ranking" if self._known.get("ranking") else str(pair),
                "rows with one answer; `stage: dpo` trains pairs",
            )

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

    def _instructions(self) -> tuple[str, dict[str, str]]:
        """Type and columns of rows with an instruction and an answer."""
        columns = self._columns
        if columns is None:
            return "alpaca", {}
        if is_pairs(self._job):
            named = {ours: columns.get(theirs) for theirs, ours in _PROMPT_COLUMNS.items()}
            return "alpaca", {ours: str(column) for ours, column in named.items() if not is_off(column)}
        if is_off(columns.get("prompt")) or is_off(columns.get("response")):
            raise self._refusal("the rows of this dataset have no prompt or no answer", "columns", "prompt, response")
        beside = {key: str(columns[key]) for key in ("system", "history", "tools") if not is_off(columns.get(key))}
        if is_off(columns.get("query")):  # LLaMA-Factory reads no column `input` then
            return "prompt_completion", {"prompt": columns["prompt"], "completion": columns["response"], **beside}
        return "alpaca", {**{ours: columns[theirs] for theirs, ours in FACTORY_COLUMNS.items()}, **beside}

    def _messages(self) -> tuple[str, dict[str, str]]:
        """Type and columns of rows with messages, as the tags name their keys and roles."""
        kind = message_type(self._tags.get("role_tag"), self._tags.get("content_tag"), f"{self._where}: tags")
        for tag, meant in _ROLES.items():
            if not is_off(self._tags.get(tag)):
                check_role(self._tags[tag], meant, kind, f"{self._where}: tags.{tag}")
        if self._tags is not _TAGS and self._tags.get("function_tag") not in (None, "", "function_call"):
            self._result.leave_out(
                f"{self._dataset}.tags.function_tag",
                self._tags["function_tag"],
                "calls are read in turns of function_call; rows with this role are refused when they are read",
            )
        columns = self._columns or {}
        beside = {key: str(columns[key]) for key in ("system", "tools") if not is_off(columns.get(key))}
        messages = columns.get("messages") or "conversations"
        return kind, {"conversations" if kind == "sharegpt" else "messages": messages, **beside}

    def _answers(self, columns: Mapping[str, str]) -> dict[str, str]:
        """The columns of a prompt with those of both answers."""
        given = self._columns or {}
        prompt = {ours: theirs for ours, theirs in columns.items() if ours not in ("output", "messages")}
        if "messages" in columns:
            prompt["messages"] = columns["messages"]
        return {**prompt, **{side: str(given[side]) for side in _SIDES}}

    def _texts(self, formatting: str) -> tuple[str, dict[str, str]]:
        """Type and column of rows with one text: LLaMA-Factory's prompts."""
        columns = self._columns or {}
        if formatting != "alpaca":
            raise self._refusal("chats are no texts to pretrain on", "formatting", "alpaca, with columns.prompt")
        for key in ("query", "response", "system", "history"):
            self._leave_out_column(key)
        return "text", {"text": str(columns.get("prompt") or "instruction")}

    def _leave_out_column(self, key: str) -> None:
        value = (self._columns or {}).get(key)
        if not is_off(value):
            where = f"{self._dataset}.columns.{key}"
            self._result.leave_out(where, value, "rows of this type have no such column", change="it is not read")

    def _refusal(self, what: str, key: str, expected: str) -> RefusedError:
        value: Any = self._known
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return RefusedError(
            what, where=self._where, found=f"{key}: {shown_value(value)}", expected=expected, hint=_OTHER_ENTRY
        )
