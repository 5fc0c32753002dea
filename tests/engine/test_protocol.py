"""The dispatcher's protocol in any order that threads and devices could take, and carried out on emulated devices.

`protocol_machine.py` has the machine and what it asserts; engine/dispatch/PROTOCOL.md has the argument.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from roundpipe_cli.choices import SCHEDULES
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.builders import Options
from roundpipe_cli.schedule.program import ACTIVATION, WEIGHT_GRADIENT, WEIGHTS, Program, lower
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP, busy_s, makespan_s
from tests.support.emulated import Emulated, run_emulated
from tests.support.protocol_machine import Facts, Machine
from tests.support.schedules import small_schedule

DEALINGS = (Options(), Options(head_workers=2), Options(earliest_free=True), Options(shared_stages=2))


def costs(num_blocks: int, slots: int) -> CostModel:
    block = LayerCost("block", 1.0, 2.0, recompute=True, param_bytes=2, boundary_bytes=1, grad_bytes=1, optimizer_s=1.0)
    head = replace(block, name="head", recompute=False, boundary_bytes=0)
    return CostModel("tiny", (*[block] * num_blocks, head), slots=slots)


def program_of(
    name: str, num_workers: int, num_microbatches: int, *, num_blocks: int = 4, slots: int = 2, **rounds: Any
) -> Program:
    model = costs(num_blocks, slots)
    schedule = small_schedule(name, num_workers, num_microbatches, num_blocks, model, **rounds)
    return lower(schedule, model, staleness=rounds.get("staleness", 0))


def walk(facts: Facts, seed: int) -> None:
    """One random order; some agents are lazy, so that orders far from the usual one come up."""
    generator = random.Random(seed)
    machine = Machine(facts)
    lazy = {kind: generator.choice((0.05, 1.0)) for kind in ("issue", "compute", "admit", "send", "arrive")}
    while moves := machine.moves():
        weights = [lazy[what] for what, _ in moves]
        machine.make(generator.choices(moves, weights)[0])
    machine.check_end()


@pytest.mark.covering(2)
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_random_orders(name: str, slots: int, staleness: int) -> None:
    for seed in range(6):
        program = program_of(name, 2, 4, slots=slots, staleness=staleness, num_steps=2)
        walk(Facts(program, max_in_flight=1 + seed % 3), seed)


@pytest.mark.parametrize("dealing", DEALINGS, ids=str)
def test_random_orders_of_every_dealing(dealing: Options) -> None:
    for seed in range(12):
        program = program_of("roundpipe", 3, 5, options=dealing, per_round=2 + seed % 3, slots=1 + seed % 2)
        walk(Facts(program), seed)


@pytest.mark.parametrize(("name", "num_workers", "num_microbatches"), [("roundpipe", 1, 2), ("roundpipe", 2, 1)])
def test_all_orders_of_a_small_step(name: str, num_workers: int, num_microbatches: int) -> None:
    program = program_of(name, num_workers, num_microbatches, num_blocks=2)
    first = Machine(Facts(program, num_chunks=1))
    seen, todo = {first.key()}, [first]
    num_ends = 0
    while todo:
        machine = todo.pop()
        moves = machine.moves()
        if not moves:
            machine.check_end()
            num_ends += 1
        for move in moves:
            following = machine.clone()
            following.make(move)
            if (key := following.key()) not in seen:
                seen.add(key)
                todo.append(following)
        assert len(seen) < 400_000, "too large to search"
    assert num_ends == 1 and len(seen) > 1000


def without(program: Program, is_broken: Any, dropped: Any) -> Program:
    """The program with some dependencies of some operations forgotten."""
    ops = [
        op._replace(deps=[dep for dep in op.deps if not dropped(program, op, dep)]) if is_broken(op) else op
        for op in program.ops
    ]
    return replace(program, ops=ops)


def _is(payload: str, lane: str) -> Any:
    return lambda op: (op.payload, op.lane) == (payload, lane)


def _from(kind: Kind) -> Any:
    return lambda program, op, dep: program.ops[dep].kind is kind


BROKEN = {
    "weights come while the slot is read": (_is(WEIGHTS, UP), lambda p, op, dep: p.ops[dep].lane == "compute"),
    "weights come before their update": (_is(WEIGHTS, UP), lambda p, op, dep: p.ops[dep].lane == HOST),
    "weights come before the sums have left": (_is(WEIGHTS, UP), _from(Kind.DOWNLOAD)),
    "sums leave before the backward": (_is(WEIGHT_GRADIENT, DOWN), _from(Kind.BACKWARD)),
    "a sum goes on before the one before": (_is(WEIGHT_GRADIENT, UP), _from(Kind.DOWNLOAD)),
    "updates do not wait for sums": (lambda op: op.lane == HOST and op.stage < 0, _from(Kind.DOWNLOAD)),
    "a boundary goes up before it came down": (_is(ACTIVATION, UP), _from(Kind.DOWNLOAD)),
    "nobody waits for weights": (lambda op: op.lane == "compute", lambda p, op, dep: p.ops[dep].payload == WEIGHTS),
}


@pytest.mark.parametrize("what", sorted(BROKEN))
def test_the_machine_finds_a_forgotten_dependency(what: str) -> None:
    program = program_of("roundpipe", 2, 4, slots=1, num_steps=2, per_round=2)
    broken = without(program, *BROKEN[what])
    assert sum(len(op.deps) for op in broken.ops) < sum(len(op.deps) for op in program.ops)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(30):
            walk(Facts(broken), seed)


# --- carried out on emulated devices, against the simulator that reads the same program ------------------------------
#
# Times are small but real: nothing here asserts on how fast the machine is. What the host issued too late is counted by
# the emulation itself, and the bounds below make use of that.

MIB = 1024**2
NUM_BLOCKS, NUM_MICROBATCHES = 6, 4


def timed_costs(*, with_bytes: bool, slots: int = 2) -> CostModel:
    """Six blocks of a few hundred microseconds; a link of 40 GB/s, so that weights and boundaries take chunks."""
    layer = LayerCost("block", 4e-4, 9e-4, recompute=True)
    head = LayerCost("head", 3e-4, 5e-4, recompute=False)
    if with_bytes:
        layer = replace(layer, param_bytes=50 * MIB, boundary_bytes=3 * MIB, grad_bytes=5 * MIB, optimizer_s=2e-4)
        head = replace(head, param_bytes=20 * MIB, grad_bytes=40 * MIB, optimizer_s=3e-4)
    return CostModel("small", (*[layer] * NUM_BLOCKS, head), hop_s=1e-4, link_bytes_per_s=40e9, slots=slots)


def rows(result: Emulated) -> list[list[str]]:
    found: list[list[tuple[float, float, str]]] = [[] for _ in range(result.timeline.num_workers)]
    for item in result.timeline.intervals:
        if item.lane == COMPUTE:
            found[item.worker].append((item.start_s, item.end_s, f"{item.stage}{item.kind.value}{item.microbatch}"))
    return [[text for _, _, text in sorted(row)] for row in found]


@pytest.mark.covering(2)
@pytest.mark.parametrize("way", [{"staleness": 0}, {"staleness": 1}, {"after_update": True}], ids=str)
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_without_bytes_the_emulation_is_late_at_most(name: str, num_workers: int, way: dict[str, Any]) -> None:
    """No path through the program is longer than the simulated one by more than all that was issued too late."""
    model = replace(timed_costs(with_bytes=False), worker_speed=(1.0, 0.5, 0.8)[:num_workers])
    rounds = {"num_steps": 2, **way}
    if rounds.pop("after_update", False):
        rounds["num_steps"] = 1
        model = replace(model, layers=tuple(replace(layer, optimizer_s=1e-3) for layer in model.layers))
    chained = small_schedule(name, num_workers, NUM_MICROBATCHES, NUM_BLOCKS, **rounds)
    result, simulated = run_emulated(chained, model, **way), simulate(chained, model, **way)
    late_s = sum(result.late_s) + result.host_late_s
    assert rows(result) == [[str(action) for action in row] for row in chained.actions]
    assert makespan_s(simulated) * (1 - 1e-9) <= result.makespan_s <= makespan_s(simulated) + late_s + 1e-9
    assert all(0 <= part <= whole for part, whole in zip(result.compute_late_s, result.late_s, strict=True))
    assert busy_s(result.timeline) == pytest.approx(busy_s(simulated))


@pytest.mark.covering(2)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_byte_and_every_update_goes_over_its_lane(name: str, staleness: int, slots: int) -> None:
    chained = small_schedule(name, 3, NUM_MICROBATCHES, NUM_BLOCKS, num_steps=2, staleness=staleness)
    model = timed_costs(with_bytes=True, slots=slots)
    result = run_emulated(chained, model, staleness=staleness)
    program = lower(chained, model, staleness=staleness)
    for lane in (UP, DOWN, HOST):
        wanted = sum(op.num_bytes for op in program.ops if op.lane == lane)
        moved_s = sum(i.end_s - i.start_s for i in result.timeline.intervals if i.lane == lane)
        if lane == HOST:
            assert moved_s == pytest.approx(2 * (NUM_BLOCKS * 2e-4 + 3e-4))
        else:
            assert moved_s == pytest.approx(wanted / model.link_bytes_per_s)
    # one thing at a time on every stream, and each worker in its schedule's order
    assert rows(result) == [[str(action) for action in row] for row in chained.actions]
    for lane in (COMPUTE, UP, DOWN, HOST):
        for worker in range(-1, chained.num_workers):
            spans = sorted(
                (i.start_s, i.end_s) for i in result.timeline.intervals if (i.lane, i.worker) == (lane, worker)
            )
            assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in zip(spans, spans[1:], strict=False))
