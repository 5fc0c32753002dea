"""The end of a run: its figures, predicted against measured, and what to do with the result."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundpipe_cli.cli.output import say
from roundpipe_cli.cli.wrap import terminal_width, wrapped
from roundpipe_cli.units import format_loss, format_seconds


def show_end(output_dir: Path) -> None:
    """Say how a finished run went and which commands come next, and write its page."""
    from rich.console import Console

    from roundpipe_cli.dashboard.html import comparison, comparison_table, range_note, read_report, write_page
    from roundpipe_cli.errors import RoundpipeError

    page = output_dir / "report.html"
    finished = output_dir / "report.json"
    if page.exists() and finished.exists() and page.stat().st_mtime >= finished.stat().st_mtime:
        return  # the run was finished already
    report = read_report(output_dir)
    width = terminal_width(2)
    for line in wrapped([summary(report)], width):
        if line:
            say(line)
    if comparison(report):
        table = io.StringIO()  # not to a terminal, which may be gone
        Console(file=table, width=80).print(comparison_table(report))
        say("\n".join(line for line in (table.getvalue().rstrip(), *wrapped([range_note(report)], width)) if line))
    try:
        write_page(output_dir, page)
    except RoundpipeError as error:  # the result itself is complete
        say(f"note: no report.html: {error}")
    if report:
        say(next_commands(output_dir, report))


def summary(report: Mapping[str, Any]) -> str:
    """`loss 3.8712 -> 3.6952, 33 tokens/s, bubble 2.0 %, 2m29s of training`; what is not known is left out.

    Speeds are of the steps since the last resume, and say so; the rest is of the whole run.
    """
    from roundpipe_cli.dashboard.html import since_resume

    loss, measured = report.get("loss") or {}, report.get("measured") or {}
    evaluation = report.get("evaluation") or {}
    parts = []
    if loss.get("first") is not None:
        parts.append(f"loss {format_loss(loss['first'])} -> {format_loss(loss['last'])}")
    elif loss.get("last") is not None:
        parts.append(f"last loss {format_loss(loss['last'])}")
    if isinstance(best := evaluation.get("best_loss"), (int, float)):
        parts.append(f"best evaluation {format_loss(best)}")
    speeds = []
    if measured.get("tokens_per_s"):
        speeds.append(f"{measured['tokens_per_s']:,.0f} tokens/s")
    if measured.get("bubble_ratio") is not None:
        speeds.append(f"bubble {100 * measured['bubble_ratio']:.1f} %")
    if speeds and since_resume(report):
        speeds[-1] += f" ({since_resume(report)})"
    parts += speeds
    if parts and report.get("seconds"):
        parts.append(f"{format_seconds(report['seconds'])} of training")
    return ", ".join(parts)


def next_commands(output_dir: Path, report: Mapping[str, Any]) -> str:
    """Commands to copy: ask the result, export it, see its page."""
    folder = shlex.quote(str(output_dir))
    merged = shlex.quote(f"{output_dir}-merged")
    export = f"export {folder} --to {shlex.quote(f'{output_dir}-exported')}"
    if report.get("method") == "lora":
        export = f"export {folder} --merge --to {merged}"
    page = shlex.quote(str(output_dir / "report.html"))
    rows = (f'roundpipe generate {folder} "your question"', f"roundpipe {export}", f"xdg-open {page}")
    return "\n".join(["next:", *(f"  {row}" for row in rows)])
