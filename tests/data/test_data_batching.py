"""Order and mixing of rows from a saved position, which rows of a step meet in a microbatch, and padding."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_cli.data.batching import BatchSampler, Grouping, Position, RowBatch
from roundpipe_cli.data.collate import collate
from roundpipe_cli.data.tokenized import Packer, Row, RowMix, epoch_order
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.schema import DatasetConfig, Recipe
from roundpipe_cli.train.prepare.steps import mix_of


def test_order_is_fixed_for_ever() -> None:
    """Golden: a resumed run must see the order that the run before it saw, whatever versions of numpy lie between."""
    assert epoch_order(10, 0, 42, shuffle=True).tolist() == [3, 7, 0, 5, 8, 4, 6, 2, 1, 9]
    assert epoch_order(10, 1, 42, shuffle=True).tolist() == [3, 8, 2, 0, 5, 7, 1, 9, 6, 4]
    assert epoch_order(4, 3, 43, shuffle=True).tolist() == [2, 3, 1, 0]
    assert epoch_order(4, 3, 42, shuffle=False).tolist() == [0, 1, 2, 3]


def sampler_of(num_rows: int, size: int, microbatches: int, seed: int, shuffle: bool) -> BatchSampler:
    return BatchSampler(RowMix([num_rows], [1.0], seed, shuffle), size, microbatches)


def rows_of(step: list[RowBatch]) -> list[int]:
    return [row for batch in step for sequence in batch for row in sequence]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**63), st.booleans())
def test_every_epoch_has_every_row_once(num_rows: int, size: int, microbatches: int, seed: int, shuffle: bool) -> None:
    if num_rows < size * microbatches:
        with pytest.raises(RefusedError, match="fewer rows than one step"):
            sampler_of(num_rows, size, microbatches, seed, shuffle)
        return
    sampler = sampler_of(num_rows, size, microbatches, seed, shuffle)
    steps_per_epoch = sampler.num_steps(1)
    assert sampler.num_steps(3) == 3 * steps_per_epoch
    for epoch in range(3):
        seen: list[int] = []
        for step in range(steps_per_epoch):
            assert sampler.position.epoch == epoch
            rows = sampler.next_step()
            is_last = step == steps_per_epoch - 1
            assert is_last or [len(microbatch) for microbatch in rows] == [size] * microbatches
            assert all(0 < len(microbatch) <= size for microbatch in rows)
            seen += rows_of(rows)
        assert seen == epoch_order(num_rows, epoch, seed, shuffle).tolist()
        assert sorted(seen) == list(range(num_rows))


LENGTHS = np.random.default_rng(5).integers(1, 100, 10_000)


def long_sampler(packing: bool, weights: tuple[float, ...] = (1.0, 1.0), microbatches: int = 50) -> BatchSampler:
    """10,000 rows from two sources: three windows an epoch."""
    packer = Packer(LENGTHS, 300, seed=1, shuffle=True) if packing else None
    return BatchSampler(RowMix([7000, 3000], weights, 1, shuffle=True), 2, microbatches, packer)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("packing", [False, True])
def test_a_step_depends_on_the_saved_position_alone(packing: bool, weights: tuple[float, ...]) -> None:
    """A resumed run seeks: nothing of the epochs and windows before is read again."""
    sampler = long_sampler(packing, weights)
    num_steps = sampler.num_steps(2)
    positions, steps = [], []
    for _ in range(num_steps):
        positions.append(Position(**json.loads(json.dumps(sampler.position.to_json()))))
        steps.append(sampler.next_step())
    assert sampler.position == Position(2)
    assert {position.window for position in positions} == {0, 1, 2}
    for index in (num_steps - 1, 0, num_steps // 2, num_steps // 5, num_steps // 3):
        resumed = long_sampler(packing, weights)
        resumed.seek(positions[index])
        assert resumed.next_step() == steps[index]
    for epoch in range(2):
        seen = [row for place, step in zip(positions, steps, strict=True) if place.epoch == epoch
                for row in rows_of(step)]  # fmt: skip
        expected = RowMix([7000, 3000], weights, 1, shuffle=True).order(epoch)
        assert sorted(seen) == sorted(expected.tolist())


@pytest.mark.parametrize("packing", [False, True])
def test_steps_are_counted_from_any_position_with_any_rows(packing: bool) -> None:
    """A run may continue with another number of rows a step: from where it is, its last epoch still ends whole."""
    sampler, places = long_sampler(packing), []
    for _ in range(sampler.num_steps(2)):
        places.append(sampler.position)
        sampler.next_step()
    others = [long_sampler(packing, microbatches=count) for count in (25, 133)]
    for place in places[:: len(places) // 3]:
        for other in others:
            left = other.num_steps(2, place)
            other.seek(place)
            for _ in range(left):
                assert other.position.epoch < 2
                other.next_step()
            assert other.position == Position(2)
            assert (other.num_steps(1, place) < 0) == (place.epoch > 0 and not place.starts_epoch)
    assert others[1].num_steps(1, Position(3)) == -(others[1].num_steps(3) - others[1].num_steps(1))


@pytest.mark.parametrize("packing", [False, True])
def test_epochs_done_grow_to_a_whole_number_and_name_their_position(packing: bool) -> None:
    sampler, rows, before = long_sampler(packing), 0, 0.0
    while sampler.position.epoch < 2:
        place = sampler.position
        assert sampler.position_after(before) == place
        sampler.seek(place)
        rows += len(rows_of(sampler.next_step()))
        assert before < sampler.epochs_done == pytest.approx(rows / 10_000, abs=1e-9 if not packing else 0.02)
        before = sampler.epochs_done
        assert not sampler.position.starts_epoch or before == sampler.position.epoch
    assert sampler.position_after(0.5 + 1e-9).epoch == 0 and sampler.position_after(2.0) == Position(2)


def test_packed_epochs_are_counted_one_by_one() -> None:
    packer = Packer(LENGTHS[:5000], 110, seed=1, shuffle=True)
    sampler = BatchSampler(RowMix([5000], [1.0], 1, shuffle=True), 1, 1, packer)
    counts = [sampler.num_sequences(epoch) for epoch in range(3)]
    assert len(set(counts)) > 1 and sampler.num_steps(3) == sum(counts)


def test_a_position_that_smaller_data_no_longer_has_is_the_end_of_its_epoch() -> None:
    sampler = sampler_of(10, 2, 2, 0, shuffle=True)
    for position in (Position(3, 0, 10), Position(3, 0, 500), Position(3, 2, 0)):
        sampler.seek(position)
        assert sampler.position == Position(4) and len(rows_of(sampler.next_step())) == 4


def test_too_few_packed_rows_are_refused() -> None:
    packer = Packer(np.full(20, 10), 100, seed=0, shuffle=True)
    mix = RowMix([20], [1.0], 0, shuffle=True)
    assert len(rows_of(BatchSampler(mix, 1, 2, packer).next_step())) == 20
    with pytest.raises(RefusedError, match="fewer rows than one step") as caught:
        BatchSampler(mix, 1, 3, packer)
    problem = caught.value.problems[0]
    assert problem.found == "20 rows, packed into 2 sequences"
    assert problem.hint == "gradient_accumulation_steps=2 or packing=false"
    with pytest.raises(RefusedError, match="fewer rows than one step") as caught:
        BatchSampler(RowMix([3], [1.0], 0, True), 1, 4, Packer(np.array([1, 1, 1]), 9, 0, True))
    (problem,) = caught.value.problems
    assert problem.found == "3 rows, packed into 1 sequence"
    assert problem.hint == "gradient_accumulation_steps=1", "without packing, 3 rows are too few as well"


@settings(max_examples=60, deadline=None)
@given(
    sources=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0.1, 0.5, 1.0, 3.0])), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    shuffle=st.booleans(),
)
def test_weights_are_shares_and_rows_take_turns(sources: list[tuple[int, float]], seed: int, shuffle: bool) -> None:
    """No row comes twice before all of its source have come."""
    sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
    total = sum(sizes)
    if total == 0:
        return
    mix = RowMix(sizes, weights, seed, shuffle)
    filled = [weight for size, weight in sources if size]
    shares = [weight / sum(filled) if size else 0.0 for size, weight in sources]
    borders = np.cumsum([0, *sizes])
    seen = np.zeros(total, dtype=int)
    for epoch in range(5):
        rows = mix.order(epoch)
        assert np.array_equal(rows, RowMix(sizes, weights, seed, shuffle).order(epoch))
        np.add.at(seen, rows, 1)
        for first, last, share in zip(borders, borders[1:], shares, strict=False):
            counts = seen[first:last]
            assert len(counts) == 0 or counts.max() - counts.min() <= 1
            if mix.is_mixed:
                assert abs(int(((rows >= first) & (rows < last)).sum()) - share * total) <= len(sizes)
    if len(set(filled)) == 1:
        assert (seen == 5).all()


def test_mixing_by_hand() -> None:
    mix = RowMix([4, 4], [3.0, 1.0], 0, shuffle=False)
    assert mix.epoch_rows == (6, 2)
    assert mix.order(0).tolist() == [0, 1, 4, 2, 3, 0, 5, 1]
    assert mix.order(1).tolist() == [2, 3, 6, 0, 1, 2, 7, 3]
    assert RowMix([4, 4], [2.0, 2.0], 0, shuffle=False).order(0).tolist() == list(range(8))
    assert RowMix([6, 0, 2], [2.0, 2.0, 2.0], 0, shuffle=False).order(0).tolist() == list(range(8)), "one is empty"


def flat(batches: list[list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    return [sequence for batch in batches for sequence in batch]


def padded_tokens(batches: list[list[tuple[int, ...]]], lengths: np.ndarray) -> int:
    return sum(len(batch) * max(int(lengths[list(rows)].sum()) for rows in batch) for batch in batches)


def test_grouping_by_hand() -> None:
    grouping = Grouping(np.array([40, 300, 90, 310, 50, 80, 50]), 2)
    assert grouping.group([(index,) for index in range(7)]) == [[(3,), (1,)], [(2,), (5,)], [(4,), (6,)], [(0,)]]
    assert grouping.group([(0, 1), (3,), (2, 5)]) == [[(0, 1), (3,)], [(2, 5)]], "packed rows count together"
    alone = Grouping(np.array([1, 9, 5]), 1).group([(0,), (1,), (2,)])
    assert alone == [[(0,)], [(1,)], [(2,)]], "rows that stand alone keep their order"


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


def test_grouping_by_tokens_by_hand() -> None:
    grouping = Grouping(np.array([40, 300, 90, 310, 50, 80, 50]), 1, max_tokens=400)
    rows = [(index,) for index in range(7)]
    assert grouping.group(rows) == [[(3,)], [(1,)], [(2,), (5,), (4,)], [(6,), (0,)]]
    assert grouping.resized(2).group(rows) == [[(3,), (1,)], [(2,), (5,), (4,), (6,), (0,)]]
    assert Grouping(np.array([500, 10]), 1, max_tokens=400).group([(0,), (1,)]) == [[(0,)], [(1,)]]
    even = Grouping(np.full(9, 100), 8, max_tokens=800).group([(index,) for index in range(9)])
    assert [len(batch) for batch in even] == [5, 4], "not 8 and 1"


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
    num_full = sampler.num_steps(1) - 1
    assert num_full == 7473 * 149.5 // 32_768
    for _ in range(num_full):
        step = sampler.next_step()
        assert len(step) == 4
        assert 0.95 * 32_768 < sum(int(lengths[list(rows)].sum()) for rows in flat(step)) <= 32_768


def test_short_sequences_make_the_least_number_of_microbatches() -> None:
    """All would fit one microbatch, and one worker would do all the work."""
    for lengths, sizes in (
        *(([70] * 16, [4] * 4), ([300, 70, 70, 70], [1] * 4), ([70] * 6, [2, 1] * 2), ([70, 60], [1, 1])),
    ):
        grouping, sequences = (
            Grouping(np.array(lengths), 1, max_tokens=2048, least=4),
            [(n,) for n in range(len(lengths))],
        )
        batches = grouping.group(sequences)
        assert [len(batch) for batch in batches] == sizes and sorted(flat(batches)) == sequences
        assert len(grouping.resized(1).group(sequences)) == 1, "of a part of a step"


def make_row(row_id: int, ids: list[int], labels: list[int]) -> Row:
    return Row(row_id, np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32))


def test_collate_pads_on_the_right() -> None:
    batch = collate([[make_row(7, [1, 2, 3], [-100, 2, 3])], [make_row(3, [4], [4])]], 9, packed=False)
    assert batch.input_ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch.labels.tolist() == [[-100, 2, 3], [4, -100, -100]]
    assert batch.attention_mask is not None and batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.input_ids.dtype == batch.labels.dtype == np.int64
    assert batch.row_ids == (7, 3)
    assert batch.num_target_tokens == 2  # the label of a first token has nothing before it to be predicted from
    assert batch.position_ids is None
    # a pad that is also EOS is never trained
    batch = collate([[make_row(0, [1, 2, 5], [-100, 2, 5])], [make_row(1, [1, 5], [-100, 5])]], 5, packed=False)
    assert batch.labels.tolist() == [[-100, 2, 5], [-100, 5, -100]]
    even = collate([[make_row(0, [1, 2], [1, 2])], [make_row(1, [3, 4], [-100, 4])]], 0, packed=False)
    assert even.attention_mask is None and even.num_target_tokens == 2, "without padding there is no mask"


def test_an_epoch_has_the_rows_of_each_entry_by_its_weight() -> None:
    """16 rows as 2 : 1 : 0.5, a row again only when all of its entry were there."""
    entries = (DatasetConfig(path="a", weight=2.0), DatasetConfig(path="b"), DatasetConfig(path="c", weight=0.5))
    mix = mix_of(Recipe(model="m", datasets=entries, output_dir="o", learning_rate=1e-4), [3, 5, 8])
    counts = np.bincount(mix.order(0), minlength=16)
    assert [int(part.sum()) for part in np.split(counts, [3, 8])] == [9, 5, 2]
    assert set(counts[:3]) == {3} and set(counts[3:8]) == {1}
