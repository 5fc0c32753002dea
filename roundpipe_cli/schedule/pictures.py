"""Pictures of timelines: SVG for a page, a trace for Perfetto. All from a `Timeline` alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.palette import WORK_COLOURS, WORK_NAMES
from roundpipe_cli.schedule.timeline import (
    COMPUTE,
    DOWN,
    HOST,
    UP,
    Interval,
    Timeline,
    bubble_ratio,
    compute_rows,
    makespan_s,
)
from roundpipe_cli.units import format_seconds, round_step

_LEFT, _WIDTH, _RIGHT = 70, 1000, 20
"""Columns of labels, of lanes, and of the margin."""
_LANE_HEIGHT, _TITLE_HEIGHT, _GAP = 14, 26, 14
MAX_GAP = 0.8
"""Between two marks."""
_TICKS = 6
"""About so many on the axis."""
_CSS = f"""
svg {{ font: 12px system-ui, sans-serif; }} text {{ fill: #1c2024; }} .back {{ fill: #ffffff; }}
.idle {{ fill: #e6e8ec; }} .faint {{ fill: #5a626b; }} .large {{ font-size: 30px; font-weight: 700; }}
.strong {{ font-weight: 600; }} .heading {{ font-size: 18px; font-weight: 600; }} .tick {{ stroke: #aab2bb; }}
{" ".join(f".kind-{letter} {{ fill: {colour}; }}" for letter, colour in WORK_COLOURS.items())}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6e8ea; }} .back {{ fill: #14171a; }} .idle {{ fill: #2a3037; }}
.faint {{ fill: #9aa5b0; }} .tick {{ stroke: #57606a; }} }}
"""


def svg_picture(rows: Sequence[tuple[str, Timeline]], *, heading: str, note: str) -> str:
    """An SVG document with one row per (title, timeline), all on one axis of seconds; for light and dark pages.

    Args:
        heading: what is trained on what.
        note: where the times come from, such as `simulated`; a picture travels without its page.
    """
    longest_s = max((makespan_s(timeline) for _, timeline in rows), default=0.0) or 1.0
    width = _LEFT + _WIDTH + _RIGHT
    parts = [
        f'<text class="heading" x="10" y="28">{escape(heading)}</text>',
        f'<text class="faint" x="10" y="48">{escape(note)}</text>',
    ]
    if len(rows) == 1:
        busy = f"workers {100 * (1 - bubble_ratio(rows[0][1])):.0f} % busy"
        parts.append(f'<text class="large" x="{width - _RIGHT}" y="40" text-anchor="end">{busy}</text>')
    top = 60
    for title, timeline in rows:
        parts += _svg_row(title, timeline, top, longest_s)
        top += _TITLE_HEIGHT + timeline.num_workers * _LANE_HEIGHT + _GAP
    parts += [*_axis(top, longest_s), *_legend(top + 30)]
    height = top + 56
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">',
            f"<title>{escape(heading)}</title><style>{_CSS}</style>",
            f'<rect class="back" width="{width}" height="{height}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _svg_row(title: str, timeline: Timeline, top: int, longest_s: float) -> list[str]:
    scale = _WIDTH / longest_s
    parts = [f'<text class="strong" x="{_LEFT}" y="{top + 16}">{escape(title)}</text>']
    span = makespan_s(timeline) * scale
    for worker, row in enumerate(compute_rows(timeline)):
        y = top + _TITLE_HEIGHT + worker * _LANE_HEIGHT
        label = f'<text x="{_LEFT - 8}" y="{y + 10}" text-anchor="end">worker {worker}</text>'
        parts += [label, _bar("idle", _LEFT, y, span, "idle")]
        for interval in row:
            name = f"{interval.stage}{interval.kind.value}{interval.microbatch}"
            length = (interval.end_s - interval.start_s) * scale
            parts.append(_bar(f"kind-{interval.kind.value}", _LEFT + interval.start_s * scale, y, length, name))
    return parts


def _bar(css: str, x: float, y: float, length: float, name: str) -> str:
    """A mark; the gap to the next one is small against it, where a stroke would hide most of a narrow one."""
    length -= min(MAX_GAP, 0.08 * length)
    place = f'x="{x:.2f}" y="{y}" width="{max(length, 0.05):.2f}" height="{_LANE_HEIGHT - 2}"'
    return f'<rect class="{css}" {place}><title>{name}</title></rect>'


def _axis(top: float, longest_s: float) -> list[str]:
    """Round numbers of seconds below the lanes."""
    step_s = round_step(longest_s, _TICKS)
    parts = []
    for index in range(int(longest_s / step_s) + 1):
        x = _LEFT + index * step_s / longest_s * _WIDTH
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{top - 2}"/>')
        text = format_seconds(index * step_s) if index else "0 s"
        parts.append(f'<text class="faint" x="{x:.1f}" y="{top + 12}" text-anchor="middle">{text}</text>')
    return parts


def _legend(top: int) -> list[str]:
    parts = []
    names = {**{f"kind-{letter}": name for letter, name in WORK_NAMES.items()}, "idle": "idle"}
    for index, (css, name) in enumerate(names.items()):
        x = _LEFT + index * 110
        parts.append(f'<rect class="{css}" x="{x}" y="{top}" width="12" height="12"/>')
        parts.append(f'<text x="{x + 18}" y="{top + 10}">{name}</text>')
    return parts


_LANES = {COMPUTE: "compute", UP: "host to device", DOWN: "device to host", HOST: "optimizer"}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the Trace Event format that Perfetto and chrome://tracing open; microseconds."""
    events: list[dict[str, Any]] = []
    lanes = list(_LANES)
    used = sorted({(interval.worker, lanes.index(interval.lane)) for interval in timeline.intervals})
    for worker in sorted({worker for worker, _ in used}):
        name = f"worker {worker}" if worker >= 0 else "host"
        events.append({"ph": "M", "pid": worker + 1, "name": "process_name", "args": {"name": name}})
    for worker, lane in used:
        arguments = {"name": _LANES[lanes[lane]]}
        events.append({"ph": "M", "pid": worker + 1, "tid": lane, "name": "thread_name", "args": arguments})
    for interval in timeline.intervals:
        events.append(
            {
                "ph": "X",
                "name": _event_name(interval),
                "cat": interval.kind.name.lower(),
                "pid": interval.worker + 1,
                "tid": lanes.index(interval.lane),
                "ts": interval.start_s * 1e6,
                "dur": (interval.end_s - interval.start_s) * 1e6,
                "args": {"stage": interval.stage, "microbatch": interval.microbatch},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event_name(interval: Interval) -> str:
    if interval.kind is Kind.OPTIMIZER:
        return f"update of layer {interval.stage}" if interval.stage >= 0 else "gradients complete"
    if interval.microbatch < 0:
        return "weights up" if interval.lane == UP else "weight gradients down"
    text = f"{interval.stage}{interval.kind.value}{interval.microbatch}"
    return text if interval.lane == COMPUTE else f"boundary {text}"
