"""Faults planted in the engine or its backend, each with the cases on simulated cards that find it.

A case finds a fault by other bits than workers that copy nothing, by accesses that nothing orders, by a slot that has
another visit's weights, or by an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from roundpipe_cli.engine import layer as layer_file
from roundpipe_cli.engine.backends.cuda import CudaBackend
from roundpipe_cli.engine.carrier import BoundaryStore, Carrier
from roundpipe_cli.engine.dispatch.decisions import Ledger
from roundpipe_cli.engine.dispatch.dispatch import StepRun, _LaneStep
from roundpipe_cli.engine.gradients import GradientFold
from roundpipe_cli.engine.layer import LayerRunner
from roundpipe_cli.engine.slots import DeviceSums, StageSlots
from roundpipe_cli.engine.worker import Worker
from roundpipe_cli.errors import RoundpipeError
from roundpipe_cli.schedule import program
from roundpipe_cli.schedule.program import WEIGHT_GRADIENT, WEIGHTS, Op, Program
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, UP
from tests.support.simulated_cases import CASES, Bits, is_equal

Plant = Callable[[pytest.MonkeyPatch], None]


def around(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Plants `change(real method, *its arguments)` in place of a method."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: change(real, *args, **kwargs))

    return plant


def in_program(change: Callable[[Program], None]) -> Plant:
    """Plants a lowering that leaves something out."""

    def lowered(real: Callable[..., Program], *args: Any, **kwargs: Any) -> Program:
        found = real(*args, **kwargs)
        change(found)
        return found

    from roundpipe_cli.engine import prepared

    return around(prepared, "lower_for_engine", lowered)


def without(found: Program, of: Callable[[Op], bool], dep: Callable[[Op], bool]) -> None:
    """Take dependencies out of a program."""
    for op in filter(of, found.ops):
        op.deps[:] = [one for one in op.deps if not dep(found.ops[one])]


def is_upload(payload: str) -> Callable[[Op], bool]:
    return lambda op: op.lane == UP and op.payload == payload


def slot_too_early(found: Program) -> None:
    """As soon as the slot's visit before has begun."""
    for visit in found.visits:
        op = found.ops[visit.upload] if visit.upload >= 0 else None
        for place, dep in enumerate(op.deps if op is not None else ()):
            if found.ops[dep].visit >= 0 and found.ops[dep].lane == COMPUTE:
                op.deps[place] = found.visits[found.ops[dep].visit].ops[0]


def one_slot(found: Program) -> None:
    for visit in found.visits:
        visit.slot = 0


def no_record_stream(real: Any, backend: CudaBackend, host: torch.Tensor) -> torch.Tensor:
    with torch.cuda.stream(backend._up):
        return torch.empty_like(host, device=backend.device, pin_memory=False)


def one_host_buffer(patch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, torch.Tensor] = {}
    real = CudaBackend.host_like

    def shared(backend: CudaBackend, tensor: torch.Tensor) -> torch.Tensor:
        return kept.setdefault((tensor.shape, tensor.dtype), real(backend, tensor))

    patch.setattr(CudaBackend, "host_like", shared)


def readable_when_issued(real: Any, carrier: Carrier, op: Op, event: Any) -> None:
    real(carrier, op, None)


def issued_is_arrived(real: Any, run: StepRun, op_id: int, event: Any) -> None:
    op = run.ledger.ops[op_id]
    real(run, op_id, None if op.lane == DOWN and op.boundary >= 0 else event)


def filled_at_once(real: Any, slots: StageSlots, *args: Any) -> None:
    real(slots, *args)
    slots.step_done()


def chunks_let_go(real: Any, lane: _LaneStep, *args: Any) -> None:
    real(lane, *args)
    event, _, record = lane.state.moving.pop()
    lane.state.moving.append((event, None, record))


def ended_when_issued(real: Any, worker: Worker, op: Op, event: Any) -> None:
    real(worker, op, event)
    if op.lane == DOWN and op.payload == WEIGHT_GRADIENT:
        worker.ended(op)


FAULTS: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "compute does not wait for uploads": (around(CudaBackend, "wait", lambda *_: None), ("lora",)),
    "compute does not wait for late inputs": (
        around(Worker, "run", lambda real, worker, op, ready, late: real(worker, op, ready, [])), ("lora",)),
    "weights into a slot in use": (in_program(lambda found: without(found, is_upload(WEIGHTS), lambda op: op.lane == COMPUTE)), ("full", "many-visits")),
    "weights into a slot whose visit has begun": (in_program(slot_too_early), ("full", "many-visits")),
    "all visits in one slot": (in_program(one_slot), ("full", "many-visits")),
    "a slot taken before its sums came down": (in_program(lambda found: without(found, is_upload(WEIGHTS), lambda op: op.lane == DOWN)), ("full", "many-visits")),
    "an upload before its update": (around(StepRun, "__init__", lambda real, *args, readers=None, **kwargs: real(*args, **kwargs)), ("updates-beside",)),
    "a cache counted as filled too early": (around(StageSlots, "begin_step", filled_at_once), ("after-failures-cached",)),
    "sums up before the last visit's came down": (in_program(lambda found: without(found, is_upload(WEIGHT_GRADIENT), lambda op: op.lane == DOWN and op.payload == WEIGHT_GRADIENT)), ("full",)),
    "sums up into a slot in use": (in_program(lambda found: without(found, is_upload(WEIGHT_GRADIENT), lambda op: op.lane == COMPUTE)), ("full", "many-visits")),
    "a boundary readable when issued, in the store": (around(Carrier, "issued", readable_when_issued), ("recompute-layer", "sequence-chunks")),
    "a boundary readable when issued, in the ledger": (around(StepRun, "issue", issued_is_arrived), ("full",)),
    "no record_stream": (around(CudaBackend, "device_like", no_record_stream), ("alike",)),
    "kept activations not looked up again": (lambda patch: patch.setattr(layer_file, "weights_found_again", lambda *_: nullcontext()), ("kept-activations-moved",)),
    "a host buffer used again early": (one_host_buffer, ("full",)),
    "copies of a failed step": (around(CudaBackend, "synchronize", lambda real, backend: backend._compute.synchronize()), ("after-failures",)),
    "lanes do not wait": (around(Worker, "happens_in_s", lambda *_: 0.0), ("full",)),
    "chunks let go before they arrived": (around(_LaneStep, "_move", chunks_let_go), ("full",)),
    "sums complete when their download is issued": (around(Worker, "issued", ended_when_issued), ("early-updates",)),
    "the embedding's gradient read before it came": (around(LayerRunner, "finish_arrived", lambda real, layers, context, **_: real(layers, context, all_have=True)), ("full",)),
    "sums that begin with what was there": (around(DeviceSums, "start", lambda *_: None), ("full",)),
    "a product that torch refuses": (lambda patch: patch.setattr(layer_file, "adds_products", lambda like: like.dtype == torch.float16), ("head-in-chunks-narrow",)),
}
