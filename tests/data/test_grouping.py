"""Which rows of a step meet in a microbatch."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_cli.data.batching import BatchSampler, Grouping
from roundpipe_cli.data.tokenized import Packer, RowMix


def flat(batches: list[list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    return [sequence for batch in batches for sequence in batch]


def padded_tokens(batches: list[list[tuple[int, ...]]], lengths: np.ndarray) -> int:
    return sum(len(batch) * max(int(lengths[list(rows)].sum()) for rows in batch) for batch in batches)


def test_by_hand() -> None:
    grouping = Grouping(np.array([40, 300, 90, 310, 50, 80, 50]), 2)
    assert grouping.group([(index,) for index in range(7)]) == [[(3,), (1,)], [(2,), (5,)], [(4,), (6,)], [(0,)]]
    assert grouping.group([(0, 1), (3,), (2, 5)]) == [[(0, 1), (3,)], [(2, 5)]], "packed rows count together"


def test_rows_that_stand_alone_keep_their_order() -> None:
    assert Grouping(np.array([1, 9, 5]), 1).group([(0,), (1,), (2,)]) == [[(0,)], [(1,)], [(2,)]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 8))
def test_same_rows_in_as_many_microbatches_with_less_padding(lengths: list[int], size: int) -> None:
    rows = np.array(lengths)
    sequences = [(index,) for index in range(len(rows))]
    batches = Grouping(rows, size).group(sequences)
    in_order = [sequences[start : start + size] for start in range(0, len(rows), size)]
    assert [len(batch) for batch in batches] == [len(batch) for batch in in_order]
    assert sorted(flat(batches)) == sequences
    if len(rows) % size == 0:
        assert padded_tokens(batches, rows) <= padded_tokens(in_order, rows)


def test_a_step_has_the_rows_that_it_had_without() -> None:
    lengths = np.random.default_rng(3).integers(1, 900, 100)
    samplers = [
        BatchSampler(RowMix([100], [1.0], 7, shuffle=True), 4, 3, grouping=grouping)
        for grouping in (None, Grouping(lengths, 4))
    ]
    for _ in range(18):  # two epochs of 9 steps, the last of 4 rows
        plain, grouped = (sampler.next_step() for sampler in samplers)
        assert sorted(flat(plain)) == sorted(flat(grouped))
        assert len(plain) == 1 or padded_tokens(grouped, lengths) < padded_tokens(plain, lengths)
        assert samplers[0].position == samplers[1].position


# --- by tokens --------------------------------------------------------------------------------------------------------


def test_tokens_by_hand() -> None:
    grouping = Grouping(np.array([40, 300, 90, 310, 50, 80, 50]), 1, max_tokens=400)
    rows = [(index,) for index in range(7)]
    assert grouping.group(rows) == [[(3,)], [(1,)], [(2,), (5,), (4,)], [(6,), (0,)]]
    assert grouping.resized(2).group(rows) == [[(3,), (1,)], [(2,), (5,), (4,), (6,), (0,)]]
    assert Grouping(np.array([500, 10]), 1, max_tokens=400).group([(0,), (1,)]) == [[(0,)], [(1,)]]


def test_microbatches_of_equal_rows_are_evened_out() -> None:
    batches = Grouping(np.full(9, 100), 8, max_tokens=800).group([(index,) for index in range(9)])
    assert [len(batch) for batch in batches] == [5, 4], "not 8 and 1"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(500, 4000), st.randoms())
def test_no_microbatch_has_more_tokens_and_no_fewer_would_do(lengths: list[int], most: int, random: Random) -> None:
    rows = np.array(lengths)
    sequences = [(index,) for index in range(len(rows))]
    batches = Grouping(rows, 1, most).group(sequences)
    assert sorted(flat(batches)) == sequences
    assert all(padded_tokens([batch], rows) <= most for batch in batches)
    left, fewest = sorted(lengths, reverse=True), 0
    while left:  # the longest first, each microbatch as full as it can be
        left, fewest = left[most // left[0] :], fewest + 1
    assert len(batches) == fewest
    shuffled = random.sample(sequences, len(sequences))
    again = Grouping(rows, 1, most).group(shuffled)
    assert [[lengths[row] for (row,) in batch] for batch in again] == [
        [lengths[row] for (row,) in batch] for batch in batches
    ]


def test_packed_rows_of_150_tokens_fill_the_step_that_plan_counts() -> None:
    """16 sequences of 2,048 tokens a step, in microbatches of 8,192: not a twelfth of the tokens in 16 microbatches."""
    lengths = np.random.default_rng(1).integers(100, 200, 7473)
    packer = Packer(lengths, 2048, seed=0, shuffle=True)
    sampler = BatchSampler(RowMix([7473], [1.0], 0, shuffle=True), 1, 16, packer, grouping=Grouping(lengths, 4, 8192))
    for _ in range(sampler.num_steps(1) - 1):
        step = sampler.next_step()
        assert len(step) == 4
        assert 0.95 * 32_768 < sum(int(lengths[list(rows)].sum()) for rows in flat(step)) <= 32_768


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [([70] * 16, [4, 4, 4, 4]), ([300, 70, 70, 70], [1, 1, 1, 1]), ([70] * 6, [2, 1, 2, 1]), ([70, 60], [1, 1])],
)
def test_short_sequences_make_the_least_number_of_microbatches(lengths: list[int], sizes: list[int]) -> None:
    """All would fit one microbatch, and one worker would do all the work."""
    grouping = Grouping(np.array(lengths), 1, max_tokens=2048, least=4)
    batches = grouping.group([(index,) for index in range(len(lengths))])
    assert [len(batch) for batch in batches] == sizes
    assert sorted(row for batch in batches for (row,) in batch) == list(range(len(lengths)))
    assert len(grouping.resized(1).group([(index,) for index in range(len(lengths))])) == 1, "of a part of a step"
