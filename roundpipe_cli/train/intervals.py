"""When a run saves and evaluates: after every so many steps, after a share of all steps, or after each epoch."""

from __future__ import annotations

import math
from typing import Literal

Interval = Literal["epoch"] | int | float
"""Steps between two saves or evaluations; a number below 1 is a share of the run's steps, as in transformers."""


def is_due(every: Interval | None, done: int, num_steps: int, *, ends_epoch: bool) -> bool:
    """Whether an interval ends after `done` of `num_steps` steps; None has no intervals.

    A share is rounded up to whole steps: 0.34 of 10 steps is 4, so that steps 4 and 8 end one.
    """
    if every is None:
        return False
    if isinstance(every, str):
        return ends_epoch
    return done % (every if isinstance(every, int) else max(1, math.ceil(round(every * num_steps, 6)))) == 0
