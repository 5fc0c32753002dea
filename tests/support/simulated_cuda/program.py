"""Order by a step's program alone: a transfer comes after what the program makes it wait for, and after nothing else.

A lane's thread puts many transfers on one stream and asks for many events. In which order, and which of them it has
seen when it issues the next transfer, is otherwise in the next run. So each transfer is an actor of its own, which
knows

- what was over when the step began,
- the events that it was given, once its thread has seen them,
- the host's updates whose layers it was told of,
- what its thread has waited for.

A slot is stamped with the visit whose weights go there: who computes with another visit's is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from roundpipe_cli.engine.backends.cuda import CudaBackend
from roundpipe_cli.engine.dispatch.dispatch import Pool, StepRun
from roundpipe_cli.engine.worker import Worker
from roundpipe_cli.schedule.program import WEIGHTS, Op
from tests.support.simulated_cuda.clocks import Actor, Clock, join, of_hosts
from tests.support.simulated_cuda.mode import Machine


class Transfers:
    """The transfers of the step under way."""

    def __init__(self, machine: Machine, new_actor: Callable[[str], Actor]) -> None:
        self._machine, self._streams, self._new_actor = machine, machine.streams, new_actor
        self._actors: dict[tuple[int, int], Actor] = {}  # by worker and operation
        self._arrivals: dict[tuple[int, int], Any] = {}
        self._updates: dict[int, Clock] = {}  # operation -> what the host did before it let go of it
        self._stamps: dict[tuple[int, int], int] = {}  # by worker and slot: the visit whose weights go there

    def begin(self) -> None:
        """A step begins, by the calling thread."""
        self._streams.floor = dict(self._streams.myself().clock)
        for held in (self._actors, self._arrivals, self._updates, self._stamps):
            held.clear()

    def let_go(self, op_ids: Sequence[int]) -> None:
        """The host's memory is as these operations are to read it."""
        for op_id in op_ids:
            join(self._updates.setdefault(op_id, {}), of_hosts(self._streams.myself().clock))

    def admit(self, op: Op, after: Sequence[Any]) -> Actor:
        """A transfer's inputs have happened, as it was given them."""
        thread = self._streams.myself()
        actor = self._new_actor(f"transfer {op.id} ({op.payload} {op.lane}) of worker {op.worker}")
        seen = [one.marker for one in after if one is not None and thread.number in one.marker.seen_by]
        for clock in (self._streams.floor, self._updates.get(op.id, {}), *(marker.clock for marker in seen)):
            actor.learn(clock)
        self._actors[op.worker, op.id] = actor
        return actor

    def copies(self, op: Op) -> Actor:
        """A chunk of an admitted transfer is issued."""
        if op.payload == WEIGHTS:
            self._stamps[op.worker, self._slot(op)] = op.visit
        return self._actors[op.worker, op.id]

    def issued(self, op: Op, event: Any) -> None:
        """The last one was, or there are none."""
        self._arrivals[op.worker, op.id] = event
        if op.payload == WEIGHTS:
            self._stamps[op.worker, self._slot(op)] = op.visit

    def ended(self, op: Op) -> None:
        """The calling thread acts on the arrival of a transfer."""
        event, thread = self._arrivals.pop((op.worker, op.id)), self._streams.myself()
        if event is not None and thread.number in event.marker.seen_by:
            thread.learn(event.marker.clock)

    def check_slot(self, op: Op) -> None:
        """A computation uses the weights of its visit."""
        visit = self.program.visits[op.visit] if op.visit >= 0 else None
        if visit is not None and visit.upload >= 0:
            found = self._stamps.get((op.worker, visit.slot))
            if found != op.visit:
                text = f"worker {op.worker} computes visit {op.visit} (layers {visit.layers}) with visit {found}'s slot"
                self._machine.unordered.append(text)

    def _slot(self, op: Op) -> int:
        return self.program.visits[op.visit].slot

    # -- patches of the engine -----------------------------------------------------------------------------------
    def patches(self) -> list[tuple[Any, str, Any]]:
        """(owner, name, value) of what tells this object of a step."""
        start, ready, make = Pool.start, StepRun.ready, CudaBackend.__init__
        prepare, copy, issued, ended, run = Worker.prepare, Worker.copy, Worker.issued, Worker.ended, Worker.run
        happens_in_s, lock, streams = Worker.happens_in_s, self._machine.lock, self._streams

        def is_ours(worker: Worker) -> bool:
            return isinstance(worker.backend, CudaBackend)

        def pool_start(pool: Pool, step: StepRun) -> None:
            with lock:
                self.begin()
                self.program = step.program
            start(pool, step)

        def run_ready(step: StepRun, layer: int) -> None:
            with lock:
                self.let_go(step._readers.get(layer, ()))
            ready(step, layer)

        def backend_made(backend: CudaBackend, *args: Any, **kwargs: Any) -> None:
            make(backend, *args, **kwargs)
            for stream in (backend._compute, backend._up, backend._down):
                line: Any = stream.line  # type: ignore[attr-defined]
                line.by_program, line.carries = True, stream is not backend._compute

        def worker_prepare(worker: Worker, op: Op, after: Sequence[Any]) -> Any:
            if not is_ours(worker):
                return prepare(worker, op, after)
            with lock:
                actor = self.admit(op, after)
            with streams.working_at(actor):
                return prepare(worker, op, after)

        def worker_copy(worker: Worker, op: Op, chunk: Any) -> Any:
            if not is_ours(worker):
                return copy(worker, op, chunk)
            with lock:
                actor = self.copies(op)
            with streams.working_at(actor):
                return copy(worker, op, chunk)

        def worker_issued(worker: Worker, op: Op, event: Any) -> None:
            with lock:
                self.issued(op, event)
            issued(worker, op, event)

        def worker_ended(worker: Worker, op: Op) -> None:
            with lock:
                self.ended(op)
            ended(worker, op)

        def worker_run(worker: Worker, op: Op, *events: Any) -> Any:
            with lock:
                self.check_slot(op) if is_ours(worker) else None
            event = run(worker, op, *events)
            with lock:
                self.check_slot(op) if is_ours(worker) else None
            return event

        def worker_looks(worker: Worker, event: Any) -> float:
            streams.looks = True
            try:
                return happens_in_s(worker, event)
            finally:
                streams.looks = False

        return [
            (Pool, "start", pool_start),
            (StepRun, "ready", run_ready),
            (CudaBackend, "__init__", backend_made),
            *((Worker, "prepare", worker_prepare), (Worker, "copy", worker_copy), (Worker, "issued", worker_issued)),
            *((Worker, "ended", worker_ended), (Worker, "run", worker_run), (Worker, "happens_in_s", worker_looks)),
        ]
