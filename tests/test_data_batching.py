"""Order and grouping of rows as pure functions of (seed, step), and padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_cli.data.batching import BatchSampler, collate, epoch_order, pad_token_id
from roundpipe_cli.data.dataset import Row
from roundpipe_cli.errors import RefusedError


def test_order_is_fixed_for_ever() -> None:
    # Golden: a resumed run must see the order that the run before it saw, whatever versions of numpy lie between.
    assert epoch_order(10, 0, 42, shuffle=True).tolist() == [3, 7, 0, 5, 8, 4, 6, 2, 1, 9]
    assert epoch_order(10, 1, 42, shuffle=True).tolist() == [3, 8, 2, 0, 5, 7, 1, 9, 6, 4]
    assert epoch_order(4, 3, 42, shuffle=False).tolist() == [0, 1, 2, 3]


def test_order_neither_reads_nor_writes_global_state() -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    first = epoch_order(100, 0, 7, shuffle=True)
    np.random.seed(2)
    assert np.array_equal(first, epoch_order(100, 0, 7, shuffle=True))
    np.random.seed(1)
    assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index]


def test_orders_of_seeds_and_epochs_differ_and_are_uniform() -> None:
    orders = {tuple(epoch_order(50, epoch, seed, shuffle=True)) for epoch in range(20) for seed in range(20)}
    assert len(orders) == 400
    first_places = np.zeros(5, dtype=int)
    for epoch in range(2000):
        first_places[epoch_order(5, epoch, 0, shuffle=True)[0]] += 1
    assert (abs(first_places - 400) < 100).all()  # 5.6 standard deviations


@settings(max_examples=100, deadline=None)
@given(
    num_rows=st.integers(1, 60),
    micro_batch_size=st.integers(1, 5),
    microbatches=st.integers(1, 5),
    seed=st.integers(0, 2**63),
    shuffle=st.booleans(),
)
def test_every_epoch_has_every_row_once(
    num_rows: int, micro_batch_size: int, microbatches: int, seed: int, shuffle: bool
) -> None:
    if num_rows < micro_batch_size * microbatches:
        with pytest.raises(RefusedError, match="fewer rows than one step"):
            BatchSampler(num_rows, micro_batch_size, microbatches, seed, shuffle)
        return
    sampler = BatchSampler(num_rows, micro_batch_size, microbatches, seed, shuffle)
    for epoch in range(3):
        seen: list[int] = []
        for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch):
            assert sampler.epoch_of(step) == epoch
            rows = sampler.step_rows(step)
            is_last = step == (epoch + 1) * sampler.steps_per_epoch - 1
            assert is_last or [len(microbatch) for microbatch in rows] == [micro_batch_size] * microbatches
            assert all(0 < len(microbatch) <= micro_batch_size for microbatch in rows)
            seen += [row for microbatch in rows for row in microbatch]
        assert seen == epoch_order(num_rows, epoch, seed, shuffle).tolist()
        assert sorted(seen) == list(range(num_rows))


def test_a_step_does_not_depend_on_the_steps_before_it() -> None:
    sampler = BatchSampler(23, 2, 3, 5, shuffle=True)
    in_turn = [sampler.step_rows(step) for step in range(12)]
    for step in (11, 0, 7, 3, 4, 10):
        assert BatchSampler(23, 2, 3, 5, shuffle=True).step_rows(step) == in_turn[step]
        assert sampler.step_rows(step) == in_turn[step]
    assert [len(microbatch) for microbatch in in_turn[3]] == [2, 2, 1]


def make_row(row_id: int, ids: list[int], labels: list[int]) -> Row:
    return Row(row_id, np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32))


def test_collate_pads_on_the_right() -> None:
    batch = collate([make_row(7, [1, 2, 3], [-100, 2, 3]), make_row(3, [4], [4])], pad_token_id=9)
    assert batch.input_ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch.labels.tolist() == [[-100, 2, 3], [4, -100, -100]]
    assert batch.attention_mask is not None and batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.input_ids.dtype == batch.labels.dtype == np.int64
    assert batch.row_ids == (7, 3)
    assert batch.num_target_tokens == 2  # the label of a first token has nothing before it to be predicted from
    assert batch.position_ids is None


def test_collate_without_padding_needs_no_mask() -> None:
    batch = collate([make_row(0, [1, 2], [1, 2]), make_row(1, [3, 4], [-100, 4])], pad_token_id=0)
    assert batch.attention_mask is None
    assert batch.num_target_tokens == 2


def test_collate_never_trains_a_pad_that_is_also_eos() -> None:
    batch = collate([make_row(0, [1, 2, 5], [-100, 2, 5]), make_row(1, [1, 5], [-100, 5])], pad_token_id=5)
    assert batch.labels.tolist() == [[-100, 2, 5], [-100, 5, -100]]


def test_pad_token_falls_back() -> None:
    class Named:
        pad_token_id: int | None = None
        eos_token_id: int | None = None

    tokenizer = Named()
    assert pad_token_id(tokenizer) == 0
    tokenizer.eos_token_id = 2
    assert pad_token_id(tokenizer) == 2
    tokenizer.pad_token_id = 5
    assert pad_token_id(tokenizer) == 5
