"""One worker's gradient sums in device memory, and their way to the host's and back.

A visit of a backward stage continues the sums of the visit before: they come up with its weights, and go down once its
last backward is done. Gradients that are added up on the host go down one backward at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from roundpipe_cli.engine.backends.base import Backend, Pair
from roundpipe_cli.engine.collect import GradientCollector
from roundpipe_cli.engine.context import StepContext
from roundpipe_cli.engine.gradients import GradientFold, Leaving, square_sum
from roundpipe_cli.engine.program import backward_ops, layer_range
from roundpipe_cli.engine.slots import StageSlots
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.layout import round_up
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.program import Op, Program, Visit
from roundpipe_cli.schedule.timeline import UP


def _fold_place(program: Program, op: Op) -> int:
    """Place of a backward operation's microbatch in the order in which its stage's gradients are added up."""
    return program.schedule.backward_place(op.stage, op.microbatch)


class DeviceSums:
    """The gradient sums in one worker's slots."""

    def __init__(self, backend: Backend, store: WeightStore, slots: StageSlots, collector: GradientCollector) -> None:
        self._backend, self._store, self._slots, self._collector = backend, store, slots, collector
        self._leaving: dict[int, list[Leaving]] = {}
        """By backward operation: gradients that wait for their download."""
        self._landing: dict[int, list[tuple[Leaving, torch.Tensor]]] = {}
        """By download: gradients on their way to the host's fold, with the host memory that they go to."""
        self._squares: dict[int, torch.Tensor] = {}
        """Layer -> sum of squares of its complete gradient, which is on its way to the host."""

    def reset(self) -> None:
        """Drop what a failed step left."""
        self._leaving.clear()
        self._landing.clear()

    def begin_step(self) -> None:
        """Begin a step."""
        self._squares = {}

    # -- compute thread ------------------------------------------------------------------------------------------

    def bind(self, context: StepContext, visit_id: int) -> None:
        """Let backward passes add to the sums of a visit."""
        self._collector.accumulators = {}
        if backward_ops(context.program, visit_id):
            for fold, flat in self._sums(context, context.program.visits[visit_id]):
                places = self._store.layouts[fold.layer].trainable
                self._collector.accumulators[fold.layer] = [place.trainable_view(flat) for place in places]

    def start(self, context: StepContext, op: Op) -> None:
        """Before a visit's first backward: its sums begin at zero, or are there already from the visit before."""
        if op.kind is not Kind.BACKWARD or _fold_place(context.program, op):
            return
        if backward_ops(context.program, op.visit)[0].id == op.id:
            for _, flat in self._sums(context, context.program.visits[op.visit]):
                flat.zero_()

    def ran(self, op: Op) -> None:
        """After an operation: gradients that it made for the host's sums wait for their download."""
        leaving = self._collector.take_leaving()
        if leaving:
            self._leaving[op.id] = leaving

    def finish(self, context: StepContext, visit_id: int) -> None:
        """After a visit's last operation: take the squares of sums that are complete."""
        backwards = backward_ops(context.program, visit_id)
        if backwards and _fold_place(context.program, backwards[-1]) + 1 == len(context.microbatches):
            for fold, flat in self._sums(context, context.program.visits[visit_id]):
                self._squares[fold.layer] = square_sum(flat)

    # -- lane threads --------------------------------------------------------------------------------------------

    def copies(self, context: StepContext, op: Op) -> list[Pair]:
        """Between a visit's sums on the device and the host's; of gradients that are added up on the host, those of
        one backward."""
        visit = context.program.visits[op.visit]
        if visit.layers in context.program.host_folded:
            leaving = self._leaving.pop(op.deps[0], [])
            self._landing[op.id] = [(one, self._backend.host_like(one.flat)) for one in leaving]
            return [(host, one.flat) for one, host in self._landing[op.id]]
        sums = self._sums(context, visit)
        return [(flat, fold.flat) if op.lane == UP else (fold.flat, flat) for fold, flat in sums]

    def downloaded(self, context: StepContext, op: Op) -> None:
        """A download of gradients has arrived."""
        for leaving, host in self._landing.pop(op.id, ()):
            self._collector.fold_on_host(context, leaving.layer, leaving.place, leaving.parts_in(host))
        end = _fold_place(context.program, backward_ops(context.program, op.visit)[-1]) + 1
        for fold, _ in self._sums(context, context.program.visits[op.visit]):
            fold.finish_visit(end)
            if fold.layer in self._squares:
                context.gradients.complete(fold.layer, self._squares.pop(fold.layer))

    def _sums(self, context: StepContext, visit: Visit) -> Iterator[tuple[GradientFold, torch.Tensor]]:
        """Each trained layer's fold and its sum in the visit's slot."""
        offset = 0
        for layer in layer_range(visit.layers):
            fold = context.gradients.folds[layer]
            if layer == 0 or fold is None or layer not in context.prepared.device_folds:
                continue
            count = self._store.layouts[layer].num_trainable_elements
            yield fold, self._slots.slots[visit.slot].gradients[offset : offset + count]
            offset += round_up(count, 64)
