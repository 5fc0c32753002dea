"""Where, when and in which order a step is computed does not change a bit of it.

Every case is compared with one worker that does everything in one forward and one backward stage.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roundpipe_cli.choices import BOUND_SCHEDULES, SCHEDULE_KINDS
from roundpipe_cli.engine.program import device_folds, layer_range, lower_for_engine
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.builders import Options, Rounds, build_schedule
from roundpipe_cli.schedule.program import WEIGHT_GRADIENT
from roundpipe_cli.schedule.timeline import DOWN
from tests.support.schedules import dealt
from tests.support.tiny import Rig, make_rig, random_microbatches

SIZES = [(2, 12), (1, 7), (2, 9)]  # three: of two, either may be added to the other
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # all of three blocks: layers 0 (embed), 1-3, 4 (head)
    "llama-lora-dropout-fused": ("llama", "lora", {"attention_dropout": 0.1, "lora_dropout": 0.1, "kernels": "auto"}),
    "gpt2-full-dropout": ("gpt2", "full", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "qwen3_moe-lora": ("qwen3_moe", "lora", {}),
    "qwen3_moe-full": ("qwen3_moe", "full", {}),
    "gemma3_text-full-tied-fused": ("gemma3_text", "full", {"kernels": "auto"}),
    "llama-full-bfloat16": ("llama", "full", {"dtype": torch.bfloat16}),
}
PARTITIONS = {
    "whole": ([(0, 3)], [(4, 4), (0, 3)]),
    "all-fused": ([(0, -1)], [(0, 4)]),
    "single": ([(0, 0), (1, 1), (2, 2), (3, 3)], [(4, 4), (3, 3), (2, 2), (1, 1), (0, 0)]),
    "halves": ([(0, 1), (2, 3)], [(4, 4), (2, 3), (0, 1)]),
    "uneven": ([(0, 0), (1, 2)], [(3, 4), (0, 2)]),
    "late-cut": ([(0, 1)], [(2, 4), (1, 1), (0, 0)]),
    "with-empty": ([(0, 1), (2, 1), (2, 3)], [(4, 4), (2, 3), (2, 1), (0, 1)]),
}
BOUND_STAGES = {  # by number of workers: for one stage per worker, and for two
    1: [[(0, 4)], [(0, 1), (2, 4)]],
    2: [[(0, 1), (2, 4)], [(0, 0), (1, 1), (2, 3), (4, 4)]],
    3: [[(0, 1), (2, 3), (4, 4)], [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 4)]],
}


Bits = tuple[object, ...]


def run_step(rig: Rig, schedule: Schedule, *, copy: bool, recompute: str) -> Bits:
    with rig.engine(schedule.num_workers, copy=copy, recompute=recompute, seed=3, head_chunk_tokens=8) as engine:
        result = engine.run_step(random_microbatches(SIZES), schedule, step=0)
    gradients = tuple(gradient.numpy().tobytes() for gradient in rig.store.gradients)
    return result.loss.hex(), result.gradient_norm.hex(), gradients


def roundpipe(partition: str, num_workers: int, per_round: int | None = None, options: Options = Options()) -> Schedule:
    return dealt(*PARTITIONS[partition], num_workers, len(SIZES), per_round=per_round, options=options)


def bound(name: str, num_workers: int) -> Schedule:
    stages = BOUND_STAGES[num_workers][not SCHEDULE_KINDS[name].one_stage_each]
    return build_schedule(name, forward_stages=stages, num_workers=num_workers, rounds=Rounds(len(SIZES)))


@pytest.fixture(scope="module", params=sorted(MODELS))
def case(request: pytest.FixtureRequest) -> tuple[Rig, Bits]:
    model_type, method, options = MODELS[request.param]
    rig = make_rig(model_type, method, **options)
    return rig, run_step(rig, roundpipe("whole", 1), copy=False, recompute="stage")


@pytest.mark.covering(2)
@pytest.mark.parametrize("copy", [False, True], ids=["alias", "copy"])
@pytest.mark.parametrize("partition", sorted({*PARTITIONS} - {"halves"}))
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_partitions_and_copies(case: tuple[Rig, Bits], num_workers: int, partition: str, copy: bool) -> None:
    rig, expected = case
    recompute = "layer" if (num_workers + copy) % 2 else "stage"
    assert run_step(rig, roundpipe(partition, num_workers), copy=copy, recompute=recompute) == expected


@pytest.mark.covering(1)
@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize("per_round", [1, 2, 3])
def test_rounds_and_recompute(case: tuple[Rig, Bits], per_round: int, recompute: str) -> None:
    rig, expected = case
    schedule = roundpipe("uneven", 2, per_round)
    assert run_step(rig, schedule, copy=per_round % 2 == 0, recompute=recompute) == expected


@pytest.mark.covering(1)
@pytest.mark.parametrize("copy", [False, True], ids=["alias", "copy"])
@pytest.mark.parametrize("per_round", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        *(Options(head_workers=2), Options(head_workers=3), Options(earliest_free=True)),
        *(Options(shared_stages=2), Options(shared_stages=99)),
    ],
    ids=["head on 2", "head on 3", "earliest free", "last stages", "last round"],
)
def test_a_stage_shared_by_workers(case: tuple[Rig, Bits], options: Options, per_round: int, copy: bool) -> None:
    rig, expected = case
    schedule = roundpipe("late-cut" if per_round == 2 else "single", 3, per_round, options)
    assert run_step(rig, schedule, copy=copy, recompute="stage") == expected


@pytest.mark.covering(1)
@pytest.mark.parametrize(("copy", "recompute"), [(True, "stage"), (False, "layer")], ids=["copy", "alias"])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("name", BOUND_SCHEDULES)
def test_bound_schedules(case: tuple[Rig, Bits], name: str, num_workers: int, copy: bool, recompute: str) -> None:
    rig, expected = case
    assert run_step(rig, bound(name, num_workers), copy=copy, recompute=recompute) == expected


# --- stages shared by workers: where their gradients are added up ---------------------------------------------------
def test_a_frozen_head_that_is_shared_leaves_the_blocks_sums_on_the_devices() -> None:
    """Earlier, one stage that several workers shared sent every layer's gradients to the host."""
    rig = make_rig("llama", "lora")
    head, free = (
        lower_for_engine(roundpipe("halves", 3, options=options), rig.store.layouts, 2)
        for options in (Options(head_workers=3), Options(earliest_free=True))
    )
    assert set(range(1, rig.num_layers - 1)) <= device_folds(head)
    assert not device_folds(free) & {1, 2, 3}


def test_gradients_for_the_hosts_sum_leave_by_the_lane() -> None:
    """Nobody waits for them: each backward's go down beside the next one's arithmetic, a layer in one piece."""
    rig, schedule = make_rig("llama", "lora"), roundpipe("halves", 2, options=Options(earliest_free=True))
    program = lower_for_engine(schedule, rig.store.layouts, 2)
    with rig.engine(2, copy=True) as engine:
        result = engine.run_step(random_microbatches(SIZES), schedule, step=0)
    wanted = 0
    for visit in program.visits:
        trained = sum(rig.store.layouts[layer].trainable_num_bytes for layer in layer_range(visit.layers) if layer)
        wanted += len(visit.downloads) * trained
    assert program.host_folded and wanted
    assert result.moved_bytes[DOWN, WEIGHT_GRADIENT] == wanted
