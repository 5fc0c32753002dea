"""README.md of a result that is given to others: what was trained, on what, with which recipe and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from roundpipe_cli.redact import redact


def model_card(result: Path, *, base: str | None, merged: bool, usage: str) -> str:
    """The card of the run in `result`; what a file there does not tell is left out.

    Args:
        base: name of the base model, if known.
        merged: whole weights, not an adapter.
        usage: a sentence on how to load it.
    """
    report = _read(result / "report.json")
    recipe = _read_yaml(result / "recipe.yaml")
    front: dict[str, Any] = {"tags": ["roundpipe"], "library_name": "transformers" if merged else "peft"}
    if base and not base.startswith((".", "/", "~")) and ":" not in base:
        front["base_model"] = base
    lines = ["---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "", f"# {result.absolute().name}", ""]
    if base:
        lines += [f"Fine-tuned from {base} with RoundPipe CLI. {usage}", ""]
    else:
        lines += [f"Fine-tuned with RoundPipe CLI. {usage}", ""]
    lines += _data(recipe, report) + _figures(report) + _base(report)
    if recipe:
        text = yaml.safe_dump({key: recipe[key] for key in _told(recipe)}, sort_keys=False)
        lines += ["## Recipe", "", "```yaml", text.strip(), "```", ""]
    return redact("\n".join(lines))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _told(recipe: Mapping[str, Any]) -> list[str]:
    """Keys of the recipe that say how the weights came about; those of machines and folders are left out."""
    private = {"output_dir", "pipeline", "hardware", "weights", "report_to", "resume_from_checkpoint", "on_oom"}
    return [key for key in recipe if key not in private]


def _data(recipe: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    datasets = [item for item in recipe.get("datasets", []) if isinstance(item, dict)]
    if not datasets:
        return []
    lines = ["## Data", ""]
    lines += [
        f"- {Path(str(item.get('path'))).name} ({item.get('type')}, split {item.get('split')})" for item in datasets
    ]
    data = report.get("data", {})
    if data:
        lines += ["", f"{data.get('rows_kept')} rows, {data.get('trained_tokens')} trained tokens."]
    return [*lines, ""]


def _figures(report: Mapping[str, Any]) -> list[str]:
    loss, evaluation = report.get("loss", {}), report.get("evaluation") or {}
    rows = [("steps", report.get("num_steps")), ("first training loss", loss.get("first"))]
    rows += [("last training loss", loss.get("last"))]
    rows += [(f"evaluation: {key}", value) for key, value in evaluation.items() if isinstance(value, (int, float))]
    rows = [(name, value) for name, value in rows if value is not None]
    if not rows:
        return []
    table = [
        f"| {name} | {value:.4f} |" if isinstance(value, float) else f"| {name} | {value} |" for name, value in rows
    ]
    return ["## Figures", "", "| figure | value |", "|---|---|", *table, ""]


def _base(report: Mapping[str, Any]) -> list[str]:
    commit = report.get("model_commit")
    return [f"Base model at commit {commit}.", ""] if commit else []
