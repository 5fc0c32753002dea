"""From a training file of axolotl, LLaMA-Factory or TRL to a recipe, and a list of what has no counterpart.

Every key ends in exactly one of three lists: it is in the recipe, it changes nothing here, or it is left out with a
reason. The recipe always passes every check: whatever would not is left out. A peer's step has micro batch x
accumulation x GPUs rows; a step here does not depend on the number of GPUs, so the accumulation is multiplied by it.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from roundpipe_cli.errors import RecipeError, RefusedError
from roundpipe_cli.recipe.aliases import ALIASES, is_off, value_alias
from roundpipe_cli.recipe.check import known_keys
from roundpipe_cli.recipe.convert_tables import (
    ADAPTER_DEFAULTS,
    DATASET_TYPES,
    DEFAULTS,
    FIELD_COLUMNS,
    NO_COUNTERPART,
    OTHER_JOBS,
    SIGNS,
    TOOLS,
    WITHOUT_EFFECT,
    Tool,
)
from roundpipe_cli.recipe.load import load_text
from roundpipe_cli.recipe.schedules import NEEDED_SCHEDULE_KEYS, SCHEDULE_KEYS
from roundpipe_cli.recipe.schema import MAX_LEARNING_RATE, Recipe
from roundpipe_cli.recipe.strict_yaml import MAX_BYTES, parse_bytes, show


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A line of the file that the recipe does not have."""

    key: str
    value: Any
    reason: str


@dataclass(slots=True)
class Conversion:
    """What became of a file."""

    tool: Tool
    recipe: dict[str, Any] = field(default_factory=dict)
    """Nested, as it is written."""
    left_out: list[LeftOut] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    """Keys that change nothing here."""
    notes: list[str] = field(default_factory=list)
    """What a user of the other tool should know."""

    def text(self, source: str) -> str:
        """The recipe's file: a header that says what happened, then the keys."""
        lines = _comment(f"Converted from {source}, a file of {self.tool}.", *self.notes)
        if self.left_out:
            lines += ["#", "# Left out:"]
            for entry in self.left_out:
                lines += textwrap.wrap(
                    f"{entry.key}: {_short(entry.value)} - {entry.reason}",
                    width=116,
                    initial_indent="#   ",
                    subsequent_indent="#     ",
                    break_on_hyphens=False,
                )
        dumped = yaml.dump(self.recipe, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
        return "\n".join([*lines, "", dumped])


class _Dumper(yaml.SafeDumper):
    """Numbers such as 2.0e-05 as YAML 1.2 reads them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _comment(*sentences: str) -> list[str]:
    return textwrap.wrap(" ".join(sentences), 118, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def convert(raw: bytes, name: str, *, tool: Tool | None = None, num_gpus: int = 1) -> Conversion:
    """The recipe that does what the file `name` asks of another tool.

    Args:
        tool: whose file it is; None finds out by its keys.
        num_gpus: on how many GPUs the file was run: the rows of a step there are multiplied by it.

    Raises:
        RefusedError: not YAML, not a file of a known tool, or not supervised fine-tuning.
    """
    data = cast("dict[str, Any]", parse_bytes(raw[: MAX_BYTES + 1], name).data)
    tool = tool or _tool_of(data, name)
    _refuse_other_jobs(data, name)
    result = Conversion(tool)
    is_lora = _is_lora(data, tool)
    defaults = {**DEFAULTS[tool], **(ADAPTER_DEFAULTS[tool] if is_lora else {})}
    if is_lora and tool == "llama-factory":
        defaults["lora_alpha"] = 2 * int(data.get("lora_rank") or defaults["lora_rank"])
    writes = _Writes(result)
    datasets = _datasets(data, tool, Path(name).parent, result)
    for key, value in data.items():
        if key not in _DATASET_KEYS[tool]:
            _convert_key(key, value, writes)
    for key, value in defaults.items():
        writes.default(key, value)
    writes.values["method"] = "lora" if is_lora else "full"
    if not is_lora:
        writes.drop("lora", "every weight is trained")
    _multiply(writes, num_gpus, result)
    _without_steps(data, result)
    _assemble(writes, datasets, result)
    return result


def _tool_of(data: dict[str, Any], name: str) -> Tool:
    counts = {tool: sum(key in data for key in SIGNS[tool]) for tool in TOOLS}
    best = max(counts, key=lambda tool: counts[tool])
    needed = "base_model" if best == "axolotl" else "model_name_or_path"
    if not counts[best] or needed not in data:
        raise RefusedError(
            "this is no training file of axolotl, LLaMA-Factory or TRL",
            where=name,
            found=", ".join(list(data)[:8]),
            expected="base_model, or model_name_or_path with dataset, dataset_name or template",
            hint="a recipe needs no conversion: roundpipe recipes validate FILE" if "model" in data else None,
        )
    return best


def _refuse_other_jobs(data: dict[str, Any], name: str) -> None:
    job = next((f"{key}: {show(data[key])}" for key in OTHER_JOBS if not is_off(data.get(key))), None)
    stage = data.get("stage")
    if stage not in (None, "sft"):
        job = f"stage: {show(stage)}"
    if data.get("finetuning_type") not in (None, "lora", "full"):
        job = f"finetuning_type: {show(data['finetuning_type'])}"
    if job is not None:
        raise RefusedError(
            "this file asks for another job than supervised fine-tuning of all weights or by LoRA",
            where=name,
            found=job,
            expected="a file for supervised fine-tuning",
        )


def _is_lora(data: dict[str, Any], tool: Tool) -> bool:
    if tool == "axolotl":
        return data.get("adapter") in ("lora", "qlora")
    if tool == "llama-factory":
        return bool(data.get("finetuning_type", "lora") == "lora")
    return data.get("use_peft") is True


class _Writes:
    """Values for dotted recipe keys, each with the key of the file that it comes from."""

    def __init__(self, result: Conversion) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, tuple[str, Any]] = {}
        self._result = result

    def put(self, target: str, value: Any, key: str, written: Any) -> None:
        known, meant = value_alias(target, value)
        value = meant if known else value
        if target in self.values and self.values[target] != value:
            self._result.left_out.append(LeftOut(key, written, f"{self.sources[target][0]} says otherwise"))
            return
        reason = _mistake(target, value)
        if reason is not None:
            self._result.left_out.append(LeftOut(key, written, reason))
            return
        self.values[target] = value
        self.sources[target] = (key, written)

    def default(self, key: str, value: Any) -> None:
        """A default of the other tool, where its file says nothing about the same thing."""
        for target, meant in ALIASES.get(key, lambda given: {key: given})(value).items():
            if target not in self.values and target not in self._given_but_left_out():
                self.values[target] = meant
                self.sources[target] = (f"{key} (default of {self._result.tool})", value)

    def _given_but_left_out(self) -> set[str]:
        found = set()
        for entry in self._result.left_out:
            with_alias = ALIASES.get(entry.key)
            try:
                found |= set(with_alias(entry.value)) if with_alias else {entry.key}
            except ValueError:
                continue
        return found

    def drop(self, section: str, why: str) -> None:
        for target in [key for key in self.values if key.startswith(f"{section}.")]:
            key, written = self.sources.pop(target)
            del self.values[target]
            if not key.endswith(")"):
                self._result.left_out.append(LeftOut(key, written, why))


_DATASET_KEYS: dict[str, frozenset[str]] = {
    "axolotl": frozenset({"datasets"}),
    "llama-factory": frozenset({"dataset", "dataset_dir", "max_samples"}),
    "trl": frozenset(
        {"dataset_name", "dataset_config", "dataset_train_split", "dataset_mixture", "dataset_text_field"}
    ),
}
_TOP_KEYS = frozenset(known_keys(Recipe))


def _convert_key(key: str, value: Any, writes: _Writes) -> None:
    """One line of the file into one of the three lists."""
    result = writes._result
    off = is_off(value) or value == "no"
    if key in ("micro_batch_size", "gradient_accumulation_steps"):
        writes.put(key, value, key, value)
    elif key in NO_COUNTERPART or key in OTHER_JOBS:
        if off:
            result.without_effect.append(key)
        else:
            result.left_out.append(LeftOut(key, value, NO_COUNTERPART.get(key, "another job")))
    elif key in WITHOUT_EFFECT:
        result.without_effect.append(key)
    elif key in ALIASES:
        try:
            targets = ALIASES[key](value)
        except ValueError as error:
            result.left_out.append(LeftOut(key, value, str(error)))
            return
        if (off and key not in ("adapter", "use_peft")) or not targets:
            result.without_effect.append(key)
            return
        for target, meant in targets.items():
            writes.put(target, meant, key, value)
    elif key in _TOP_KEYS and "." not in key:
        if off and value not in (0, 0.0, False):
            result.without_effect.append(key)
        else:
            writes.put(key, value, key, value)
    elif off:
        result.without_effect.append(key)
    else:
        result.left_out.append(LeftOut(key, value, "no counterpart here"))


def _mistake(target: str, value: Any) -> str | None:
    """Why a recipe with this value is refused, or None."""
    data: dict[str, Any] = {"model": "some/model", "datasets": [{"path": "rows.jsonl"}]}
    section = data
    *outer, last = target.split(".")
    for part in outer:
        section = section.setdefault(part, {})
    section[last] = value
    for key, needed in _together(target, value).items():
        data.setdefault(key, needed)
    try:
        load_text(yaml.dump(data, Dumper=_Dumper), "recipe.yaml")
    except RecipeError as error:
        problem = error.problems[0]
        return problem.what + (f" (expected: {problem.expected})" if problem.expected else "")
    return None


def _together(target: str, value: Any) -> dict[str, Any]:
    """What a recipe needs beside a key so that this key makes sense."""
    if target == "lr_scheduler_kwargs" and isinstance(value, dict):
        fitting = [name for name, keys in SCHEDULE_KEYS.items() if set(value) <= set(keys)]
        return {"lr_scheduler_type": fitting[-1], "learning_rate": MAX_LEARNING_RATE} if fitting else {}
    if target == "lr_scheduler_type" and isinstance(value, str):
        return {"lr_scheduler_kwargs": dict.fromkeys(NEEDED_SCHEDULE_KEYS.get(value, ())[-1:], 1)}
    if target == "eval_steps":
        return {"val_set_size": 0.1}  # evaluation needs rows
    return {"optim": "sgd"} if target == "sgd_momentum" else {}


def _multiply(writes: _Writes, num_gpus: int, result: Conversion) -> None:
    micro = int(writes.values.get("micro_batch_size", 1))
    steps = int(writes.values.get("gradient_accumulation_steps", 1))
    writes.values["gradient_accumulation_steps"] = steps * num_gpus
    rows = micro * steps * num_gpus
    gpus = f"{num_gpus} GPUs" if num_gpus > 1 else "one GPU"
    result.notes.append(
        f"A step has {rows} rows: micro batch {micro} x accumulation {steps} x {gpus}; here the number of GPUs does "
        "not multiply it."
    )
    if steps * num_gpus < 4:
        result.notes.append("Several GPUs need more microbatches a step to be busy: gradient_accumulation_steps.")


def _without_steps(data: dict[str, Any], result: Conversion) -> None:
    if result.tool == "trl" and not data.get("assistant_only_loss") and not data.get("completion_only_loss"):
        result.notes.append(
            "TRL trains on the prompts of chats too unless it is told otherwise; here only answers are trained "
            "(train_on_inputs: true trains all)."
        )


def _datasets(data: dict[str, Any], tool: Tool, folder: Path, result: Conversion) -> list[dict[str, Any]]:
    """The recipe's `datasets`; empty where the file names none that can be read here."""
    entries: list[dict[str, Any]]
    if tool == "axolotl":
        found = [_axolotl_dataset(index, item, result) for index, item in enumerate(data.get("datasets") or [])]
        entries = [entry for entry in found if entry is not None]
    elif tool == "llama-factory":
        entries = _factory_datasets(data, folder, result)
    else:
        entries = _trl_datasets(data, result)
    return entries


def _axolotl_dataset(index: int, item: Any, result: Conversion) -> dict[str, Any] | None:
    where = f"datasets[{index}]"
    if not isinstance(item, dict) or not isinstance(item.get("path"), str):
        result.left_out.append(LeftOut(where, item, "it has no path"))
        return None
    entry: dict[str, Any] = {"path": item["path"]}
    columns: dict[str, str] = {}
    fields = {key: value for key, value in item.items() if key != "path"}
    kind = fields.pop("type", None)
    if isinstance(kind, dict):  # a format written out: names of columns, and texts around them
        fields = {**fields, **kind}
        entry["type"] = "alpaca"
    elif isinstance(kind, str):
        first = kind.partition(".")[0].partition(":")[0]
        entry["type"] = DATASET_TYPES.get(first, "auto")
        if first not in DATASET_TYPES or "." in kind:
            result.left_out.append(LeftOut(f"{where}.type", kind, f"read as {entry['type']}; check the rows"))
    files = fields.pop("data_files", None)
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if isinstance(files, str):
        entry["path"] = files if item["path"] in ("json", "csv", "parquet", "text") else f"{item['path']}/{files}"
    elif files is not None:
        result.left_out.append(LeftOut(f"{where}.data_files", files, "name each file as a dataset of its own"))
    for key, value in fields.items():
        if key in ("name", "split") and isinstance(value, str):
            entry[key] = value
        elif key in FIELD_COLUMNS and isinstance(value, str):
            _column(FIELD_COLUMNS[key], value, entry, columns)
        elif key != "ds_type" and not is_off(value):
            result.left_out.append(LeftOut(f"{where}.{key}", value, "the rows' own form decides"))
    if columns:
        entry["columns"] = columns
    return entry


def _column(column: str, name: str, entry: dict[str, Any], columns: dict[str, str]) -> None:
    if column == "messages" and name == "conversations":
        entry["type"] = "sharegpt"
    elif column != name:
        columns[column] = name


def _factory_datasets(data: dict[str, Any], folder: Path, result: Conversion) -> list[dict[str, Any]]:
    names = data.get("dataset") or []
    names = names if isinstance(names, list) else [name.strip() for name in str(names).split(",")]
    base = str(data.get("dataset_dir") or "data")
    info = _dataset_info(folder, base)
    entries = []
    for name in names:
        known = info.get(name, {})
        path = known.get("hf_hub_url") or f"{base}/{known.get('file_name', f'{name}.json')}"
        kind = {"alpaca": "alpaca", "sharegpt": "sharegpt"}.get(known.get("formatting", ""), "auto")
        entry: dict[str, Any] = {"path": path, "type": kind}
        if isinstance(data.get("max_samples"), int):
            entry["split"] = f"train[:{data['max_samples']}]"
        entries.append(entry)
        if not known:
            result.notes.append(f"{path} stands for the dataset {name}: no dataset_info.json here; check the path.")
    return entries


def _dataset_info(folder: Path, base: str) -> dict[str, dict[str, Any]]:
    """LLaMA-Factory's table of datasets, where it lies beside the file or in the working directory."""
    for path in (folder / base / "dataset_info.json", Path(base) / "dataset_info.json"):
        try:
            if path.is_file() and path.stat().st_size <= MAX_BYTES:
                table = json.loads(path.read_text(encoding="utf-8"))
                return {str(key): value for key, value in table.items() if isinstance(value, dict)}
        except (OSError, ValueError, AttributeError):
            continue
    return {}


def _trl_datasets(data: dict[str, Any], result: Conversion) -> list[dict[str, Any]]:
    mixture = data.get("dataset_mixture")
    items = mixture.get("datasets", []) if isinstance(mixture, dict) else []
    entries = []
    for index, item in enumerate(items):
        if isinstance(item, dict) and isinstance(item.get("path"), str):
            entries.append({key: item[key] for key in ("path", "name", "split") if isinstance(item.get(key), str)})
            result.left_out += [
                LeftOut(f"dataset_mixture.datasets[{index}].{key}", value, "the rows' own form decides")
                for key, value in item.items()
                if key not in ("path", "name", "split") and not is_off(value)
            ]
    if isinstance(mixture, dict):
        result.left_out += [
            LeftOut(f"dataset_mixture.{key}", value, "see val_set_size and shuffle")
            for key, value in mixture.items()
            if key != "datasets" and not is_off(value)
        ]
    if isinstance(data.get("dataset_name"), str):
        entry = {"path": data["dataset_name"]}
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
    return entries


def _assemble(writes: _Writes, datasets: list[dict[str, Any]], result: Conversion) -> None:
    """The recipe in the schema's order, checked whole."""
    if not datasets:
        datasets = [{"path": "data/train.jsonl"}]
        result.notes.append("The file names no dataset that can be read here: put yours in place of data/train.jsonl.")
    recipe: dict[str, Any] = {}
    for target in known_keys(Recipe):
        if target == "datasets":
            recipe["datasets"] = datasets
        elif writes.values.get(target) is not None and "[]" not in target:
            section = recipe
            *outer, last = target.split(".")
            for part in outer:
                section = section.setdefault(part, {})
            section[last] = writes.values[target]
    while True:
        try:
            load_text(yaml.dump(recipe, Dumper=_Dumper), "recipe.yaml")
            break
        except RecipeError as error:
            _leave_out(recipe, error, result)
    result.recipe = recipe


def _leave_out(recipe: dict[str, Any], error: RecipeError, result: Conversion) -> None:
    """Take the key of the first problem out of the recipe.

    Raises:
        RecipeError: it is one that a recipe cannot do without.
    """
    problem = error.problems[0]
    key = (problem.where or "").rpartition(": ")[2].partition(" (")[0]
    top = key.partition(".")[0].partition("[")[0]
    if top in ("", "model", "datasets") or top not in recipe:
        raise error
    result.left_out.append(LeftOut(top, recipe.pop(top), problem.what))
