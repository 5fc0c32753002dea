"""`packing: auto`: rows are packed where they are short, where the model allows it, and where enough steps are left.

    max_seq_length 2048, 16 sequences a step        rows of 150 tokens        rows of 1,500 tokens
    packed                                          14 rows a sequence: on    1 row a sequence: off

What is short depends on the rows alone, so that the answer is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.order import RowMix
from roundpipe_cli.data.packing import WINDOW_ROWS, Packer

SHORT_SHARE = 0.5
"""Rows are short if their mean is at most this share of a sequence: two and more of them fit."""
MIN_STEPS = 10
"""Steps that epochs of packed rows make at least, where `auto` may choose: fewer updates learn little."""


@dataclass(frozen=True, slots=True)
class PackingChoice:
    """The answer, and its reason in words."""

    packs: bool
    why: str

    def describe(self) -> str:
        """A line for the user."""
        return f"packing (auto): {'on' if self.packs else 'off'}: {self.why}"


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """Demands of a recipe beside its rows."""

    max_seq_length: int
    rows_per_step: int
    num_epochs: int
    max_steps: int | None
    seed: int
    shuffle: bool


def count_sequences(mix: RowMix, packer: Packer) -> int:
    """Packed sequences of the first epoch."""
    order = mix.order(0)
    windows = [order[start : start + WINDOW_ROWS] for start in range(0, len(order), WINDOW_ROWS)]
    return sum(len(packer.pack(rows, 0, index)) for index, rows in enumerate(windows))


def choose_packing(
    mix: RowMix, lengths: npt.NDArray[np.int64], needs: StepNeeds, obstacle: str | None = None
) -> PackingChoice:
    """Whether `packing: auto` packs these rows.

    Args:
        lengths: tokens of each row.
        obstacle: why this model or recipe cannot train on packed rows; None where it can.
    """
    tokens = lengths[mix.order(0)]
    mean, longest = float(tokens.mean()), needs.max_seq_length
    measured = f"rows have {mean:,.0f} tokens on average, max_seq_length is {longest:,}"
    if mean > SHORT_SHARE * longest:
        return PackingChoice(False, measured)
    if obstacle is not None:
        little = f"a step has {mean / longest:.0%} of the tokens that `plan` counts"
        return PackingChoice(False, f"{obstacle}; {measured}: {little}, more with gradient_accumulation_steps")
    packer = Packer(lengths, longest, needs.seed, needs.shuffle)
    num_sequences, per_step = count_sequences(mix, packer), needs.rows_per_step
    per_epoch = -(-num_sequences // per_step)
    steps = per_epoch * needs.num_epochs if num_sequences >= per_step else 0
    if not steps or (needs.max_steps is None and steps < MIN_STEPS):
        few = f"{num_sequences} sequences would make {steps} steps of {per_step}"
        return PackingChoice(False, f"{measured}, but {few}; fewer gradient_accumulation_steps, or packing=true")
    rows = round(mix.rows_per_epoch * per_step / num_sequences)
    unpacked = -(-mix.rows_per_epoch // per_step)
    change = f"a step has about {rows} rows in place of {per_step}, an epoch {per_epoch} steps in place of {unpacked}"
    return PackingChoice(True, f"{measured}: {change}; packing=false keeps to {per_step} rows")
