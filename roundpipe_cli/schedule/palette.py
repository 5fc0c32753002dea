"""Colours and names of forward, recompute and backward: the same on the terminal, on pages and in pictures.

Each has a contrast of at least 3:1 with white and with the dark pages' background. In grey, and for readers who see red
and green alike, they differ too: forward is the darkest, recompute the lightest. A test computes this.
"""

from __future__ import annotations

WORK_COLOURS = {"F": "#2a5fc4", "R": "#cc7f10", "B": "#14866c"}
"""By the letter of an action's kind."""
WORK_NAMES = {"F": "forward", "R": "recompute", "B": "backward"}
