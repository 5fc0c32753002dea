"""Packed rows train exactly as rows on their own: same loss per token, through the engine and in gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from roundpipe_cli.data.collate import collate
from roundpipe_cli.data.tokenized import Packer, Row, first_fit_decreasing
from roundpipe_cli.engine.parity import prove
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.attention import describe_slow_kernels
from roundpipe_cli.model.chunks import check_packing, check_sequence_chunks
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.split import split_model
from tests.support.covering import swept
from tests.support.every_type import GATED_DELTA, hybrid_config
from tests.support.tiny import ALIKE, BASE, EXTRA, Rig, make_rig, schedule_for, tiny_config

LENGTHS = [[9, 1, 6], [3, 12], [16], [2, 2, 2, 2, 5]]
"""Rows of four sequences; the window of the sliding models is 4 tokens."""
TOLERANCE = 1e-5


def test_first_fit_decreasing_by_hand() -> None:
    lengths = np.array([3, 7, 2, 5, 6, 4, 3])
    bins = first_fit_decreasing(lengths, 10)
    assert [[int(lengths[place]) for place in places] for places in bins] == [[7, 3], [6, 4], [5, 3, 2]]
    assert first_fit_decreasing(np.array([], dtype=np.int64), 10) == []
    assert first_fit_decreasing(np.array([10, 10]), 10) == [[0], [1]]


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), extra=st.integers(0, 30))
def test_every_row_is_packed_once_and_no_sequence_overflows(lengths: list[int], extra: int) -> None:
    max_tokens = max(lengths) + extra
    bins = first_fit_decreasing(np.array(lengths), max_tokens)
    assert sorted(place for places in bins for place in places) == list(range(len(lengths)))
    used = [sum(lengths[place] for place in places) for places in bins]
    assert max(used) <= max_tokens
    fewest = math.ceil(sum(lengths) / max_tokens)
    assert len(bins) <= 2 * fewest  # any first fit: at most one bin is half empty
    for earlier in range(len(bins) - 1):  # no later row would have fitted into an earlier bin
        assert all(used[earlier] + lengths[place] > max_tokens for place in bins[-1])


def test_a_window_is_packed_the_same_way_every_time_and_epochs_differ() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 300)
    rows = np.arange(300)[::-1].copy()
    packer = Packer(lengths, 64, seed=3, shuffle=True)
    first = packer.pack(rows, 0, 0)
    assert first == Packer(lengths, 64, seed=3, shuffle=True).pack(rows, 0, 0)
    assert first != packer.pack(rows, 1, 0) and sorted(first) == sorted(packer.pack(rows, 1, 0))
    assert all(list(sequence) == sorted(sequence, reverse=True) for sequence in first), "the epoch's order inside"
    in_order = [tuple(rows[sorted(places)].tolist()) for places in first_fit_decreasing(lengths[rows], 64)]
    for seed, epoch, window in ((3, 0, 0), (7, 2, 5)):
        assert Packer(lengths, 64, seed, shuffle=False).pack(rows, epoch, window) == in_order != first
    assert sorted(in_order) == sorted(first)


def made_rows(seed: int = 0) -> list[list[Row]]:
    """Four sequences of rows; labels partly masked, first tokens sometimes trained."""
    generator = np.random.default_rng(seed)
    sequences = []
    for number, lengths in enumerate(LENGTHS):
        sequence = []
        for place, length in enumerate(lengths):
            ids = generator.integers(3, 128, length).astype(np.int32)
            labels = np.where(generator.random(length) < 0.3, -100, ids).astype(np.int32)
            sequence.append(Row(10 * number + place, ids, labels))
        sequences.append(sequence)
    return sequences


def test_collate_packed_by_hand() -> None:
    a = Row(4, np.array([11, 12, 13], dtype=np.int32), np.array([11, -100, 13], dtype=np.int32))
    b = Row(2, np.array([21, 22], dtype=np.int32), np.array([21, 22], dtype=np.int32))
    c = Row(9, np.array([31, 32, 33], dtype=np.int32), np.array([-100, -100, 33], dtype=np.int32))
    batch = collate([[a, b], [c]], 0, packed=True)
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22], [31, 32, 33, 0, 0]]
    assert batch.position_ids is not None and batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]
    assert batch.labels.tolist() == [[-100, -100, 13, -100, 22], [-100, -100, 33, -100, -100]]
    assert batch.attention_mask is None
    assert batch.row_ids == (4, 2, 9) and batch.num_target_tokens == 3


def step_of(rig: Rig, sequences: Sequence[Sequence[Sequence[Row]]], *, packed: bool) -> tuple[StepResult, Any]:
    """Result and gradients of a step over these microbatches."""
    microbatches = []
    for batch in (collate(some, 0, packed=packed) for some in sequences):
        places = None if batch.position_ids is None else torch.from_numpy(batch.position_ids)
        microbatches.append(Microbatch(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels), places))
    with rig.engine(2) as engine:
        result = engine.run_step(microbatches, schedule_for(rig, 2, len(microbatches)), step=0)
    return result, {name: rig.store.gradient(name).clone() for name in rig.store.trainable_names}


DELTA = ["qwen3_5_moe_text", "olmo_hybrid", *swept(sorted(set(GATED_DELTA) - {"qwen3_5_moe_text", "olmo_hybrid"}))]
"""The two forms of the rule, one with experts."""


@pytest.mark.parametrize(
    "model_type", [*("llama", "qwen3_moe", "gemma3_text", *DELTA), *swept(["gpt2", "mistral", "gemma2", "cohere2"])]
)
def test_packed_and_unpacked_steps_are_equal_through_the_engine(model_type: str) -> None:
    sequences = made_rows()
    rig = make_rig(model_type, config=hybrid_config(model_type) if model_type in GATED_DELTA else None)
    alone, expected = step_of(rig, [[[row]] for rows in sequences for row in rows], packed=False)
    packed, got = step_of(rig, [sequences[:2], sequences[2:]], packed=True)
    assert packed.num_target_tokens == alone.num_target_tokens > 30
    assert abs(packed.loss - alone.loss) <= TOLERANCE * alone.loss
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((got[name] - gradient).norm()) <= TOLERANCE * (float(gradient.norm()) + 1e-2 * largest), name


def skeleton(model_type: str, **changes: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = model_type in EXTRA
        config = tiny_config(model_type, **changes) if known else CONFIG_MAPPING[model_type](**BASE, **changes)
        return build_skeleton(config, torch.float32)


@pytest.mark.parametrize(
    "model_type", [*sorted(EXTRA.keys() - ALIKE - {"qwen3_next", "minimax"}), *swept(sorted(ALIKE))]
)
def test_a_model_that_is_accepted_keeps_rows_apart(model_type: str) -> None:
    model = skeleton(model_type)
    try:
        check_packing(model, split_model(model), max_seq_length=64, micro_batch_size=1)
    except RefusedError as error:
        assert model_type in ("opt", "bloom", "mpt"), error
        return
    rig = make_rig(model_type)
    plain = rig.plain.eval()
    packed = collate([made_rows()[0]], 0, packed=True)
    assert packed.position_ids is not None
    ids, positions = torch.from_numpy(packed.input_ids), torch.from_numpy(packed.position_ids)
    if model_type == "gpt_oss":  # its own code makes masks without position ids, so ours is compared with rows alone
        prove(model, split_model(model), packing=True)
        return
    with torch.no_grad():
        together = plain(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        start = 0
        for length in LENGTHS[0]:
            alone = plain(input_ids=ids[:, start : start + length], use_cache=False).logits[0]
            assert torch.allclose(together[start : start + length], alone, atol=1e-4, rtol=1e-4)
            start += length


@pytest.mark.parametrize(
    ("model_type", "changes", "where"),
    [
        *(("minimax", {}, "block.0"), ("bamba", {}, "block.0"), ("opt", {}, "block.0"), ("bloom", {}, "transformer")),
        ("lfm2", {"layer_types": ["full_attention", "conv", "full_attention"]}, "block.1"),
    ],
)
def test_models_that_cannot_keep_rows_apart_are_refused(model_type: str, changes: dict[str, Any], where: str) -> None:
    model = skeleton(model_type, **changes)
    with pytest.raises(RefusedError, match="they would see each other") as caught:
        check_packing(model, split_model(model), max_seq_length=64, micro_batch_size=1)
    problem = caught.value.problems[0]
    assert caught.value.exit_code == 2
    assert where in (problem.where or "") and problem.hint == "packing=false"


@pytest.mark.parametrize("model_type", DELTA)
def test_gated_delta_rules_begin_anew_at_each_row_and_go_on_in_each_chunk(model_type: str) -> None:
    """All hybrid models were refused. A run proves both before it trains, and says which kernels a GPU lacks."""
    model = build_skeleton(hybrid_config(model_type), torch.float32)
    split = split_model(model)
    check_packing(model, split, max_seq_length=64, micro_batch_size=1)
    check_sequence_chunks(model, split, max_seq_length=64)
    proof = prove(model, split, packing=True, chunks=True)
    assert not proof.unproven and max(proof.loss_error, proof.gradient_error) <= 1e-5
    blocks = list(model.get_submodule(split.blocks_path).children())
    assert describe_slow_kernels(blocks, ["cpu"]) is None
    assert "pip install flash-linear-attention causal-conv1d" in str(describe_slow_kernels(blocks, ["cuda:0", "cpu"]))


def test_too_large_masks_and_scaling_by_the_longest_row_are_refused() -> None:
    """Masks of attention that needs them; what can be told where rows lie trains at any length."""
    scaled = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    plain, model = skeleton("llama"), skeleton("llama", max_position_embeddings=32, **scaled)
    check_packing(plain, split_model(plain), max_seq_length=32768, micro_batch_size=1)
    plain.config._attn_implementation = "eager"
    with pytest.raises(RefusedError, match="too large") as caught:
        check_packing(plain, split_model(plain), max_seq_length=32768, micro_batch_size=1)
    assert "max_seq_length=23170" in (caught.value.problems[0].hint or "")
    with pytest.raises(RefusedError, match="they would see each other"):
        check_packing(model, split_model(model), max_seq_length=64, micro_batch_size=1)
    check_packing(model, split_model(model), max_seq_length=32, micro_batch_size=1)
