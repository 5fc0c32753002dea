"""When a run saves and evaluates: after every so many steps, after a share of all steps, or after each epoch."""

from __future__ import annotations

import math

from roundpipe_cli.recipe.schema import StepInterval


def is_due(every: StepInterval | None, done: int, num_steps: int, *, ends_epoch: bool) -> bool:
    """Whether an interval ends after `done` of `num_steps` steps; None has no intervals.

    A share is rounded up to whole steps: 0.34 of 10 steps is 4, so that steps 4 and 8 end one.
    """
    if every is None:
        return False
    if isinstance(every, str):
        return ends_epoch
    return done % (every if isinstance(every, int) else max(1, math.ceil(round(every * num_steps, 6)))) == 0
