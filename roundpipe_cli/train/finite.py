"""Responses to a loss or a gradient that is not finite: a smaller loss scale, a step left out, or the end."""

from __future__ import annotations

import math
from dataclasses import replace

from roundpipe_cli.data.batching import RowBatch
from roundpipe_cli.data.tokenized import TokenizedDataset
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.errors import NotFiniteError
from roundpipe_cli.events import Notice, Tell
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.optim.loss_scale import LossScale
from roundpipe_cli.units import shown_step

MAX_SKIPPED_IN_A_ROW = 10
"""With more steps left out in a row than these, the weights are the cause, not the rows."""

IN_FLOAT16 = "values above 65,504 overflow in float16: dtype=bfloat16 or dtype=float32 has room; if that is not all, "


def poisoned(result: StepResult, poison: float | None) -> StepResult:
    """The result with the value of a fault point in place of the gradient norm."""
    return result if poison is None else replace(result, gradient_norm=poison)


class FiniteGuard:
    """Counts steps that are left out, and holds float16's loss scale."""

    def __init__(self, recipe: Recipe, dataset: TokenizedDataset) -> None:
        self.loss_scale = LossScale.of(recipe.dtype)
        self.num_skipped = 0
        """Steps left out since the start of the run."""
        self.num_in_a_row = 0
        """Steps left out since the last update."""
        self._is_float16 = recipe.dtype == "float16"
        self._may_skip = recipe.on_nonfinite == "skip"
        self._dataset = dataset

    def is_finite(self, result: StepResult) -> bool:
        """Whether the step's update may be made."""
        is_finite = math.isfinite(result.loss) and math.isfinite(result.gradient_norm)
        if is_finite:
            self.num_in_a_row = 0
        return is_finite

    def skip(self, step: int, batches: list[RowBatch], result: StepResult, tell: Tell) -> None:
        """Leave the update out, where float16's loss scale was too large or the recipe says so.

        Raises:
            NotFiniteError: neither, or too often.
        """
        if math.isfinite(result.loss) and self.loss_scale.may_be_too_large:
            self.loss_scale.overflowed()
            scale = self.loss_scale.value
            tell(Notice(f"step {shown_step(step)}: gradient overflow, update skipped, loss scale {scale:g}"))
            return
        dataset = self._dataset
        self.num_skipped += 1
        self.num_in_a_row += 1
        indices = sorted(index for batch in batches for sequence in batch for index in sequence)
        rows = [dataset.where(dataset.rows[index].row_id) for index in indices]
        what = "loss" if not math.isfinite(result.loss) else "gradient"
        found = f"loss {result.loss}, gradient norm {result.gradient_norm}, rows {', '.join(rows[:16])}"
        if self._may_skip and self.num_in_a_row < MAX_SKIPPED_IN_A_ROW:
            text = f"the {what} is not finite ({found}): no update; {self.num_skipped} skipped so far"
            tell(Notice(f"step {shown_step(step)}: {text}"))
            return
        raise NotFiniteError(
            f"the {what} is not finite: stopped before the update",
            where=f"step {shown_step(step)}",
            found=found,
            hint=(IN_FLOAT16 if self._is_float16 else "")
            + "the last checkpoint is good; look at these rows, or lower learning_rate, then --resume; or leave "
            "such steps out with on_nonfinite=skip",
        )
