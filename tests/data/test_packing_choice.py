"""`packing: auto`: when it packs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roundpipe_cli.data.tokenized import PackingChoice, RowMix, StepNeeds, choose_packing

NEEDS = StepNeeds(max_seq_length=2048, rows_per_step=16, num_epochs=1, max_steps=None, seed=0, shuffle=True)


def choice(num_rows: int, tokens: int, needs: StepNeeds = NEEDS, obstacle: str | None = None) -> PackingChoice:
    return choose_packing(RowMix([num_rows], [1.0], 0, shuffle=True), np.full(num_rows, tokens), needs, obstacle)


def test_short_rows_are_packed_and_the_change_is_said() -> None:
    found = choice(7473, 150)
    assert found.packs
    assert found.describe() == (
        "packing (auto): on: rows have 150 tokens on average, max_seq_length is 2,048: a step has about 208 rows in "
        "place of 16, an epoch 36 steps in place of 468; packing=false keeps to 16 rows"
    )


@pytest.mark.parametrize("tokens, packs", [(1024, True), (1025, False), (2048, False)])
def test_rows_of_more_than_half_a_sequence_are_not_short(tokens: int, packs: bool) -> None:
    assert choice(2000, tokens).packs is packs


def test_a_model_that_cannot_is_named() -> None:
    found = choice(7473, 150, obstacle="block.0 carries state")
    assert not found.packs
    assert "block.0 carries state" in found.why and "7% of the tokens that `plan` counts" in found.why


def test_too_few_steps_are_not_worth_it() -> None:
    """1,000 rows of 150 tokens are 77 sequences: 5 steps."""
    found = choice(1000, 150)
    assert not found.packs and "77 sequences would make 5 steps of 16" in found.why
    assert choice(1000, 150, replace(NEEDS, num_epochs=2)).packs
    assert choice(1000, 150, replace(NEEDS, max_steps=100)).packs
    none = choice(190, 150, replace(NEEDS, max_steps=100))
    assert not none.packs and "15 sequences would make 0 steps of 16" in none.why
