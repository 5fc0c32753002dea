"""report.html: a run on one page without network or script. Everything comes from the run's files.

It has only content of the output directory: figures, messages, the resolved recipe. Recipes have no secrets.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from roundpipe_cli.dashboard.comparison import comparison, figures, headings, range_note, since_resume
from roundpipe_cli.dashboard.replay import REPORT_NAME, RunFiles, TimedEvent
from roundpipe_cli.dashboard.state import DashboardState, fold_all
from roundpipe_cli.dashboard.svg import STEPS, TIME, Series, curves, timelines
from roundpipe_cli.dashboard.waiting import CAUSES, longest_waiting
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import RunStarted, Sample, StepTimeline
from roundpipe_cli.files import read_regular, write_named
from roundpipe_cli.schedule.pictures import BOTH_ID, BOTH_NAME, WORK_COLOURS, WORK_NAMES
from roundpipe_cli.units import GIB, counted, format_loss, format_seconds

NUM_TIMELINES = 3
MAX_SAMPLES = 1500
MAX_FILE_BYTES = 64 * 1024**2
"""Largest size of report.json and recipe.yaml."""
SMOOTHING = 20
"""Spans of the loss curve over which it is smoothed."""

_CSS = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2024; --faint: #667; --line: #dde; --card: #f6f7f9;
  --f: FORWARD; --r: RECOMPUTE; --b: BACKWARD; --wait: #c9507a; --idle: #e6e8ec;
  --both: linear-gradient(var(--f) 50%, var(--b) 50%); }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e6e8ea; --faint: #9aa; --line: #333a41;
  --card: #1c2126; --idle: #2a3037; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0.5rem 0 0; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
.sub { color: var(--faint); margin: 0 0 1rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 0.6rem; }
.card { background: var(--card); border-radius: 0.5rem; padding: 0.6rem 0.8rem; }
.card b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.card span, .legend { color: var(--faint); font-size: 0.85rem; }
.scroll { overflow-x: auto; }
svg { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; fill: var(--text); }
svg .grid { stroke: var(--line); } svg .note { fill: var(--faint); } svg .strong { font-weight: 600; }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.c1 { stroke: var(--f); } .c2 { stroke: var(--b); } .c3 { stroke: var(--r); } .c4 { stroke: var(--wait); }
.raw { stroke: var(--faint); stroke-width: 1; } .limit { stroke-dasharray: 6 4; stroke-width: 1.2; }
.dot { stroke: none; } .c1.dot { fill: var(--f); } .c2.dot { fill: var(--b); } .c3.dot { fill: var(--r); }
.c4.dot { fill: var(--wait); }
.idle { fill: var(--idle); } .kind-F { fill: var(--f); } .kind-R { fill: var(--r); } .kind-B { fill: var(--b); }
.kind-H { fill: url(#BOTH_ID); }
.up { fill: var(--wait); } .down { fill: var(--faint); }
.legend span { white-space: nowrap; margin-right: 0.7em; }
.legend i { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px; margin-right: 0.3em; }
@media (max-width: 40rem) { svg { font-size: 20px; } table { font-size: 0.9rem; } }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: right; padding: 0.3rem 0.4rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
td:first-child, th:first-child { text-align: left; padding-left: 0; white-space: normal; overflow-wrap: normal; }
@media (max-width: 27rem) { table { font-size: 0.8rem; } td, th { padding: 0.3rem 0.15rem; } }
pre { background: var(--card); border-radius: 0.5rem; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem;
  white-space: pre-wrap; }
details summary { cursor: pointer; }
"""
_CSS = _CSS.replace("BOTH_ID", BOTH_ID)
for _letter, _name in WORK_NAMES.items():
    _CSS = _CSS.replace(_name.upper(), WORK_COLOURS[_letter])


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
    """The page as a string.

    Args:
        events: (time, event), oldest first.
        report: what report.json holds; may be empty.
        recipe: the resolved recipe's text.
    """
    state = fold_all(events)
    title = state.run.title if state.run else str(report.get("model", "run"))
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(_subtitle(state))}</p>',
        f'<p class="sub">{escape(_made_by(state, report))}</p>',
        _cards(state, report),
        _comparison(report),
        _section("Loss", _loss(state), _loss_legend(state)),
        _section("Workers", _workers(events, state), f"{_waiting(state)}{_HEAD_NOTE}{_WORK_LEGEND}"),
        _section("Memory in GiB", *_memory(events)),
        f"<h2>Recipe</h2><pre>{escape(recipe) or 'not found'}</pre>",
        _messages(state),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}: report</title><style>{_CSS}</style></head>\n<body>\n"
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
    if "reward_margin" in (step.preference or {}):
        cards.append(("last reward margin", f"{(step.preference or {})['reward_margin']:.3g}"))
    since = f", {since_resume(report)}" if since_resume(report) else ""
    cards += [
        (f"tokens per second{since}", f"{tokens_per_s:,.0f}"),
        (f"time per step{since}", format_seconds(measured.get("step_s") or step.step_s)),
        (f"bubble, median of steps{since}", f"{100 * bubble:.1f} %"),
    ]
    if state.finished:
        cards.append(("training time", format_seconds(state.finished.seconds)))
    items = "".join(f'<div class="card"><span>{escape(name)}</span><b>{escape(text)}</b></div>' for name, text in cards)
    return f'<div class="cards">{items}</div>'


def _section(heading: str, picture: str, legend: str = "") -> str:
    return f'<h2>{escape(heading)}</h2>{legend}<div class="scroll">{picture}</div>'


def _legend(*entries: tuple[str, str]) -> str:
    items = " ".join(
        f'<span><i style="background: var(--{colour})"></i>{escape(name)}</span>' for colour, name in entries
    )
    return f'<div class="legend">{items}</div>'


_HEAD_NOTE = (
    '<p class="sub">The stage that ends with the loss computes forward and backward in one and has both colours.</p>'
)
_WORK_LEGEND = _legend(
    ("f", "forward"),
    ("r", "recompute"),
    ("b", "backward"),
    ("both", BOTH_NAME),
    ("idle", "idle"),
    ("wait", "upload"),
    ("faint", "download"),
)


def _made_by(state: DashboardState, report: Mapping[str, Any]) -> str:
    """When, with which versions, where and by which command; what is not known is left out."""
    machine = report.get("machine") or {}
    versions = (("roundpipe", report.get("tool_version")), ("torch", machine.get("torch")))
    parts = []
    if state.run is not None:
        parts.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(state.run.time_s)))
    parts += [f"{name} {version}" for name, version in versions if version]
    parts += [str(item) for item in (machine.get("processor"), report.get("command")) if item]
    return ", ".join(parts)


def _loss_legend(state: DashboardState) -> str:
    entries = [("faint", "training"), ("f", "training, smoothed")]
    return _legend(*entries, *([("wait", "evaluation")] if state.evaluations else []))


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Exponential means of the values, over a twentieth of the points."""
    share = 2 / (max(1.0, len(points) / SMOOTHING) + 1)
    mean, found = 0.0, []
    for index, (at, value) in enumerate(points):
        mean = value if index == 0 else mean + share * (value - mean)
        found.append((at, mean))
    return found


def _loss(state: DashboardState) -> str:
    points = state.losses.all_points
    lines = [Series("loss", points, "raw"), Series("smoothed loss", smoothed(points), "c1")]
    if state.evaluations:
        lines.append(Series("evaluation", state.evaluations, "c4", marks=True))
    return curves(lines, STEPS, title="Loss by step")


def _workers(events: Sequence[TimedEvent], state: DashboardState) -> str:
    steps = [event for _, event in events if isinstance(event, StepTimeline)][-NUM_TIMELINES:]
    devices = state.run.devices if state.run else ()
    return timelines(steps, devices, title=f"What the workers did in {counted(len(steps), 'step')}")


def _waiting(state: DashboardState) -> str:
    """Why the worker that waited most in the newest step did so."""
    found = longest_waiting(state)
    if found is None:
        return ""
    meanings = (f"{cause}: {CAUSES[cause]}" for cause in found.by_cause_s)
    return f'<p class="sub">{"<br>".join(map(escape, (found.text(), *meanings)))}</p>'


def _memory(events: Iterable[TimedEvent]) -> tuple[str, str]:
    """Picture and legend: the program, the host, the fullest device and what there is of each, in GiB over time."""
    started: list[float] = []
    samples: list[Sample] = []
    for _, event in events:
        if isinstance(event, RunStarted):
            started.append(event.time_s)
        elif isinstance(event, Sample):
            samples.append(event)
    samples = samples[:: max(1, len(samples) // MAX_SAMPLES)]
    zero_s = min([*started[:1], *(sample.time_s for sample in samples[:1])], default=0.0)
    lines = {
        "this program": ("c1", "f"),
        "host in use": ("c2", "b"),
        "host in all": ("c2 limit", "b"),
        "fullest device": ("c3", "r"),
        "device in all": ("c3 limit", "r"),
    }
    values: dict[str, list[tuple[float, float]]] = {name: [] for name in lines}
    for sample in samples:
        since_s = sample.time_s - zero_s
        values["this program"].append((since_s, sample.process_bytes / GIB))
        values["host in use"].append((since_s, sample.host_used_bytes / GIB))
        values["host in all"].append((since_s, sample.host_total_bytes / GIB))
        used = [device.used_bytes for device in sample.devices if device.used_bytes is not None]
        limits = [device.total_bytes for device in sample.devices if device.total_bytes]
        if used:
            values["fullest device"].append((since_s, max(used) / GIB))
        if limits:
            values["device in all"].append((since_s, min(limits) / GIB))
    shown = [Series(name, values[name], css) for name, (css, _) in lines.items() if values[name]]
    names = ((lines[series.name], series.name) for series in shown)
    entries = [(colour, f"{name} (dashed)" if "limit" in css else name) for (css, colour), name in names]
    legend = _legend(*entries) if entries else ""
    picture = curves(
        shown,
        TIME,
        title="Memory over time",
        height=220,
        from_zero=True,
    )
    return picture, legend


def _comparison(report: Mapping[str, Any]) -> str:
    rows = comparison(report)
    if not rows:
        return ""
    head = "<tr>" + "".join(f"<th>{escape(heading)}</th>" for heading in headings(report)) + "</tr>"
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    note = f"<p>{escape(range_note(report))}</p>" if range_note(report) else ""
    return f'<h2>Predicted and measured</h2><div class="scroll"><table>{head}{body}</table></div>{note}'


def _messages(state: DashboardState) -> str:
    if not state.messages:
        return ""
    lines = "\n".join(escape(message.text) for message in state.messages)
    count = counted(len(state.messages), "message")
    return f"<h2>Messages</h2><details><summary>{count}</summary><pre>{lines}</pre></details>"


def write_page(folder: Path, path: Path) -> None:
    """Write the page of the run in `folder`.

    Raises:
        RefusedError: no run there.
        ResourceError: the disk is full or failing.
    """
    write_named(path, report_page(folder))
