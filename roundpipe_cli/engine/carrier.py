"""Boundary tensors between stages: stored in host memory, moved to and from a worker's device.

Where the device reads host memory as it is (the processor), they pass through the store untouched. Elsewhere they go
over the worker's lanes: down as soon as they are computed, up ahead of the operation that reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roundpipe_cli.engine.backends.base import Backend, DeviceEvent, Pair
from roundpipe_cli.engine.dispatch.dispatch import StepRun
from roundpipe_cli.engine.dispatch.progress import Progress
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.program import ACTIVATION, GRADIENT, NUM_STAGING, SAVED, URGENT, Op, Program
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, UP

KEYS_VALUES = ("keys", "values")
"""Payloads of a block's attention, which later chunks of the sequence read; `layer` is the block. Not in programs: the
compute thread requests and publishes them while it runs."""
PAYLOADS = (ACTIVATION, GRADIENT, *KEYS_VALUES)
BoundaryKey = tuple[str, int, int]
"""(payload, layer, microbatch): the hidden states at the input of `layer`, or their gradient."""


@dataclass(eq=False)
class Boundary:
    """A boundary tensor on the host."""

    tensor: torch.Tensor
    event: DeviceEvent
    """Event after which the tensor is complete."""
    num_to_take: int
    """Number of readers that have not asked for it yet."""


class BoundaryStore:
    """Host tensors that wait for their readers; each is dropped once the last reader has it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stored: dict[BoundaryKey, Boundary] = {}

    def put(self, key: BoundaryKey, tensor: torch.Tensor, event: DeviceEvent, num_readers: int) -> None:
        """Publish a boundary for `num_readers` readers, at least one."""
        with self._progress.condition:
            assert key not in self._stored, f"boundary {key} written twice"
            self._stored[key] = Boundary(tensor, event, num_readers)
        self._progress.moved()

    def take(self, key: BoundaryKey) -> Boundary:
        """Wait for a boundary, for one reader."""
        self._progress.wait_for(lambda: key in self._stored)
        found = self.take_if_there(key)
        assert found is not None
        return found

    def take_if_there(self, key: BoundaryKey) -> Boundary | None:
        """The boundary as `take` gives it; None if nothing was published."""
        with self._progress.lock:
            stored = self._stored.get(key)
            if stored is None:
                return None
            stored.num_to_take -= 1
            if stored.num_to_take == 0:
                del self._stored[key]
            return stored

    def __len__(self) -> int:
        return len(self._stored)


def key_of(op: Op) -> BoundaryKey:
    """The boundary that a transfer carries."""
    return op.payload, op.boundary, op.microbatch


_Reader = tuple[bool, int]
"""(is forward, stage): a recompute and its backward count as one reader."""


def _reader(op: Op) -> _Reader:
    return op.kind is Kind.FORWARD, op.stage


def downloads_of(program: Program) -> dict[BoundaryKey, int]:
    """Boundary -> the program's download of it; what passes by a stage without layers is not downloaded again."""
    downloads = (op for op in program.ops if op.lane == DOWN and op.payload in PAYLOADS)
    return {key_of(op): op.id for op in downloads if program.ops[op.deps[0]].visit >= 0}


class Carrier:
    """One worker's boundary tensors in one step. `take` and `put` are for the compute thread, the rest for lanes."""

    def __init__(
        self,
        backend: Backend,
        store: BoundaryStore,
        run: StepRun,
        downloads: dict[BoundaryKey, int],
        *,
        recompute_each_layer: bool,
    ) -> None:
        self._backend, self._store, self._run = backend, store, run
        self._downloads = downloads
        self._recompute_each_layer = recompute_each_layer
        self.op: Op
        """The compute operation that is being issued."""
        self._inputs: dict[tuple[_Reader, BoundaryKey], torch.Tensor] = {}
        """(reader, boundary) -> device tensor that has arrived, or whose arrival the reader already waits for."""
        self._outputs: dict[int, tuple[torch.Tensor, int]] = {}
        """Download -> (device tensor, number of readers)."""
        self._leaving: deque[Op] = deque(maxlen=NUM_STAGING)
        self._fetched: dict[int, tuple[_Reader, Boundary]] = {}
        """Upload that the compute thread asked for -> (reader, boundary)."""
        self._landing: dict[int, tuple[torch.Tensor, int]] = {}
        """Download that is being issued -> (host tensor, number of readers)."""

    # -- compute thread ------------------------------------------------------------------------------------------

    def take(self, key: BoundaryKey) -> torch.Tensor:
        """A boundary tensor, on this worker's device when the next computation starts."""
        if self._backend.aliases_host:
            return self._store.take(key).tensor
        tensor = self._inputs.pop((_reader(self.op), key), None)
        if tensor is not None:
            return tensor
        boundary = self._store.take(key)
        like = self.op._replace(microbatch=key[2])  # of an earlier chunk, where it is keys or values
        transfer = self._run.add(like, boundary.event, lane=UP, payload=key[0], boundary=key[1], priority=(URGENT, -1))
        self._fetched[transfer.id] = (_reader(self.op), boundary)
        self._run.start(transfer.id)
        self._backend.wait(self._run.wait_issued(transfer))
        return self._inputs.pop((_reader(self.op), key))

    def put(self, key: BoundaryKey, tensor: torch.Tensor, num_readers: int) -> None:
        """Publish a tensor that was just computed; waits while two others are still being moved."""
        if self._backend.aliases_host:
            self._store.put(key, tensor, None, num_readers)
            return
        if len(self._leaving) == NUM_STAGING:
            self._backend.wait(self._run.wait_issued(self._leaving[0]))
        event = self._backend.record()
        known = self._downloads.get(key)
        if known is None:
            priority = SAVED, self.op.id
            transfer = self._run.add(self.op, event, lane=DOWN, payload=key[0], boundary=key[1], priority=priority)
            self._outputs[transfer.id] = (tensor, num_readers)
            self._run.start(transfer.id)
        else:
            transfer = self._run.program.ops[known]
            self._outputs[known] = (tensor, num_readers)
            self._run.release(known, event)
        self._leaving.append(transfer)

    # -- lane threads --------------------------------------------------------------------------------------------

    def prepare(self, op: Op) -> Sequence[Pair]:
        """The copies of a boundary's transfer; none where no tensor was made, or where its reader reads none."""
        if op.lane == UP:
            return self._prepare_up(op)
        if op.id not in self._outputs:
            return ()
        tensor, num_readers = self._outputs.pop(op.id)
        host = self._backend.host_like(tensor)
        self._landing[op.id] = host, num_readers
        return [(host, tensor)]

    def _prepare_up(self, op: Op) -> Sequence[Pair]:
        key = key_of(op)
        if op.id in self._fetched:
            reader, found = self._fetched.pop(op.id)
        else:
            followers = (self._run.program.ops[follower] for follower in self._run.ledger.followers(op.id))
            consumer = next(other for other in followers if other.lane == COMPUTE)
            reader = _reader(consumer)
            unread = consumer.kind is Kind.RECOMPUTE and self._recompute_each_layer
            from_embed = op.boundary == 0  # the compute thread itself gathers the embedding's rows
            there = None if from_embed or unread or consumer.visit < 0 else self._store.take_if_there(key)
            if there is None:
                return ()
            found = there
        device = self._backend.device_like(found.tensor)
        self._inputs[reader, key] = device
        return [(device, found.tensor)]

    def issued(self, op: Op, event: DeviceEvent) -> None:
        """A transfer has been issued: readers may ask for the host tensor that it fills."""
        if op.id in self._landing:
            host, num_readers = self._landing.pop(op.id)
            self._store.put(key_of(op), host, event, num_readers)
