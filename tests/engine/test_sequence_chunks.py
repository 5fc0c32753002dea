"""One sequence in chunks on several workers: losses and gradients are those of the whole sequence in plain PyTorch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.integrations import moe

from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.engine.layer import LayerGraph, LayerRunner
from roundpipe_cli.engine.parity import prove
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model import attention
from roundpipe_cli.model.chunks import check_sequence_chunks
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.reduced import reduce_model
from roundpipe_cli.model.split import split_model
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import SimulationCase, run
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.builders import Options, Rounds, build_schedule
from roundpipe_cli.schedule.timeline import bubble_ratio
from roundpipe_cli.train.build import make_planner
from roundpipe_cli.train.checkpoint.resume import describe_other_bits, run_state
from roundpipe_cli.train.prepare.rows import describe_padded_to_chunks
from scripts import memory_table
from tests.support.covering import swept
from tests.support.e2e import finetune, make_model, make_workspace, numbers, write_recipe
from tests.support.every_type import GATED_DELTA, hybrid_config, tiny_config_of
from tests.support.schedules import dealt, validate_schedule
from tests.support.simulated_cases import Case, is_equal, roundpipe
from tests.support.simulated_cuda import Card
from tests.support.tiny import Rig, make_rig, masks, plain_step, random_microbatches, tiny_config
from tests.train.test_training_options import setup_of

TOLERANCE = 1e-5
SIZES = ((1, 23), (2, 16))


def chunk_schedule(
    num_layers: int, num_sequences: int, chunks: int, num_workers: int = 2, per_round: int | None = None
) -> Schedule:
    """Two blocks a forward stage, one a backward stage but for the last, the head alone."""
    last = num_layers - 1
    forward = [(start, min(start + 1, last - 1)) for start in range(0, last, 2)]
    backward = [(last, last), *((layer, layer) for layer in range(last - 1, 1, -1)), (0, 1)]
    return dealt(forward, backward, num_workers, num_sequences * chunks, per_round=per_round, sequence_chunks=chunks)


def chunk_step(
    rig: Rig, microbatches: Any, chunks: int = 4, num_workers: int = 2, schedule: Schedule | None = None, **options: Any
) -> StepResult:
    schedule = schedule or chunk_schedule(rig.num_layers, len(microbatches), chunks, num_workers)
    with rig.engine(num_workers, **options) as engine:
        return engine.run_step(microbatches, schedule, step=0)


def assert_gradients_equal(rig: Rig, tolerance: float = TOLERANCE) -> None:
    """Every trained parameter's, relative to the largest entry of its gradient."""
    trained = {name: parameter.grad for name, parameter in rig.plain.named_parameters() if parameter.requires_grad}
    assert trained
    for name, expected in trained.items():
        assert expected is not None, name
        error = (rig.store.gradient(name) - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
        assert error < tolerance, f"{name}: {error}"


def compared(rig: Rig, sizes: Any = SIZES, chunks: int = 4, **options: Any) -> None:
    microbatches = random_microbatches(sizes)
    loss = plain_step(rig, microbatches)
    result = chunk_step(rig, microbatches, chunks, **options)
    assert result.loss == pytest.approx(loss, rel=TOLERANCE)
    assert result.num_target_tokens == sum(int((m.labels[:, 1:] != -100).sum()) for m in microbatches)
    assert_gradients_equal(rig)


def test_a_model_whose_chunks_fail_is_refused_before_a_run() -> None:
    """Story: its masks were right, so it was accepted, and the first step ended in an error."""
    model = build_skeleton(tiny_config_of("deepseek_v32"), torch.float32)
    split = split_model(model)
    check_sequence_chunks(model, split, max_seq_length=64)
    with pytest.raises(RefusedError, match="cannot train on sequences in chunks") as refused:
        prove(model, split, chunks=True)
    assert "update_indexer" in str(refused.value.problems[0].found)


def test_chunks_are_part_of_the_proof() -> None:
    """Of a large model too, whose blocks are left out but for one of each kind."""
    for vocab_size in (128, 5000):
        rig = make_rig("llama", vocab_size=vocab_size)
        assert (len(reduce_model(rig.skeleton, rig.split).kept) == 3) == (vocab_size == 128)
        proof = prove(rig.skeleton, rig.split, chunks=True, fused=True)
        assert proof.unproven == "" and proof.gradient_error < TOLERANCE


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text", "gpt_oss", "gpt2"])
def test_gradients_are_those_of_the_whole_sequence(model_type: str, method: str) -> None:
    # llama and mistral: two query heads for each key head; mistral, gemma3 and gpt_oss: windows of 4 tokens
    compared(make_rig(model_type, method))


TRIED = (("qwen3_5_moe_text", 4), ("olmo_hybrid", 8))


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)


@pytest.mark.parametrize(
    ("model_type", "chunks"),
    [
        pytest.param(name, chunks, marks=[] if (name, chunks) in TRIED else [pytest.mark.sweep])
        for name in GATED_DELTA
        for chunks in (4, 8)
    ],
)
def test_a_gated_delta_rule_goes_on_where_a_chunk_ended(model_type: str, chunks: int, in_float64: None) -> None:
    """In float64 chunks are whole sequences but for 1e-10; in float32, where both round, they are up to 4e-5 apart."""
    microbatches = random_microbatches([(1, 9), (2, 8)])
    rig = make_rig(model_type, config=hybrid_config(model_type), dtype=torch.float64)
    rig.store.gradients = [torch.zeros(one.num_trainable_elements, dtype=torch.float64) for one in rig.store.layouts]
    loss = plain_step(rig, microbatches)
    assert chunk_step(rig, microbatches, chunks).loss == pytest.approx(loss, rel=1e-12)
    assert_gradients_equal(rig, 1e-10)


# --- packed rows -----------------------------------------------------------------------------------------------------
def packed(microbatches: Sequence[Microbatch]) -> Microbatch:
    """One sequence of rows; the first token of each is nobody's target."""
    labels = [torch.cat([torch.full_like(one.labels[:, :1], -100), one.labels[:, 1:]], dim=1) for one in microbatches]
    positions = [torch.arange(one.input_ids.shape[1])[None] for one in microbatches]
    return Microbatch(*(torch.cat(each, 1) for each in ([m.input_ids for m in microbatches], labels, positions)))


def rows_of(*lengths: int) -> list[Microbatch]:
    return random_microbatches([(1, length) for length in lengths])


ROWS, MORE_ROWS = (5, 13, 1, 4), (3, 20)


def compare_packed(rig: Rig, rows: Sequence[Sequence[int]], chunks: int, tolerance: float, **options: Any) -> None:
    each = [rows_of(*lengths) for lengths in rows]
    loss = plain_step(rig, [row for rows in each for row in rows])
    assert chunk_step(rig, [*map(packed, each)], chunks, **options).loss == pytest.approx(loss, rel=tolerance)
    assert_gradients_equal(rig, tolerance)


@pytest.mark.parametrize(
    ("model_type", "by_rows"),
    [
        *((name, False) for name in ("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "gemma2")),
        *(("gemma2", True), pytest.param("gemma3_text", True, marks=pytest.mark.sweep)),
    ],
)
def test_packed_chunks_are_whole_rows_alone(model_type: str, by_rows: bool) -> None:
    compare_packed(make_rig(model_type), (ROWS, MORE_ROWS), 4, TOLERANCE, attends_in_rows=by_rows)


@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "olmo_hybrid"),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("apertus", "qwen3_5_moe_text")),
    ],
)
def test_packed_chunks_differ_by_rounding_alone(model_type: str, in_float64: None) -> None:
    """In float32 the one number of apertus' activation, a sum over all tokens, is up to 8e-5 apart."""
    config = hybrid_config(model_type) if model_type in GATED_DELTA else None
    config = tiny_config_of(model_type) if model_type == "apertus" else config
    rig = make_rig(model_type, config=config, dtype=torch.float64)
    rig.store.gradients = [torch.zeros(one.num_trainable_elements, dtype=torch.float64) for one in rig.store.layouts]
    compare_packed(rig, (ROWS, MORE_ROWS), 6, 1e-10, attends_in_rows=True)


PACKED_RIG = functools.cache(lambda: make_rig("mistral", "lora", num_hidden_layers=2))


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(2, 7))
def test_packed_chunks_end_anywhere(lengths: list[int], chunks: int) -> None:
    # of a token that sees only itself the gradient of the query is 0, and rounding is all that there is
    assume(any(int((row.labels[:, 2:] != -100).sum()) for row in rows_of(*lengths)))
    compare_packed(PACKED_RIG(), [lengths], chunks, TOLERANCE, attends_in_rows=True)


def test_packed_chunks_have_the_same_bits_on_any_number_of_workers() -> None:
    rig, found = make_rig("gemma3_text"), []
    for num_workers in (1, 2, 3):
        microbatches = [packed(rows_of(*lengths)) for lengths in (ROWS, MORE_ROWS)]
        result = chunk_step(rig, microbatches, 4, num_workers, copy=num_workers > 1, attends_in_rows=True)
        found.append((result.loss.hex(), [gradient.clone() for gradient in rig.store.gradients]))
    assert_same_bits(found)


def assert_same_bits(found: list[tuple[str, list[torch.Tensor]]]) -> None:
    for loss, gradients in found[1:]:
        assert loss == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(gradients, found[0][1], strict=True))


@pytest.mark.parametrize(("model_type", "rows"), [("llama", (ROWS,)), ("gemma3_text", (ROWS, MORE_ROWS))])
def test_chunks_on_cards_attend_without_masks(model_type: str, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bit, by what stands for flash attention; masks on all pairs were repeated for each block."""
    microbatches = [packed(rows_of(*lengths)) for lengths in rows]
    starts, attend = set[int](), attention._attend_at_once
    noted = lambda *given, **more: (starts.add(given[3].start), attend(*given, **more))[1]  # noqa: E731
    monkeypatch.setattr(attention, "_takes_other_ends", True)
    monkeypatch.setattr(attention, "_attend_at_once", noted)
    schedule, engine = functools.partial(roundpipe, sequence_chunks=4), {"attends_in_rows": True}
    case = Case(model_type, "full", {"dtype": torch.bfloat16}, engine, chunks=4, schedule=schedule)
    case = replace(case, microbatches=microbatches)
    expected = case.on_processor()
    attention.set_up_attention((9, 0))
    found, simulation = case.simulated(0, cards=[Card(), Card()])
    assert is_equal(found, expected, 0.03) and len(starts - {0}) > 1
    assert simulation.machine.substituted >= {f"torch_attn._varlen_attn{way}.default" for way in ("", "_backward")}


@pytest.mark.parametrize(("changes", "without"), [({"packed": True}, True), ({"masked": True}, False)])
def test_the_allocators_peak_is_what_plan_counts(changes: Any, without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: masks and repeated keys of chunks took 1.08 to 1.41 times what `plan` counted."""
    monkeypatch.setattr(memory_table, "SEQUENCE_TOKENS", 512)
    monkeypatch.setitem(memory_table.SIZES, "vocab_size", 2000)
    for name, value in (("_least_capability", None), ("_takes_other_ends", False)):
        monkeypatch.setattr(attention, name, value)
    interval_s = sys.getswitchinterval()
    planned, peak, _ = memory_table.planned_and_peak(memory_table.Form("llama", "lora", "chunks", 4, changes))
    sys.setswitchinterval(interval_s)
    assert attention.chunks_need_no_mask(*[torch.empty(1, 2, 3, 64, dtype=torch.bfloat16)] * 2) is without
    assert memory_table.LEAST <= peak / planned <= memory_table.MOST


@pytest.mark.parametrize(
    ("model_type", "changes", "chunks", "sizes"),
    [
        ("llama", {"num_key_value_heads": 1}, 4, SIZES),
        ("llama", {"num_key_value_heads": 4}, 4, SIZES),
        ("mistral", {"tie_word_embeddings": True}, 6, ((1, 3), (1, 9))),
    ],
)
def test_any_number_of_key_heads_and_chunks(model_type: str, changes: Any, chunks: int, sizes: Any) -> None:
    compared(make_rig(model_type, **changes), sizes, chunks)


@pytest.mark.parametrize(
    ("model_type", "method", "tolerance"),
    [
        ("mistral", "full", TOLERANCE),
        pytest.param("mistral", "lora", TOLERANCE, marks=pytest.mark.sweep),
        ("olmo_hybrid", "full", 4e-5),  # see above
    ],
)
def test_bits_do_not_depend_on_workers_copies_or_recompute(model_type: str, method: str, tolerance: float) -> None:
    config = hybrid_config(model_type) if model_type in GATED_DELTA else None
    rig, microbatches, found = make_rig(model_type, method, config=config), random_microbatches(SIZES), []
    plain_step(rig, microbatches)
    for num_workers, copy, recompute in ((1, False, "stage"), (3, True, "stage"), (2, True, "layer")):
        result = chunk_step(rig, microbatches, 4, num_workers, copy=copy, recompute=recompute)
        found.append((result.loss.hex(), [gradient.clone() for gradient in rig.store.gradients]))
        assert_gradients_equal(rig, tolerance)
    assert_same_bits(found)


def test_schedules_with_a_stage_per_worker_and_rounds_of_two_sequences() -> None:
    rig, microbatches = make_rig("llama", num_hidden_layers=2), random_microbatches([*SIZES, (1, 9)])
    rounds = Rounds(6, sequence_chunks=2)
    loss = plain_step(rig, microbatches)
    for schedule in (
        build_schedule("gpipe", forward_stages=[(0, 1), (2, 3)], num_workers=2, rounds=rounds),
        build_schedule("looped_bfs", forward_stages=[(0, 1), (2, 3)], num_workers=2, rounds=rounds),
        chunk_schedule(4, 3, 2, per_round=4),
    ):
        validate_schedule(schedule)
        assert chunk_step(rig, microbatches, schedule=schedule, copy=True).loss == pytest.approx(loss, rel=TOLERANCE)
        assert_gradients_equal(rig)


@pytest.mark.covering(1)
@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize("backward", [[(4, 4), (0, 3)], [(4, 4), (2, 3), (0, 1)]])
def test_keys_and_values_of_frozen_lower_blocks(recompute: str, backward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: a recompute kept those of its own chunk until the backward, which has no use for them."""
    useless, take_backward = set[int](), LayerRunner.backward

    def note(layers: LayerRunner, context: Any, graph: LayerGraph, *rest: Any) -> Any:
        if graph.own is not None and graph.layer < layers.trained.first:
            useless.add(graph.layer)
        return take_backward(layers, context, graph, *rest)

    monkeypatch.setattr(LayerRunner, "backward", note)
    rig = make_rig("llama", frozen=["embed_tokens", "layers.0.", "layers.1.self_attn", "layers.1.input"])
    schedule = dealt([(0, 3)], backward, 2, 8, sequence_chunks=4)
    compared(rig, schedule=schedule, copy=True, recompute=recompute)
    assert not useless


def plain_chunks(rig: Rig, microbatch: Any, chunks: int, seed: int) -> None:
    """Gradients of one sequence in chunks by plain PyTorch, through transformers' own cache, with dropout."""
    from transformers import DynamicCache

    rig.plain.zero_grad(set_to_none=True)
    cache, losses = DynamicCache(), []
    ids, targets = microbatch.input_ids, torch.full_like(microbatch.labels, -100)
    targets[:, :-1] = microbatch.labels[:, 1:]
    bounds = [ids.shape[1] * index // chunks for index in range(chunks + 1)]
    for index in range(chunks):
        part = slice(bounds[index], bounds[index + 1])
        with masks(rig, rig.plain, 0, index, seed):
            logits = rig.plain(input_ids=ids[:, part], past_key_values=cache, use_cache=True).logits
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, part].flatten(), reduction="sum"))
    (torch.stack(losses).sum() / int((targets != -100).sum())).backward()


@pytest.mark.parametrize("recompute", ["layer", pytest.param("stage", marks=pytest.mark.sweep)])
def test_dropout_is_the_same_in_forward_and_recompute(recompute: str) -> None:
    rig = make_rig("llama", "lora", lora_dropout=0.3, attention_dropout=0.2)
    microbatches = random_microbatches([(1, 23)])
    plain_chunks(rig, microbatches[0], 4, seed=5)
    chunk_step(rig, microbatches, 4, seed=5, recompute=recompute)
    assert_gradients_equal(rig)


@pytest.mark.parametrize(
    ("model_type", "changes", "found"),
    [
        ("minimax", {}, "MiniMaxLightningAttention, which carries state"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "scaling by length"),
    ],
)
def test_models_that_need_the_whole_sequence_are_refused(model_type: str, changes: Any, found: str) -> None:
    skeleton = build_skeleton(tiny_config(model_type, **changes), torch.float32)
    with pytest.raises(RefusedError, match=found):
        check_sequence_chunks(skeleton, split_model(skeleton), max_seq_length=4096)


def test_attention_in_chunks_is_proved_for_every_block() -> None:
    for model_type in ("gemma3_text", "gpt2", "bloom"):
        skeleton = build_skeleton(tiny_config(model_type), torch.float32)
        check_sequence_chunks(skeleton, split_model(skeleton), max_seq_length=64)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "problem"),
    [
        ("1f1b", None, 8, "goes backward before all chunks"),
        ("gpipe", None, 6, "a step holds whole sequences"),
        ("roundpipe", [(2, 3), (0, 1)], 8, "holds no blocks"),
    ],
)
def test_schedules_that_chunks_do_not_suit_are_refused(name: str, stages: Any, microbatches: int, problem: str) -> None:
    forward = [(0, 1), (2, 3)] if stages is None else [(0, 1)]
    with pytest.raises(RefusedError, match=problem):
        rounds = Rounds(microbatches, sequence_chunks=4)
        build_schedule(name, forward_stages=forward, backward_stages=stages, num_workers=2, rounds=rounds)


# --- the command ----------------------------------------------------------------------------------------------------
STAGES = {"pipeline__forward_stages": [[0, 1], [2, 2]], "pipeline__backward_stages": [[3, 3], [2, 2], [0, 1]]}


@pytest.mark.parametrize("packing", ["packing=true", *swept(["packing=false"])])
def test_a_run_in_chunks_resumes_to_the_same_bits(tmp_path: Path, packing: str) -> None:
    model = make_model(tmp_path / "model", "mistral", num_hidden_layers=2)
    chunks = ("pipeline.sequence_chunks=3", packing)
    folder = make_workspace(tmp_path / "work", model, lora__dropout=0.0, val_set_size=2, **STAGES)
    finetune(folder, *chunks, "output_dir=whole", "max_steps=2").expect(0)
    finetune(folder, *chunks, "max_steps=1").expect(0)
    finetune(folder, *chunks, "max_steps=2", "--resume", "pipeline.devices=[cpu]").expect(0)
    assert numbers(folder / "out") == numbers(folder / "whole")


LATENT = {"num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 16}
GEMMA4 = {"vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8}


@pytest.mark.parametrize(
    ("model_type", "changes", "without"),
    [
        *(("gpt_oss", {}, False), ("deepseek_v3", LATENT, False), ("gemma4_text", GEMMA4, True)),
        ("llama", {"attention_dropout": 0.1}, False),
    ],
)
def test_a_run_counts_masks_where_its_chunks_have_them(
    model_type: str, changes: Any, without: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: those of sinks, narrow values and dropout were not counted; heads of two widths ended the run."""
    folder = make_workspace(tmp_path / "work", make_model(tmp_path / "model", model_type, **changes))
    setup, found = setup_of(folder, "pipeline.sequence_chunks=3", "dtype=bfloat16"), list[list[float]]()
    monkeypatch.setattr(attention, "_least_capability", (9, 0))
    for takes in (False, True):
        monkeypatch.setattr(attention, "_takes_other_ends", takes)
        found.append([layer.activation_bytes for layer in make_planner(setup).costs.layers])
    pairs = setup.probe.find_chunk_pairs()
    assert len(pairs) == setup.split.num_blocks and {pair[0].dim() for pair in pairs} == {4}
    assert (found[1] != found[0]) is without and all(map(float.__le__, *(map(float, each) for each in found[::-1])))


def test_a_resume_says_that_chunks_attend_otherwise(tmp_path: Path) -> None:
    """Story: chunks of windows had masks, and a checkpoint from then went on with other last bits without a word."""
    folder = make_workspace(tmp_path / "work", make_model(tmp_path / "model", "mistral"))
    setup = setup_of(folder, "pipeline.sequence_chunks=3")
    saved = run_state(setup)
    assert describe_other_bits(saved, setup) is None
    del saved["computed_by"]["attention of chunks"]
    assert "attention of chunks is without masks, was not noted" in str(describe_other_bits(saved, setup))


def test_chunks_of_eight_tokens_are_the_least(tmp_path: Path) -> None:
    """1,024 chunks of rows of 64 tokens took minutes a step. Other refusals: tests/planning/test_chunk_count.py."""
    recipe, few = write_recipe(tmp_path / "recipe.yaml", lora__dropout=0.0), "fewer than 8 tokens"
    for words in (["pipeline.sequence_chunks=8"], ["max_seq_length=8192", "pipeline.sequence_chunks=1024"]):
        load_recipe(recipe, words)
    recompute = ("pipeline.recompute=none", "does not go with pipeline.recompute")
    for word, problem in (recompute, ("max_seq_length=31", few)):
        with pytest.raises(RefusedError, match=problem):
            load_recipe(recipe, ["pipeline.sequence_chunks=4", word])
    with pytest.raises(RefusedError, match=few):
        load_recipe(recipe, ["max_seq_length=8191", "pipeline.sequence_chunks=1024"])


def test_rows_shorter_than_chunks_are_reported() -> None:
    lengths = np.array([3, 4, 9])
    assert describe_padded_to_chunks(lengths, 1) is None
    assert str(describe_padded_to_chunks(lengths, 8)).startswith("2 of 3 rows have fewer tokens than")


def test_one_sequence_of_32_chunks_keeps_8_workers_busy() -> None:
    block = LayerCost("block", 0.01, 0.02, recompute=True)
    costs = CostModel("blocks", (*[block] * 32, LayerCost("head", 0.01, 0.02, recompute=False)))
    question = SimulationCase(costs, 8, 32, options=Options(head_workers=8), sequence_chunks=32)
    result = run("roundpipe", choose("roundpipe", question), question)
    validate_schedule(result.schedule)
    assert 1 - bubble_ratio(result.timeline) >= 0.9
