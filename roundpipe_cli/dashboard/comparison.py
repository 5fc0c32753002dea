"""Predicted against measured: the rows of a table, from a run's report.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from roundpipe_cli.events import MAX_NUMBER
from roundpipe_cli.units import format_bytes, format_seconds

ComparisonRow = tuple[str, str, str, str]
_NONE = "-"


def comparison(report: Mapping[str, Any]) -> list[ComparisonRow]:
    """(name, predicted, measured, error) of a finished run."""
    predicted, measured = figures(report, "predicted"), figures(report, "measured")
    rows = [
        _row("forward and backward", predicted.get("step_s"), measured.get("pipeline_s"), _seconds),
        _row("whole step", None, measured.get("step_s"), _seconds),
        _row("tokens/s", predicted.get("tokens_per_s"), measured.get("tokens_per_s"), _rate),
        _share("bubble", predicted.get("bubble_ratio"), measured.get("bubble_ratio")),
        _share("busy, launch bound", None, measured.get("launch_bound_ratio") or None),
        _row("device memory", predicted.get("device_peak_bytes"), measured.get("device_peak_bytes"), _bytes),
        _row("host memory", predicted.get("host_bytes"), measured.get("host_peak_bytes"), _bytes),
    ]
    return [row for row in rows if row[2] != _NONE]


def range_note(report: Mapping[str, Any]) -> str:
    """Whether the measured time of forward and backward lay in the predicted range; empty where either is not known."""
    predicted, measured = figures(report, "predicted"), figures(report, "measured").get("pipeline_s")
    least_s, most_s = predicted.get("least_step_s"), predicted.get("most_step_s")
    if not (least_s and most_s and measured):
        return ""
    where = "inside" if least_s <= measured <= most_s else "OUTSIDE"
    return f"forward and backward: {where} the predicted range, {format_seconds(least_s)} to {format_seconds(most_s)}"


def since_resume(report: Mapping[str, Any]) -> str:
    """`since step 5` where the measured figures begin with a resume after step 4; empty where with the run."""
    first_step = figures(report, "measured").get("first_step", 1)
    return f"since step {first_step:.0f}" if first_step > 1 else ""


def figures(report: Mapping[str, Any], key: str) -> dict[str, float]:
    """The numbers of a part of the report; other values are left out."""
    part = report.get(key)
    items = part.items() if isinstance(part, dict) else ()
    return {
        name: value
        for name, value in items
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MAX_NUMBER
    }


def comparison_table(report: Mapping[str, Any]) -> Table:
    """The table as lines for a terminal."""
    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings(report)):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in comparison(report):
        table.add_row(*row)
    return table


def headings(report: Mapping[str, Any]) -> ComparisonRow:
    """Headings of the columns of the table."""
    return "", "predicted", f"measured {since_resume(report)}".rstrip(), "off"


def _row(name: str, predicted: float | None, measured: float | None, show: Any) -> ComparisonRow:
    off = f"{100 * (measured / predicted - 1):+.0f} %" if predicted and measured else _NONE
    return name, show(predicted), show(measured), off


def _share(name: str, predicted: float | None, measured: float | None) -> ComparisonRow:
    points = 100 * (measured - predicted) if predicted is not None and measured is not None else None
    shown = [_NONE if share is None else f"{100 * share:.1f} %" for share in (predicted, measured)]
    return name, shown[0], shown[1], _NONE if points is None else f"{points:+.1f} points"


def _seconds(value: float | None) -> str:
    return format_seconds(value) if value else _NONE


def _bytes(value: float | None) -> str:
    return format_bytes(value) if value else _NONE


def _rate(value: float | None) -> str:
    return f"{value:,.0f}" if value else _NONE
