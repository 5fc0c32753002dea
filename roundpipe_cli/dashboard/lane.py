"""The lane of a worker: what it did in each short slice of the last seconds, in proportion, as characters.

forward        recompute and backward           idle
FFFFFFFFFF.....RRBBBRRBBBRRBBB..................~~~FFFF        (without colour; ~ waits for an upload)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.text import Text

from roundpipe_cli.dashboard.theme import Theme
from roundpipe_cli.events import Span
from roundpipe_cli.schedule.pictures import BOTH

IDLE, WAIT = ".", "~"
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
        num_slices: how many.
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
    uploads = [0.0] * len(compute)
    for span in spans:
        if span.end_s <= begin * slice_s or span.lane not in ("compute", "up"):
            continue
        start_at, end_at = span.start_s / slice_s - begin, span.end_s / slice_s - begin
        for index in range(max(0, math.floor(start_at)), min(len(compute), math.ceil(end_at))):
            share = min(end_at, index + 1) - max(start_at, index)
            if span.lane == "up":
                uploads[index] += share
            else:
                compute[index][span.kind] = compute[index].get(span.kind, 0.0) + share
    for shares, upload in zip(compute, uploads, strict=True):
        idle = 1.0 - sum(shares.values())
        if idle > ROUNDING:
            shares[WAIT if upload > 0.5 * idle else IDLE] = idle
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
    spans: Sequence[Span], end_s: float, seconds: float, width: int, theme: Theme, num_lines: int = 1
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
    start = 0
    pairs = [letters[index : index + 2] for index in range(0, 2 * width, 2)]
    for index in range(1, width + 1):  # runs of equal characters are one piece: fewer bytes for the terminal
        if index == width or pairs[index] != pairs[start]:
            character, style = _block(pairs[start], idle, theme)
            text.append(character * (index - start), style)
            start = index
    return text


def _block(pair: str, idle: str, theme: Theme) -> tuple[str, str]:
    """Character and style of two slices."""
    left, right = pair[0], pair[1]
    glyphs, colours = theme.glyphs, theme.kinds
    if left in colours and right in colours:
        return (glyphs.full, colours[left]) if left == right else (glyphs.left, f"{colours[left]} on {colours[right]}")
    if left in colours:
        return glyphs.left, colours[left]
    if right in colours:
        return glyphs.right, colours[right]
    return (glyphs.wait, theme.wait) if WAIT in pair else (idle, theme.faint)
