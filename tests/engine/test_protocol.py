"""The dispatcher's protocol in any order that threads and devices could take: random ones, and all of a small step.

`protocol_machine.py` has the machine and what it asserts; engine/dispatch/PROTOCOL.md has the argument.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from roundpipe_cli.choices import SCHEDULES
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.engine.dispatch.decisions import TransferOptions, TransferRecord, statistics_of
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.builders import Options
from roundpipe_cli.schedule.program import ACTIVATION, WEIGHT_GRADIENT, WEIGHTS, Program, lower
from roundpipe_cli.schedule.timeline import DOWN, HOST, UP
from tests.support.protocol_machine import Facts, Machine
from tests.support.schedules import small_schedule

DEALINGS = (Options(), Options(head_workers=2), Options(earliest_free=True), Options(shared_stages=2))


def costs(num_blocks: int, slots: int) -> CostModel:
    """Everything has bytes and updates."""
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


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_random_orders(name: str, slots: int, staleness: int) -> None:
    for seed in range(6):
        options = TransferOptions(max_in_flight=1 + seed % 3, fifo=(seed + slots) % 3 == 2)
        program = program_of(name, 2, 4, slots=slots, staleness=staleness, num_steps=2)
        walk(Facts(program, 2, options), seed)


@pytest.mark.parametrize("dealing", DEALINGS, ids=str)
def test_random_orders_of_every_dealing(dealing: Options) -> None:
    for seed in range(12):
        program = program_of("roundpipe", 3, 5, options=dealing, per_round=2 + seed % 3, slots=1 + seed % 2)
        walk(Facts(program, 2, TransferOptions()), seed)


@pytest.mark.parametrize(("name", "num_workers", "num_microbatches"), [("roundpipe", 1, 2), ("roundpipe", 2, 1)])
def test_all_orders_of_a_small_step(name: str, num_workers: int, num_microbatches: int) -> None:
    """Every state that any order of moves leads to, each visited once."""
    program = program_of(name, num_workers, num_microbatches, num_blocks=2)
    first = Machine(Facts(program, 1, TransferOptions()))
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
            walk(Facts(broken, 2, TransferOptions()), seed)


def test_exposed_time_counts_from_when_everything_was_computed() -> None:
    """A worker that waits for another worker does not wait for the link, though its weights are on their way."""
    program = program_of("roundpipe", 2, 1, num_blocks=2)
    reader = next(op for op in program.ops if op.kind is Kind.FORWARD and op.stage == 1)
    upload = next(program.ops[dep] for dep in reader.deps if program.ops[dep].payload == ACTIVATION)
    weights = next(program.ops[dep] for dep in reader.deps if program.ops[dep].payload == WEIGHTS)
    download = program.ops[upload.deps[0]]
    producer = program.ops[download.deps[0]]
    records = [
        TransferRecord(weights.id, WEIGHTS, UP, 8, 0.0, 0.0, 4.0),
        TransferRecord(download.id, ACTIVATION, DOWN, 1, 3.0, 3.0, 3.5),
        TransferRecord(upload.id, ACTIVATION, UP, 1, 4.5, 4.5, 5.0),
    ]
    found = statistics_of(program, {producer.id: (1.0, 3.0), reader.id: (6.0, 7.0)}, records, 0.0)
    assert found.classes[UP, WEIGHTS].exposed_s == pytest.approx(1.0)  # from 3, not from 0
    assert found.classes[DOWN, ACTIVATION].exposed_s == pytest.approx(0.5)
    assert found.classes[UP, ACTIVATION].exposed_s == pytest.approx(0.5)
    assert found.exposed_s == pytest.approx(1.5)
