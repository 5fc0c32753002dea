"""The rows of each step as a recipe says, the share of them that workers wait, and what gives them more. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.batching import BatchSampler, Grouping, RowBatch
from roundpipe_cli.data.tokenized import Packer, RowMix, TokenizedDataset
from roundpipe_cli.planning.question import ENOUGH_PER_WORKER
from roundpipe_cli.planning.token_budget import MIN_MICROBATCHES
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.units import counted

Lengths = npt.NDArray[np.int64]


def mix_of(recipe: Recipe, by_spec: Sequence[int]) -> RowMix:
    """The rows of the recipe's epochs; `by_spec`: of each entry of its `datasets`."""
    return RowMix(by_spec, [entry.weight for entry in recipe.datasets], recipe.seed, recipe.shuffle)


def grouping_of(recipe: Recipe, lengths: Lengths) -> Grouping:
    """How sequences become microbatches; `lengths`: tokens of each row; of a pair, of its longer answer."""
    num_rows, least = recipe.rows_per_microbatch, min(MIN_MICROBATCHES, recipe.microbatches_per_step)
    tokens = None if recipe.token_budget is None else num_rows * recipe.row_tokens
    return Grouping(lengths, num_rows, tokens, least)


WINDOW_TOKENS = 1 << 14
"""Tokens of a window of rows, about."""


def grouped_in_windows(recipe: Recipe, lengths: Lengths) -> list[list[RowBatch]]:
    """The microbatches of rows that are gone through once in their order: windows of consecutive rows, in each of which
    rows of similar length are together. `lengths`: as of `grouping_of`."""
    grouping, starts = grouping_of(recipe, lengths), np.cumsum(lengths) - lengths
    least = max(WINDOW_TOKENS, MIN_MICROBATCHES * recipe.rows_per_microbatch * recipe.row_tokens)
    firsts = np.flatnonzero(np.diff(starts // least))
    windows = np.split(np.arange(len(lengths)), firsts + 1)
    return [grouping.group([(index,) for index in window.tolist()]) for window in windows]


def rows_of_steps(recipe: Recipe, dataset: TokenizedDataset) -> BatchSampler:
    """The sampler of a recipe's rows.

    Raises:
        RefusedError: fewer rows than one step takes.
    """
    return sampler_of(recipe, mix_of(recipe, dataset.rows_by_spec), dataset.lengths)


def sampler_of(recipe: Recipe, mix: RowMix, lengths: Lengths) -> BatchSampler:
    """As `rows_of_steps`, by the tokens of each row as a microbatch pads them; `packing` is decided."""
    packer = Packer(lengths, recipe.row_tokens, recipe.seed, recipe.shuffle) if recipe.packs else None
    grouping = grouping_of(recipe, lengths)
    return BatchSampler(mix, recipe.micro_batch_size, recipe.gradient_accumulation_steps, packer, grouping=grouping)


LOOKED_AHEAD = 64
"""Steps that say what a usual one has."""


@dataclass(frozen=True, slots=True)
class UsualStep:
    """Means over the first steps of a run."""

    tokens: float
    """Without padding; of pairs, of the longer answers."""
    num_microbatches: int
    rows: float
    """Sequences of a microbatch."""
    length: int
    """Tokens to which they are padded."""


def usual_step(sampler: BatchSampler, num_steps: int) -> UsualStep:
    """Means of a run of so many steps."""
    assert sampler.grouping is not None
    lengths, steps = sampler.grouping.lengths, sampler.steps_ahead(max(1, min(LOOKED_AHEAD, num_steps)))
    batches = [[int(lengths[list(rows)].sum()) for rows in batch] for step in steps for batch in step]
    num_sequences = sum(map(len, batches))
    return UsualStep(
        tokens=sum(map(sum, batches)) / len(steps),
        num_microbatches=max(1, round(len(batches) / len(steps))),
        rows=num_sequences / len(batches),
        length=max(1, round(sum(len(batch) * max(batch) for batch in batches) / num_sequences)),
    )


LEAST_UPDATES = 60
"""A run of fewer hardly changes the answers (scripts/MEASUREMENTS.md, small data)."""
MOST_EPOCHS = 20


def enough_epochs(updates: int) -> int:
    """Epochs of so many updates that make `LEAST_UPDATES`, at most `MOST_EPOCHS`."""
    return min(MOST_EPOCHS, -(-LEAST_UPDATES // max(1, updates)))


NAMED_BUBBLE = 0.15
"""Predicted share of waiting above which a run names it before its first step."""


@dataclass(frozen=True, slots=True)
class WaitingRemedy:
    """Workers that wait since a step has few microbatches."""

    text: str
    """A step's microbatches, and how long workers wait."""
    remedy: str
    overrides: tuple[str, ...]
    """Changes that give them more, as `key=value`; empty: none does."""

    def describe(self) -> str:
        """A line for the user."""
        return f"{self.text}: {self.remedy}"


def find_waiting(
    recipe: Recipe, num_workers: int, count: int, bubble: float, *, num_sequences: int
) -> WaitingRemedy | None:
    """Remedy for workers that wait `bubble` of a step of `count` microbatches; None where they do not.

    Args:
        num_sequences: of an epoch.
    """
    enough, by_tokens = ENOUGH_PER_WORKER * num_workers, recipe.token_budget is not None
    if num_workers == 1 or recipe.pipeline.num_chunks > 1 or count >= enough or bubble <= NAMED_BUBBLE:
        return None
    size = max(1, recipe.rows_per_step // enough) if by_tokens else recipe.micro_batch_size
    steps = max(enough, recipe.rows_per_step // size)
    rows, few = size * steps, f"{counted(count, 'microbatch')} for {counted(num_workers, 'worker')}"
    text = f"a step has {few}, which will wait {bubble:.0%} of the time (predicted)"
    if rows > num_sequences:
        return WaitingRemedy(text, "the data have too few rows for more", ())
    words = ["micro_batch_tokens=null", f"micro_batch_size={size}"] if by_tokens else []
    words.append(f"gradient_accumulation_steps={steps}")
    more = f", with {counted(rows, 'row')} a step in place of {recipe.rows_per_step}"
    return WaitingRemedy(
        text, f"{' '.join(words)} makes them wait less{more * (rows > recipe.rows_per_step)}", tuple(words)
    )
