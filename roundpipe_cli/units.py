"""Formatting of bytes, seconds, counts, names and tables. Inside the program all values are plain bytes and seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

MIB = 1024**2
GIB = 1024**3


def format_bytes(num_bytes: float) -> str:
    """`1536 -> '1.5 KiB'`, binary units, three significant figures."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 999.5 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if abs(size) < 999.5 else f"{size:,.0f} TiB"


def shown_step(index: int) -> int:
    """The number of the step with this index as users see it, in messages, metrics.jsonl and folders: from 1."""
    return index + 1


def format_seconds(seconds: float) -> str:
    """`75 -> '1m15s'`; below a minute with three significant figures."""
    if seconds < 5e-10:  # what is left of a difference of two sums
        return "0 s"
    if seconds < 0.9995e-3:  # from here on three figures would round to 1000 of the smaller unit
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s"


def format_clock(time_s: float, now_s: float) -> str:
    """A Unix time in local time: `14:32` on the day of `now_s`, `Sat 14:32` within a week, `5 Dec 14:32` later."""
    at, now = time.localtime(time_s), time.localtime(now_s)
    if at[:3] == now[:3]:
        return time.strftime("%H:%M", at)
    day = time.strftime("%a", at) if time_s - now_s < 6 * 86400 else f"{at.tm_mday} {time.strftime('%b', at)}"
    return f"{day} {time.strftime('%H:%M', at)}"


def format_loss(loss: float) -> str:
    """`1.1304`; with three significant figures and an exponent where four decimals would show none, or too many."""
    return f"{loss:.4f}" if loss == 0 or not math.isfinite(loss) or 1e-3 <= abs(loss) < 1e5 else f"{loss:.2e}"


def escape_controls(text: str, kept: str = "") -> str:
    """Control characters but those of `kept` escaped, so that no name, row or message can steer the terminal."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def either(names: Iterable[str]) -> str:
    """Names with `or` before the last: `dpo, orpo or simpo`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def counted(count: int, name: str) -> str:
    """`1 worker`, `2 workers`, `3 microbatches`."""
    plural = "es" if name.endswith("batch") else "s"
    return f"{count:,} {name}{'' if count == 1 else plural}"


def round_step(length: float, about: int) -> float:
    """The distance of ticks on an axis: 1, 2 or 5 times a power of ten, so that about `about` of them fit."""
    raw = length / about
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * (1 - 1e-9))


def format_count(count: float) -> str:
    """`134515008 -> '135M'`."""
    value = float(count)
    for unit in ("", "K", "M", "B"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def aligned(
    rows: Sequence[Sequence[str]], num_left: int, left_out: Sequence[str] = (), width: int | None = None
) -> list[str]:
    """Rows as lines of padded cells; the first row has the headings.

    Args:
        num_left: columns whose cells begin at the left; those of the others end at the right.
        left_out: headings of columns to leave out where the terminal is too narrow, the first one first.
        width: columns of the terminal; None: any number.
    """
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown = list(range(len(widths)))
    for name in left_out:
        if width is None or sum(widths[column] for column in shown) + 2 * (len(shown) - 1) <= width:
            break
        shown.remove(rows[0].index(name))
    return [
        "  ".join(
            row[column].ljust(widths[column]) if column < num_left else row[column].rjust(widths[column])
            for column in shown
        ).rstrip()
        for row in rows
    ]
