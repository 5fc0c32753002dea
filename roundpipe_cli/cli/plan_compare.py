"""`roundpipe plan --compare`: one row for each combination of values."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundpipe_cli.planning.what_if import Combination

QUIET_S = 1.0
"""Seconds before the first report of progress."""


def show_comparison(recipe: str, overrides: Sequence[str], hardware: str | None, *, as_json: bool) -> None:
    """Print the table, or its JSON document.

    Raises:
        RefusedError: as `compare_plans`.
    """
    import json

    from roundpipe_cli.cli.built_model import build_counts
    from roundpipe_cli.cli.colour import VERDICTS
    from roundpipe_cli.cli.output import say_data
    from roundpipe_cli.cli.wrap import terminal_width, wrapped
    from roundpipe_cli.planning.what_if import compare_plans

    rows = compare_plans(recipe, overrides, hardware, build_counts, _progress())
    if as_json:
        say_data(json.dumps({"rows": [row_document(row) for row in rows]}, indent=1))
        return
    width = terminal_width()
    for line in wrapped(comparison_lines(rows, width), width):
        say_data(line, colours=VERDICTS)


def _progress() -> Any:
    """Shows the progress on a terminal, from the second second on."""
    from roundpipe_cli.cli.output import say

    started_s = time.monotonic()

    def tell(done: int, count: int, values: Mapping[str, str]) -> None:
        if os.isatty(2) and time.monotonic() - started_s > QUIET_S:
            say(f"planning {done + 1} of {count}: {_words(values)} ...")

    return tell


def _words(values: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())


def row_document(row: Combination) -> dict[str, Any]:
    """A row for `--json`, bytes and seconds; what a refused combination does not have is null."""
    plan, summary = row.plan, row.summary
    runs = plan is not None and plan.verdict.fits
    return {
        "values": dict(row.values),
        "verdict": summary.word if summary is not None else "REFUSED",
        "reasons": list(summary.reasons) if summary is not None else [row.refused],
        "device_bytes": plan.verdict.device.total_bytes if plan is not None else None,
        "host_bytes": _host_bytes(row),
        "step_s": plan.step_s if plan is not None and runs else None,
        "tokens_per_s": plan.tokens_per_s if plan is not None and runs else None,
    }


def _host_bytes(row: Combination) -> int | None:
    verdict = row.plan.verdict if row.plan is not None else None
    return None if verdict is None else max(verdict.host.total_bytes, verdict.loading.total_bytes)


LEFT_OUT = ("host", "GPU")
"""Columns to leave out where the terminal is too narrow, the first one first; --json has all."""


def comparison_lines(rows: Sequence[Combination], width: int | None = None) -> list[str]:
    """Aligned columns; the reason of a row that is slow, does not fit or is refused follows below it.

    Args:
        width: columns of the terminal; None: any number.
    """
    from roundpipe_cli.units import format_bytes, format_seconds

    cells = [[*rows[0].values, "verdict", "GPU", "host", "step", "tokens/s"]]
    for row in rows:
        document = row_document(row)
        cells.append(
            [
                *row.values.values(),
                document["verdict"],
                *(format_bytes(document[key]) if document[key] else "-" for key in ("device_bytes", "host_bytes")),
                format_seconds(document["step_s"]) if document["step_s"] else "-",
                f"{document['tokens_per_s']:,.0f}" if document["tokens_per_s"] else "-",
            ]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    num_left = len(rows[0].values) + 1
    kept = list(range(len(widths)))
    for name in LEFT_OUT:
        if width is None or sum(widths[column] for column in kept) + 2 * (len(kept) - 1) <= width:
            break
        kept.remove(cells[0].index(name, num_left))
    lines = []
    shown: list[Combination | None] = [None, *rows]
    for line, row_of in zip(cells, shown, strict=True):
        padded = (
            line[column].ljust(widths[column]) if column < num_left else line[column].rjust(widths[column])
            for column in kept
        )
        lines.append("  ".join(padded).rstrip())
        lines += [f"    {reason}" for reason in (row_document(row_of)["reasons"] if row_of is not None else ())]
    return lines
