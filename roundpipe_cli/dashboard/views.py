"""A screen from a state: a pure function of state, time and size.

header and progress           2 lines
workers                       framed where there is room, down to a line each
curve | figures               what is left
messages                      2 lines and more
keys and legend               1 line
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from rich.text import Text

from roundpipe_cli.dashboard.chart import chart
from roundpipe_cli.dashboard.digits import large
from roundpipe_cli.dashboard.figures import figure_lines
from roundpipe_cli.dashboard.layout import beside, escape_controls, fit, framed, spread
from roundpipe_cli.dashboard.spans import window_s
from roundpipe_cli.dashboard.state import SIMULATED, DashboardState
from roundpipe_cli.dashboard.theme import Theme
from roundpipe_cli.dashboard.workers import staircase_block, workers_block
from roundpipe_cli.schedule.pictures import WORK_NAMES
from roundpipe_cli.units import format_loss, format_seconds

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
SHORT_NAMES = {"F": "fwd", "R": "rec", "B": "bwd"}


def screen(
    state: DashboardState, now_s: float, width: int, height: int, theme: Theme, keys: Sequence[tuple[str, str]] = ()
) -> list[Text]:
    """Exactly `height` lines of exactly `width` columns.

    Args:
        state: what is known.
        now_s: of the run's clock.
        keys: (key, what it does), shown at the bottom.
    """
    head = [header(state, now_s, width, theme), progress(state, now_s, width, theme)]
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return _exactly(head, width, height, theme)
    foot = [footer(_now_meaning(keys, state), width, theme)]
    room = height - len(head) - len(foot)
    draw = staircase_block if state.is_simulated else workers_block
    workers = draw(
        state.workers,
        state.seen_s,
        _lanes_s(state),
        width,
        room - MIN_MESSAGES,
        theme,
    )
    room -= len(workers)
    messages_room = max(MIN_MESSAGES, min(len(state.messages) + 1, room // 3))
    curve_height = room - messages_room
    if curve_height >= MIN_CURVE_HEIGHT:
        middle = curve_and_figures(state, now_s, width, curve_height, theme)
    else:
        middle = _short_figures(state, now_s, width, min(2, room), theme)
    if room == len(middle) > 0 and _has_news(state, now_s):  # an answer to a key is seen on the smallest screen too
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


def _has_news(state: DashboardState, now_s: float) -> bool:
    """Whether something was said in the last seconds of a run that continues."""
    return bool(state.messages) and not state.is_over and now_s - state.messages[-1].time_s < NEWS_S


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
    """`step 12/100 ━━━━━━━────── 12 %  eta 3m10s`."""
    run, step = state.run, state.step
    if run is None:
        return Text(
            f" {escape_controls(state.phase) or 'waiting for the run'} {theme.glyphs.ellipsis}", style=theme.faint
        )
    done = step.step if step else run.first_step
    total = max(1, step.num_steps if step else run.num_steps)
    count = f" step {done}/{total} "
    eta = f" {100 * done / total:3.0f} % "
    if step is not None and not (state.is_over or state.paused) and done < total:
        left_s = step.eta_s - max(0.0, now_s - state.step_seen_s)
        eta += f" eta {format_seconds(round(left_s)) if left_s >= 1 else '0 s'} "
    room = max(0, width - len(count) - len(eta))
    filled = round(room * done / total)
    return Text.assemble(
        (count, "bold"),
        (theme.glyphs.done * filled, theme.good),
        (theme.glyphs.rest * (room - filled), theme.faint),
        eta,
    )


def curve_and_figures(state: DashboardState, now_s: float, width: int, height: int, theme: Theme) -> list[Text]:
    """The loss (or speed) curve and, at its right, the figures of the last step."""
    speed = state.run is not None and state.run.goal == "speed"
    points = (state.speeds if speed else state.losses).all_points
    title = Text.assemble(("tokens/s" if speed else "loss", "bold"))
    if not speed and state.step is not None:
        title.append(f" {format_loss(state.step.loss)}")
    if not speed and state.evaluations:
        shown = f" evaluation {format_loss(state.evaluations[-1][1])}"
        title.append(f"  {theme.glyphs.point}", theme.wait).append(shown)
    side = FIGURES_WIDTH if width < 110 else max(FIGURES_WIDTH, min(46, width // 4))
    if width < NARROW:
        side = 0
    curve_width = width - side
    if state.is_simulated:
        title = Text("a step", style="bold")
        lines = _busy(state, curve_width - 4, height - 2, theme)
    else:
        lines = chart(points, () if speed else state.evaluations, curve_width - 4, height - 2, theme)
    curve = framed(title, "", lines, curve_width, theme)
    if not side:
        return curve
    rows = figure_lines(state, height - 2, side - 4, theme)
    block = framed(
        Text("last step" if state.is_over else "this step", style="bold"),
        "",
        [*rows, *[Text()] * (height - 2 - len(rows))],
        side,
        theme,
    )
    return beside([curve, block], [curve_width, side], theme)


def _busy(state: DashboardState, width: int, height: int, theme: Theme) -> list[Text]:
    """The share of a step in which the workers compute, in large digits, in the middle of the room."""
    if state.bubble_ratio is None:
        return [Text("waiting for the first step", style=theme.faint)]
    busy = f"{state.worker_word} {100 * (1 - state.bubble_ratio):.0f}% busy"
    lines = large(busy, width, height, theme)
    margin = " " * ((width - max(line.cell_len for line in lines)) // 2)
    lines = [Text.assemble(margin, line) for line in lines]
    return [*[Text()] * ((height - len(lines)) // 2), *lines, *[Text()] * (height - len(lines))][:height]


def _short_figures(state: DashboardState, now_s: float, width: int, height: int, theme: Theme) -> list[Text]:
    """The most important figures in one line or two, where there is no room for a curve."""
    rows = figure_lines(state, 6, 24, theme, has_loss=True)
    per_line = max(1, (width - 2) // 26)
    lines = []
    for start in range(0, len(rows), per_line):
        part = rows[start : start + per_line]
        lines.append(Text.assemble("  ", beside([[row] for row in part], [26] * len(part), theme)[0]))
    return lines[:height]


def messages(state: DashboardState, width: int, height: int, theme: Theme) -> list[Text]:
    """The newest messages, oldest first, with the time since the start."""
    started_s = state.run.time_s if state.run else math.inf  # until then there is nothing to count from
    lines = []
    if state.num_dropped and height > 1:
        lines.append(Text(f" {state.num_dropped} events were not shown: the terminal is slow", style=theme.warn))
    said: list[Text] = []
    for message in reversed(state.messages):
        room = height - len(lines) - len(said)
        if room <= 0:
            break
        since = format_seconds(round(message.time_s - started_s)) if message.time_s >= started_s + 1 else ""
        said = [*_wrapped(f" {since:>7}  ", escape_controls(message.text), width, room, theme), *said]
    return [*lines, *said][:height]


def _wrapped(time: str, text: str, width: int, room: int, theme: Theme) -> list[Text]:
    """A message behind its time, in at most `room` lines; the last of them is cut where it needs more."""
    parts = textwrap.wrap(text, max(MIN_LEFT, width - len(time)), break_on_hyphens=False) or [""]
    parts = [*parts[: room - 1], " ".join(parts[room - 1 :])] if len(parts) > room else parts
    return [Text.assemble((time if at == 0 else " " * len(time), theme.faint), part) for at, part in enumerate(parts)]


def _now_meaning(keys: Sequence[tuple[str, str]], state: DashboardState) -> list[tuple[str, str]]:
    """The keys and their present effect: the key that paused the run continues it."""
    return [(key, "resume" if state.paused and meaning == "pause" else meaning) for key, meaning in keys]


def footer(keys: Sequence[tuple[str, str]], width: int, theme: Theme) -> Text:
    """The keys, and what the colours of a lane mean; the keys lose their meaning before the colours do."""
    plain = [(key, "" if key == "?" else meaning) for key, meaning in keys]
    for gap, short, named in ((3, False, keys), (2, False, keys), (2, True, keys), (1, True, keys), (1, True, plain)):
        left = Text(" ")
        for key, meaning in named:
            left.append(key, "bold").append(f"{' ' * bool(meaning)}{meaning}{' ' * gap}")
        right = legend(theme, short=short)
        if left.cell_len + right.cell_len <= width:
            return spread(left, right, width, theme)
    left = Text.assemble(" ", *((f"{key} ", "bold") for key, _ in keys))
    return spread(left, right, width, theme)


def legend(theme: Theme, *, short: bool = False) -> Text:
    """Legend of a lane's characters or colours."""
    glyphs, has_colour = theme.glyphs, theme.has_colour
    text = Text()
    for letter, name in WORK_NAMES.items():
        text.append(glyphs.full if has_colour else letter, theme.kinds[letter] if has_colour else "bold")
        text.append(f" {SHORT_NAMES[letter] if short else name} ")
    text.append(glyphs.wait if has_colour else "~", theme.wait if has_colour else "").append(" wait ")
    return text.append(glyphs.idle if has_colour else ".", theme.faint).append(" idle ")
