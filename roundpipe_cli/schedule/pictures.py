"""Pictures of timelines: SVG for a page, a trace for Perfetto. All from a `Timeline` alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP, Interval, Timeline, compute_rows, makespan_s

_COLOURS = {Kind.FORWARD: "#4c78a8", Kind.RECOMPUTE: "#f2b447", Kind.BACKWARD: "#54a24b"}
_NAMES = {Kind.FORWARD: "forward", Kind.RECOMPUTE: "recompute", Kind.BACKWARD: "backward"}
_LABEL_WIDTH, _PICTURE_WIDTH, _LANE_HEIGHT, _TITLE_HEIGHT, _MARGIN = 60, 1000, 14, 30, 10


def svg_picture(rows: Sequence[tuple[str, Timeline]]) -> str:
    """An SVG document with one row per (title, timeline), all on one time axis."""
    longest_s = max((makespan_s(timeline) for _, timeline in rows), default=0.0) or 1.0
    parts: list[str] = []
    top = _MARGIN
    for title, timeline in rows:
        parts += _svg_row(title, timeline, top, longest_s)
        top += _TITLE_HEIGHT + timeline.num_workers * _LANE_HEIGHT + _MARGIN
    parts += _legend(top)
    width, height = _LABEL_WIDTH + _PICTURE_WIDTH + 2 * _MARGIN, top + 2 * _TITLE_HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _svg_row(title: str, timeline: Timeline, top: int, longest_s: float) -> list[str]:
    scale = _PICTURE_WIDTH / longest_s
    parts = [f'<text x="{_MARGIN}" y="{top + 18}" font-size="13" font-weight="bold">{escape(title)}</text>']
    span = makespan_s(timeline) * scale
    for worker, row in enumerate(compute_rows(timeline)):
        y = top + _TITLE_HEIGHT + worker * _LANE_HEIGHT
        left = _MARGIN + _LABEL_WIDTH
        parts.append(f'<text x="{_MARGIN}" y="{y + 10}">worker {worker}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{span:.2f}" height="{_LANE_HEIGHT - 2}" fill="#eeeeee"/>')
        for interval in row:
            x, width = left + interval.start_s * scale, (interval.end_s - interval.start_s) * scale
            name = f"{interval.stage}{interval.kind.value}{interval.microbatch}"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.05):.2f}" height="{_LANE_HEIGHT - 2}" '
                f'fill="{_COLOURS[interval.kind]}" stroke="white" stroke-width="0.2"><title>{name}</title></rect>'
            )
    return parts


def _legend(top: int) -> list[str]:
    parts = []
    for index, (kind, colour) in enumerate(_COLOURS.items()):
        x = _MARGIN + _LABEL_WIDTH + index * 110
        parts.append(f'<rect x="{x}" y="{top + 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{top + 20}">{_NAMES[kind]}</text>')
    x = _MARGIN + _LABEL_WIDTH + len(_COLOURS) * 110
    parts.append(f'<rect x="{x}" y="{top + 10}" width="12" height="12" fill="#eeeeee"/>')
    parts.append(f'<text x="{x + 18}" y="{top + 20}">idle</text>')
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
