"""How steps are computed where a device is full.

First one layer is recomputed at a time, which changes no bit; then microbatches are divided, again and again: more of
them in a step, of fewer rows, the same rows and the same loss (dropout masks differ: each microbatch has its own).
Single rows come in chunks, twice as many each time, where the model can: the same sums but for their last bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from roundpipe_cli.data.batching import Grouping, RowBatch
from roundpipe_cli.planning.chunk_count import CHUNKS_KEY, chunk_counts, with_chunks
from roundpipe_cli.recipe.schema import Recipe


@dataclass(frozen=True)
class Fit:
    """How steps are computed, from a step of the run on."""

    micro_batch_size: int
    """Sequences of one microbatch; divides the recipe's. With a token budget, those of `max_seq_length` tokens."""
    recompute: str
    first_step: int = 1
    """The first step that is computed so, counted from 1."""
    sequence_chunks: int = 1
    """Chunks of each sequence; the recipe's at least."""

    @staticmethod
    def of(recipe: Recipe) -> Fit:
        """How the recipe says that steps are computed."""
        return Fit(recipe.rows_per_microbatch, recipe.pipeline.recompute, sequence_chunks=recipe.pipeline.num_chunks)

    def smaller(self, step: int) -> Fit | None:
        """The next change that needs less device memory, from `step` (counted from 1) on; None if there is none."""
        if self.recompute != "layer":
            return replace(self, recompute="layer", first_step=step)
        divisors = (size for size in range(self.micro_batch_size // 2, 0, -1) if self.micro_batch_size % size == 0)
        size = next(divisors, None)
        return None if size is None else replace(self, micro_batch_size=size, first_step=step)

    def in_more_chunks(self, step: int, row_tokens: int) -> Fit | None:
        """The next number of chunks from `step` (counted from 1) on; None: rows of `row_tokens` have no more."""
        more = next((count for count in chunk_counts(row_tokens) if count > self.sequence_chunks), None)
        return None if more is None else replace(self, sequence_chunks=more, first_step=step)

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe that says from the start how chunks are computed now."""
        size, steps = self.micro_batch_size, recipe.rows_per_step // self.micro_batch_size
        recipe = replace(recipe, micro_batch_tokens=None, micro_batch_size=size, gradient_accumulation_steps=steps)
        return with_chunks(recipe, self.sequence_chunks)

    def divide(self, batches: Sequence[RowBatch], grouping: Grouping | None = None) -> list[RowBatch]:
        """A step's microbatches, each cut into microbatches of at most `micro_batch_size` sequences, or the tokens of
        so many where `grouping` counts tokens."""
        size = self.micro_batch_size
        if grouping is not None and grouping.max_tokens is not None and self.sequence_chunks == 1:
            smaller = grouping.resized(size)
            return [part for batch in batches for part in smaller.group(batch)]
        return [batch[start : start + size] for batch in batches for start in range(0, len(batch), size)]

    def recipe_lines(self, recipe: Recipe) -> dict[str, int | str]:
        """Recipe keys with which a run computes in this way from the start."""
        steps = recipe.gradient_accumulation_steps * recipe.micro_batch_size // self.micro_batch_size
        lines: dict[str, int | str] = {}
        if self.sequence_chunks != recipe.pipeline.num_chunks:
            lines = {"micro_batch_size": self.micro_batch_size, "gradient_accumulation_steps": steps}
            lines[CHUNKS_KEY] = self.sequence_chunks
        elif self.micro_batch_size != recipe.rows_per_microbatch and recipe.token_budget is not None:
            lines = {"micro_batch_tokens": self.micro_batch_size * recipe.tokens_of_full_row}
        elif self.micro_batch_size != recipe.rows_per_microbatch:
            lines = {"micro_batch_size": self.micro_batch_size, "gradient_accumulation_steps": steps}
        if self.recompute != recipe.pipeline.recompute:
            lines["pipeline.recompute"] = self.recompute
        return lines

    def to_json(self, recipe: Recipe) -> dict[str, Any] | None:
        """JSON values for checkpoint, metrics and report; None if steps are computed as the recipe says."""
        return asdict(self) if self.recipe_lines(recipe) else None


def resumed_fit(saved: Mapping[str, Any] | None, recipe: Recipe) -> Fit:
    """How a run that continues computes: as it did in the end, `saved`, as far as the recipe asks for more."""
    own = Fit.of(recipe)
    if saved is None:
        return own
    size, first_step = int(saved["micro_batch_size"]), int(saved["first_step"])
    chunks = max(own.sequence_chunks, int(saved.get("sequence_chunks", 1)))
    return Fit(size if own.micro_batch_size % size == 0 else own.micro_batch_size, "layer", first_step, chunks)
