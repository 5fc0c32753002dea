"""The threads of one worker: one computes, one uploads the weights of the visits to come.

Both take their orders from queues and end when the engine closes. An exception is put into the results as a value;
the engine raises it, once, in the caller.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe_cli.engine.activations import AbortedError, Progress
from roundpipe_cli.engine.backends.base import Backend, Event
from roundpipe_cli.engine.gradients import square_sum
from roundpipe_cli.engine.program import Visit
from roundpipe_cli.engine.stage import StageRunner, StepContext
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.faults import fault
from roundpipe_cli.model.layout import LayerLayout, round_up
from roundpipe_cli.schedule.actions import Action

SLOT_ALIGNMENT_BYTES = 256


@dataclass
class Slot:
    """Device memory for one stage: its weights and, for a backward stage, its gradient sums."""

    index: int
    weights: torch.Tensor
    gradients: torch.Tensor
    free: Event = None
    """When the last computation that used this slot is done."""


@dataclass
class WorkItem:
    """One step's orders for one worker."""

    context: StepContext
    visits: Sequence[Visit]


@dataclass(frozen=True)
class ComputeInterval:
    """One action as it was carried out; marks are the backend's."""

    action: Action
    start: Any
    end: Any


@dataclass
class WorkResult:
    """What came of a `WorkItem`."""

    worker: int
    intervals: list[ComputeInterval] = field(default_factory=list)
    error: BaseException | None = None
    where: str = ""


class _Handover:
    """A queue between the prefetch thread and the worker thread that an abort can interrupt."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._progress.moved()

    def get(self) -> Any:
        self._progress.wait_for(lambda: bool(self._items))
        return self._items.popleft()


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
        self._prefetch_orders: queue.Queue[tuple[WorkItem, _Handover, _Handover] | None] = queue.Queue()
        self._slots: list[Slot] = []
        self._bound: dict[tuple[int, int, int], dict[str, nn.Parameter]] = {}
        self._threads = [threading.Thread(target=self._work, name=f"worker-{index}", daemon=True)]
        if backend.aliases_host:
            self._bind_host()
        else:
            self._threads.append(threading.Thread(target=self._prefetch, name=f"prefetch-{index}", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ask the threads to end and wait for them."""
        self._orders.put(None)
        self._prefetch_orders.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

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

    # -- worker thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with self.backend.worker_thread():
            while True:
                item = self._orders.get()
                if item is None:
                    return
                result = WorkResult(self.index)
                try:
                    self._run(item, result)
                except AbortedError:
                    pass
                except BaseException as error:  # travels as a value; the engine raises it
                    result.error = error
                    item.context.progress.abort()
                self.runner.reset()
                self._results.put(result)

    def _run(self, item: WorkItem, result: WorkResult) -> None:
        context = item.context
        loaded, free = _Handover(context.progress), _Handover(context.progress)
        if not self.backend.aliases_host:
            for slot in self._slots:
                free.put(slot)
            self._prefetch_orders.put((item, loaded, free))
        for visit in item.visits:
            result.where = f"waiting for the weights of layers {visit.layers[0]}-{visit.layers[1]}"
            held = self._enter(context, visit, loaded)
            for action in visit.actions:
                result.where = describe(action, visit, context.step)
                start = self.backend.mark()
                self.runner.run(context, visit, action)
                result.intervals.append(ComputeInterval(action, start, self.backend.mark()))
                context.progress.moved()
            if held is not None:
                self._leave(context, visit, held, free)
        result.where = "finishing the step"
        self.backend.synchronize()

    def _enter(self, context: StepContext, visit: Visit, loaded: _Handover) -> Slot | None:
        if self.backend.aliases_host:
            return None
        got, event = loaded.get()
        if isinstance(got, BaseException):
            raise got
        slot: Slot = got
        self.backend.wait(event)
        self.runner.accumulators = {}
        gradient_offset = 0
        offset = 0
        for layer in visit.layer_range:
            if layer == 0:
                continue
            layout = self._store.layouts[layer]
            self._bind(layer, slot, offset)
            offset += round_up(layout.num_bytes, SLOT_ALIGNMENT_BYTES)
            if visit.backward and context.folds[layer] is not None and context.device_folds:
                flat = slot.gradients[gradient_offset : gradient_offset + layout.num_trainable_elements]
                if visit.first_microbatch == 0:
                    flat.zero_()
                self.runner.accumulators[layer] = [place.trainable_view(flat) for place in layout.trainable]
                gradient_offset += round_up(layout.num_trainable_elements, 64)
        return slot

    def _leave(self, context: StepContext, visit: Visit, slot: Slot, free: _Handover) -> None:
        offset = 0
        if visit.backward and context.device_folds:
            end = visit.actions[-1].microbatch + 1
            for layer in visit.layer_range:
                fold = context.folds[layer]
                if layer == 0 or fold is None:
                    continue
                count = self._store.layouts[layer].num_trainable_elements
                flat = slot.gradients[offset : offset + count]
                fault("download", step=context.step, worker=self.index)
                event = self.backend.download(fold.flat, flat)
                if end == len(context.microbatches):
                    context.square_sums[layer] = square_sum(flat)
                fold.finish_visit(end, event)
                offset += round_up(count, 64)
        slot.free = self.backend.record()
        free.put(slot)

    # -- weights -------------------------------------------------------------------------------------------------

    def _parameters(self, layer: int, buffer: torch.Tensor) -> dict[str, nn.Parameter]:
        return {place.name: place.parameter(buffer) for place in self._store.layouts[layer].places}

    def _use(self, layer: int, parameters: dict[str, nn.Parameter]) -> None:
        self.runner.model.bind(layer, parameters)
        layout = self._store.layouts[layer]
        self.runner.parameters[layer] = [parameters[place.name] for place in layout.trainable]

    def _bind_host(self) -> None:
        for layer in range(1, len(self._store.layouts)):
            self._use(layer, self._parameters(layer, self._store.buffers[layer]))

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
                item, loaded, free = order
                try:
                    for visit in item.visits:
                        slot = free.get()
                        loaded.put((slot, self._upload(item.context, visit, slot)))
                except AbortedError:
                    pass
                except BaseException as error:
                    loaded.put((error, None))

    def _upload(self, context: StepContext, visit: Visit, slot: Slot) -> Event:
        fault("prefetch", step=context.step, worker=self.index)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        after = [slot.free]
        offset = gradient_offset = 0
        for layer in visit.layer_range:
            if layer == 0:
                continue
            layout = self._store.layouts[layer]
            copies.append((slot.weights[offset : offset + layout.num_bytes], self._store.buffers[layer]))
            offset += round_up(layout.num_bytes, SLOT_ALIGNMENT_BYTES)
            fold = context.folds[layer]
            if visit.backward and fold is not None and context.device_folds:
                count = layout.num_trainable_elements
                if visit.first_microbatch > 0:
                    after.append(fold.wait_turn(visit.first_microbatch))
                    copies.append((slot.gradients[gradient_offset : gradient_offset + count], fold.flat))
                gradient_offset += round_up(count, 64)
        fault("upload", step=context.step, worker=self.index)
        event = self.backend.upload(copies, after)
        with context.progress.condition:
            context.upload_bytes += sum(source.nbytes for _, source in copies)
        return event


def describe(action: Action, visit: Visit, step: int) -> str:
    """Where an error happened, for its message."""
    kind = {"F": "forward", "R": "recompute", "B": "backward"}[action.kind.value]
    stage = f"stage {action.stage} (layers {visit.layers[0]}-{visit.layers[1]})"
    return f"{kind} of {stage}, microbatch {action.microbatch}, step {step}"
