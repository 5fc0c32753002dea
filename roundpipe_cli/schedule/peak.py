"""Device memory over time, from a program and the times of its operations. Bytes.

Counted: weights and gradient accumulators of a visit while it holds its slot, its weights that lie unpacked while it
computes, activations between recompute (or the
fused head's forward) and backward, and boundary tensors while they wait or travel.
"""

from __future__ import annotations

from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.operations import ACTIVATION, GRADIENT, Program
from roundpipe_cli.schedule.timeline import DOWN, UP

_Changes = list[tuple[float, int]]
"""(time, bytes taken or, negative, given back)."""


def device_peak_bytes(program: Program, costs: CostModel, start_s: list[float], end_s: list[float]) -> tuple[int, ...]:
    """The most bytes that each worker held at once."""
    changes: list[_Changes] = [[] for _ in program.compute]
    _add_visits(program, changes, start_s, end_s)
    _add_unpacked(program, costs, changes, start_s, end_s)
    _add_activations(program, costs, changes, start_s, end_s)
    _add_boundaries(program, changes, start_s, end_s)
    return tuple(_peak(worker_changes) for worker_changes in changes)


def _add_visits(program: Program, changes: list[_Changes], start_s: list[float], end_s: list[float]) -> None:
    for visit in program.visits:
        taken = start_s[visit.upload] if visit.upload >= 0 else start_s[visit.ops[0]]
        freed = max(end_s[op_id] for op_id in (*visit.downloads, visit.ops[-1]))
        _hold(changes[visit.worker], max(freed, end_s[visit.ops[-1]]), taken, visit.num_bytes)


def _add_unpacked(
    program: Program, costs: CostModel, changes: list[_Changes], start_s: list[float], end_s: list[float]
) -> None:
    for visit in program.visits:
        first, last = visit.layers
        whole = sum(layer.whole_bytes for layer in costs.layers[first : last + 1])
        _hold(changes[visit.worker], end_s[visit.ops[-1]], start_s[visit.ops[0]], whole)


def _add_activations(
    program: Program, costs: CostModel, changes: list[_Changes], start_s: list[float], end_s: list[float]
) -> None:
    stage_bytes = [
        sum(layer.activation_bytes for layer in costs.layers[first : last + 1])
        for first, last in program.schedule.backward_stages
    ]
    for worker, row in enumerate(program.compute):
        for op_id in row:
            op = program.ops[op_id]
            if op.kind is Kind.BACKWARD and stage_bytes[op.stage]:
                paired = bool(op.deps) and program.ops[op_id - 1].kind is Kind.RECOMPUTE
                taken = start_s[op_id - 1] if paired else start_s[op_id]
                _hold(changes[worker], end_s[op_id], taken, stage_bytes[op.stage])


def _add_boundaries(program: Program, changes: list[_Changes], start_s: list[float], end_s: list[float]) -> None:
    readers: dict[int, int] = {}
    for row in program.compute:
        for op_id in row:
            op = program.ops[op_id]
            # a recompute's input is read until its backward, the next operation, has ended
            reader = op_id + 1 if op.kind is Kind.RECOMPUTE else op_id
            for dep in (*op.deps, *op.late_deps):
                readers[dep] = reader
    for op in program.ops:
        if op.payload not in (ACTIVATION, GRADIENT):
            continue
        if op.lane == UP:
            _hold(changes[op.worker], end_s[readers.get(op.id, op.id)], start_s[op.id], op.num_bytes)
        elif op.lane == DOWN:
            _hold(changes[op.worker], end_s[op.id], end_s[op.deps[0]], op.num_bytes)


def _hold(changes: _Changes, freed_s: float, taken_s: float, num_bytes: int) -> None:
    if num_bytes:
        changes.append((taken_s, num_bytes))
        changes.append((freed_s, -num_bytes))


def _peak(changes: _Changes) -> int:
    held = peak = 0
    for _, num_bytes in sorted(changes):  # at equal times, memory is freed before it is taken
        held += num_bytes
        peak = max(peak, held)
    return peak
