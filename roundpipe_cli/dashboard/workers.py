"""The workers' part of a screen: the largest of several layouts that fits.

framed      title, lane (of several lines where there is room), figures, bottom
two lines   lane, figures
one line    name, lane, busy share, memory

A simulated run has lanes without figures between them, in one column: the staircase of the method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from roundpipe_cli.dashboard.lane import lane
from roundpipe_cli.dashboard.layout import beside, escape_controls, fit, framed
from roundpipe_cli.dashboard.state import WorkerView
from roundpipe_cli.dashboard.theme import Theme
from roundpipe_cli.units import GIB, format_seconds

RESERVED_LINES = 9
"""Lines of the room that is left, for curve and messages; a look that takes them is chosen only if none leaves them."""
MIN_COLUMN = 58


@dataclass(frozen=True)
class _Scene:
    workers: Sequence[WorkerView]
    end_s: float
    """End of the lanes, on the run's clock."""
    seconds: float
    theme: Theme


_Look = Callable[[_Scene, int, int], list[Text]]


def workers_block(
    workers: Sequence[WorkerView], end_s: float, seconds: float, width: int, height: int, theme: Theme
) -> list[Text]:
    """At most `height` lines; workers that have no room at all are counted in the last line.

    Args:
        end_s: up to when it is known what workers did, on the run's clock.
        seconds: that a lane shows.
    """
    if not workers or height <= 0:
        return []
    scene = _Scene(workers, end_s, seconds, theme)
    looks: list[tuple[int, _Look]] = [(n + 3, _framed(n)) for n in ((3, 2, 1) if theme.has_colour else (1,))]
    looks += [(2, _two_lines), (1, _one_line)]
    columns = [1] if width < 2 * MIN_COLUMN else [1, 2] if width < 4 * MIN_COLUMN else [1, 2, 4]
    candidates = [(lines, look, count) for lines, look in looks for count in columns if not (count > 1 and lines == 6)]
    reserved = RESERVED_LINES if height >= 18 else 0
    for room in (height - reserved, height):
        for lines, look, count in candidates:
            if lines * -(-len(workers) // count) <= room:
                return _grid(scene, look, count, width)
    shown = max(0, height - 1) * columns[-1]
    some = _Scene(workers[:shown], end_s, seconds, theme)
    rest = Text(f"  and {len(workers) - shown} more workers: a higher terminal shows them", style=theme.faint)
    return [*_grid(some, _one_line, columns[-1], width), rest]


def staircase_block(
    workers: Sequence[WorkerView], end_s: float, seconds: float, width: int, height: int, theme: Theme
) -> list[Text]:
    """One column of lanes, as high as there is room for; arguments as of `workers_block`."""
    for lines in (3, 2) if theme.has_colour else ():
        if 0 < lines * len(workers) <= height - RESERVED_LINES:
            return _grid(_Scene(workers, end_s, seconds, theme), _named(lines), 1, width)
    if len(workers) > height:
        return workers_block(workers, end_s, seconds, width, height, theme)
    return _grid(_Scene(workers, end_s, seconds, theme), _one_line, 1, width)


def _grid(scene: _Scene, look: _Look, count: int, width: int) -> list[Text]:
    widths = [width // count + (index < width % count) for index in range(count)]
    lines: list[Text] = []
    for start in range(0, len(scene.workers), count):
        members = range(start, min(start + count, len(scene.workers)))
        blocks = [look(scene, index, widths[index - start]) for index in members]
        lines += beside(blocks, widths[: len(blocks)], scene.theme)
    return lines


def _lane(scene: _Scene, worker: WorkerView, width: int, num_lines: int = 1) -> list[Text]:
    spans = worker.spans if worker.running is None else (*worker.spans, worker.running)
    return lane(spans, scene.end_s, scene.seconds, width, scene.theme, num_lines)


def _framed(num_lanes: int) -> _Look:
    def look(scene: _Scene, index: int, width: int) -> list[Text]:
        worker, theme = scene.workers[index], scene.theme
        title = Text.assemble((f"worker {index}", "bold"), f" {theme.glyphs.between} {escape_controls(worker.device)}")
        body = [*_lane(scene, worker, width - 4, num_lanes), _figures(worker, width - 4, theme)]
        return framed(title, f"last {format_seconds(scene.seconds)}", body, width, theme)

    return look


def _two_lines(scene: _Scene, index: int, width: int) -> list[Text]:
    worker, theme = scene.workers[index], scene.theme
    name = _name_of(scene, index)
    indent = name.cell_len
    return [
        Text.assemble(name, *_lane(scene, worker, width - indent - 1)),
        Text.assemble(" " * indent, _figures(worker, width - indent - 1, theme)),
    ]


def _named(num_lanes: int) -> _Look:
    """A lane of several lines with its name and share beside one of them, and no line between two lanes."""

    def look(scene: _Scene, index: int, width: int) -> list[Text]:
        worker, middle = scene.workers[index], (num_lanes - 1) // 2
        name, tail = _name_of(scene, index), Text(f" {_percent(worker.utilization)} ")
        blank, after = Text(" " * name.cell_len), Text(" " * tail.cell_len)
        lanes = _lane(scene, worker, width - name.cell_len - tail.cell_len, num_lanes)
        return [
            Text.assemble(name if at == middle else blank, line, tail if at == middle else after)
            for at, line in enumerate(lanes)
        ]

    return look


def _name_of(scene: _Scene, index: int) -> Text:
    """Number and device, as wide as the longest of them: lanes begin below each other."""
    number = len(str(len(scene.workers) - 1))
    devices = [escape_controls(worker.device) for worker in scene.workers]
    name = Text.assemble((f" {index:>{number}} ", "bold"), f"{devices[index]} ")
    return fit(name, max(10, number + 3 + max(map(len, devices))), scene.theme)


def _one_line(scene: _Scene, index: int, width: int) -> list[Text]:
    worker, name = scene.workers[index], _name_of(scene, index)
    tail = Text(f" {_percent(worker.utilization)}")
    sample = worker.sample
    if sample.used_bytes is not None and sample.total_bytes:
        tail.append(f" {sample.used_bytes / GIB:4.1f}/{sample.total_bytes / GIB:.0f} GiB")
    tail.append(" ")
    return [Text.assemble(name, *_lane(scene, worker, width - name.cell_len - tail.cell_len), tail)]


def _percent(share: float | None) -> str:
    return f"{100 * share:3.0f} %" if share is not None else "  - %"


def _figures(worker: WorkerView, width: int, theme: Theme) -> Text:
    """Share of the last step that it computed, and what the device tells; the rest is left out where it has no room."""
    now, mean = worker.utilization, worker.mean_utilization.value
    parts = []
    if now is not None:
        busy = Text.assemble("busy ", (_percent(now).strip(), "bold"), (f" mean {_percent(mean).strip()}", theme.faint))
        parts.append(busy)
    else:
        parts.append(Text("first step", style=theme.faint))
    sample = worker.sample
    if sample.used_bytes is not None and sample.total_bytes:
        parts.append(Text(f"{sample.used_bytes / GIB:.1f} of {sample.total_bytes / GIB:.0f} GiB"))
    if sample.upload_bytes_per_s is not None:
        rates = f"{theme.glyphs.up}{sample.upload_bytes_per_s / 1e9:.1f}"
        if sample.download_bytes_per_s is not None:
            rates += f" {theme.glyphs.down}{sample.download_bytes_per_s / 1e9:.1f}"
        parts.append(Text(f"{rates} GB/s"))
    if sample.temperature_c is not None:
        parts.append(Text(f"{sample.temperature_c:.0f}{theme.glyphs.degree}"))
    if sample.power_w is not None:
        parts.append(Text(f"{sample.power_w:.0f} W"))
    return _joined(parts, width)


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
