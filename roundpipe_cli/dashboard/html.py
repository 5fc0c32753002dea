"""report.html: a run on one page without network or script, with its pictures and predicted against measured.

It has only content of the output directory: figures, messages, the resolved recipe. Recipes have no secrets.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from roundpipe_cli.dashboard.replay import RunFiles, TimedEvent
from roundpipe_cli.dashboard.state import DashboardState, compared, fold_all
from roundpipe_cli.dashboard.views import arithmetic
from roundpipe_cli.dashboard.waiting import longest_waiting
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import MAX_NUMBER, REPORT_NAME, RunStarted, Sample, Span, StepFinished, StepTimeline
from roundpipe_cli.regular_files import read_regular
from roundpipe_cli.schedule.pictures import BOTH_ID, BOTH_NAME, BOTH_PAINT, DRAWN_NAMES, WORK_COLOURS, WORK_NAMES
from roundpipe_cli.units import GIB, aligned, counted, format_bytes, format_loss, format_seconds, round_step

# Pictures of a run as SVG: curves over steps or time, and what each worker did. Colours come from the page's CSS.

WIDTH = 720
"""Units of a picture; the page scales it."""
LEFT, RIGHT, TOP, BOTTOM = 76, 12, 14, 30
MAX_RECTANGLES = 6000
"""More than a page can show: the shortest pieces are left out."""
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
        return _multiples(step, left, right)


def _multiples(step: float, low: float, high: float) -> list[float]:
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


STEPS = Axis("step", lambda step: f"{step:.0f}", least=1.0)
TIME = Axis(
    "time",
    format_seconds,
    round_lengths=(10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400),
)


def curves(series: Sequence[Series], axis: Axis, *, title: str, height: int = 260, from_zero: bool = False) -> str:
    """Lines over a common axis; an empty picture says so."""
    points = [point for one in series for point in one.points]
    if not points:
        note = f'<text class="note" x="{WIDTH / 2}" y="{height / 2}" text-anchor="middle">nothing was recorded</text>'
        return _picture(title, height, [note])
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = 0.0 if from_zero else min(y for _, y in points), max(y for _, y in points)
    if high - low <= 1e-9 * abs(high):
        low, high = low - 0.5, high + 0.5

    def pixel(point: SvgPoint) -> SvgPoint:
        across = (point[0] - left) / (right - left) if right > left else 0.5
        up = (point[1] - low) / (high - low)
        return (LEFT + across * (WIDTH - LEFT - RIGHT), height - BOTTOM - up * (height - TOP - BOTTOM))

    body = []
    for value in _multiples(round_step(high - low, NUM_TICKS), low, high):
        _, y = pixel((left, value))
        body.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>')
    body.append(f'<text x="{LEFT - 8}" y="{height - 8}" text-anchor="end">{escape(axis.name)}</text>')
    body += [tick(pixel((value, low))[0], height - 8, axis.show(value)) for value in axis.ticks(left, right)]
    for one in series:
        name, pixels = escape(one.name), [pixel(point) for point in one.points]
        if one.marks or len(pixels) == 1:
            body += [
                f'<circle class="{one.css} dot" cx="{x:.1f}" cy="{y:.1f}" r="4">'
                f"<title>{name} {value:.4f} at {at:g}</title></circle>"
                for (x, y), (at, value) in zip(pixels, one.points, strict=True)
            ]
        elif pixels:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
            body.append(f'<polyline class="{one.css}" points="{path}"><title>{name}</title></polyline>')
    return _picture(title, height, body)


def tick(x: float, y: float, text: str) -> str:
    """A value of the lower axis, inside the picture at both of its ends."""
    anchor = "start" if x < LEFT + 1 else "end" if x > WIDTH - RIGHT - MIN_MARGIN else "middle"
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def timelines(steps: Sequence[StepTimeline], lost_at: Sequence[str], *, title: str) -> str:
    """The work of each worker in consecutive steps, each step from zero on a common scale, one below the other.

    Args:
        lost_at: where each worker's device was lost, if it was.
    """
    lane, gap, heading = 18, 6, 30
    num_workers = max(len(lost_at), 1)
    block = heading + num_workers * (lane + gap) + 10
    height = max(60, len(steps) * block + BOTTOM)
    longest_s = max((span.end_s for step in steps for span in step.spans), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest_s
    body = [BOTH_PAINT]
    if not steps:
        body.append(f'<text class="note" x="{WIDTH / 2}" y="34" text-anchor="middle">no timeline was recorded</text>')
    lengths = sorted((span.end_s - span.start_s for step in steps for span in step.spans), reverse=True)
    smallest_s = max(lengths[MAX_RECTANGLES], 1e-5 * longest_s) if len(lengths) > MAX_RECTANGLES else 0.0
    for index, step in enumerate(steps):
        top = index * block
        last_s = max((span.end_s for span in step.spans), default=0.0)
        body.append(f'<text class="strong" x="4" y="{top + 20}">step {step.step}: {format_seconds(last_s)}</text>')
        for worker in range(num_workers):
            y, spans = top + heading + worker * (lane + gap), [span for span in step.spans if span.worker == worker]
            body.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">w{worker}</text>')
            body.append(
                f'<rect class="idle" x="{LEFT}" y="{y}" width="{last_s * scale:.2f}" height="{lane}">'
                f"<title>idle</title></rect>"
            )
            if any(lost_at[worker : worker + 1]) and not spans:
                words = escape(f"lost at {lost_at[worker]}")
                body.append(f'<text class="note" x="{LEFT + 6}" y="{y + 13}">{words}</text>')
            body += [_rectangle(span, y, scale) for span in spans if span.end_s - span.start_s >= smallest_s]
    body += [tick(LEFT + value * scale, height - 8, TIME.show(value)) for value in TIME.ticks(0.0, longest_s)]
    return _picture(title, height, body)


def _rectangle(span: Span, y: float, scale: float) -> str:
    seconds, css, top, height = span.end_s - span.start_s, span.lane, y, 14
    if span.lane == "compute" and span.kind in DRAWN_NAMES:
        css, name = f"kind-{span.kind}", f"{DRAWN_NAMES[span.kind]}, stage {span.stage}, microbatch {span.microbatch}"
        name += f", {format_seconds(seconds)}"
    elif span.lane == "host":
        css, name = "update", f"{UPDATE_NAME}, {format_seconds(seconds)}"
    elif span.lane in ("up", "down"):  # links are thin lines below the computation
        name, top, height = span.lane, y + (14 if span.lane == "up" else 16), 2
    else:
        return ""
    box = f'x="{LEFT + span.start_s * scale:.2f}" y="{top}" width="{max(seconds * scale, 0.3):.2f}" height="{height}"'
    return f'<rect class="{css}" {box}><title>{name}</title></rect>'


def _picture(title: str, height: int, body: Sequence[str]) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>{''.join(body)}</svg>"
    )


# Predicted against measured: the rows of a table, from a run's report.json.

ComparisonRow = tuple[str, str, str, str]
_NONE = "-"


def comparison(report: Mapping[str, Any]) -> list[ComparisonRow]:
    """(name, predicted, measured, error) of a finished run."""
    predicted, measured = figures(report, "predicted"), figures(report, "measured")
    rows = [
        _row("forward and backward", predicted.get("step_s"), measured.get("pipeline_s"), format_seconds),
        _row("whole step", None, measured.get("step_s"), format_seconds),
        _row("tokens/s", predicted.get("tokens_per_s"), measured.get("tokens_per_s"), "{:,.0f}".format),
        *_lost_rows(report),
        _share("bubble", predicted.get("bubble_ratio"), measured.get("bubble_ratio")),
        _share("launches bind, of the busy time", None, measured.get("launch_bound_ratio")),
        _share("arithmetic, of the cards' (MFU)", None, measured.get("mfu")),
        _row("device memory", predicted.get("device_peak_bytes"), measured.get("device_peak_bytes"), format_bytes),
        _row("host memory", predicted.get("host_bytes"), measured.get("host_peak_bytes"), format_bytes),
    ]
    return [row for row in rows if row[2] != _NONE]


def _lost_rows(report: Mapping[str, Any]) -> Iterator[ComparisonRow]:
    losses = report.get("lost_devices")
    for loss in losses if isinstance(losses, list) else ():
        found = figures({"loss": loss}, "loss")
        for when in ("before", "after") if "worker" in found else ():
            speed = found.get(f"tokens_per_s_{when}")
            yield _row(f"tokens/s {when} worker {found['worker']} was lost", None, speed, "{:,.0f}".format)


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


def comparison_lines(report: Mapping[str, Any]) -> list[str]:
    """The table and the note on its range as lines for a terminal; none where nothing was measured."""
    rows = comparison(report)
    return [*aligned([headings(report), *rows], 1), *filter(None, [range_note(report)])] if rows else []


def headings(report: Mapping[str, Any]) -> ComparisonRow:
    """Headings of the columns of the table."""
    return "", "predicted", f"measured {since_resume(report)}".rstrip(), "off"


def _row(name: str, predicted: float | None, measured: float | None, show: Callable[[float], str]) -> ComparisonRow:
    off = f"{100 * (measured / predicted - 1):+.0f} %" if predicted and measured else _NONE
    return name, show(predicted) if predicted else _NONE, show(measured) if measured else _NONE, off


def _share(name: str, predicted: float | None, measured: float | None) -> ComparisonRow:
    points = 100 * (measured - predicted) if predicted is not None and measured is not None else None
    shown = [_NONE if share is None else f"{100 * share:.1f} %" for share in (predicted, measured)]
    return name, shown[0], shown[1], _NONE if points is None else f"{points:+.1f} points"


NUM_TIMELINES = 3
MAX_EVALUATIONS = 20
MAX_EXPONENT = 700.0
"""Larger losses have no perplexity in a float."""
FAR_OFF = 25.0
"""Per cent, or ten points of a share, from which on a difference is coloured."""
MAX_SAMPLES = 1500
MAX_FILE_BYTES = 64 * 1024**2
"""Largest size of report.json and recipe.yaml."""
SMOOTHING = 20
"""Spans of the loss curve over which it is smoothed."""


@cache
def _css() -> str:
    """Styles of pages, with the colours of pictures."""
    text = files("roundpipe_cli.dashboard").joinpath("page.css").read_text(encoding="utf-8")
    for letter, name in WORK_NAMES.items():
        text = text.replace(f"@{name.upper()}", WORK_COLOURS[letter])
    return text.replace("@BOTH", BOTH_ID)


def report_page(folder: Path) -> str:
    """The page of the run in an output directory, whether it is finished or not.

    Raises:
        RefusedError: there is no run in it.
    """
    _, events = RunFiles(folder).poll()
    return page(events, read_report(folder), _text(folder / "recipe.yaml"))


def read_report(folder: Path) -> dict[str, Any]:
    """Content of report.json; empty where there is none yet."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(_text(folder / REPORT_NAME))
        if isinstance(value, dict):
            return value
    return {}


def _text(path: Path) -> str:
    try:
        return read_regular(path, MAX_FILE_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise RefusedError(f"a file of the run cannot be read: {error.strerror}", where=str(path)) from error


def page(events: Sequence[TimedEvent], report: Mapping[str, Any], recipe: str) -> str:
    """The page of a run's events, its report.json, which may be empty, and the text of its resolved recipe."""
    state = fold_all(events)
    title = state.run.title if state.run else str(report.get("model", "run"))
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(_subtitle(state))}</p>',
        f'<p class="sub">{escape(_made_by(state, report))}</p>',
        _cards(state, report),
        _section("Loss", *_loss(state)),
        _evaluations(state),
        _rates(events),
        _comparison(report),
        _section("Workers", _workers(events, state), f"{_waiting(state)}{_HEAD_NOTE}{_WORK_LEGEND}"),
        _section("Memory in GiB", *_memory(events)),
        _folded("Recipe", counted(len(recipe.splitlines()), "line"), recipe),
        _messages(state),
    ]
    return document(f"{title}: report", sections)


def document(title: str, sections: Sequence[str]) -> str:
    """A page of HTML sections, with the styles of a run's report; empty ones are left out."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>\n{_css()}</style></head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


def _subtitle(state: DashboardState) -> str:
    run = state.run
    if run is None:
        return "no step was recorded"
    status = "finished" if state.finished else f"stopped: {state.stopped}" if state.stopped else "not finished"
    done = state.step.step if state.step else run.first_step
    workers = f"{counted(len(run.devices), 'worker')} ({', '.join(run.devices)})"
    return f"{run.settings}, {workers}, step {done} of {run.num_steps}, {status}"


def _cards(state: DashboardState, report: Mapping[str, Any]) -> str:
    step = state.step
    if step is None:
        return ""
    measured = figures(report, "measured")
    tokens_per_s = measured.get("tokens_per_s") or step.tokens_per_s
    bubble = measured.get("bubble_ratio") or state.median_bubble.value
    cards = [("last loss", format_loss(step.loss))]
    if state.evaluations:
        cards.append(("last evaluation", format_loss(state.evaluations[-1][1])))
    cards += [(f"last {name}", value) for name, value in compared(step.preference)]
    since = f", {since_resume(report)}" if since_resume(report) else ""
    of = since if measured else ", last step"
    cards += [
        (f"tokens per second{of}", f"{tokens_per_s:,.0f}"),
        (f"time per step{of}", format_seconds(measured.get("step_s") or step.step_s)),
        (f"bubble, median of steps{since}", f"{100 * bubble:.1f} %"),
        *arithmetic(measured.get("launch_bound_ratio", step.launch_bound_ratio), measured.get("mfu", step.mfu)),
    ]
    if state.finished:
        cards.append(("training time", format_seconds(state.finished.seconds)))
    items = "".join(f'<div class="card"><span>{escape(name)}</span><b>{escape(text)}</b></div>' for name, text in cards)
    return f'<div class="cards">{items}</div>'


def _section(heading: str, picture: str, legend: str = "") -> str:
    return f'<h2>{escape(heading)}</h2>{legend}<div class="scroll">{picture}</div>'


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML, below headings that are text."""
    lines = [
        [f"<th>{escape(heading)}</th>" for heading in headings],
        *([f"<td>{cell}</td>" for cell in row] for row in rows),
    ]
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in lines)
    return f'<div class="scroll"><table>{body}</table></div>'


def _legend(*entries: tuple[str, str]) -> str:
    items = " ".join(
        f'<span><i style="background: var(--{colour})"></i>{escape(name)}</span>' for colour, name in entries
    )
    return f'<div class="legend">{items}</div>'


UPDATE_NAME = "waits for the update"
_HEAD_NOTE = (
    '<p class="sub">The stage that ends with the loss computes forward and backward in one and has both colours.</p>'
)
_WORK_LEGEND = _legend(
    *((letter.lower(), name) for letter, name in WORK_NAMES.items()),
    ("both", BOTH_NAME),
    ("idle", "idle"),
    ("update", UPDATE_NAME),
    ("wait", "upload"),
    ("faint", "download"),
)


def _made_by(state: DashboardState, report: Mapping[str, Any]) -> str:
    """When, with which versions, where and by which command; what is not known is left out."""
    found = report.get("machine")
    machine = found if isinstance(found, dict) else {}
    versions = (("roundpipe", report.get("tool_version")), ("torch", machine.get("torch")))
    parts = []
    if state.run is not None:
        parts.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(state.run.time_s)))
    parts += [f"{name} {version}" for name, version in versions if version]
    parts += [str(item) for item in (machine.get("processor"), report.get("command")) if item]
    return ", ".join(parts)


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Exponential means of the values, over a twentieth of the points."""
    share = 2 / (max(1.0, len(points) / SMOOTHING) + 1)
    means = accumulate((value for _, value in points), lambda mean, value: mean + share * (value - mean))
    return [(at, mean) for (at, _), mean in zip(points, means, strict=True)]


def _loss(state: DashboardState) -> tuple[str, str]:
    points, entries = state.losses.all_points, [("faint", "training"), ("f", "training, smoothed")]
    lines = [Series("loss", points, "raw"), Series("smoothed loss", smoothed(points), "c1")]
    if state.evaluations:
        lines.append(Series("evaluation", state.evaluations, "c4", marks=True))
        entries.append(("wait", "evaluation"))
    return curves(lines, STEPS, title="Loss by step"), _legend(*entries)


def _evaluations(state: DashboardState) -> str:
    """A table of the newest evaluations, the best one in bold."""
    if not state.evaluations:
        return ""
    best = min(loss for _, loss in state.evaluations)
    rows = []
    for step, loss in state.evaluations[-MAX_EVALUATIONS:]:
        texts = format_loss(loss), f"{math.exp(loss):.4g}" if loss < MAX_EXPONENT else "-"
        rows.append([f"{step:.0f}", *(f"<b>{text}</b>" if loss == best else text for text in texts)])
    left_out = len(state.evaluations) - len(rows)
    note = f'<p class="sub">{counted(left_out, "earlier evaluation")} left out.</p>' if left_out else ""
    return f"<h2>Evaluations</h2>{html_table(('step', 'loss', 'perplexity'), rows)}{note}"


def _rates(events: Sequence[TimedEvent]) -> str:
    points = [(float(event.step), event.learning_rate) for _, event in events if isinstance(event, StepFinished)]
    points = points[:: max(1, len(points) // MAX_SAMPLES)]
    if not any(rate > 0 for _, rate in points):
        return ""
    power = math.floor(math.log10(max(rate for _, rate in points)))  # short numbers fit beside the axis
    scaled = [(step, rate / 10.0**power) for step, rate in points]
    picture = curves([Series("learning rate", scaled, "c1")], STEPS, title="Learning rate", height=140, from_zero=True)
    return _section(f"Learning rate, in 1e{power}", picture)


def _workers(events: Sequence[TimedEvent], state: DashboardState) -> str:
    steps = [event for _, event in events if isinstance(event, StepTimeline)][-NUM_TIMELINES:]
    lost_at = [worker.lost_at for worker in state.workers]
    return timelines(steps, lost_at, title=f"What the workers did in {counted(len(steps), 'step')}")


def _waiting(state: DashboardState) -> str:
    found = longest_waiting(state)
    return f'<p class="sub">{"<br>".join(map(escape, found.lines()))}</p>' if found is not None else ""


def _memory(events: Sequence[TimedEvent]) -> tuple[str, str]:
    """Picture and legend: the program, the host, the fullest device and what there is of each, in GiB over time."""
    started = [event.time_s for _, event in events if isinstance(event, RunStarted)]
    samples = [event for _, event in events if isinstance(event, Sample)]
    samples = samples[:: max(1, len(samples) // MAX_SAMPLES)]
    zero_s = min([*started[:1], *(sample.time_s for sample in samples[:1])], default=0.0)
    lines = {
        "this program": ("c1", "f"),
        "all programs": ("c2", "b"),
        "host in all": ("c2 limit", "b"),
        "fullest device": ("c3", "r"),
        "device in all": ("c3 limit", "r"),
    }
    values: dict[str, list[tuple[float, float]]] = {name: [] for name in lines}
    for sample in samples:
        used = [device.used_bytes for device in sample.devices if device.used_bytes is not None]
        limits = [device.total_bytes for device in sample.devices if device.total_bytes]
        in_bytes = (sample.process_bytes, sample.host_used_bytes, sample.host_total_bytes)
        for name, num_bytes in zip(lines, (*in_bytes, max(used, default=None), min(limits, default=None)), strict=True):
            if num_bytes is not None:
                values[name].append((sample.time_s - zero_s, num_bytes / GIB))
    there = [(name, css, colour) for name, (css, colour) in lines.items() if values[name]]
    entries = [(colour, f"{name} (dashed)" if "limit" in css else name) for name, css, colour in there]
    shown = [Series(name, values[name], css) for name, css, _ in there]
    picture = curves(shown, TIME, title="Memory over time", height=220, from_zero=True)
    return picture, _legend(*entries) if entries else ""


def _comparison(report: Mapping[str, Any]) -> str:
    rows = [[*map(escape, row[:-1]), _coloured(row[-1])] for row in comparison(report)]
    if not rows:
        return ""
    note = f"<p>{escape(range_note(report))}</p>" if range_note(report) else ""
    return f"<h2>Predicted and measured</h2>{html_table(headings(report), rows)}{note}"


def _coloured(off: str) -> str:
    """A difference such as `+124 %` or `-3.1 points`, marked where it is far off."""
    amount, _, unit = off.partition(" ")
    far = {"%": FAR_OFF, "points": FAR_OFF / 2.5}.get(unit)
    return f'<span class="off">{off}</span>' if far is not None and abs(float(amount)) > far else off


def _messages(state: DashboardState) -> str:
    lines = "\n".join(message.text for message in state.messages)
    return _folded("Messages", counted(len(state.messages), "message"), lines)


def _folded(heading: str, summary: str, text: str) -> str:
    if not text:
        return ""
    return f"<h2>{heading}</h2><details><summary>{summary}</summary><pre>{escape(text)}</pre></details>"
