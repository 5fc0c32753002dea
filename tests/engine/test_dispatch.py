"""Other ways to deal out roundpipe stages: head and stages shared by workers, earliest-free dispatch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.engine.program import device_folds, layer_range, lower_for_engine
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.builders import Options, Rounds, build_schedule
from roundpipe_cli.schedule.program import WEIGHT_GRADIENT, Program, lower
from roundpipe_cli.schedule.timeline import DOWN
from tests.support.tiny import Rig, make_rig, random_microbatches

SIZES = [(2, 9), (1, 7), (2, 5), (1, 11), (2, 6)]
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-lora-dropout": ("llama", "lora", {"attention_dropout": 0.1, "lora_dropout": 0.1}),
    "gpt2-full-tied": ("gpt2", "full", {}),
    "qwen3_moe-full": ("qwen3_moe", "full", {}),
}
DEALT = {
    "head shared": Options(head_workers=3),
    "earliest free": Options(earliest_free=True),
    "last stages shared": Options(shared_stages=2),
    "last round shared": Options(shared_stages=99),
}


def dealt(rig: Rig, num_workers: int, options: Options, per_round: int | None = None) -> Schedule:
    last = rig.num_layers - 1
    return build_schedule(
        "roundpipe",
        forward_stages=[(0, 1), (2, last - 1)],
        backward_stages=[(last, last), (2, last - 1), (0, 1)],
        num_workers=num_workers,
        rounds=Rounds(len(SIZES), per_round=per_round, options=options),
    )


def step(rig: Rig, schedule: Schedule, copy: bool) -> tuple[StepResult, tuple[object, ...]]:
    """What came of a step, and everything that must not change."""
    with rig.engine(schedule.num_workers, copy=copy, seed=3, head_chunk_tokens=8) as engine:
        result = engine.run_step(random_microbatches(SIZES), schedule, step=0)
    gradients = tuple(gradient.numpy().tobytes() for gradient in rig.store.gradients)
    return result, (result.loss.hex(), result.gradient_norm.hex(), gradients)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_no_bit_changes(name: str) -> None:
    model_type, method, changes = MODELS[name]
    rig = make_rig(model_type, method, **changes)
    _, expected = step(rig, dealt(rig, 1, Options()), copy=False)
    for index, (what, options) in enumerate(DEALT.items()):
        num_workers = 3 - index // 2
        schedule = dealt(rig, num_workers, options, per_round=(3, 5)[index % 2])
        result, bits = step(rig, schedule, copy=index % 2 == 0)
        assert bits == expected, what
        if what == "head shared":
            actions = [item.action for item in result.actions]
            workers = {a.worker for a in actions if a.kind is Kind.BACKWARD and a.stage == 0}
            assert len(workers) == num_workers


def test_a_frozen_head_that_is_shared_leaves_the_blocks_sums_on_the_devices() -> None:
    """Earlier, one stage that several workers shared sent every layer's gradients to the host."""
    rig = make_rig("llama", "lora")
    program = lower_for_engine(dealt(rig, 3, Options(head_workers=3)), rig.store.layouts, 2)
    assert set(range(1, rig.num_layers - 1)) <= device_folds(program)
    shared = lower_for_engine(dealt(rig, 3, Options(earliest_free=True)), rig.store.layouts, 2)
    assert not device_folds(shared) & {1, 2, 3}


def test_gradients_for_the_hosts_sum_leave_by_the_lane() -> None:
    """Nobody waits for them: each backward's go down beside the next one's arithmetic, a layer in one piece."""
    rig = make_rig("llama", "lora")
    schedule = dealt(rig, 2, Options(earliest_free=True))
    program = lower_for_engine(schedule, rig.store.layouts, 2)
    result, _ = step(rig, schedule, copy=True)
    wanted = 0
    for visit in program.visits:
        trained = sum(rig.store.layouts[layer].trainable_num_bytes for layer in layer_range(visit.layers) if layer)
        wanted += len(visit.downloads) * trained
    assert program.host_folded and wanted
    assert result.transfers.classes[DOWN, WEIGHT_GRADIENT].num_bytes == wanted


def two_blocks_and_a_head(forward: list[StageRange], backward: list[StageRange], num_microbatches: int) -> Program:
    """On two workers, dealt to whoever is free first, in rounds of two microbatches."""
    block = LayerCost("block", 1.0, 2.0, recompute=True, grad_bytes=8)
    costs = CostModel("two blocks and a head", (block, block, LayerCost("head", 1.0, 2.0, recompute=False)))
    schedule = build_schedule(
        "roundpipe",
        forward_stages=forward,
        backward_stages=backward,
        num_workers=2,
        rounds=Rounds(num_microbatches, per_round=2, options=Options(earliest_free=True)),
        costs=costs,
    )
    return lower(schedule, costs)


def test_gradients_wait_for_their_lane_in_twos() -> None:
    """What waits takes device memory: a slow lane holds its worker up before the third microbatch's."""
    program = two_blocks_and_a_head([], [(0, 2)], num_microbatches=8)
    assert program.host_folded == {(0, 2)}
    for visit in program.visits:
        backwards = [op_id for op_id in visit.ops if program.ops[op_id].kind is Kind.BACKWARD]
        assert len(backwards) == len(visit.downloads) == 4
        waits = [set(program.ops[op_id].deps) & set(visit.downloads) for op_id in backwards]
        assert waits == [set(), set(), {visit.downloads[0]}, {visit.downloads[1]}]


def test_interleaved_visits_send_each_microbatchs_gradients() -> None:
    """Their sum cannot be one visit's to continue: every backward has a download, and none goes up again."""
    program = two_blocks_and_a_head([(0, 1)], [(2, 2), (0, 1)], num_microbatches=4)
    sums = [op for op in program.ops if op.payload == WEIGHT_GRADIENT]
    assert program.host_folded == {(0, 1)}
    assert [op.kind for op in sums] == [Kind.DOWNLOAD] * 4
    gate = next(op for op in program.ops if op.kind is Kind.OPTIMIZER)
    assert {op.id for op in sums} <= set(gate.deps)
