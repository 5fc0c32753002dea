"""Colours and names of forward, recompute and backward: the same on the terminal, on pages and in pictures.

Each has a contrast of at least 3:1 with white and with the dark pages' background. In grey, and for readers who see red
and green alike, they differ too: forward is the darkest, recompute the lightest. A test computes this.
"""

from __future__ import annotations

WORK_COLOURS = {"F": "#2a5fc4", "R": "#cc7f10", "B": "#14866c"}
"""By the letter of an action's kind."""
WORK_NAMES = {"F": "forward", "R": "recompute", "B": "backward"}
BOTH, BOTH_NAME = "H", "forward and backward"
"""Letter and name of what the head's stage computes where its forward belongs to its backward: the loss is computed
chunk by chunk, so the two are not measured apart. A mark has both colours, forward above backward."""
DRAWN_NAMES = {**WORK_NAMES, BOTH: BOTH_NAME}
"""Letter -> name of everything that is drawn."""
BOTH_ID = "both"
BOTH_PAINT = (
    f'<defs><linearGradient id="{BOTH_ID}" x2="0" y2="1"><stop offset="0.5" stop-color="{WORK_COLOURS["F"]}"/>'
    f'<stop offset="0.5" stop-color="{WORK_COLOURS["B"]}"/></linearGradient></defs>'
)
"""SVG definition that a picture needs before marks with both colours."""
