"""How screens, pages and pictures show work: intervals as parts of events, and the letter of their colour."""

from __future__ import annotations

from roundpipe_cli.events import Span
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.palette import BOTH
from roundpipe_cli.schedule.timeline import COMPUTE, Interval

_KINDS = {**{kind.value: kind for kind in Kind}, BOTH: Kind.BACKWARD}


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


def interval_of(span: Span) -> Interval | None:
    """The inverse of `span_of`; None for a letter that no action has."""
    kind = _KINDS.get(span.kind)
    if kind is None:
        return None
    return Interval(span.worker, span.lane, kind, span.stage, span.microbatch, span.start_s, span.end_s)
