"""Pictures of a run as SVG: curves over steps or time, and what each worker did. Colours come from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from roundpipe_cli.events import Span, StepTimeline
from roundpipe_cli.schedule.pictures import BOTH_PAINT, DRAWN_NAMES
from roundpipe_cli.units import format_seconds, round_step

WIDTH = 720
"""Units of a picture; the page scales it."""
LEFT, RIGHT, TOP, BOTTOM = 76, 12, 14, 30
MAX_RECTANGLES = 6000
MIN_MARGIN = 24
"""A value nearer to the right end than this ends below its place, in place of having its middle there."""
NUM_TICKS = 5
"""About so many on an axis, at round values."""
SvgPoint = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a picture."""

    name: str
    points: Sequence[SvgPoint]
    css: str
    marks: bool = False
    """Single points in place of a line."""


@dataclass(frozen=True)
class Axis:
    """Quantity of the horizontal axis."""

    name: str
    show: Callable[[float], str]
    """A value in words."""
    least: float = 0.0
    """Distance of two ticks at least."""
    round_lengths: Sequence[float] = ()
    """Distances that are round beside powers of ten, in order: of seconds, those that are minutes and hours."""

    def ticks(self, left: float, right: float) -> list[float]:
        """Round values from `left` to `right`."""
        if right <= left:
            return [left]
        step = max(self.least, round_step(right - left, NUM_TICKS))
        wanted = (right - left) / NUM_TICKS
        if self.round_lengths and self.round_lengths[0] <= wanted <= self.round_lengths[-1]:
            step = next(length for length in self.round_lengths if length >= wanted)
        first, last = math.ceil(left / step - 1e-9), math.floor(right / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


STEPS = Axis("step", lambda step: f"{step:.0f}", least=1.0)
TIME = Axis(
    "time",
    format_seconds,
    round_lengths=(10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400),
)


def curves(
    series: Sequence[Series],
    axis: Axis,
    *,
    title: str,
    height: int = 260,
    from_zero: bool = False,
) -> str:
    """Lines over a common axis; an empty picture says so."""
    points = [point for one in series for point in one.points]
    body = [f'<text class="note" x="{WIDTH / 2}" y="{height / 2}" text-anchor="middle">nothing was recorded</text>']
    if points:
        box = _Box(points, height, from_zero)
        body = [*box.axes(axis), *(_draw(one, box) for one in series if one.points)]
    return _picture(title, height, body)


class _Box:
    """From values to places in a picture."""

    def __init__(self, points: Sequence[SvgPoint], height: int, from_zero: bool) -> None:
        self.left, self.right = min(x for x, _ in points), max(x for x, _ in points)
        self.low = 0.0 if from_zero else min(y for _, y in points)
        self.high = max(y for _, y in points)
        if self.high - self.low <= 1e-9 * abs(self.high):
            self.low, self.high = self.low - 0.5, self.high + 0.5
        self.height = height

    def place(self, point: SvgPoint) -> SvgPoint:
        across = (point[0] - self.left) / (self.right - self.left) if self.right > self.left else 0.5
        up = (point[1] - self.low) / (self.high - self.low)
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            self.height - BOTTOM - up * (self.height - TOP - BOTTOM),
        )

    def axes(self, axis: Axis) -> list[str]:
        parts = []
        step = round_step(self.high - self.low, NUM_TICKS)
        for index in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1):
            value = index * step
            _, y = self.place((self.left, value))
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>')
        bottom = self.height - 8
        parts.append(f'<text x="{LEFT - 8}" y="{bottom}" text-anchor="end">{escape(axis.name)}</text>')
        for value in axis.ticks(self.left, self.right):
            x, _ = self.place((value, self.low))
            parts.append(tick(x, bottom, axis.show(value)))
        return parts


def tick(x: float, y: float, text: str) -> str:
    """A value of the lower axis, inside the picture at both of its ends."""
    anchor = "start" if x < LEFT + 1 else "end" if x > WIDTH - RIGHT - MIN_MARGIN else "middle"
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _draw(series: Series, box: _Box) -> str:
    places = [box.place(point) for point in series.points]
    if series.marks or len(places) == 1:
        dots = (
            f'<circle class="{series.css} dot" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(series.name)} '
            f"{value:.4f} at {at:g}</title></circle>"
            for (x, y), (at, value) in zip(places, series.points, strict=True)
        )
        return "".join(dots)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="{series.css}" points="{path}"><title>{escape(series.name)}</title></polyline>'


def timelines(steps: Sequence[StepTimeline], devices: Sequence[str], *, title: str) -> str:
    """The work of each worker in consecutive steps, each step from zero on a common scale, one below the other."""
    lane, gap, heading = 18, 6, 30
    num_workers = max(len(devices), 1)
    block = heading + num_workers * (lane + gap) + 10
    height = max(60, len(steps) * block + BOTTOM)
    longest_s = max((span.end_s for step in steps for span in step.spans), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest_s
    body = [BOTH_PAINT]
    if not steps:
        body.append(f'<text class="note" x="{WIDTH / 2}" y="34" text-anchor="middle">no timeline was recorded</text>')
    smallest_s = _smallest_s(steps, longest_s)
    for index, step in enumerate(steps):
        top = index * block
        last_s = max((span.end_s for span in step.spans), default=0.0)
        body.append(f'<text class="strong" x="4" y="{top + 20}">step {step.step}: {format_seconds(last_s)}</text>')
        for worker in range(num_workers):
            y = top + heading + worker * (lane + gap)
            body.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">w{worker}</text>')
            body.append(
                f'<rect class="idle" x="{LEFT}" y="{y}" width="{last_s * scale:.2f}" height="{lane}">'
                f"<title>idle</title></rect>"
            )
        for span in step.spans:
            if span.end_s - span.start_s < smallest_s or not 0 <= span.worker < num_workers:
                continue
            y = top + heading + span.worker * (lane + gap)
            body.append(_rectangle(span, y, scale))
    body += [tick(LEFT + value * scale, height - 8, TIME.show(value)) for value in TIME.ticks(0.0, longest_s)]
    return _picture(title, height, body)


def _smallest_s(steps: Sequence[StepTimeline], longest_s: float) -> float:
    """Shorter pieces are left out where there are more than a page can show."""
    lengths = sorted((span.end_s - span.start_s for step in steps for span in step.spans), reverse=True)
    if len(lengths) <= MAX_RECTANGLES:
        return 0.0
    return max(lengths[MAX_RECTANGLES], 1e-5 * longest_s)


def _rectangle(span: Span, y: float, scale: float) -> str:
    seconds = span.end_s - span.start_s
    x, width = LEFT + span.start_s * scale, max(seconds * scale, 0.3)
    if span.lane == "compute" and span.kind in DRAWN_NAMES:
        work = f"stage {span.stage}, microbatch {span.microbatch}"
        name = f"{DRAWN_NAMES[span.kind]}, {work}, {format_seconds(seconds)}"
        place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="14"'
        return f'<rect class="kind-{span.kind}" {place}><title>{name}</title></rect>'
    if span.lane not in ("up", "down"):
        return ""
    top = y + (14 if span.lane == "up" else 16)  # links are thin lines below the computation
    place = f'x="{x:.2f}" y="{top}" width="{width:.2f}" height="2"'
    return f'<rect class="{span.lane}" {place}><title>{span.lane}</title></rect>'


def _picture(title: str, height: int, body: Sequence[str]) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>{''.join(body)}</svg>"
    )
