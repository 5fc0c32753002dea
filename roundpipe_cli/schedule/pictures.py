"""Pictures of timelines, their colours and letters: SVG for a page, a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from roundpipe_cli.events import Span
from roundpipe_cli.schedule.actions import Kind
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
    merged,
)
from roundpipe_cli.units import format_seconds, round_step

# Colours and names of forward, recompute and backward: the same on the terminal, on pages and in pictures.
#
# Each has a contrast of at least 3:1 with white and with the dark pages' background. In grey, and for readers who see
# red and green alike, they differ too: forward is the darkest, recompute the lightest. A test computes this.

WORK_COLOURS = {"F": "#2a5fc4", "R": "#cc7f10", "B": "#14866c"}
"""By the letter of an action's kind."""
WORK_NAMES = {"F": "forward", "R": "recompute", "B": "backward"}
BOTH, BOTH_NAME = "H", "forward and backward"
"""Letter and name of what the head's stage computes where its forward belongs to its backward: the loss is computed
chunk by chunk, so the two are not measured apart. A mark has both colours, forward above backward."""
DRAWN_NAMES = {**WORK_NAMES, BOTH: BOTH_NAME}
"""Letter -> name of everything that is drawn."""
BOTH_ID = "both"
BOTH_PAINT = (
    f'<defs><linearGradient id="{BOTH_ID}" x2="0" y2="1"><stop offset="0.5" stop-color="{WORK_COLOURS["F"]}"/>'
    f'<stop offset="0.5" stop-color="{WORK_COLOURS["B"]}"/></linearGradient></defs>'
)
"""SVG definition that a picture needs before marks with both colours."""


# How screens, pages and pictures show work: intervals as parts of events, and the letter of their colour.


def work_letter(kind: Kind, stage: int, *, fused_head: bool) -> str:
    """The letter by which an action is drawn: of its kind, or `BOTH` in the head's stage.

    Args:
        stage: as of the action.
        fused_head: as of its schedule.
    """
    return BOTH if fused_head and kind is Kind.BACKWARD and stage == 0 else kind.value


def span_of(item: Interval, *, fused_head: bool) -> Span:
    """An interval as part of an event; its seconds stay as they are."""
    letter = work_letter(item.kind, item.stage, fused_head=fused_head and item.lane == COMPUTE)
    return Span(item.worker, item.lane, letter, item.stage, item.microbatch, item.start_s, item.end_s)


_LEFT, _WIDTH, _RIGHT = 70, 1000, 20
"""Columns of labels, of lanes, and of the margin."""
_LANE_HEIGHT, _TITLE_HEIGHT, _GAP = 14, 26, 14
_WIDE_NAME = 60
"""Additional columns of the legend for its longest name."""
_HIGH_LANE = 26
"""Height of a lane in a picture of one timeline."""
MAX_GAP = 0.8
"""Gap between two marks."""
MIN_MARK, MIN_NUMBERED = 4.0, 16.0
"""Marks of a visit narrower than this are drawn as one; a visit wider than this has its stage's number on it."""
_TICKS = 6
"""Approximate number of labels on the axis."""
_CSS = f"""
svg {{ font: 12px system-ui, sans-serif; }} text {{ fill: #1c2024; }} .back {{ fill: #ffffff; }}
.idle {{ fill: #e6e8ec; }} .faint {{ fill: #5a626b; }} .large {{ font-size: 30px; font-weight: 700; }}
.number {{ fill: #ffffff; font-size: 10px; }} .update {{ fill: #8a929b; }}
.strong {{ font-weight: 600; }} .heading {{ font-size: 18px; font-weight: 600; }} .tick {{ stroke: #aab2bb; }}
{" ".join(f".kind-{letter} {{ fill: {colour}; }}" for letter, colour in WORK_COLOURS.items())}
.kind-{BOTH} {{ fill: url(#{BOTH_ID}); }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6e8ea; }} .back {{ fill: #14171a; }} .idle {{ fill: #2a3037; }}
.faint {{ fill: #9aa5b0; }} .tick {{ stroke: #57606a; }} }}
"""


def svg_picture(rows: Sequence[tuple[str, Timeline]], *, heading: str, note: str, pool: str = "workers") -> str:
    """An SVG document with one row per (title, timeline), all on one axis of seconds; for light and dark pages.

    Args:
        heading: what is trained on what.
        note: where the times come from, such as `simulated`; a picture travels without its page.
        pool: what the workers are, such as `GPUs`.
    """
    longest_s = max((makespan_s(timeline) for _, timeline in rows), default=0.0) or 1.0
    width = _LEFT + _WIDTH + _RIGHT
    parts = [
        f'<text class="heading" x="10" y="28">{escape(heading)}</text>',
        f'<text class="faint" x="10" y="48">{escape(note)}</text>',
    ]
    if len(rows) == 1:
        busy = f"{pool} {100 * (1 - bubble_ratio(rows[0][1])):.0f} % busy"
        parts.append(f'<text class="large" x="{width - _RIGHT}" y="40" text-anchor="end">{busy}</text>')
    top, lane = 60, _HIGH_LANE if len(rows) == 1 else _LANE_HEIGHT
    has_host = len(rows) == 1 and any(one.lane == HOST and one.end_s > one.start_s for one in rows[0][1].intervals)
    for title, timeline in rows:
        parts += _svg_row(title, timeline, top, longest_s, lane=lane)
        top += _TITLE_HEIGHT + timeline.num_workers * lane + _GAP
    if has_host:
        parts += _host_row(rows[0][1], top - _GAP, longest_s)
        top += _LANE_HEIGHT
    has_both = any(f'class="kind-{BOTH}"' in part for part in parts)
    parts += [*_axis(top, longest_s), *_legend(top + 30, has_both=has_both, has_host=has_host)]
    height = top + 56
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">',
            f"<title>{escape(heading)}</title><style>{_CSS}</style>",
            *([BOTH_PAINT] if has_both else []),
            f'<rect class="back" width="{width}" height="{height}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _svg_row(title: str, timeline: Timeline, top: int, longest_s: float, *, lane: int) -> list[str]:
    scale = _WIDTH / longest_s
    parts = [f'<text class="strong" x="{_LEFT}" y="{top + 16}">{escape(title)}</text>']
    span = makespan_s(timeline) * scale
    for worker, row in enumerate(compute_rows(timeline)):
        y = top + _TITLE_HEIGHT + worker * lane
        label = f'<text x="{_LEFT - 8}" y="{y + lane / 2 + 3:g}" text-anchor="end">worker {worker}</text>'
        parts += [label, _bar("idle", (_LEFT, y), (span, lane - 2), "idle")]
        for visit in _visits(row):
            if sum(interval.end_s - interval.start_s for interval in visit) * scale < MIN_MARK * len(visit):
                parts += _svg_visit(visit, y, lane, scale, fused_head=timeline.fused_head)
                continue
            for interval in visit:
                name = f"{interval.stage}{interval.kind.value}{interval.microbatch}"
                size = ((interval.end_s - interval.start_s) * scale, lane - 2)
                letter = work_letter(interval.kind, interval.stage, fused_head=timeline.fused_head)
                parts.append(_bar(f"kind-{letter}", (_LEFT + interval.start_s * scale, y), size, name))
    return parts


def _visits(row: Sequence[Interval]) -> list[list[Interval]]:
    """Runs of intervals of one stage and direction without a visible pause between them."""
    visits: list[list[Interval]] = []
    for interval in row:
        before = visits[-1][-1] if visits else None
        if (
            before is not None
            and before.stage == interval.stage
            and (before.kind is Kind.FORWARD) == (interval.kind is Kind.FORWARD)
            and interval.start_s - before.end_s <= 0.5 * (interval.end_s - interval.start_s)
        ):
            visits[-1].append(interval)
        else:
            visits.append([interval])
    return visits


def _svg_visit(visit: Sequence[Interval], y: float, lane: int, scale: float, *, fused_head: bool) -> list[str]:
    """One mark for a visit whose marks are too narrow: a band for each kind, as high as its share of the time."""
    seconds: dict[str, float] = {}
    for interval in visit:
        letter = work_letter(interval.kind, interval.stage, fused_head=fused_head)
        seconds[letter] = seconds.get(letter, 0.0) + interval.end_s - interval.start_s
    x, length = _LEFT + visit[0].start_s * scale, (visit[-1].end_s - visit[0].start_s) * scale
    name = f"stage {visit[0].stage}, " + ", ".join(
        f"{DRAWN_NAMES[letter]} {format_seconds(time_s)}" for letter, time_s in seconds.items()
    )
    parts, at = [], float(y)
    for letter, time_s in seconds.items():
        height = (lane - 2) * time_s / sum(seconds.values())
        parts.append(_bar(f"kind-{letter}", (x, at), (length, height), name))
        at += height
    if length >= MIN_NUMBERED and lane >= _HIGH_LANE:
        place = f'x="{x + length / 2:.1f}" y="{y + lane - 5}" text-anchor="middle"'
        parts.append(f'<text class="number" {place}>{visit[0].stage}</text>')
    return parts


def _bar(css: str, place: tuple[float, float], size: tuple[float, float], name: str) -> str:
    """A mark, with a gap to the next one that is small beside it; a stroke would hide most of a narrow mark."""
    (x, y), (length, height) = place, size
    length -= min(MAX_GAP, 0.08 * length)
    where = f'x="{x:.2f}" y="{y:.6g}" width="{max(length, 0.05):.2f}" height="{height:.4g}"'
    return f'<rect class="{css}" {where}><title>{name}</title></rect>'


def _host_row(timeline: Timeline, y: float, longest_s: float) -> list[str]:
    """The lane of the host's updates, for which workers may wait; pieces without a visible gap are one mark."""
    scale = _WIDTH / longest_s
    updates = ((one.start_s, min(one.end_s, longest_s)) for one in timeline.intervals if one.lane == HOST)
    pieces = merged(((start * scale, end * scale) for start, end in updates), MAX_GAP)
    label = f'<text x="{_LEFT - 8}" y="{y + 10}" text-anchor="end">host</text>'
    size = _LANE_HEIGHT - 2
    return [
        label,
        *(_bar("update", (_LEFT + start, y), (end - start, size), "optimizer update") for start, end in pieces),
    ]


def _axis(top: float, longest_s: float) -> list[str]:
    step_s = round_step(longest_s, _TICKS)
    parts = []
    for index in range(int(longest_s / step_s) + 1):
        x = _LEFT + index * step_s / longest_s * _WIDTH
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{top - 2}"/>')
        text = format_seconds(index * step_s)
        parts.append(f'<text class="faint" x="{x:.1f}" y="{top + 12}" text-anchor="middle">{text}</text>')
    return parts


def _legend(top: int, *, has_both: bool, has_host: bool) -> list[str]:
    parts = []
    letters = [*WORK_NAMES, BOTH] if has_both else [*WORK_NAMES]
    names = {**{f"kind-{letter}": DRAWN_NAMES[letter] for letter in letters}, "idle": "idle"}
    if has_host:
        names["update"] = "optimizer update on the host"
    for index, (css, name) in enumerate(names.items()):
        x = _LEFT + index * 110 + (_WIDE_NAME if index > len(letters) - 1 and has_both else 0)
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
        if interval.worker >= 0:
            return "waits for the update"
        return f"update of layer {interval.stage}" if interval.stage >= 0 else "gradients complete"
    if interval.microbatch < 0:
        return "weights up" if interval.lane == UP else "weight gradients down"
    text = f"{interval.stage}{interval.kind.value}{interval.microbatch}"
    return text if interval.lane == COMPUTE else f"boundary {text}"
