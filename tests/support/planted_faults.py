"""Faults planted in the engine or its backend, each with the case on simulated cards that finds it.

A case finds a fault by other bits than workers that copy nothing, by accesses that nothing orders, by a slot that has
another visit's weights, or by an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from roundpipe_cli.engine import layer, prepared
from roundpipe_cli.engine.backends.cuda import CudaBackend
from roundpipe_cli.engine.carrier import Carrier
from roundpipe_cli.engine.dispatch.dispatch import StepRun, _LaneStep
from roundpipe_cli.engine.layer import LayerRunner
from roundpipe_cli.engine.slots import DeviceSums, StageSlots
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.engine.worker import Worker
from roundpipe_cli.errors import RoundpipeError
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

    return around(prepared, "lower_for_engine", lowered)


def without(payload: str, lanes: Collection[str]) -> Plant:
    """Uploads of this payload that wait for nothing on these lanes."""

    def change(found: Program) -> None:
        for op in found.ops:
            if op.lane == UP and op.payload == payload:
                op.deps[:] = [dep for dep in op.deps if found.ops[dep].lane not in lanes]

    return in_program(change)


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


def ended_when_issued(patch: pytest.MonkeyPatch) -> None:
    issued, ended = Worker.issued, Worker.ended

    def early(worker: Worker, op: Op, event: Any) -> None:
        issued(worker, op, event)
        ended(worker, op)

    patch.setattr(Worker, "issued", early)
    patch.setattr(Worker, "ended", lambda *_: None)


def in_pool_of(stream: str) -> Callable[..., torch.Tensor]:
    """Boundaries on the device in a stream's memory, without a word to the other that uses them."""

    def made(real: Any, backend: CudaBackend, host: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(getattr(backend, stream)):
            return torch.empty_like(host, device=backend.device, pin_memory=False)

    return made


def sent_at_once(real: Any, backend: CudaBackend, tensor: torch.Tensor) -> Any:
    return real(backend, tensor)[0], None


def event_of(name: str) -> Callable[..., Any]:
    def recorded(real: Any, backend: CudaBackend, *args: Any) -> Any:
        real(backend, *args)
        return getattr(backend, name).record_event()

    return recorded


FAULTS: dict[str, tuple[Plant, str]] = {  # name -> (what plants it, case)
    # events
    "compute does not wait for uploads": (around(CudaBackend, "wait", lambda *_: None), "lora"),
    "compute does not wait for late inputs": (
        around(Worker, "run", lambda real, worker, op, ready, late: real(worker, op, ready, [])),
        "lora",
    ),
    "lanes do not wait": (around(Worker, "happens_in_s", lambda *_: 0.0), "full"),
    "an upload's event on another stream": (around(CudaBackend, "copy_up", event_of("_compute")), "full"),
    "a download's event on another stream": (around(CudaBackend, "copy_down", event_of("_compute")), "full"),
    "a computation's event on another stream": (around(CudaBackend, "record", event_of("_up")), "full"),
    "a boundary readable when issued, in the store": (
        around(Carrier, "issued", readable_when_issued),
        "recompute-layer",
    ),
    "a boundary readable when issued, in the ledger": (around(StepRun, "issue", issued_is_arrived), "full"),
    "a gradient sent without its event": (around(CudaBackend, "send", sent_at_once), "full"),
    "the embedding's gradient read before it came": (
        around(LayerRunner, "finish_arrived", lambda real, layers, step, **_: real(layers, step, all_have=True)),
        "full",
    ),
    # slots, sums and weights
    "weights into a slot in use": (without(WEIGHTS, [COMPUTE]), "many-visits"),
    "weights into a slot whose visit has begun": (in_program(slot_too_early), "many-visits"),
    "all visits in one slot": (in_program(one_slot), "many-visits"),
    "weights of the visit before": (
        around(StageSlots, "bind", lambda real, slots, found, visit: real(slots, found, max(0, visit - 1))),
        "lora",
    ),
    "a slot taken before its sums came down": (without(WEIGHTS, [DOWN]), "many-visits"),
    "sums up before the last visit's came down": (without(WEIGHT_GRADIENT, [DOWN]), "full"),
    "sums up into a slot in use": (without(WEIGHT_GRADIENT, [COMPUTE]), "many-visits"),
    "sums that begin with what was there": (around(DeviceSums, "start", lambda *_: None), "full"),
    "sums complete when their download is issued": (ended_when_issued, "early-updates"),
    "sums of one microbatch added when issued": (ended_when_issued, "spread-head-full"),
    "sums cleared before their update": (around(WeightStore, "wait_for", lambda *_: None), "updates-beside"),
    "an upload before its update": (
        around(StepRun, "__init__", lambda real, *args, readers=None, **kwargs: real(*args, **kwargs)),
        "updates-beside",
    ),
    "a cache counted as filled too early": (around(StageSlots, "begin_step", filled_at_once), "after-failures-cached"),
    "kept activations not looked up again": (
        lambda patch: patch.setattr(layer, "weights_found_again", lambda *_: nullcontext()),
        "kept-activations-moved",
    ),
    # memory
    "no record_stream": (around(CudaBackend, "device_like", in_pool_of("_up")), "alike"),
    "boundaries in the memory of another stream": (around(CudaBackend, "device_like", in_pool_of("_compute")), "alike"),
    "a host buffer used again early": (one_host_buffer, "full"),
    "chunks let go before they arrived": (around(_LaneStep, "_move", chunks_let_go), "full"),
    "copies of a failed step": (
        around(CudaBackend, "synchronize", lambda real, backend: backend._compute.synchronize()),
        "after-failures",
    ),
    # torch
    "a product that torch refuses": (
        lambda patch: patch.setattr(layer, "adds_products", lambda like: like.dtype == torch.float16),
        "head-in-chunks-narrow",
    ),
    "a sum of products without the first": (
        around(layer, "product_sum", lambda real, total, *factors: real(None, *factors)),
        "head-in-chunks-bfloat16",
    ),
}


def signs_of(name: str, seed: int, expected: Bits) -> str:
    """What shows the fault in a run of its case; empty: nothing. Copies are put off with the odd seeds."""
    plant, case = FAULTS[name]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            found, simulation = CASES[case].simulated(seed, lazy=seed % 2 == 1, tolerant=True)
        except RoundpipeError as error:
            return f"error: {error}"
    other = "" if is_equal(found, expected, CASES[case].bound) else "other bits "
    return other + (f"{len(simulation.unordered)} unordered" if simulation.unordered else "")
