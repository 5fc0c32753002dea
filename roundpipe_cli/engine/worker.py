"""What a worker's operations do to its device: weights into slots, stages computed, gradient sums in and out.

The dispatcher's threads call this (`dispatch.py` says when); the mathematics of a stage is `StageRunner`'s. One object
per device for the whole run; it takes up one `WorkerPart` after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.engine.backends.base import Backend, DeviceEvent, Pair
from roundpipe_cli.engine.carrier import Carrier
from roundpipe_cli.engine.dispatch.dispatch import TransferChunk
from roundpipe_cli.engine.gradients import GradientFold, Leaving, square_sum
from roundpipe_cli.engine.program import backward_ops, describe_op, layer_range, stage_layers
from roundpipe_cli.engine.stage import StageRunner, StepContext
from roundpipe_cli.engine.weight_cache import WeightCache
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.faults import fault
from roundpipe_cli.model.layout import LayerLayout, round_up
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.lower import WEIGHT_GRADIENT, WEIGHTS, Op, Program, Visit
from roundpipe_cli.schedule.timeline import DOWN, UP

SLOT_ALIGNMENT_BYTES = 256
KEPT = -1
"""In place of a slot's index: the weight cache."""


@dataclass
class Slot:
    """Device memory for one stage: its weights and, for a backward stage, its gradient sums."""

    index: int
    weights: torch.Tensor
    gradients: torch.Tensor


@dataclass(frozen=True)
class ComputeInterval:
    """One operation as it was carried out; marks are the backend's."""

    op: Op
    start: Any
    end: Any


@dataclass
class WorkerStep:
    """What a worker did in one step; grows while the step is carried out."""

    worker: int
    intervals: list[ComputeInterval] = field(default_factory=list)
    start: Any = None
    """The backend's mark of when it took the step up; None until then."""
    started_s: float = 0.0
    """That moment, of `time.perf_counter`."""
    peak_bytes: int = 0
    """Of the device's memory."""


@dataclass(frozen=True)
class WorkerPart:
    """A worker's part of a step."""

    context: StepContext
    carrier: Carrier
    step: WorkerStep


@dataclass(frozen=True)
class _Now:
    """The operation that a worker is at."""

    step: WorkerStep
    op: Op
    mark: Any
    waits: bool
    """For a boundary tensor, before it begins."""


def stage_bytes(layouts: Sequence[LayerLayout], layers: Iterable[int]) -> int:
    """Device bytes of these layers' weights in a slot. The embed layer stays on the host."""
    return sum(round_up(layouts[layer].num_bytes, SLOT_ALIGNMENT_BYTES) for layer in layers if layer > 0)


def stage_gradient_elements(layouts: Sequence[LayerLayout], layers: range) -> int:
    """float32 elements of a stage's gradient sums in a slot."""
    return sum(round_up(layouts[layer].num_trainable_elements, 64) for layer in layers if layer > 0)


def _fold_place(program: Program, op: Op) -> int:
    """Place of a backward operation's microbatch in the order in which its stage's gradients are added up."""
    return program.schedule.backward_place(op.stage, op.microbatch)


class Worker:
    """One device: its slots, its module objects and what its operations do. The dispatcher's `Work`."""

    def __init__(
        self,
        index: int,
        runner: StageRunner,
        backend: Backend,
        store: WeightStore,
        layer_names: Sequence[str],
        chunk_bytes: int,
        weight_cache_bytes: int = 0,
    ) -> None:
        self.index = index
        self.cache = WeightCache(index, backend, store, weight_cache_bytes)
        self.runner = runner
        self.backend = backend
        self.lanes: tuple[str, ...] = () if backend.aliases_host else (UP, DOWN)
        self._store = store
        self._layer_names = layer_names
        self._chunk_bytes = chunk_bytes
        self._slots: list[Slot] = []
        self._bound: dict[tuple[int, int, int], dict[str, nn.Parameter]] = {}
        """By (slot or `KEPT`, offset, layer)."""
        self._bound_visit = -1
        self._last_ops: frozenset[int] = frozenset()
        """Each microbatch's last operation here."""
        self._now: _Now | None = None
        self._context: StepContext | None = None
        self._carrier: Carrier | None = None
        self._step = WorkerStep(index)
        self._on_host: dict[int, list[dict[str, nn.Parameter]]] = {}
        """By version modulo the number of versions kept: the embed layer's parameters, then those of aliased layers."""
        self._host_version = -1
        self._leaving: dict[int, list[Leaving]] = {}
        """By backward operation: gradients that wait for their download."""
        self._landing: dict[int, list[tuple[Leaving, torch.Tensor]]] = {}
        """By download: gradients on their way to the host's fold, with the host memory that they go to."""
        self._squares: dict[int, torch.Tensor] = {}
        """Layer -> sum of squares of its complete gradient, which is on its way to the host."""

    def reserve_slots(self, num_slots: int, program: Program) -> None:
        """Make sure that every slot holds the largest stage, but for what the cache keeps. Called between steps."""
        if self.backend.aliases_host:
            return
        layouts = self._store.layouts
        # Without a cache as large as any worker's, so that no later step with other dealing makes them larger.
        held = (visit.layers for visit in program.visits if visit.worker == self.index or not self.cache.is_on)
        left = ([layer for layer in layer_range(layers) if self.cache.buffer(layer) is None] for layers in held)
        weight_bytes = max((stage_bytes(layouts, layers) for layers in left), default=0)
        summed = (stage for stage in program.schedule.backward_stages if stage not in program.host_folded)
        gradient_elements = max((stage_gradient_elements(layouts, layer_range(stage)) for stage in summed), default=0)
        fits = self._slots and self._slots[0].weights.nbytes >= weight_bytes
        if fits and self._slots[0].gradients.nbytes >= 4 * gradient_elements and len(self._slots) >= num_slots:
            return
        self._slots = []
        self._unbind()
        for index in range(num_slots):
            weights = self.backend.allocate(weight_bytes)
            gradients = self.backend.allocate(4 * gradient_elements).view(torch.float32)
            self._slots.append(Slot(index, weights, gradients))

    def grant_cache(self, num_bytes: int) -> None:
        """Another budget for weights that stay, between steps; what was kept is let go at once, and the slots, which
        are as large as what is not kept makes them."""
        if not self.backend.aliases_host:
            self._slots = []
            self._unbind()
        self.cache.grant(num_bytes)
        self.backend.release_unused()

    def _unbind(self) -> None:
        """Let go of the slots' and the cache's memory, which modules and gradient sums know: visits bind anew."""
        self._bound, self._bound_visit = {}, -1
        self.runner.unbind()

    def keep_weights(self, program: Program) -> None:
        """Settle which layers' weights stay on the device. Called between steps, for a training program."""
        if self.cache.choose(program):
            self._bound = {key: bound for key, bound in self._bound.items() if key[0] != KEPT}

    def take_up(self, part: WorkerPart) -> None:
        context = part.context
        self.cache.begin_step(context.program)
        self.backend.reset_peak()
        self._context, self._carrier, self.runner.carrier = context, part.carrier, part.carrier
        self._bound_visit = -1
        self._squares = {}
        self._bind_host(context.version)
        ops = (context.program.ops[op_id] for op_id in context.program.compute[self.index])
        self._last_ops = frozenset({op.microbatch: op.id for op in ops if op.visit >= 0}.values())
        self._step = part.step
        part.step.started_s = time.perf_counter()
        part.step.start = self.backend.mark()

    def running(self, step: WorkerStep) -> ComputeInterval | None:
        """What the worker computes now in `step`, without an end; may be asked from any thread."""
        now = self._now
        if now is None or now.step is not step:
            return None
        started = self.runner.started
        if started is None and now.waits:
            return None
        return ComputeInterval(now.op, now.mark if started is None else started, None)

    # -- compute thread ------------------------------------------------------------------------------------------

    def compute_thread(self) -> AbstractContextManager[None]:
        return self.backend.worker_thread()

    def begin(self, op: Op) -> None:
        self._now = None
        if op.visit >= 0:
            assert self._context is not None
            self.runner.layer = stage_layers(self._context.program.schedule, op)[0]

    def run(self, op: Op, ready: Sequence[DeviceEvent], late: Sequence[DeviceEvent]) -> DeviceEvent:
        context, backend = self._context, self.backend
        assert context is not None and self._carrier is not None
        for event in (*ready, *late):
            backend.wait(event)
        if op.visit < 0:  # a stage without layers
            return backend.record()
        visit = context.program.visits[op.visit]
        if visit.ops[0] == op.id:
            self._check_versions(visit.layers, context.version)
        if not backend.aliases_host:
            if self._bound_visit != op.visit:
                self._bind_slot(context, op.visit)
                self._bound_visit = op.visit
            self._start_sums(context, op)
        self._carrier.op = op
        start = backend.mark()
        self.runner.started = None
        self._now = _Now(self._step, op, start, waits=stage_layers(context.program.schedule, op)[0] > 0)
        self.runner.run(context, op)
        if self.runner.leaving:
            self._leaving[op.id], self.runner.leaving = self.runner.leaving, []
        self._pass_work(context, op)
        started = start if self.runner.started is None else self.runner.started
        self._step.intervals.append(ComputeInterval(op, started, backend.mark()))
        if visit.ops[-1] == op.id and not backend.aliases_host:
            self._finish_sums(context, op.visit)
        state = context.microbatches[op.microbatch]
        # Masks and position embeddings of other microbatches take their place; those of chunks are large.
        if op.id in self._last_ops or state.chunk is not None:
            state.calls_by_worker.pop(self.index, None)
        return backend.record()

    def _pass_work(self, context: StepContext, op: Op) -> None:
        """The fault point of slower devices: once for each layer, twice where its forward and backward are one."""
        schedule = context.program.schedule
        first, last = stage_layers(schedule, op)
        fused = schedule.fused_head and op.kind is Kind.BACKWARD and op.stage == 0
        for _ in range((last + 1 - max(1, first)) * (2 if fused else 1)):
            fault("work", step=context.step, worker=self.index)

    def drain(self) -> None:
        self.backend.synchronize()
        if self._context is not None and not self._context.progress.aborted:
            self.runner.finish(self._context)
        self._step.peak_bytes = self.backend.peak_bytes

    def busy_s(self) -> float:
        return 0.0

    def reset(self) -> None:
        """Drop what belongs to the step, done or failed."""
        self._leaving.clear()
        self._landing.clear()
        self._now, self._context, self._carrier, self.runner.carrier = None, None, None, None
        self.runner.reset()

    def where(self, op: Op, *, weights: bool) -> str:
        context = self._context
        assert context is not None
        schedule = context.program.schedule
        layers = stage_layers(schedule, op)
        layer = self.runner.layer if layers[0] <= self.runner.layer <= layers[1] else layers[0]
        what = "weights for " if weights else ""
        return (
            f"worker {self.index} ({self.backend.device}), {what}{describe_op(op, schedule, context.step)}, "
            f"layer {self._layer_names[layer]}"
        )

    # -- lane threads --------------------------------------------------------------------------------------------

    def lane_thread(self) -> AbstractContextManager[None]:
        return self.backend.copy_thread()

    def arrival(self, dep: Op, op: Op, event: DeviceEvent) -> DeviceEvent:
        return event

    def happens_in_s(self, event: DeviceEvent) -> float:
        return self.backend.happens_in_s(event)

    def happened_at_s(self, event: DeviceEvent, now_s: float) -> float:
        return now_s

    def prepare(self, op: Op, after: Sequence[DeviceEvent]) -> Sequence[TransferChunk]:
        context, carrier = self._context, self._carrier
        assert context is not None and carrier is not None
        if op.payload == WEIGHTS:
            pairs = self._weight_copies(context, op.visit)
        elif op.payload == WEIGHT_GRADIENT:
            pairs = self._sum_copies(context, op)
        else:
            pairs = list(carrier.prepare(op))
        return chunks_of(pairs, self._chunk_bytes)

    def copy(self, op: Op, chunk: TransferChunk) -> DeviceEvent:
        return self.backend.copy_up(chunk.content) if op.lane == UP else self.backend.copy_down(chunk.content)

    def issued(self, op: Op, event: DeviceEvent) -> None:
        assert self._carrier is not None
        self._carrier.issued(op, event)

    def ended(self, op: Op) -> None:
        context = self._context
        assert context is not None and self._carrier is not None
        self._carrier.ended(op)
        if op.lane == DOWN and op.payload == WEIGHT_GRADIENT:
            for leaving, host in self._landing.pop(op.id, ()):
                self.runner.fold(context, leaving.layer, leaving.place, leaving.parts_in(host))
            end = _fold_place(context.program, backward_ops(context.program, op.visit)[-1]) + 1
            for fold, _ in self._sums(context, context.program.visits[op.visit]):
                fold.finish_visit(end)
                if fold.layer in self._squares:
                    context.gradient_complete(fold.layer, self._squares.pop(fold.layer))

    # -- weights and gradient sums -------------------------------------------------------------------------------

    def _weight_copies(self, context: StepContext, visit_id: int) -> list[Pair]:
        visit = context.program.visits[visit_id]
        weights, pairs, offset = self._slots[visit.slot].weights, [], 0
        for layer in layer_range(visit.layers):
            if layer == 0:
                continue
            size, kept = self._store.layouts[layer].num_bytes, self.cache.buffer(layer)
            if kept is None:
                target, pieces = weights[offset : offset + size], self._store.pieces(layer, context.version)
                offset += round_up(size, SLOT_ALIGNMENT_BYTES)
            else:
                target, pieces = kept, self.cache.missing(layer, visit_id, context.version)
            pairs += [(target[start : start + piece.nbytes], piece) for start, piece in pieces]
        return pairs

    def _sum_copies(self, context: StepContext, op: Op) -> list[Pair]:
        """Between a visit's sums on the device and the host's; of gradients that are added up on the host, those of
        one backward."""
        visit = context.program.visits[op.visit]
        if visit.layers in context.program.host_folded:
            leaving = self._leaving.pop(op.deps[0], [])
            self._landing[op.id] = [(one, self.backend.host_like(one.flat)) for one in leaving]
            return [(host, one.flat) for one, host in self._landing[op.id]]
        sums = self._sums(context, visit)
        return [(flat, fold.flat) if op.lane == UP else (fold.flat, flat) for fold, flat in sums]

    def _sums(self, context: StepContext, visit: Visit) -> Iterator[tuple[GradientFold, torch.Tensor]]:
        """Each trained layer's fold and its sum in the visit's slot."""
        offset = 0
        for layer in layer_range(visit.layers):
            fold = context.folds[layer]
            if layer == 0 or fold is None or layer not in context.device_folds:
                continue
            count = self._store.layouts[layer].num_trainable_elements
            yield fold, self._slots[visit.slot].gradients[offset : offset + count]
            offset += round_up(count, 64)

    def _start_sums(self, context: StepContext, op: Op) -> None:
        """Before a visit's first backward: its sums begin at zero, or are there already from the visit before."""
        if op.kind is not Kind.BACKWARD or _fold_place(context.program, op):
            return
        if backward_ops(context.program, op.visit)[0].id == op.id:
            for _, flat in self._sums(context, context.program.visits[op.visit]):
                flat.zero_()

    def _finish_sums(self, context: StepContext, visit_id: int) -> None:
        backwards = backward_ops(context.program, visit_id)
        if backwards and _fold_place(context.program, backwards[-1]) + 1 == len(context.microbatches):
            for fold, flat in self._sums(context, context.program.visits[visit_id]):
                self._squares[fold.layer] = square_sum(flat)

    # -- modules -------------------------------------------------------------------------------------------------

    def _bind_slot(self, context: StepContext, visit_id: int) -> None:
        """Point the modules of a visit's layers at the weights, and the gradient sums, in its slot."""
        visit = context.program.visits[visit_id]
        slot = self._slots[visit.slot]
        offset = 0
        for layer in layer_range(visit.layers):
            if layer > 0:
                kept = self.cache.buffer(layer)
                if kept is None:
                    size = self._store.layouts[layer].num_bytes
                    self._bind((slot.index, offset, layer), slot.weights[offset : offset + size])
                    offset += round_up(size, SLOT_ALIGNMENT_BYTES)
                else:
                    self._bind((KEPT, 0, layer), kept)
        self.runner.accumulators = {}
        if backward_ops(context.program, visit_id):
            for fold, flat in self._sums(context, visit):
                places = self._store.layouts[fold.layer].trainable
                self.runner.accumulators[fold.layer] = [place.trainable_view(flat) for place in places]

    def _bind(self, key: tuple[int, int, int], buffer: torch.Tensor) -> None:
        """Point a layer's modules at its weights in `buffer`. `key`: (slot or `KEPT`, offset, layer)."""
        if key not in self._bound:
            self._bound[key] = self._parameters(key[2], buffer)
        self._use(key[2], self._bound[key])

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

    def _parameters(self, layer: int, buffer: torch.Tensor) -> dict[str, nn.Parameter]:
        return {place.name: place.parameter(buffer) for place in self._store.layouts[layer].places}

    def _use(self, layer: int, parameters: dict[str, nn.Parameter]) -> None:
        self.runner.model.bind(layer, parameters)
        layout = self._store.layouts[layer]
        self.runner.parameters[layer] = [parameters[place.name] for place in layout.trainable]


def chunks_of(pairs: Sequence[Pair], chunk_bytes: int) -> list[TransferChunk]:
    """Copies cut, and put together, to chunks of at most `chunk_bytes`; a tensor with gaps is a chunk of its own."""
    chunks: list[TransferChunk] = []
    pieces: list[Pair] = []
    filled = 0

    def close() -> None:
        nonlocal pieces, filled
        if pieces:
            chunks.append(TransferChunk(filled, pieces))
        pieces, filled = [], 0

    for target, source in pairs:
        if not (target.is_contiguous() and source.is_contiguous()):
            chunks.append(TransferChunk(source.nbytes, [(target, source)]))
            continue
        target, source = target.view(-1), source.view(-1)
        start = 0
        while start < source.numel():
            count = max(1, (chunk_bytes - filled) // source.element_size())
            end = min(source.numel(), start + count)
            pieces.append((target[start:end], source[start:end]))
            filled += (end - start) * source.element_size()
            start = end
            if filled >= chunk_bytes:
                close()
    close()
    return chunks
