"""Responses to a loss or a gradient that is not finite: a smaller loss scale, a step left out, or the end."""

from __future__ import annotations

import math

from roundpipe_cli.data.batching import RowBatch
from roundpipe_cli.data.tokenized import TokenizedDataset
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.errors import NotFiniteError
from roundpipe_cli.events import Notice, Tell
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.units import shown_step

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""As in torch.amp.GradScaler."""
MAX_SKIPPED_IN_A_ROW = 10
"""With more steps left out in a row than these, the weights are the cause, not the rows."""

IN_FLOAT16 = "values above 65,504 overflow in float16: dtype=bfloat16 or dtype=float32 has room; if that is not all, "
LOWER_RATE = "lower learning_rate, then --resume --allow-changed learning_rate"


class FiniteGuard:
    """Counts steps that are left out, and holds float16's loss scale."""

    def __init__(self, recipe: Recipe, dataset: TokenizedDataset) -> None:
        self._is_float16 = recipe.dtype == "float16"
        self.loss_scale = INITIAL_SCALE if self._is_float16 else 1.0
        """For float16, whose gradients would vanish without one: doubled after many updates, halved at an overflow."""
        self.num_updates = 0
        """Updates since the last overflow."""
        self.num_skipped = 0
        """Steps left out since the start of the run."""
        self.num_in_a_row = 0
        """Steps left out since the last update."""
        self._may_skip = recipe.on_nonfinite == "skip"
        self._dataset = dataset

    def is_finite(self, result: StepResult) -> bool:
        """Whether the step's update may be made."""
        is_finite = math.isfinite(result.loss) and math.isfinite(result.gradient_norm)
        if is_finite:
            self.num_in_a_row = 0
        return is_finite

    def updated(self) -> None:
        """Note an update."""
        self.num_updates += 1
        if self._is_float16 and self.num_updates % GROWTH_STEPS == 0:
            self.loss_scale *= 2

    def skip(self, step: int, batches: list[RowBatch], result: StepResult, tell: Tell) -> None:
        """Leave the update out, where float16's loss scale was too large or the recipe says so.

        Raises:
            NotFiniteError: neither, or too often.
        """
        if math.isfinite(result.loss) and self._is_float16 and self.loss_scale > 1:  # from 1 on it is not the cause
            self.loss_scale, self.num_updates = self.loss_scale / 2, 0
            text = f"gradient overflow, update skipped, loss scale {self.loss_scale:g}"
            tell(Notice(f"step {shown_step(step)}: {text}"))
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
            + f"the last checkpoint is good; look at these rows, or {LOWER_RATE}; or leave such steps out with "
            "on_nonfinite=skip",
        )
