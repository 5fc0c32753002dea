"""A step of the longest rows before the first one: a device that is too small shows at once, not hours later.

The result is discarded: weights, the order of the rows and every bit of the run are as without it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from roundpipe_cli.data.batching import Grouping, RowBatch
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import GradientOptions
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.events import Notice, Phase, Tell
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.train.sampling import grouping_of
from roundpipe_cli.train.setup import Setup

RunStep = Callable[[Engine, int, list[Microbatch]], StepResult]
Compute = Callable[[list[RowBatch], RunStep], object]
"""Computes a step of such rows by the given function; where the recipe lets it adapt, with less memory."""


def try_longest(setup: Setup, planner: AdaptivePlanner, compute: Compute, tell: Tell, *, is_only: bool) -> None:
    """Compute a step of the longest rows with the stages of later steps, where the recipe says so, and discard it.

    Args:
        is_only: there is one machine.

    Raises:
        OutOfDeviceMemoryError: it does not fit.
    """
    asked, recipe = setup.recipe.check_longest_rows, setup.recipe
    if asked is False or (asked == "auto" and setup.devices[0] == "cpu"):
        return
    if recipe.packs or not is_only:
        if asked is True:
            why = "packed sequences are about as long" if recipe.packs else "there are several machines"
            tell(Notice(f"check_longest_rows: no step is tried before the first one, since {why}"))
        return

    def run(engine: Engine, step: int, microbatches: list[Microbatch]) -> StepResult:
        version = setup.store.step_version(step)
        schedule = planner.expected(len(microbatches))
        return engine.run_step(microbatches, schedule, step=step, version=version, gradients=GradientOptions())

    lengths = setup.dataset.rows.lengths
    if setup.rejected is not None:
        lengths = np.maximum(lengths, setup.rejected.lengths)
    tell(Phase("computing a step of the longest rows"))
    compute(longest_batches(grouping_of(recipe, lengths), recipe.rows_per_step), run)
    text = f"the longest rows ({lengths.max()} tokens) fit: a step of them was computed and discarded"
    tell(Notice(f"{text}; check_longest_rows=false begins without it"))


def longest_batches(grouping: Grouping, num_rows: int) -> list[RowBatch]:
    """Microbatches of at most `num_rows` rows (or pairs), the longest of all, grouped as those of a step are."""
    order: list[int] = np.argsort(-grouping.lengths, kind="stable")[:num_rows].tolist()
    return grouping.group([(index,) for index in order])
