"""A worker's operations on its device: weights into slots, stages computed, gradient sums in and out.

The dispatcher's threads call this (`dispatch/decisions.py` says when). The mathematics of a stage is `StageRunner`'s,
memory for weights `StageSlots`', gradient sums on the device are `DeviceSums`'. One object per device for the whole
run; it takes up one `WorkerPart` after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from roundpipe_cli.costs.cost import CHUNK_BYTES
from roundpipe_cli.engine.backends.base import DeviceEvent, Pair
from roundpipe_cli.engine.carrier import Carrier
from roundpipe_cli.engine.dispatch.work import TransferChunk
from roundpipe_cli.engine.layer import LayerRunner
from roundpipe_cli.engine.live import ComputeInterval, WorkerStep
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.prepared import StepContext
from roundpipe_cli.engine.program import describe_op, layer_range, stage_layers
from roundpipe_cli.engine.slots import DeviceSums, StageSlots
from roundpipe_cli.engine.stage import StageRunner
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.faults import fault
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.program import WEIGHT_GRADIENT, WEIGHTS, Op
from roundpipe_cli.schedule.timeline import DOWN, UP

# Copies between host and device, cut into the chunks that a link carries at a time.


def chunks_of(pairs: Sequence[Pair]) -> list[TransferChunk]:
    """Copies cut, and put together, to chunks of at most `CHUNK_BYTES`; a tensor with gaps is a chunk of its own."""
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
            count = max(1, (CHUNK_BYTES - filled) // source.element_size())
            end = min(source.numel(), start + count)
            pieces.append((target[start:end], source[start:end]))
            filled += (end - start) * source.element_size()
            start = end
            if filled >= CHUNK_BYTES:
                close()
    close()
    return chunks


@dataclass(frozen=True)
class WorkerPart:
    """A worker's part of a step."""

    context: StepContext
    carrier: Carrier
    step: WorkerStep


class Worker:
    """Carries out the operations on one device: the dispatcher's `Work`."""

    def __init__(
        self, layers: LayerRunner, store: WeightStore, options: EngineOptions, layer_names: Sequence[str]
    ) -> None:
        """`layer_names`: for messages."""
        self.runner, self.slots = StageRunner(layers), StageSlots(layers, store, options.weight_cache_bytes)
        self.index = layers.worker
        self.backend = backend = layers.backend
        self.lanes: tuple[str, ...] = () if backend.aliases_host else (UP, DOWN)
        self._sums = DeviceSums(backend, store, self.slots, layers.collector)
        self._layer_names = layer_names
        self.whole_per_visit = options.whole_per_visit
        """Packed weights are dequantised once in a visit."""
        self._whole_visit = -1
        """The visit whose packed weights are held unpacked; visits alternate, so it is one at a time."""
        self._last_ops: frozenset[int] = frozenset()
        """Each microbatch's last operation here."""
        self._part: WorkerPart | None = None

    @property
    def part(self) -> WorkerPart:
        """The worker's part of the step that it has taken up."""
        assert self._part is not None
        return self._part

    def become(self, index: int) -> None:
        """Take another number, between two steps."""
        self.index = self.runner.layers.worker = index

    def begin_part(self, part: WorkerPart) -> None:
        """Take up the worker's part of a step: slots for its weights, the start by the device's clock."""
        context = part.context
        if self._part is not None:  # of a step in which the device failed, as it seemed
            self.reset()
        self.backend.reset_peak()
        self._part, self.runner.carrier = part, part.carrier
        self.slots.begin_step(context.program, context.version)
        ops = (context.program.ops[op_id] for op_id in context.program.compute[self.index])
        self._last_ops = frozenset({op.microbatch: op.id for op in ops if op.visit >= 0}.values())
        part.step.started_s = time.perf_counter()
        part.step.start = self.backend.mark()

    # -- compute thread ------------------------------------------------------------------------------------------

    def compute_thread(self) -> AbstractContextManager[None]:
        return self.backend.worker_thread()

    def run(self, op: Op, ready: Sequence[DeviceEvent], late: Sequence[DeviceEvent]) -> DeviceEvent:
        """Issue one operation behind these events; the event at which the device has carried it out."""
        context, step, backend = self.part.context, self.part.step, self.backend
        for event in (*ready, *late):
            backend.wait(event)
        if op.visit < 0:  # a stage without layers
            return backend.record()
        visit = context.program.visits[op.visit]
        self.runner.layers.layer = visit.layers[0]
        if visit.ops[0] == op.id:
            self.slots.check_versions(visit.layers, context.version)
        if not backend.aliases_host:
            if self.slots.bound_visit != op.visit:
                self.slots.bind(context.program, op.visit)
                self._sums.bind(context, op.visit)
            self._sums.start(context, op)
        if self.whole_per_visit and self._whole_visit != op.visit:
            self.runner.layers.model.hold_whole(layer_range(visit.layers))
            self._whole_visit = op.visit
        self.part.carrier.op = op
        start = backend.mark()
        self.runner.interval = interval = ComputeInterval(op)
        step.intervals.append(interval)
        self.runner.run(context, op)
        self._pass_work(context, op)
        if interval.start is None:
            interval.start = start
        interval.end, interval.issued_s = backend.mark(), time.perf_counter()
        if visit.ops[-1] == op.id:
            self._drop_whole()
            if not backend.aliases_host:
                self._sums.finish(context, op.visit)
        state = context.microbatches[op.microbatch]
        # Masks and position embeddings of other microbatches take their place; those of chunks are large.
        if op.id in self._last_ops or state.chunk is not None:
            state.calls_by_worker.pop(self.index, None)
        return backend.record()

    def _pass_work(self, context: StepContext, op: Op) -> None:
        """The fault point of slow devices: passed once per layer, twice where forward and backward are one action."""
        schedule = context.program.schedule
        first, last = stage_layers(schedule, op)
        fused = schedule.fused_head and op.kind is Kind.BACKWARD and op.stage == 0
        for _ in range((last + 1 - max(1, first)) * (2 if fused else 1)):
            fault("work", step=context.step, worker=self.index)

    def _drop_whole(self) -> None:
        if self._whole_visit >= 0:
            self.runner.layers.model.drop_whole()
            self._whole_visit = -1

    def drain(self) -> None:
        self.backend.synchronize()
        if self._part is None:
            return
        context, step = self._part.context, self._part.step
        if not context.progress.aborted:
            self.runner.layers.finish_arrived(context, all_have=True)
        step.peak_bytes, step.reserved_bytes = self.backend.peak_bytes, self.backend.peak_reserved_bytes

    def reset(self) -> None:
        """Drop what belongs to the step, done or failed."""
        self._sums.reset()
        self._drop_whole()
        self._part, self.runner.carrier = None, None
        self.runner.reset()

    def where(self, op: Op, *, weights: bool) -> str:
        """Words for an error: stage, layer and microbatch of an operation; `weights`: while its weights arrive."""
        context = self.part.context
        schedule = context.program.schedule
        layers = stage_layers(schedule, op)
        in_work = self.runner.layers.layer
        layer = in_work if layers[0] <= in_work <= layers[1] and not weights else layers[0]
        what = "weights for " if weights else ""
        return (
            f"worker {self.index} ({self.backend.device}), {what}{describe_op(op, schedule, context.step)}, "
            f"layer {self._layer_names[layer]}"
        )

    # -- lane threads --------------------------------------------------------------------------------------------

    def lane_thread(self) -> AbstractContextManager[None]:
        return self.backend.copy_thread()

    def happens_in_s(self, event: DeviceEvent) -> float:
        return self.backend.happens_in_s(event)

    def prepare(self, op: Op, after: Sequence[DeviceEvent]) -> Sequence[TransferChunk]:
        context = self.part.context
        if op.payload == WEIGHTS:
            pairs = self.slots.weight_copies(context.program, op.visit, context.version)
        elif op.payload == WEIGHT_GRADIENT:
            pairs = self._sums.copies(context, op)
        else:
            pairs = list(self.part.carrier.prepare(op))
        return chunks_of(pairs)

    def copy(self, op: Op, chunk: TransferChunk) -> DeviceEvent:
        return self.backend.copy_up(chunk.content) if op.lane == UP else self.backend.copy_down(chunk.content)

    def issued(self, op: Op, event: DeviceEvent) -> None:
        self.part.carrier.issued(op, event)

    def ended(self, op: Op) -> None:
        if op.lane == DOWN and op.payload == WEIGHT_GRADIENT:
            self._sums.downloaded(self.part.context, op)
