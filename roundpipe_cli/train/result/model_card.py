"""README.md of a published result: what was trained, on which data, with which recipe and figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from roundpipe_cli.errors import RecipeError, redact
from roundpipe_cli.files import read_regular
from roundpipe_cli.recipe.strict_yaml import parse_bytes

MAX_FILE_BYTES = 16 * 1024**2


def model_card(result: Path, *, base: str | None, merged: bool, usage: str) -> str:
    """The card of the run in `result`; facts that its files lack are left out.

    Args:
        base: name of the base model, if known.
        merged: whole weights, not an adapter.
        usage: a sentence on how to load it.
    """
    report = _read(result / "report.json")
    recipe = _without_places(_read_yaml(result / "recipe.yaml"))
    front: dict[str, Any] = {"tags": ["roundpipe"], "library_name": "transformers" if merged else "peft"}
    if base and _is_hub_id(base, report):
        front["base_model"] = base
    lines = ["---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "", f"# {_plain(result.absolute().name)}"]
    origin = f" from {_plain(_without_places(base))}" if base else ""
    lines += ["", f"Fine-tuned{origin} with RoundPipe CLI. {usage}", ""]
    lines += _data(recipe, report) + _figures(report) + _base(report)
    if recipe:
        text = yaml.safe_dump({key: recipe[key] for key in _told(recipe)}, sort_keys=False).strip()
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        lines += ["## Recipe", "", f"{fence}yaml", text, fence, ""]
    return redact("\n".join(lines))


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{7,64}")
MARKS = re.compile(r"([\\`*_{}\[\]<>#|!~])")
"""Characters that mean something in Markdown."""
MAX_TEXT = 200


def _is_hub_id(base: str, report: Mapping[str, Any]) -> bool:
    """Whether the base came from the hub, and not from a folder whose name looks like a hub id."""
    if not HUB_ID.fullmatch(base):
        return False
    return report.get("model_commit") is not None if base == report.get("model") else not Path(base).exists()


def _plain(value: object) -> str:
    """A value as plain text in Markdown: on one line, special characters escaped."""
    text = "".join(c if c.isprintable() else " " for c in str(value)[:MAX_TEXT])
    return MARKS.sub(r"\\\1", text)


def _without_places(value: Any) -> Any:
    """The value without absolute paths, of which only the last part is kept."""
    if isinstance(value, dict):
        return {key: _without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_places(item) for item in value]
    if not isinstance(value, str):
        return value
    path = value.removeprefix("file://")
    if path.startswith(("/", "~", "\\\\")) or PureWindowsPath(path).is_absolute():
        return re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    home = str(Path("~").expanduser())
    return value.replace(home, "~") if len(home) > 1 else value


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        value = parse_bytes(read_regular(path, MAX_FILE_BYTES), str(path)).data
    except (OSError, RecipeError):
        return {}
    return dict(value)


def _told(recipe: Mapping[str, Any]) -> list[str]:
    """Keys of the recipe that describe the training; keys of machines and folders are left out."""
    private = {"output_dir", "pipeline", "hardware", "weights", "report_to", "resume_from_checkpoint", "on_oom"}
    return [key for key in recipe if key not in private]


def _part(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    part = values.get(key)
    return part if isinstance(part, dict) else {}


def _data(recipe: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    entries = recipe.get("datasets")
    datasets = [item for item in entries if isinstance(item, dict)] if isinstance(entries, list) else []
    if not datasets:
        return []
    lines = ["## Data", ""]
    for item in datasets:
        name = _plain(Path(str(item.get("path"))).name)
        lines.append(f"- {name} ({_plain(item.get('type'))}, split {_plain(item.get('split'))})")
    data = _part(report, "data")
    if data:
        lines += ["", f"{_plain(data.get('rows_kept'))} rows, {_plain(data.get('trained_tokens'))} trained tokens."]
    return [*lines, ""]


def _figures(report: Mapping[str, Any]) -> list[str]:
    loss, evaluation = _part(report, "loss"), _part(report, "evaluation")
    rows = [("steps", report.get("num_steps")), ("first training loss", loss.get("first"))]
    rows += [("last training loss", loss.get("last"))]
    rows += [
        (f"evaluation: {key.replace('_', ' ')}", value)
        for key, value in evaluation.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    rows = [(name, value) for name, value in rows if value is not None]
    if not rows:
        return []
    table = [
        f"| {_plain(name)} | {value:.4f} |" if isinstance(value, float) else f"| {_plain(name)} | {_plain(value)} |"
        for name, value in rows
    ]
    return ["## Figures", "", "| figure | value |", "|---|---|", *table, "", *_which_weights(report, evaluation)]


def _which_weights(report: Mapping[str, Any], evaluation: Mapping[str, Any]) -> list[str]:
    """Whether the weights are those of the best evaluation."""
    best_step = evaluation.get("best_step")
    if type(best_step) is not int:
        return []
    if evaluation.get("result_is_best") is True or best_step == report.get("num_steps"):
        return [f"The weights are those of the best evaluation, after step {best_step}.", ""]
    return [f"The weights are not those of the best evaluation, which was after step {best_step}.", ""]


def _base(report: Mapping[str, Any]) -> list[str]:
    commit = report.get("model_commit")
    return [f"Base model at commit {commit}.", ""] if isinstance(commit, str) and COMMIT.fullmatch(commit) else []
