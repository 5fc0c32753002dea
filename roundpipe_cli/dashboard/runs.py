"""Runs side by side: the state, figures and loss curve of every run below a folder, as a table and as one page."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from json import dumps
from pathlib import Path
from types import NoneType
from typing import Any

from roundpipe_cli import events
from roundpipe_cli.dashboard.html import STEPS, Series, curves, document, figures, html_table, read_report, smoothed
from roundpipe_cli.dashboard.replay import GrowingFile, RunFiles
from roundpipe_cli.events import EVAL_NAME, EVENTS_NAME, HEADER_NAME, LOCK_NAME, METRICS_NAME, REPORT_NAME
from roundpipe_cli.units import counted, format_loss

MAX_DEPTH = 4
"""Folders below the given one in which runs are looked for."""
MAX_CURVES = 8
"""Colours of curves; further ones repeat them."""
MAX_CURVE_POINTS = 500


@dataclass(frozen=True)
class RunSummary:
    """The figures of one run; None: not known (yet)."""

    name: str
    """The run's folder, as it was found."""
    folder: Path
    state: str
    """`running`, `finished` or `stopped`, as far as this machine can tell."""
    steps: int
    """The last step, whatever its loss was."""
    num_steps: int | None
    rows: int | None
    """Rows of data that it has, those held out for evaluation among them."""
    loss: float | None
    """Loss of the last step; None also where it was not finite."""
    best_evaluation: float | None
    tokens_per_s: float | None
    """Median of its steps."""
    bubble_ratio: float | None
    losses: Sequence[tuple[float, float]] = ()
    """(step, loss)."""
    evaluations: Sequence[tuple[float, float]] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Keys, such as `lora.r`, to values; empty where recipe.yaml cannot be read."""

    def document(self, differs: Sequence[str]) -> dict[str, Any]:
        """The run for `--json`; `differs`: the keys in which the runs differ."""
        names = ("state", "steps", "num_steps", "rows", "loss", "best_evaluation", "tokens_per_s", "bubble_ratio")
        about = {key: self.recipe.get(key) for key in ("model", "method", "objective")}
        differing = {key: self.recipe.get(key) for key in differs} if self.recipe else {}
        return {"folder": self.name, **about, **{name: getattr(self, name) for name in names}, "differs": differing}


def find_folders(folder: Path, unreadable: Callable[[OSError], object]) -> Iterator[Path]:
    """Folders at and below `folder` that may hold a run, sorted; links, hidden folders and runs are not entered. One
    that holds scores is none.

    Args:
        unreadable: is told of each folder that cannot be listed.
    """
    for place, names, files in os.walk(folder, onerror=unreadable):
        depth = len(Path(place).relative_to(folder).parts)
        inside = {METRICS_NAME, EVENTS_NAME, REPORT_NAME, LOCK_NAME} & set(files)
        if inside == {LOCK_NAME} and HEADER_NAME in files:
            continue
        if inside:
            yield Path(place)
        is_deep = bool(inside) or depth >= MAX_DEPTH
        names[:] = [] if is_deep else sorted((name for name in names if not name.startswith(".")), key=_by_number)


def _by_number(name: str) -> list[str]:
    """`r2` before `r10`."""
    return [part.zfill(12) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def read_run(folder: Path, name: str, recipe: Mapping[str, Any]) -> RunSummary | None:
    """The run in a folder; None: files of these names are there, and none has a line of ours.

    Raises:
        RefusedError: one of its files is no regular file, too large, or cannot be read.
    """
    rows = GrowingFile(folder / METRICS_NAME).new_rows()
    steps = [point for row in rows if (point := _number(row, "loss"))]
    told = GrowingFile(folder / EVENTS_NAME).new_rows()
    report = read_report(folder)
    started = [row for row in told if row.get("event") == events.RunStarted.__name__]
    own = [
        row for row in rows if _of(row, "step") is not None and isinstance(row.get("loss", ""), (int, float, NoneType))
    ]
    last = own[-1] if own else {}
    if not (own or started or "tool_version" in report or (folder / LOCK_NAME).exists()):
        return None
    evaluations = [point for row in GrowingFile(folder / EVAL_NAME).new_rows() if (point := _number(row, "loss"))]
    measured, data = figures(report, "measured"), figures(report, "data")
    total = _of(started[-1], "num_steps") if started else None
    if total is None and isinstance(report.get("num_steps"), int):
        total = report["num_steps"]
    return RunSummary(
        name,
        folder,
        RunFiles(folder).life().value,
        steps=int(_of(last, "step") or 0),
        num_steps=None if total is None else int(total),
        rows=int(data["rows_kept"]) if "rows_kept" in data else None,
        loss=_of(last, "loss"),
        best_evaluation=min((loss for _, loss in evaluations), default=None),
        tokens_per_s=_median(rows, "tokens_per_s") or measured.get("tokens_per_s"),
        bubble_ratio=_median(rows, "bubble_ratio", of=statistics.median_low) or measured.get("bubble_ratio"),
        losses=steps,
        evaluations=evaluations,
        recipe=recipe,
    )


def _number(row: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    """(step, value) of a row; None where one of them is no finite number."""
    step, value = _of(row, "step"), _of(row, key)
    return None if step is None or value is None else (step, value)


def _of(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < events.MAX_NUMBER else None


def _median(
    rows: Sequence[Mapping[str, Any]], key: str, *, of: Callable[[Sequence[float]], float] = statistics.median
) -> float | None:
    return of([value for row in rows if (value := _of(row, key)) is not None] or [0.0]) or None


LEFT_OUT = frozenset({"output_dir", "run_name", "hub_model_id", "resume_from_checkpoint"})
"""Keys in which runs differ always, or without a consequence."""


def differing_keys(runs: Sequence[RunSummary]) -> list[str]:
    """Keys that have different values in two recipes, in the recipes' order. Of a data set that one lacks, its path."""
    recipes = [run.recipe for run in runs if run.recipe]
    found = []
    for key in dict.fromkeys(key for recipe in recipes for key in recipe):
        of_item = re.search(r"\.\d+\.(?!path$)", key)
        values = {repr(recipe.get(key)) for recipe in recipes if key in recipe or not of_item}
        found += [key] if len(values) > 1 and key.split(".")[0] not in LEFT_OUT else []
    return found


def table(runs: Sequence[RunSummary], differs: Sequence[str]) -> list[list[str]]:
    """Rows of cells, the headings first; one column for each differing key. Model and method only where they differ."""
    about_keys = [key for key in ("model", "method") if key in differs or len(runs) == 1]
    shown = [key for key in differs if key not in about_keys]
    cells = [["run", "state", *about_keys, "rows", "steps", "loss", "best eval", "tokens/s", "bubble", *shown]]
    for run in runs:
        steps = str(run.steps) if run.num_steps is None else f"{run.steps}/{run.num_steps}"
        about = [str(run.recipe.get(key, "-")) for key in about_keys]
        figures_ = [
            "-" if run.rows is None else f"{run.rows:,}",
            steps,
            *("-" if loss is None else format_loss(loss) for loss in (run.loss, run.best_evaluation)),
            "-" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}",
            "-" if run.bubble_ratio is None else f"{100 * run.bubble_ratio:.1f} %",
        ]
        values = [_shown(run.recipe[key]) if key in run.recipe else "-" for key in shown]
        cells.append([run.name, run.state, *about, *figures_, *values])
    return cells


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else dumps(value, ensure_ascii=False, default=str).replace('"', "")


def runs_page(runs: Sequence[RunSummary], differs: Sequence[str]) -> str:
    """The table and the loss curves of all runs on one page, without network or script."""
    headings, *rows = table(runs, differs)
    common = {key: run.recipe[key] for run in runs for key in ("model", "method") if key in run.recipe}
    dot = '<div class="legend"><span><i style="background: hsl({} 65% 50%)"></i>{}</span></div>'
    body = [[dot.format(_hue(at), escape(row[0])), *map(escape, row[1:])] for at, row in enumerate(rows)]
    colours = "".join(
        f".r{at} {{ stroke: hsl({_hue(at)} 65% 50%); }} .r{at}.dot {{ fill: hsl({_hue(at)} 65% 50%); }}"
        for at in range(MAX_CURVES)
    )
    sections = [
        f"<h1>{counted(len(runs), 'run')}</h1>",
        f'<p class="sub">{escape(", ".join(str(value) for key, value in common.items() if key not in headings))}</p>',
        f"<style>{colours}</style>",
        html_table(headings, body),
        "<h2>Loss</h2>",
        '<p class="sub">Training, smoothed.</p>',
        f'<div class="scroll">{_picture(runs, "losses")}</div>',
    ]
    if any(run.evaluations for run in runs):
        sections += ["<h2>Evaluation</h2>", f'<div class="scroll">{_picture(runs, "evaluations")}</div>']
    return document("runs", sections)


def _hue(index: int) -> int:
    return 360 * (index % MAX_CURVES) // MAX_CURVES + 10


def _picture(runs: Sequence[RunSummary], name: str) -> str:
    series = []
    for index, run in enumerate(runs):
        points = getattr(run, name)
        points = smoothed(points) if name == "losses" else points
        points = points[:: max(1, len(points) // MAX_CURVE_POINTS)]
        series.append(Series(run.name, points, f"r{index % MAX_CURVES}"))
    return curves(series, STEPS, title=f"{name.capitalize()} by step", height=320)
