"""The threads of one worker: one computes, one uploads the weights of the visits to come.

Both take their orders from queues and end when the engine closes. An exception is put into the results as a value;
the engine raises it, once, in the caller.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from roundpipe_cli.engine.activations import AbortedError, Progress
from roundpipe_cli.engine.backends.base import Backend, Event
from roundpipe_cli.engine.gradients import GradientFold, square_sum
from roundpipe_cli.engine.program import backward_ops, layer_range, stage_layers
from roundpipe_cli.engine.stage import StageRunner, StepContext
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.faults import fault
from roundpipe_cli.model.layout import LayerLayout, round_up
from roundpipe_cli.schedule.actions import Kind, StageRange
from roundpipe_cli.schedule.lower import Op

SLOT_ALIGNMENT_BYTES = 256


@dataclass
class Slot:
    """Device memory for one stage: its weights and, for a backward stage, its gradient sums."""

    index: int
    weights: torch.Tensor
    gradients: torch.Tensor
    free: Event = None
    """When the last computation that used this slot is done."""


@dataclass(frozen=True)
class ComputeInterval:
    """One operation as it was carried out; marks are the backend's."""

    op: Op
    start: Any
    end: Any


@dataclass
class WorkResult:
    """What came of a `WorkItem`; grows while it is carried out."""

    worker: int
    intervals: list[ComputeInterval] = field(default_factory=list)
    error: BaseException | None = None
    where: str = ""


@dataclass
class WorkItem:
    """One step's orders for one worker: its row of the context's program."""

    context: StepContext
    ops: Sequence[int]
    result: WorkResult


@dataclass(frozen=True)
class _Now:
    """The operation that a worker is at."""

    result: WorkResult
    op: Op
    mark: Any
    waits: bool
    """For a boundary tensor, before it begins."""


class _Slots:
    """Who may use which slot: the prefetch thread fills, the worker thread computes and leaves."""

    def __init__(self, slots: Sequence[Slot], progress: Progress) -> None:
        self._progress = progress
        self._free = set(range(len(slots)))
        self._loaded: dict[int, Event] = {}
        self._error: BaseException | None = None
        self.slots = slots

    def take(self, index: int) -> Slot:
        """Wait until the visit before has left slot `index`."""
        self._progress.wait_for(lambda: index in self._free)
        self._free.discard(index)
        return self.slots[index]

    def loaded(self, visit: int, event: Event) -> None:
        self._loaded[visit] = event
        self._progress.moved()

    def failed(self, error: BaseException) -> None:
        self._error = error
        self._progress.moved()

    def wait_loaded(self, visit: int) -> Event:
        """Wait until the weights of `visit` are on their way."""
        self._progress.wait_for(lambda: visit in self._loaded or self._error is not None)
        if visit not in self._loaded:  # visits before the failed one go on, so that the message names the right one
            assert self._error is not None
            raise self._error
        return self._loaded.pop(visit)

    def leave(self, index: int) -> None:
        self._free.add(index)
        self._progress.moved()


def stage_bytes(layouts: Sequence[LayerLayout], layers: range) -> int:
    """Device bytes of a stage's weights in a slot. The embed layer stays on the host."""
    return sum(round_up(layouts[layer].num_bytes, SLOT_ALIGNMENT_BYTES) for layer in layers if layer > 0)


def stage_gradient_elements(layouts: Sequence[LayerLayout], layers: range) -> int:
    """float32 elements of a stage's gradient sums in a slot."""
    return sum(round_up(layouts[layer].num_trainable_elements, 64) for layer in layers if layer > 0)


class Worker:
    """One device and its threads."""

    def __init__(
        self, index: int, runner: StageRunner, backend: Backend, store: WeightStore, results: queue.Queue[WorkResult]
    ) -> None:
        self.index = index
        self.runner = runner
        self.backend = backend
        self._store = store
        self._results = results
        self._orders: queue.Queue[WorkItem | None] = queue.Queue()
        self._prefetch_orders: queue.Queue[tuple[WorkItem, _Slots] | None] = queue.Queue()
        self._slots: list[Slot] = []
        self._bound: dict[tuple[int, int, int], dict[str, nn.Parameter]] = {}
        self._now: _Now | None = None
        self._threads = [threading.Thread(target=self._work, name=f"worker-{index}", daemon=True)]
        self._on_host: dict[int, list[dict[str, nn.Parameter]]] = {}
        """By version modulo the number of versions kept: the embed layer's parameters, then those of aliased layers."""
        self._host_version = -1
        if not backend.aliases_host:
            self._threads.append(threading.Thread(target=self._prefetch, name=f"prefetch-{index}", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def ask_to_stop(self) -> None:
        """Ask the threads to end once they have nothing left to do."""
        self._orders.put(None)
        self._prefetch_orders.put(None)

    def join(self, deadline_s: float) -> None:
        """Wait for the threads until `deadline_s` of the monotonic clock."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def give(self, item: WorkItem) -> None:
        """Hand over one step's orders."""
        self._orders.put(item)

    def reserve_slots(self, num_slots: int, weight_bytes: int, gradient_elements: int) -> None:
        """Make sure that every slot holds the largest stage. Called between steps."""
        if self.backend.aliases_host:
            return
        fits = self._slots and self._slots[0].weights.nbytes >= weight_bytes
        if fits and self._slots[0].gradients.nbytes >= 4 * gradient_elements and len(self._slots) >= num_slots:
            return
        self._slots, self._bound = [], {}
        for index in range(num_slots):
            weights = self.backend.allocate(weight_bytes)
            gradients = self.backend.allocate(4 * gradient_elements).view(torch.float32)
            self._slots.append(Slot(index, weights, gradients))

    def running(self, result: WorkResult) -> ComputeInterval | None:
        """What the worker computes now for `result`, without an end; may be asked from any thread."""
        now = self._now
        if now is None or now.result is not result:
            return None
        started = self.runner.started
        if started is None and now.waits:
            return None
        return ComputeInterval(now.op, now.mark if started is None else started, None)

    # -- worker thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with self.backend.worker_thread():
            while True:
                item = self._orders.get()
                if item is None:
                    return
                result = item.result
                try:
                    self._run(item, result)
                except AbortedError:
                    pass
                except BaseException as error:  # travels as a value; the engine raises it
                    result.error = error
                    item.context.progress.abort()
                self._now = None
                self.runner.reset()
                self._results.put(result)

    def _run(self, item: WorkItem, result: WorkResult) -> None:
        context, program = item.context, item.context.program
        slots = _Slots(self._slots, context.progress)
        if not self.backend.aliases_host:
            self._prefetch_orders.put((item, slots))
        self._bind_host(context.version)
        bound = -1
        last_op = {program.ops[op_id].microbatch: op_id for op_id in item.ops if program.ops[op_id].visit >= 0}
        for op_id in item.ops:
            op = program.ops[op_id]
            if op.visit < 0:
                continue  # a stage without layers
            visit = program.visits[op.visit]
            if visit.ops[0] == op_id:
                self._check_versions(visit.layers, context.version)
            if not self.backend.aliases_host:
                if visit.ops[0] == op_id:
                    result.where = f"weights for {describe(op, context)}"
                    self.runner.layer = visit.layers[0]
                    self.backend.wait(slots.wait_loaded(op.visit))
                if bound != op.visit:
                    self._bind_slot(context, op.visit)
                    bound = op.visit
                self._start_sums(context, op)
            result.where = describe(op, context)
            start = self.backend.mark()
            self.runner.started = None
            self._now = _Now(result, op, start, waits=stage_layers(program.schedule, op)[0] > 0)
            self.runner.run(context, op)
            started = start if self.runner.started is None else self.runner.started
            result.intervals.append(ComputeInterval(op, started, self.backend.mark()))
            context.progress.moved()
            if visit.ops[-1] == op_id and not self.backend.aliases_host:
                self._leave(context, op.visit, slots)
            if last_op[op.microbatch] == op_id:  # masks and position embeddings of later rounds take their place
                context.microbatches[op.microbatch].calls_by_worker.pop(self.index, None)
        result.where = "finishing the step"
        self.backend.synchronize()

    def _bind_slot(self, context: StepContext, visit_id: int) -> None:
        """Point the modules of a visit's layers at the weights, and the gradient sums, in its slot."""
        visit = context.program.visits[visit_id]
        slot = self._slots[visit.slot]
        offset = 0
        for layer in layer_range(visit.layers):
            if layer > 0:
                self._bind(layer, slot, offset)
                offset += round_up(self._store.layouts[layer].num_bytes, SLOT_ALIGNMENT_BYTES)
        self.runner.accumulators = {}
        if context.device_folds and backward_ops(context.program, visit_id):
            for fold, flat in self._sums(context, visit.layers, slot):
                places = self._store.layouts[fold.layer].trainable
                self.runner.accumulators[fold.layer] = [place.trainable_view(flat) for place in places]

    def _start_sums(self, context: StepContext, op: Op) -> None:
        """Before a visit's first backward: its gradient sums, from zero or from where the visit before left them.

        Done here and not with the weights, because a visit may begin with forwards, which must not wait for this.
        """
        if not context.device_folds or op.kind is not Kind.BACKWARD:
            return
        visit = context.program.visits[op.visit]
        if backward_ops(context.program, op.visit)[0].id != op.id:
            return
        copies, after = [], []
        for fold, flat in self._sums(context, visit.layers, self._slots[visit.slot]):
            if op.microbatch == 0:
                flat.zero_()
            else:
                after.append(fold.wait_turn(op.microbatch))
                copies.append((flat, fold.flat))
        if copies:
            self.backend.wait(self._upload(context, copies, after))

    def _sums(
        self, context: StepContext, layers: StageRange, slot: Slot
    ) -> Iterator[tuple[GradientFold, torch.Tensor]]:
        """Each trained layer's fold and its sum in the slot."""
        offset = 0
        for layer in layer_range(layers):
            fold = context.folds[layer]
            if layer == 0 or fold is None or layer not in context.device_folds:
                continue
            count = self._store.layouts[layer].num_trainable_elements
            yield fold, slot.gradients[offset : offset + count]
            offset += round_up(count, 64)

    def _leave(self, context: StepContext, visit_id: int, slots: _Slots) -> None:
        visit = context.program.visits[visit_id]
        slot = self._slots[visit.slot]
        backwards = backward_ops(context.program, visit_id)
        if backwards and context.device_folds:
            end = backwards[-1].microbatch + 1
            for fold, flat in self._sums(context, visit.layers, slot):
                fault("download", step=context.step, worker=self.index)
                event = self.backend.download(fold.flat, flat)
                if end == len(context.microbatches):
                    context.gradient_complete(fold.layer, square_sum(flat), partial(self.backend.finish, event))
                fold.finish_visit(end, event)
        slot.free = self.backend.record()
        slots.leave(visit.slot)

    # -- weights -------------------------------------------------------------------------------------------------

    def _parameters(self, layer: int, buffer: torch.Tensor) -> dict[str, nn.Parameter]:
        return {place.name: place.parameter(buffer) for place in self._store.layouts[layer].places}

    def _use(self, layer: int, parameters: dict[str, nn.Parameter]) -> None:
        self.runner.model.bind(layer, parameters)
        layout = self._store.layouts[layer]
        self.runner.parameters[layer] = [parameters[place.name] for place in layout.trainable]

    def _bind_host(self, version: int) -> None:
        """Point what is read from host memory at the weights of `version`: the embed layer, aliased layers."""
        store, model = self._store, self.runner.model
        last = len(store.layouts) if self.backend.aliases_host else 1
        slot = version % (1 + store.staleness)
        if slot == self._host_version:
            return
        if slot not in self._on_host:
            embed = model.embed_parameters(store.views_at(version))
            self._on_host[slot] = [embed, *(store.parameters(layer, version) for layer in range(1, last))]
        self._host_version = slot
        model.bind_embed(self._on_host[slot][0])
        for layer in range(1, last):
            self._use(layer, self._on_host[slot][layer])

    def _check_versions(self, layers: StageRange, version: int) -> None:
        """Assert that the host has a visit's layers at the version that the step reads."""
        for layer in layer_range(layers):
            self._store.check_version(layer, version)
        if layers[0] == 0:  # its table may lie in the head's buffer
            for name in self.runner.model.embed_names:
                self._store.check_version(self._store.layer_of(name), version)

    def _bind(self, layer: int, slot: Slot, offset: int) -> None:
        key = (slot.index, offset, layer)
        if key not in self._bound:
            num_bytes = self._store.layouts[layer].num_bytes
            self._bound[key] = self._parameters(layer, slot.weights[offset : offset + num_bytes])
        self._use(layer, self._bound[key])

    # -- prefetch thread -----------------------------------------------------------------------------------------

    def _prefetch(self) -> None:
        with self.backend.copy_thread():
            while True:
                order = self._prefetch_orders.get()
                if order is None:
                    return
                item, slots = order
                try:
                    self._upload_visits(item, slots)
                except AbortedError:
                    pass
                except BaseException as error:
                    slots.failed(error)

    def _upload_visits(self, item: WorkItem, slots: _Slots) -> None:
        """The weights of each visit, in order, each as soon as its slot is free."""
        context, program = item.context, item.context.program
        visits = dict.fromkeys(program.ops[op].visit for op in item.ops if program.ops[op].visit >= 0)
        for visit_id in visits:
            visit = program.visits[visit_id]
            slot = slots.take(visit.slot)
            fault("prefetch", step=context.step, worker=self.index)
            copies = []
            offset = 0
            for layer in layer_range(visit.layers):
                if layer > 0:
                    for start, piece in self._store.pieces(layer, context.version):
                        target = offset + start
                        copies.append((slot.weights[target : target + piece.nbytes], piece))
                    offset += round_up(self._store.layouts[layer].num_bytes, SLOT_ALIGNMENT_BYTES)
            slots.loaded(visit_id, self._upload(context, copies, [slot.free]))

    def _upload(
        self, context: StepContext, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event]
    ) -> Event:
        fault("upload", step=context.step, worker=self.index)
        event = self.backend.upload(copies, after)
        with context.progress.condition:
            context.upload_bytes += sum(source.nbytes for _, source in copies)
        return event


def describe(op: Op, context: StepContext) -> str:
    """Where an error happened, for its message."""
    kind = {Kind.FORWARD: "forward", Kind.RECOMPUTE: "recompute", Kind.BACKWARD: "backward"}[op.kind]
    first, last = stage_layers(context.program.schedule, op)
    return f"{kind} of stage {op.stage} (layers {first}-{last}), microbatch {op.microbatch}, step {context.step}"
