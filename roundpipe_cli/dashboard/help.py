"""The help of a dashboard: keys, the meaning of a lane, and why the worker with the longest wait waited."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.text import Text

from roundpipe_cli.dashboard.layout import fit
from roundpipe_cli.dashboard.state import DashboardState
from roundpipe_cli.dashboard.theme import Theme
from roundpipe_cli.dashboard.waiting import CAUSES, longest_waiting
from roundpipe_cli.units import counted

HELP_KEY = "?"
_LANES = (
    "A lane is a worker; time runs to the right. F computes a stage forward, R computes it again from the tensors "
    "kept at its boundary, B computes its gradients. The stage that ends with the loss does F and B in one; its lane "
    "shows them in turn. A stage is a run of layers; a worker takes the next stage, whichever that is, and uploads its "
    "weights while it computes the stage before."
)


def help_screen(
    state: DashboardState, width: int, height: int, theme: Theme, keys: Sequence[tuple[str, str]]
) -> list[Text]:
    """Exactly `height` lines of `width` columns: the step first, what is always true after it.

    Args:
        keys: (key, what it does).
    """
    lines = [Text(" why workers waited", style="bold"), *_indented(_why(state), width)]
    causes = (f"{cause}: {meaning}" for cause, meaning in CAUSES.items())
    lines += [Text(" causes", style="bold"), *(line for text in causes for line in _indented(text, width))]
    meanings = "   ".join(f"{key} {meaning}" for key, meaning in keys)
    lines += [Text(" keys", style="bold"), *_indented(meanings, width)]
    lines += [Text(" lanes", style="bold"), *_indented(_LANES, width)]
    rest = len(lines) - (height - 1)
    back = f" {HELP_KEY} back" + (f"   {counted(rest, 'line')} more on a higher terminal" if rest > 0 else "")
    lines = [*lines, *[Text()] * height][: height - 1]
    return [fit(line, width, theme) for line in (*lines, Text(back, style=theme.faint))][:height]


def _why(state: DashboardState) -> str:
    """A line on the worker that waited most in the newest step."""
    found = longest_waiting(state)
    return found.text() if found is not None else "no step is finished yet"


def _indented(text: str, width: int) -> list[Text]:
    return [Text(f"   {line}") for line in textwrap.wrap(text, max(20, width - 4), break_on_hyphens=False)]
