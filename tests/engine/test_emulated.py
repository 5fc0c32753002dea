"""Schedules carried out by the dispatcher on emulated devices, against the simulator that reads the same program.

Times are small but real: nothing here asserts on how fast the machine is. What the host issued too late is counted by
the emulation itself, and the bounds below make use of that.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from roundpipe_cli.choices import SCHEDULES
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.schedule.program import WEIGHT_GRADIENT, WEIGHTS, lower
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP, busy_s, makespan_s
from tests.support.emulated import Emulated, run_emulated
from tests.support.schedules import dealt, small_schedule

MIB = 1024**2
NUM_BLOCKS, NUM_MICROBATCHES = 6, 4


def costs(*, with_bytes: bool, slots: int = 2) -> CostModel:
    """Six blocks of a few hundred microseconds; a link of 40 GB/s, so that weights and boundaries take chunks."""
    layer = LayerCost("block", 4e-4, 9e-4, recompute=True)
    head = LayerCost("head", 3e-4, 5e-4, recompute=False)
    if with_bytes:
        layer = replace(layer, param_bytes=50 * MIB, boundary_bytes=3 * MIB, grad_bytes=5 * MIB, optimizer_s=2e-4)
        head = replace(head, param_bytes=20 * MIB, grad_bytes=40 * MIB, optimizer_s=3e-4)
    return CostModel("small", (*[layer] * NUM_BLOCKS, head), hop_s=1e-4, link_bytes_per_s=40e9, slots=slots)


def rows(result: Emulated) -> list[list[str]]:
    """Per worker what was computed, in order of time."""
    found: list[list[tuple[float, float, str]]] = [[] for _ in range(result.timeline.num_workers)]
    for item in result.timeline.intervals:
        if item.lane == COMPUTE:
            found[item.worker].append((item.start_s, item.end_s, f"{item.stage}{item.kind.value}{item.microbatch}"))
    return [[text for _, _, text in sorted(row)] for row in found]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_without_bytes_the_emulation_is_the_simulation_plus_lateness(
    name: str, num_workers: int, staleness: int
) -> None:
    """No path through the program is longer than the simulated one by more than all that was issued too late."""
    chained = small_schedule(name, num_workers, NUM_MICROBATCHES, NUM_BLOCKS, num_steps=2, staleness=staleness)
    model = costs(with_bytes=False)
    result = run_emulated(chained, model, staleness=staleness)
    simulated = simulate(chained, model, staleness=staleness)
    assert rows(result) == [[str(action) for action in row] for row in chained.actions]
    assert makespan_s(simulated) * (1 - 1e-9) <= result.makespan_s <= makespan_s(simulated) + sum(result.late_s) + 1e-9
    assert all(0 <= part <= whole for part, whole in zip(result.compute_late_s, result.late_s, strict=True))
    assert busy_s(result.timeline) == pytest.approx(busy_s(simulated))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_that_begins_with_updates_is_the_simulation_plus_lateness(name: str) -> None:
    one, model = small_schedule(name, 3, NUM_MICROBATCHES, NUM_BLOCKS), costs(with_bytes=False)
    model = replace(model, layers=tuple(replace(layer, optimizer_s=1e-3) for layer in model.layers))
    result, simulated = run_emulated(one, model, after_update=True), simulate(one, model, after_update=True)
    late_s = sum(result.late_s) + result.host_late_s
    assert makespan_s(simulated) * (1 - 1e-9) <= result.makespan_s <= makespan_s(simulated) + late_s + 1e-9
    first = min(item.start_s for item in result.timeline.intervals if item.lane == COMPUTE)
    last = max(item.end_s for item in result.timeline.intervals if item.lane == HOST)
    assert 0 < first < last, "the forward begins before the last update has ended"


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_byte_and_every_update_goes_over_its_lane(name: str, staleness: int, slots: int) -> None:
    chained = small_schedule(name, 3, NUM_MICROBATCHES, NUM_BLOCKS, num_steps=2, staleness=staleness)
    model = costs(with_bytes=True, slots=slots)
    result = run_emulated(chained, model, staleness=staleness)
    program = lower(chained, model, staleness=staleness)
    for lane in (UP, DOWN, HOST):
        wanted = sum(op.num_bytes for op in program.ops if op.lane == lane)
        moved_s = sum(i.end_s - i.start_s for i in result.timeline.intervals if i.lane == lane)
        if lane == HOST:
            assert moved_s == pytest.approx(2 * (NUM_BLOCKS * 2e-4 + 3e-4))
        else:
            assert moved_s == pytest.approx(wanted / model.link_bytes_per_s)
    moved = {key: entry.num_bytes for key, entry in result.transfers.classes.items()}
    assert moved[UP, WEIGHTS] == sum(op.num_bytes for op in program.ops if op.payload == WEIGHTS)
    assert moved[DOWN, WEIGHT_GRADIENT] > 0
    # one thing at a time on every stream, and each worker in its schedule's order
    assert rows(result) == [[str(action) for action in row] for row in chained.actions]
    for lane in (COMPUTE, UP, DOWN, HOST):
        for worker in range(-1, chained.num_workers):
            spans = sorted(
                (i.start_s, i.end_s) for i in result.timeline.intervals if (i.lane, i.worker) == (lane, worker)
            )
            assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in zip(spans, spans[1:], strict=False))


def test_workers_of_different_speed() -> None:
    model = replace(costs(with_bytes=False), worker_speed=(1.0, 0.5))
    chained = dealt([(0, 5)], [(6, 6), (0, 5)], 2, 2, model)
    result, simulated = run_emulated(chained, model), simulate(chained, model)
    assert busy_s(result.timeline) == pytest.approx(busy_s(simulated))


def test_emulation_needs_no_torch() -> None:
    code = "import sys, scripts.bench_emulated; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
