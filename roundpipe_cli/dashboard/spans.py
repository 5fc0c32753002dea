"""Keeps the work of a worker that a lane needs, and merges short pieces."""

from __future__ import annotations

import math
from dataclasses import replace

from roundpipe_cli.events import Span

NICE_S = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
KEPT_WINDOWS = 2
"""Lanes that are kept: sums begin up to one lane's length before the shown part."""
MAX_SPANS = 8000
"""Most spans per worker; beyond them short pieces are merged."""
PIECES = 800
"""More slices than any lane has."""


def window_s(step_s: float | None) -> float:
    """Seconds that a lane shows: a round number, about one and a half steps."""
    wanted = 1.5 * (step_s or 5.0)
    return next((seconds for seconds in NICE_S if seconds >= wanted), NICE_S[-1])


def recent(spans: tuple[Span, ...], now_s: float, step_s: float | None) -> tuple[Span, ...]:
    """The spans that a lane needs, in order of time; of very many, those that cannot be seen apart as one.

    Args:
        step_s: seconds of a step, as for `window_s`.
    """
    kept_s = KEPT_WINDOWS * NICE_S[-1]
    if spans and spans[0].end_s < now_s - kept_s:
        spans = tuple(span for span in spans if span.end_s >= now_s - kept_s)
    if len(spans) <= MAX_SPANS:
        return spans
    window = window_s(step_s)
    spans = tuple(span for span in spans if span.end_s >= now_s - KEPT_WINDOWS * window)
    return _together(spans, window / PIECES)[-MAX_SPANS:]


def _together(spans: tuple[Span, ...], piece_s: float) -> tuple[Span, ...]:
    """Spans shorter than a piece, by lane and kind, one after the other from where the first of the piece began.

    FRBFRB......FRBFRB  ->  FFRRBB......FFRRBB       (the time of each kind stays; a longer span stays as it is)
    """
    whole: list[Span] = []
    parts: dict[tuple[str, int], dict[str, Span]] = {}
    for span in spans:
        seconds = span.end_s - span.start_s
        if seconds >= piece_s:
            whole.append(span)
            continue
        kinds = parts.setdefault((span.lane, math.floor(span.start_s / piece_s)), {})
        before = kinds.get(span.kind)
        kinds[span.kind] = replace(before, end_s=before.end_s + seconds) if before else span
    for kinds in parts.values():
        start_s = min(span.start_s for span in kinds.values())
        for span in kinds.values():
            end_s = start_s + span.end_s - span.start_s
            whole.append(replace(span, start_s=start_s, end_s=end_s))
            start_s = end_s
    return tuple(sorted(whole, key=lambda span: span.start_s))
