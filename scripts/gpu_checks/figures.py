"""The tables of scripts/MEASUREMENTS.md that come from a card, written from the JSON document of `gpu_check`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "MEASUREMENTS.md"
START, END = "<!-- gpu_check: start -->", "<!-- gpu_check: end -->"
Document = Mapping[str, Any]


def figures(document: Document, part: str) -> dict[str, dict[str, Any]]:
    """Figures by check, of those that passed."""
    checks = document["parts"].get(part, ())
    return {one["check"]: one["figures"] for one in checks if one["status"] == "ok"}


def tables(document: Document, day: str) -> str:
    """Everything between the marks: the hardware's name, then a table for each part that has figures."""
    outcomes = [
        one["status"] for checks in document["parts"].values() for one in {o["check"]: o for o in checks}.values()
    ]
    counts = ", ".join(f"{outcomes.count(word)} {word}" for word in ("ok", "failed", "stopped", "skipped"))
    blocks = [f"{document['hardware']}, {day}: {counts}.", _throughput(document), _memory(document)]
    blocks += [_prediction(document), _links(document), _kernels(document), _experts(document)]
    blocks.append(_rates(document))
    return "\n\n".join(block for block in blocks if block)


def table(head: str, rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left; empty without rows."""
    if not rows:
        return ""
    columns = head.split(" | ")
    lines = [f"| {head} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def _throughput(document: Document) -> str:
    rows = []
    for name, one in figures(document, "throughput").items():
        idle = f"{100 * one['idle']:.1f} %" if "idle" in one else "-"
        rows.append(
            [name, f"{one['tokens_per_s']:,.0f}", f"{one['step_s']:.3f} s", idle, _gigabytes(one["peak_bytes"])]
        )
    return table("way | tokens/s | step | idle | peak", rows)


def _memory(document: Document) -> str:
    keys = ("planned_bytes", "allocated_bytes", "reserved_bytes", "driver_peak_bytes")
    checks = figures(document, "memory").items()
    rows = [[name, *(_gigabytes(one[key]) for key in keys)] for name, one in checks if "planned_bytes" in one]
    return table("memory | planned | allocated | reserved | driver's peak", rows)


def _prediction(document: Document) -> str:
    rows = [
        [name, f"{one['predicted_s']:.3f} s", f"{one['measured_s']:.3f} s", f"{one['measured_to_predicted']:.2f}"]
        for name, one in figures(document, "prediction").items()
    ]
    return table("step | predicted | measured | measured / predicted", rows)


def _links(document: Document) -> str:
    rows = [
        [name, *("/".join(f"{speed:.1f}" for speed in one[key]) for key in ("up_gb_per_s", "down_gb_per_s"))]
        for name, one in figures(document, "links").items()
        if "up_gb_per_s" in one
    ]
    return table("link | up, GB/s | down, GB/s", rows)


def _kernels(document: Document) -> str:
    rows = []
    for name, one in figures(document, "kernels").items():
        if "microseconds" not in one:  # rates of products and of launches
            continue
        total = sum(one["microseconds"].values()) or 1.0
        shares = [f"{100 * one['microseconds'].get(kind, 0) / total:.0f} %" for kind in ("product", "attention")]
        rows.append([name, str(sum(one["launches"].values())), f"{total / 1e3:.2f} ms", *shares])
    return table("block, forward and backward | launches | time | products | attention", rows)


def _experts(document: Document) -> str:
    rows = []
    for name, one in figures(document, "experts").items():
        if "milliseconds" in one:
            times = {key: f"{value:.2f} ms" for key, value in one["milliseconds"].items()}
            kind = "a loop" if one["torch_loops"] else "one kernel"
            rows.append([name, times["ours"], times["torch"], times["ours, both"], times["torch, both"], kind])
    return table("experts | ours: forward | torch's | ours: both passes | torch's | torch's is", rows)


def _rates(document: Document) -> str:
    """The largest rates of the first worker, in 10^12 operations, 10^9 bytes or 10^9 weights a second."""
    units = {"products": 1e12, "narrow_products": 1e12, "attention": 1e12, "memory": 1e9, "unpacking": 1e9}
    rows = [
        [f"{part.replace('_', ' ')} {name}", f"{curve[-1][1] / unit:,.1f}"]
        for part, unit in units.items()
        for worker in figures(document, "rates").get(part, {}).get("workers", ())[:1]
        for name, curve in worker[part].items()
    ]
    return table("rate | reached", rows)


def updated(page: str, document: Document, day: str) -> str:
    """The page with new tables between the marks."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    assert rest and after, f"{PAGE} has no marks {START} ... {END}"
    return f"{before}{START}\n\n{tables(document, day)}\n\n{END}{after}"


def main(path: Path) -> int:
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["device"] == "simulated":
        print("these results are of simulated devices: no figure of theirs belongs into a table", file=sys.stderr)
        return 2
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), document, date.today().isoformat()), encoding="utf-8")
    print(f"wrote {PAGE}; look at what changed before you commit it")
    return 0
