"""A screen from a state: figures, lanes and workers as a pure function of state, time and size.

header and progress           2 lines
workers                       framed where there is room, down to a line each
curve | figures               what is left
messages                      2 lines and more
keys and legend               1 line
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.text import Text

from roundpipe_cli.dashboard.chart import chart, large
from roundpipe_cli.dashboard.state import SIMULATED, DashboardState, WorkerView, compared, window_s
from roundpipe_cli.dashboard.theme import ASCII, Theme, beside, fit, framed, spread
from roundpipe_cli.dashboard.waiting import longest_waiting
from roundpipe_cli.events import Span
from roundpipe_cli.schedule.pictures import BOTH, WORK_NAMES
from roundpipe_cli.units import GIB, escape_controls, format_clock, format_loss, format_seconds

# The figures of a run at the side of its curve, the most important first.


def figure_lines(state: DashboardState, height: int, width: int, theme: Theme, *, has_loss: bool = False) -> list[Text]:
    """At most `height` lines of `width` columns: a name and a value each.

    Args:
        has_loss: the loss first; elsewhere the curve's title has it.
    """
    rows = [*_step_rows(state, has_loss), *_machine_rows(state)]
    return [_row(name, value, note, width, theme=theme) for name, value, note in rows[:height]]


def _row(name: str, value: str, note: str, width: int, *, theme: Theme) -> Text:
    if len(name) + len(value) + len(note) + 1 > width:  # a note adds to the value; the unit is in the value
        note = ""
    gap = max(1, width - len(name) - len(value) - len(note))
    return Text.assemble((name, theme.faint), " " * gap, (value, "bold"), (note, theme.faint))


def _step_rows(state: DashboardState, has_loss: bool) -> list[tuple[str, str, str]]:
    step = state.step
    if step is None:
        return [("tokens/s", "-", ""), ("step", "-", ""), ("bubble", "-", "")]
    median = f"{100 * state.median_bubble.value:.1f} %"
    rows = [
        ("tokens/s", _grouped(step.tokens_per_s), ""),
        ("step", format_seconds(step.step_s), ""),
        ("bubble", f"{100 * step.bubble_ratio:.1f} %", "" if state.is_simulated else f" median {median}"),
    ]
    if has_loss and state.is_over and not state.is_simulated:  # the end of a run shows the median below
        rows = [(f"{name}, last", value, "") for name, value, _ in rows[:2]] + [("bubble, median", median, "")]
    if state.is_simulated:
        return rows
    if has_loss or (state.run is not None and state.run.goal != "loss"):
        rows.insert(0 if has_loss else len(rows), ("loss", format_loss(step.loss), ""))
    more = (*compared(step.preference), *arithmetic(step.launch_bound_ratio, step.mfu))
    rows += [(name, value, "") for name, value in more]
    if state.run is None or state.run.goal == "loss":
        rows += [("learning rate", f"{step.learning_rate:.2e}", ""), ("gradient norm", f"{step.grad_norm:.3g}", "")]
    return rows


def arithmetic(launch_bound_ratio: float | None, mfu: float | None) -> list[tuple[str, str]]:
    """(name, value): what a GPU's share of busy time does not tell, as one that waits for launches counts as busy."""
    bound = "-" if launch_bound_ratio is None else f"{100 * launch_bound_ratio:.1f} %"
    return [("launches bind", bound), ("arithmetic, MFU", "not known" if mfu is None else f"{100 * mfu:.1f} %")]


def _machine_rows(state: DashboardState) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    sample, step = state.sample, state.step
    if sample is not None:
        total = f" of {sample.host_total_bytes / GIB:.3g} GiB"
        rows.append(("host memory", f"{sample.process_bytes / GIB:.1f} GiB", total))
        rows.append(("all programs", f"{sample.host_used_bytes / GIB:.1f} GiB", ""))
    if step is not None and step.upload_bytes:
        rows.append(("upload", f"{step.upload_bytes / step.step_s / 1e9:.1f} GB/s", ""))
    if step is not None and step.device_peak_bytes and all(w.sample.used_bytes is None for w in state.workers):
        rows.append(("device peak", f"{step.device_peak_bytes / GIB:.2f} GiB", ""))
    if step is not None:
        rows.append(("tokens", _grouped(step.tokens), " this step"))
    return rows


def _grouped(value: float) -> str:
    """Thousands apart, as `plan` writes them: `12,345`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# The lane of a worker: what it did in each short slice of the last seconds, in proportion, as characters.
#
# forward        recompute and backward           idle
# FFFFFFFFFF.....RRBBBRRBBBRRBBB..........uuuuu...~~~FFFF        (without colour; ~ waits for an upload, u an update)

IDLE, WAIT, UPDATE = ".", "~", "u"
ROUNDING = 1e-6
"""Smaller shares are rounding errors."""


def slices(spans: Sequence[Span], num_slices: int, slice_s: float, end_index: int) -> str:
    """One letter per slice; slice k of the world lasts from k to k + 1 times `slice_s`.

    A slice that several kinds of work share shows one of them. What it could not show of the others is carried over to
    the next slice that has them, so that over a lane each kind has as many letters as its share of the time.

    Slices are bound to the clock and not to the present, and so is the slice where carrying begins: a moving lane does
    not flicker.

    Args:
        spans: of one worker, on the run's clock.
        end_index: of the world's slice after the last one shown.
    """
    if num_slices <= 0:
        return ""
    first = end_index - num_slices
    begin = first // num_slices * num_slices
    shares = _shares(spans, begin, end_index, slice_s)
    letters = _letters(shares)[first - begin :]
    return "".join("FB"[(first + at) % 2] if one == BOTH else one for at, one in enumerate(letters))


def _shares(spans: Sequence[Span], begin: int, end: int, slice_s: float) -> list[dict[str, float]]:
    """Shares of each slice by use: kinds of work, and the rest as waiting or idle."""
    compute: list[dict[str, float]] = [{} for _ in range(end - begin)]
    waits = [{"up": 0.0, "host": 0.0} for _ in compute]
    for span in spans:
        if span.end_s <= begin * slice_s or span.lane not in ("compute", "up", "host"):
            continue
        start_at, end_at = span.start_s / slice_s - begin, span.end_s / slice_s - begin
        for index in range(max(0, math.floor(start_at)), min(len(compute), math.ceil(end_at))):
            share = min(end_at, index + 1) - max(start_at, index)
            if span.lane in waits[index]:
                waits[index][span.lane] += share
            else:
                compute[index][span.kind] = compute[index].get(span.kind, 0.0) + share
    for shares, wait in zip(compute, waits, strict=True):
        idle = 1.0 - sum(shares.values())
        if idle > ROUNDING:
            shares[UPDATE if wait["host"] > 0.5 * idle else WAIT if wait["up"] > 0.5 * idle else IDLE] = idle
    return compute


def _letters(shares: Sequence[Mapping[str, float]]) -> str:
    """For each slice, the kind of work in it with most time not yet shown."""
    owed: dict[str, float] = {}
    letters = []
    for slice_ in shares:
        for kind, share in slice_.items():
            owed[kind] = owed.get(kind, 0.0) + share
        letter = max(slice_, key=lambda kind: (owed[kind], slice_[kind]))
        owed[letter] -= 1.0
        letters.append(letter)
    return "".join(letters)


def lane(
    spans: Sequence[Span], end_s: float, seconds: float, width: int, *, theme: Theme, num_lines: int = 1
) -> list[Text]:
    """The last `seconds` before `end_s` of one worker in `width` characters, with colour two slices in each.

    Args:
        num_lines: equal ones, but for the thin line where the worker is idle.
    """
    if width <= 0:
        return [Text()] * num_lines
    if not theme.has_colour:
        slice_s = seconds / width
        return [Text(slices(spans, width, slice_s, math.floor(end_s / slice_s)))] * num_lines
    slice_s = seconds / width / 2
    end_index = math.floor(end_s / slice_s / 2) * 2
    letters = slices(spans, 2 * width, slice_s, end_index)
    idle = [" "] * num_lines
    idle[num_lines // 2] = theme.glyphs.idle_of_two if num_lines == 2 else theme.glyphs.idle
    return [_line(letters, width, idle[line], theme) for line in range(num_lines)]


def _line(letters: str, width: int, idle: str, theme: Theme) -> Text:
    text = Text()
    pairs = (letters[index : index + 2] for index in range(0, 2 * width, 2))
    for pair, run in groupby(pairs):  # equal characters are one piece: fewer bytes for the terminal
        character, style = _block(pair, idle, theme)
        text.append(character * len(list(run)), style)
    return text


def _block(pair: str, idle: str, theme: Theme) -> tuple[str, str]:
    left, right = pair[0], pair[1]
    glyphs, colours = theme.glyphs, theme.kinds
    if left in colours and right in colours:
        return (glyphs.full, colours[left]) if left == right else (glyphs.left, f"{colours[left]} on {colours[right]}")
    if left in colours or right in colours:
        return (glyphs.left, colours[left]) if left in colours else (glyphs.right, colours[right])
    if UPDATE in pair:
        return glyphs.wait, theme.update
    return (glyphs.wait, theme.wait) if WAIT in pair else (idle, theme.faint)


# The workers' part of a screen: the largest of several layouts that fits.
#
# framed      title, lane (of several lines where there is room), figures, bottom
# two lines   lane, figures
# one line    name, lane, busy share, memory
#
# A simulated run has lanes without figures between them, in one column: the staircase of the method.

RESERVED_LINES = 9
"""Lines of the room that is left, for curve and messages; a look that takes them is chosen only if none leaves them."""
MIN_COLUMN = 58


@dataclass(frozen=True)
class Scene:
    """The workers' part of a screen, of any size."""

    workers: Sequence[WorkerView]
    end_s: float
    """End of the lanes, on the run's clock: up to when it is known what workers did."""
    seconds: float
    """Shown in a lane."""
    theme: Theme


_Look = Callable[[Scene, int, int], list[Text]]


def workers_block(scene: Scene, width: int, height: int, *, is_staircase: bool = False) -> list[Text]:
    """At most `height` lines; workers that have no room at all are counted in the last line.

    Args:
        is_staircase: rather one column of lanes, as high as there is room for.
    """
    workers = scene.workers
    if not workers or height <= 0:
        return []
    heights = (3, 2, 1) if scene.theme.has_colour else (1,)
    looks = [*((lanes + 3, _framed(lanes)) for lanes in heights), (2, _two_lines), (1, _named(1))]
    columns = [1] if width < 2 * MIN_COLUMN else [1, 2] if width < 4 * MIN_COLUMN else [1, 2, 4]
    ways = [(lines, look, count) for lines, look in looks for count in columns if not (count > 1 and lines == 6)]
    candidates = [(RESERVED_LINES if height >= 18 else 0, *way) for way in ways] + [(0, *way) for way in ways]
    if is_staircase:
        stairs = [(RESERVED_LINES if lanes > 1 else 0, lanes, _named(lanes), 1) for lanes in heights]
        candidates = [*stairs, *candidates]
    for reserved, lines, look, count in candidates:
        if lines * -(-len(workers) // count) <= height - reserved:
            return _grid(scene, look, count, width)
    shown = max(0, height - 1) * columns[-1]
    some = replace(scene, workers=workers[:shown])
    rest = Text(f"  and {len(workers) - shown} more workers: a higher terminal shows them", style=scene.theme.faint)
    return [*_grid(some, _named(1), columns[-1], width), rest]


def _grid(scene: Scene, look: _Look, count: int, width: int) -> list[Text]:
    widths = [width // count + (index < width % count) for index in range(count)]
    lines: list[Text] = []
    for start in range(0, len(scene.workers), count):
        members = range(start, min(start + count, len(scene.workers)))
        blocks = [look(scene, index, widths[index - start]) for index in members]
        lines += beside(blocks, widths[: len(blocks)], scene.theme)
    return lines


def _lane(scene: Scene, worker: WorkerView, width: int, num_lines: int = 1) -> list[Text]:
    if worker.lost_at:
        said = Text(f"lost at {escape_controls(worker.lost_at)}", style=scene.theme.bad)
        return [fit(said if at == (num_lines - 1) // 2 else Text(""), width, scene.theme) for at in range(num_lines)]
    spans = worker.spans if worker.running is None else (*worker.spans, worker.running)
    return lane(spans, scene.end_s, scene.seconds, width, theme=scene.theme, num_lines=num_lines)


def _framed(num_lanes: int) -> _Look:
    def look(scene: Scene, index: int, width: int) -> list[Text]:
        worker, theme = scene.workers[index], scene.theme
        title = Text.assemble((f"worker {index}", "bold"), f" {theme.glyphs.between} {escape_controls(worker.device)}")
        body = [*_lane(scene, worker, width - 4, num_lanes), _joined(_worker_figures(worker, theme), width - 4)]
        return framed(title, f"last {format_seconds(scene.seconds)}", body, width, theme=theme)

    return look


def _two_lines(scene: Scene, index: int, width: int) -> list[Text]:
    worker, theme = scene.workers[index], scene.theme
    name = _name_of(scene, index)
    indent = name.cell_len
    return [
        Text.assemble(name, *_lane(scene, worker, width - indent - 1)),
        Text.assemble(" " * indent, _joined(_worker_figures(worker, theme), width - indent - 1)),
    ]


def _named(num_lanes: int) -> _Look:
    """A lane with its name, share and memory beside one of its lines, and no line between two lanes."""

    def look(scene: Scene, index: int, width: int) -> list[Text]:
        worker, middle = scene.workers[index], (num_lanes - 1) // 2
        name, tail, sample = _name_of(scene, index), Text(f" {_percent(worker.utilization)}"), worker.sample
        if sample.used_bytes is not None and sample.total_bytes:
            tail.append(f" {sample.used_bytes / GIB:4.1f}/{sample.total_bytes / GIB:.0f} GiB")
        tail.append(" ")
        blank, after = Text(" " * name.cell_len), Text(" " * tail.cell_len)
        lanes = _lane(scene, worker, width - name.cell_len - tail.cell_len, num_lanes)
        return [
            Text.assemble(name if at == middle else blank, line, tail if at == middle else after)
            for at, line in enumerate(lanes)
        ]

    return look


def _name_of(scene: Scene, index: int) -> Text:
    """Number and device, as wide as the longest of them: lanes begin below each other."""
    number = len(str(len(scene.workers) - 1))
    devices = [escape_controls(worker.device) for worker in scene.workers]
    name = Text.assemble((f" {index:>{number}} ", "bold"), f"{devices[index]} ")
    return fit(name, max(10, number + 3 + max(map(len, devices))), scene.theme)


def _percent(share: float | None) -> str:
    return f"{100 * share:3.0f} %" if share is not None else "  - %"


def _worker_figures(worker: WorkerView, theme: Theme) -> list[Text]:
    """Share of the last step that it computed, and what the device tells."""
    if worker.lost_at:
        return []
    now, mean = worker.utilization, worker.mean_utilization.value
    parts, sample = [Text("first step", style=theme.faint)], worker.sample
    if now is not None:
        mean_of = (f" mean {_percent(mean).strip()}", theme.faint)
        parts = [Text.assemble("busy ", (_percent(now).strip(), "bold"), mean_of)]
    if sample.used_bytes is not None and sample.total_bytes:
        parts.append(Text(f"{sample.used_bytes / GIB:.1f} of {sample.total_bytes / GIB:.0f} GiB"))
    if sample.temperature_c is not None:
        parts.append(Text(f"{sample.temperature_c:.0f}{theme.glyphs.degree}"))
    if sample.power_w is not None:
        parts.append(Text(f"{sample.power_w:.0f} W"))
    return parts


def _joined(parts: Sequence[Text], width: int) -> Text:
    """The parts that fit, three columns apart where there is room, otherwise two or one."""
    for gap in (3, 2, 1):
        if sum(part.cell_len + gap for part in parts) - gap <= width:
            return Text(" " * gap).join(parts)
    line = Text()
    for part in parts:
        if line.cell_len + 1 + part.cell_len <= width:
            line.append(" " if line.cell_len else "").append_text(part)
    return line


MIN_WIDTH, MIN_HEIGHT = 40, 10
"""On smaller screens only the header is shown."""
FIGURES_WIDTH = 32
MIN_CURVE_HEIGHT = 7
"""With its frame."""
MIN_MESSAGES = 2
NEWS_S = 5.0
"""A message without room of its own is shown for this long, in place of the last figures."""
NARROW = 66
MIN_LEFT = 12
"""Columns for the program's name."""
MIN_BAR = 10
"""Columns of the bar of progress, where epoch and time of day leave it them."""
SHORT_NAMES = {"F": "fwd", "R": "rec", "B": "bwd"}


def screen(
    state: DashboardState, now_s: float, width: int, height: int, theme: Theme, keys: Sequence[tuple[str, str]] = ()
) -> list[Text]:
    """Exactly `height` lines of exactly `width` columns.

    Args:
        now_s: of the run's clock.
        keys: (key, what it does), shown at the bottom.
    """
    head = [header(state, now_s, width, theme), progress(state, now_s, width, theme)]
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return _exactly(head, width, height, theme)
    updates = any(span.lane == "host" for worker in state.workers for span in worker.spans)
    if state.paused:  # the key that paused the run continues it
        keys = [(key, "resume" if meaning == "pause" else meaning) for key, meaning in keys]
    foot = [footer(keys, width, theme, updates=updates)]
    room = height - len(head) - len(foot)
    scene = Scene(state.workers, state.seen_s, _lanes_s(state), theme)
    workers = workers_block(scene, width, room - MIN_MESSAGES, is_staircase=state.is_simulated)
    room -= len(workers)
    messages_room = max(MIN_MESSAGES, min(len(state.messages) + 1, room // 3))
    curve_height = room - messages_room
    if curve_height >= MIN_CURVE_HEIGHT:
        middle = curve_and_figures(state, width, curve_height, theme)
    else:
        middle = _short_figures(state, width, min(2, room), theme)
    has_news = bool(state.messages) and not state.is_over and now_s - state.messages[-1].time_s < NEWS_S
    if room == len(middle) > 0 and has_news:  # an answer to a key is seen on the smallest screen too
        middle = [*middle[:-1], *messages(state, width, 1, theme)]
    said = messages(state, width, room - len(middle), theme)
    blank = [Text()] * (room - len(middle) - len(said))
    return _exactly([*head, *workers, *middle, *said, *blank, *foot], width, height, theme)


def _lanes_s(state: DashboardState) -> float:
    """How many seconds a lane shows; of a simulated step that is short, which is played slowly, one and a half."""
    shown_s = window_s(state.step.step_s if state.step else None)
    if state.is_simulated and state.timeline is not None:
        return min(shown_s, 1.5 * max((span.end_s for span in state.timeline.spans), default=shown_s))
    return shown_s


def _exactly(lines: Sequence[Text], width: int, height: int, theme: Theme) -> list[Text]:
    lines = [*lines, *[Text()] * height][:height]
    return [fit(line, width, theme) for line in lines]


def header(state: DashboardState, now_s: float, width: int, theme: Theme) -> Text:
    """The header: program, model and state."""
    run = state.run
    left = Text.assemble((" roundpipe ", "bold"))
    between = f" {theme.glyphs.between} "
    if run is not None:
        left.append(" " + between.join(escape_controls(part) for part in (run.title, run.settings, state.pool) if part))
    word, colour = _status(state, theme)
    elapsed = format_seconds(max(0, round(now_s - run.time_s))) if run is not None else ""
    right = Text.assemble((f"{theme.glyphs.dot} {word}", f"bold {colour}"), f"  {elapsed} ")
    if width > MIN_LEFT + right.cell_len:  # how it goes is worth more than the end of a long name
        left = fit(left, min(left.cell_len, width - 1 - right.cell_len), theme)
    return spread(left, right, width, theme)


def _status(state: DashboardState, theme: Theme) -> tuple[str, str]:
    if state.is_simulated:
        return SIMULATED, theme.warn
    if state.finished is not None:
        return "finished", theme.good
    if state.stopped:
        return ("stopped" if state.stopped.startswith("stopped") else "failed"), theme.bad
    if state.paused:
        return "paused", theme.warn
    if state.phase:
        return escape_controls(state.phase.partition(": ")[0]), theme.accent  # the progress is shown below
    if state.step is None:
        return "first step", theme.accent
    return ("measuring" if state.run and state.run.goal == "speed" else "training"), theme.good


def progress(state: DashboardState, now_s: float, width: int, theme: Theme) -> Text:
    """`step 12/100 ━━━━━━━────── 12 %  epoch 0.36  eta 3m10s at 14:32`; the bar keeps some room."""
    run, step = state.run, state.step
    if run is None:
        doing = escape_controls(state.phase) or "waiting for the run"
        return Text(f" {doing} {theme.glyphs.ellipsis}", style=theme.faint)
    done = step.step if step else run.first_step
    total = max(1, step.num_steps if step else run.num_steps)
    count = f" step {done}/{total} "
    share, epoch, eta, at = f" {100 * done / total:3.0f} % ", "", "", ""
    if step is not None and step.epoch is not None:
        epoch = f" epoch {step.epoch:.2f} "
    if step is not None and not (state.is_over or state.paused) and done < total:
        left_s = max(0.0, step.eta_s - max(0.0, now_s - state.step_seen_s))
        eta = f" eta {format_seconds(round(left_s)) if left_s >= 1 else '0 s'} "
        at = f"at {format_clock(now_s + left_s, now_s)} "
    shown = (f"{share}{epoch}{eta}{at}", f"{share}{eta}{at}", f"{share}{eta}")
    after = next((text for text in shown if len(count) + MIN_BAR + len(text) <= width), shown[-1])
    room = max(0, width - len(count) - len(after))
    filled = round(room * done / total)
    return Text.assemble(
        (count, "bold"),
        (theme.glyphs.done * filled, theme.good),
        (theme.glyphs.rest * (room - filled), theme.faint),
        after,
    )


def curve_and_figures(state: DashboardState, width: int, height: int, theme: Theme) -> list[Text]:
    """The loss (or speed) curve and, at its right, the figures of the last step."""
    speed = state.run is not None and state.run.goal == "speed"
    points = (state.speeds if speed else state.losses).all_points
    title = Text.assemble(("tokens/s" if speed else "loss", "bold"))
    if not speed and state.step is not None:
        title.append(f" {format_loss(state.step.loss)}")
    if not speed and state.evaluations:
        shown = f" evaluation {format_loss(state.evaluations[-1][1])}"
        title.append(f"  {theme.glyphs.point}", theme.wait).append(shown)
    side = max(FIGURES_WIDTH, min(46, width // 4)) if width >= 110 else FIGURES_WIDTH if width >= NARROW else 0
    curve_width = width - side
    if state.is_simulated:
        title = Text("a step", style="bold")
        lines = _busy(state, curve_width - 4, height - 2, theme)
    else:
        lines = chart(points, () if speed else state.evaluations, curve_width - 4, height - 2, theme=theme)
    curve = framed(title, "", lines, curve_width, theme=theme)
    if not side:
        return curve
    rows = figure_lines(state, height - 2, side - 4, theme)
    heading = Text("last step" if state.is_over else "this step", style="bold")
    block = framed(heading, "", [*rows, *[Text()] * (height - 2 - len(rows))], side, theme=theme)
    return beside([curve, block], [curve_width, side], theme)


def _busy(state: DashboardState, width: int, height: int, theme: Theme) -> list[Text]:
    """The share of a step in which the workers compute, in large digits, in the middle of the room."""
    if state.step is None:
        return [Text("waiting for the first step", style=theme.faint)]
    busy = f"{state.worker_word} {100 * (1 - state.step.bubble_ratio):.0f}% busy"
    lines = large(busy, width, height, theme)
    margin = " " * ((width - max(line.cell_len for line in lines)) // 2)
    lines = [Text.assemble(margin, line) for line in lines]
    return [*[Text()] * ((height - len(lines)) // 2), *lines, *[Text()] * (height - len(lines))][:height]


def _short_figures(state: DashboardState, width: int, height: int, theme: Theme) -> list[Text]:
    """The most important figures in one line or two, where there is no room for a curve."""
    rows = figure_lines(state, 6, 24, theme, has_loss=True)
    per_line = max(1, (width - 2) // 26)
    lines = []
    for start in range(0, len(rows), per_line):
        part = rows[start : start + per_line]
        lines.append(Text.assemble("  ", beside([[row] for row in part], [26] * len(part), theme)[0]))
    return lines[:height]


def messages(state: DashboardState, width: int, height: int, theme: Theme) -> list[Text]:
    """The newest messages, oldest first, with the time since the start; details only where the others leave room."""
    started_s = state.run.time_s if state.run else math.inf  # until then there is nothing to count from
    lines = []
    if state.num_dropped and height > 1:
        lines.append(Text(f" {state.num_dropped} events were not shown: the terminal is slow", style=theme.warn))
    said: dict[int, list[Text]] = {}
    newest_first = sorted(range(len(state.messages)), key=lambda at: (state.messages[at].is_detail, -at))
    for at in newest_first:
        room = height - len(lines) - sum(map(len, said.values()))
        if room <= 0:
            break
        message = state.messages[at]
        since = format_seconds(round(message.time_s - started_s)) if message.time_s >= started_s + 1 else ""
        said[at] = _wrapped(f" {since:>7}  ", escape_controls(message.text), width, room, theme=theme)
    return [*lines, *(line for at in sorted(said) for line in said[at])][:height]


def _wrapped(time: str, text: str, width: int, room: int, *, theme: Theme) -> list[Text]:
    """A message behind its time, in at most `room` lines; the last of them is cut where it needs more."""
    parts = textwrap.wrap(text, max(MIN_LEFT, width - len(time)), break_on_hyphens=False) or [""]
    parts = [*parts[: room - 1], " ".join(parts[room - 1 :])] if len(parts) > room else parts
    return [Text.assemble((time if at == 0 else " " * len(time), theme.faint), part) for at, part in enumerate(parts)]


def footer(keys: Sequence[tuple[str, str]], width: int, theme: Theme, *, updates: bool = False) -> Text:
    """The keys, and what the colours of a lane mean; the keys lose their meaning before the colours do.

    Args:
        updates: a lane shows a wait for an update.
    """
    plain, bare = [(key, "" if key == "?" else meaning) for key, meaning in keys], [(key, "") for key, _ in keys]
    ways = ((3, False, keys), (2, False, keys), (2, True, keys), (1, True, keys), (1, True, plain), (1, True, bare))
    for gap, short, named in ways:
        left = Text(" ")
        for key, meaning in named:
            left.append(key, "bold").append(f"{' ' * bool(meaning)}{meaning}{' ' * gap}")
        right = legend(theme, short=short, updates=updates)
        if left.cell_len + right.cell_len <= width:
            break
    return spread(left, right, width, theme)


def legend(theme: Theme, *, short: bool = False, updates: bool = False) -> Text:
    """Legend of a lane's characters or colours."""
    glyphs, has_colour = theme.glyphs, theme.has_colour
    text = Text()
    for letter, name in WORK_NAMES.items():
        text.append(glyphs.full if has_colour else letter, theme.kinds[letter] if has_colour else "bold")
        text.append(f" {SHORT_NAMES[letter] if short else name} ")
    text.append(glyphs.wait if has_colour else WAIT, theme.wait if has_colour else "").append(" wait ")
    if updates:
        text.append(glyphs.wait if has_colour else UPDATE, theme.update if has_colour else "").append(" update ")
    return text.append(glyphs.idle if has_colour else ".", theme.faint).append(" idle ")


def details(state: DashboardState) -> list[str]:
    """The figures that a screen shows beside the step's line, in plain lines: for screen readers, logs and pipes."""
    if state.step is None:
        return []
    lines, machine = [], _machine_rows(replace(state, workers=()))  # the step's own figures of devices, too
    for what, rows in ((f"step {state.step.step}", _step_rows(state, False)), ("machine", machine)):
        lines.append(f"{what}: {', '.join(f'{name} {value}{note}' for name, value, note in rows)}")
    for index, worker in enumerate(state.workers):
        found = [part.plain for part in _worker_figures(worker, Theme(glyphs=ASCII))] or [f"lost at {worker.lost_at}"]
        lines.append(f"worker {index}: {', '.join([worker.device, *found])}")
    longest = longest_waiting(state)
    return [*lines, *(longest.lines() if longest is not None else ())]
