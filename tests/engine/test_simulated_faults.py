"""Faults planted in the engine or its CUDA backend: the simulation's clocks find each, and lazy copies show most."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from roundpipe_cli.engine import carrier as carriers
from roundpipe_cli.engine import slots
from roundpipe_cli.engine import worker as workers
from roundpipe_cli.engine.backends.base import DeviceEvent, Pair
from roundpipe_cli.engine.backends.cuda import CudaBackend
from roundpipe_cli.engine.layer import GradientCollector
from roundpipe_cli.errors import InternalError, RoundpipeError
from roundpipe_cli.schedule.timeline import DOWN
from tests.support.covering import swept
from tests.support.simulated_cases import CASES, Bits, is_equal

SEEDS = range(6)
Plant = Callable[[pytest.MonkeyPatch], None]


def no_wait(patch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for what is uploaded."""
    patch.setattr(CudaBackend, "wait", lambda backend, event: None)


def memory_from(stream: str, patch: pytest.MonkeyPatch) -> None:
    def device_like(backend: CudaBackend, host: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(getattr(backend, stream)):
            return torch.empty_like(host, device=backend.device, pin_memory=False)

    patch.setattr(CudaBackend, "device_like", device_like)


def no_record_stream(patch: pytest.MonkeyPatch) -> None:
    """What was uploaded is free before compute has read it."""
    memory_from("_up", patch)


def wrong_pool(patch: pytest.MonkeyPatch) -> None:
    """Memory for uploads is the compute stream's, which may still be using it."""
    memory_from("_compute", patch)


def lanes_ignore_events(patch: pytest.MonkeyPatch) -> None:
    """A lane takes all that was issued for done: it writes over slots, and sends boundaries before they are there."""
    patch.setattr(workers.Worker, "happens_in_s", lambda worker, event: 0.0)


def one_host_buffer(patch: pytest.MonkeyPatch) -> None:
    """All downloads of one size and type go to the same host memory."""
    kept: dict[Any, torch.Tensor] = {}
    host_like = CudaBackend.host_like

    def shared(backend: CudaBackend, tensor: torch.Tensor) -> torch.Tensor:
        return kept.setdefault((tensor.shape, tensor.dtype), host_like(backend, tensor))

    patch.setattr(CudaBackend, "host_like", shared)


def dropped_at_issue(patch: pytest.MonkeyPatch) -> None:
    """What a download reads is let go as soon as the copy has been issued."""
    issued = carriers.Carrier.issued

    def drop(carrier: carriers.Carrier, op: Any, event: DeviceEvent) -> None:
        issued(carrier, op, event)
        carrier._held.pop(op.id, None)

    patch.setattr(carriers.Carrier, "issued", drop)


def folded_at_issue(patch: pytest.MonkeyPatch) -> None:
    """The host takes gradients for complete when their download has been issued."""
    issued = workers.Worker.issued

    def early(worker: workers.Worker, op: Any, event: DeviceEvent) -> None:
        issued(worker, op, event)
        if op.lane == DOWN:
            assert worker._context is not None
            for leaving, host in worker._sums._landing.pop(op.id, ()):
                collector = worker.runner.layers.collector
                collector.fold_on_host(worker._context, leaving.layer, leaving.place, leaving.parts_in(host))

    patch.setattr(workers.Worker, "issued", early)


def event_before_copy(patch: pytest.MonkeyPatch) -> None:
    """The event of an upload says nothing of the upload."""
    copy_up = CudaBackend.copy_up

    def early(backend: CudaBackend, pairs: Sequence[Pair]) -> DeviceEvent:
        event = backend._up.record_event()
        copy_up(backend, pairs)
        return event

    patch.setattr(CudaBackend, "copy_up", early)


def event_of_another_stream(patch: pytest.MonkeyPatch) -> None:
    """A download's event is recorded on the compute stream."""
    copy_down = CudaBackend.copy_down

    def other(backend: CudaBackend, pairs: Sequence[Pair]) -> DeviceEvent:
        copy_down(backend, pairs)
        return backend._compute.record_event()

    patch.setattr(CudaBackend, "copy_down", other)


def one_staging_buffer(patch: pytest.MonkeyPatch) -> None:
    """Small tensors go up through one host buffer, which is written again while the copy before may be under way."""
    kept: dict[Any, torch.Tensor] = {}

    def receive(backend: CudaBackend, tensor: torch.Tensor) -> torch.Tensor:
        key = backend, tensor.shape, tensor.dtype
        if key not in kept:
            kept[key] = torch.empty_like(tensor, pin_memory=True)
        return kept[key].copy_(tensor).to(backend.device, non_blocking=True)

    patch.setattr(CudaBackend, "receive", receive)


def old_event(patch: pytest.MonkeyPatch) -> None:
    """What compute records is where it was at its first operation."""
    record = CudaBackend.record

    def first(backend: CudaBackend) -> DeviceEvent:
        return (
            backend.__dict__.setdefault("first_event", None)
            or backend.__dict__.update(first_event=record(backend))
            or backend.__dict__["first_event"]
        )

    patch.setattr(CudaBackend, "record", first)


def received_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Small tensors go up on the upload stream, and compute reads them at once."""

    def receive(backend: CudaBackend, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(backend._up):
            return tensor.contiguous().pin_memory().to(backend.device, non_blocking=True)

    patch.setattr(CudaBackend, "receive", receive)


def sent_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """The host reads a gradient whose download was only issued."""

    send = CudaBackend.send
    patch.setattr(CudaBackend, "send", lambda backend, tensor: (send(backend, tensor)[0], None))


def event_of_the_first_chunk(patch: pytest.MonkeyPatch) -> None:
    """A transfer counts as done with its first chunk."""
    copy = workers.Worker.copy

    def early(worker: workers.Worker, op: Any, chunk: Any) -> DeviceEvent:
        event = copy(worker, op, chunk)
        return worker.__dict__.setdefault("first", {}).setdefault((id(worker._step), op.id), event)

    patch.setattr(workers.Worker, "copy", early)


def squares_behind_their_event(patch: pytest.MonkeyPatch) -> None:
    """Squares of a complete sum are taken after the event that its download waits for."""
    finish, run = slots.DeviceSums.finish, workers.Worker.run
    late: dict[slots.DeviceSums, Any] = {}
    patch.setattr(slots.DeviceSums, "finish", lambda sums, *which: late.update({sums: which}))

    def run_and_finish(worker: workers.Worker, *order: Any) -> DeviceEvent:
        event = run(worker, *order)
        if worker._sums in late:
            finish(worker._sums, *late.pop(worker._sums))
        return event

    patch.setattr(workers.Worker, "run", run_and_finish)


def copies_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A step's end waits for compute alone, which a failed step's copies outlast."""
    patch.setattr(CudaBackend, "synchronize", lambda backend: backend._compute.synchronize())


FAULTS: dict[str, tuple[str, Plant, bool]] = {
    "a wait left out": ("lora", no_wait, True),
    "a record_stream left out": ("alike", no_record_stream, False),
    "memory of the wrong stream's pool": ("full", wrong_pool, False),
    "a lane that ignores events": ("full", lanes_ignore_events, True),
    "a host buffer used again early": ("full", one_host_buffer, True),
    "a source let go early": ("full", dropped_at_issue, True),
    "gradients read early": ("resident", folded_at_issue, True),
    "an event before its copy": ("lora", event_before_copy, True),
    "an event of another stream": ("full", event_of_another_stream, True),
    "a staging buffer written early": ("lora", one_staging_buffer, True),
    "an old event": ("full", old_event, False),
    "an upload past its stream": ("lora", received_elsewhere, True),
    "a host read without waiting": ("full", sent_without_waiting, True),
    "an event of the first chunk": ("small-chunks", event_of_the_first_chunk, True),
    "squares behind their event": ("early-updates", squares_behind_their_event, False),
    "copies of a failed step": ("after-failures", copies_not_waited_for, False),
}
"""Name -> (case, what plants it, whether copies put off change the result: compute is never put off)."""


def outcome(case: str, seed: int, *, lazy: bool) -> tuple[Bits, int]:
    """What a run with the fault came to (nothing if it failed), and how many pairs of accesses had no order."""
    try:
        bits, simulation = CASES[case].simulated(seed, lazy=lazy, tolerant=True)
    except (RoundpipeError, AssertionError):
        return [], 0
    return bits, len(simulation.unordered)


@functools.cache
def on_processor(case: str) -> Bits:
    return CASES[case].on_processor()


KIN = {
    *("an event of another stream", "an old event"),  # an event before its copy, or of the first chunk
    *("memory of the wrong stream's pool", "a source let go early"),  # a record_stream left out
    *("a staging buffer written early", "an upload past its stream"),  # a host buffer used again, a wait left out
    "a host read without waiting",  # gradients read early
}
"""Faults of a kind of which another one is planted in the suite."""


@pytest.mark.parametrize("name", [*sorted(FAULTS.keys() - KIN), *swept(sorted(KIN))])
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plant, shows = FAULTS[name]
    expected = on_processor(case)
    plant(monkeypatch)
    assert any(outcome(case, seed, lazy=False)[1] for seed in SEEDS), "the clocks saw nothing"
    if shows:
        assert any(not is_equal(outcome(case, seed, lazy=True)[0], expected) for seed in SEEDS), (
            "the result is the same"
        )


def test_a_gradient_hook_that_takes_a_turn_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card it runs in autograd's thread, and the thread that has the turn waits for it."""
    taker = GradientCollector.taker

    def with_turn(collector: GradientCollector, *which: Any) -> Any:
        take, parts = taker(collector, *which)

        def hook(index: int, gradient: torch.Tensor) -> None:
            with collector._backend.compute():
                take(index, gradient)

        return hook, parts

    monkeypatch.setattr(GradientCollector, "taker", with_turn)
    with pytest.raises(InternalError, match="backward-cuda._0 waits for the turn"):
        CASES["resident"].simulated(0)
