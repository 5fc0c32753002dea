"""Times of many partitions at once: `evaluate.walk_rounds`, one numpy operation for all of them. Seconds.

Shapes: C candidates, N stages per round (forward then backward, the same for all candidates of a batch), W workers,
R microbatches of a round. The operations and their order are those of `walk_rounds`, so results agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe_cli.plan.evaluate import Chain
from roundpipe_cli.plan.stages import StageLimits, StageSums

Array = Any
"""A numpy array; numpy is imported when a search starts, not when this module is."""

INFEASIBLE = float("inf")


@dataclass(frozen=True)
class Batch:
    """Candidates that have the same number of stages in all."""

    sizes: Array
    """(C, N) layers per stage: forward stages, then backward stages, each in execution order."""
    num_forward: Array
    """(C,) how many of the N are forward stages."""


class BatchScorer:
    """Scores batches for one model, number of workers and chain of rounds."""

    def __init__(
        self, sums: StageSums, *, speeds: Sequence[float], hop_s: float, limits: StageLimits | None = None
    ) -> None:
        import numpy

        self.numpy = numpy
        self.num_layers = sums.num_layers
        self.num_workers = len(speeds)
        self.speeds = numpy.array(speeds)
        self.equal = min(speeds) == max(speeds) == 1.0
        self.hop_s = hop_s if self.num_workers > 1 else 0.0
        self.forward_s = numpy.array(sums.forward_s)
        self.recompute_s = numpy.array(sums.recompute_s)
        self.backward_s = numpy.array(sums.backward_s)
        self.allowed = _allowed(numpy, sums, limits) if limits else None
        self.evaluations = 0

    def ranges(self, batch: Batch) -> tuple[Array, Array, Array]:
        """First layer, stop layer and whether forward, each (N, C)."""
        numpy = self.numpy
        sizes = batch.sizes.T
        ends = numpy.cumsum(sizes, axis=0)
        position = numpy.arange(len(sizes))[:, None]
        is_forward = position < batch.num_forward[None, :]
        forward_layers = (sizes * is_forward).sum(axis=0)
        stop = numpy.where(is_forward, ends, self.num_layers + forward_layers - ends + sizes)
        return stop - sizes, stop, is_forward

    def works(self, batch: Batch) -> tuple[Array, Array, Array]:
        """Lead, whole and fused share of every stage at speed 1, each (N, C)."""
        numpy = self.numpy
        first, stop, is_forward = self.ranges(batch)
        is_head = numpy.arange(len(first))[:, None] == batch.num_forward[None, :]
        forward = self.forward_s[first, stop]
        backward = self.backward_s[first, stop]
        lead = numpy.where(is_head, forward, numpy.where(is_forward, 0.0, self.recompute_s[first, stop]))
        whole = numpy.where(is_head, backward + forward, numpy.where(is_forward, forward, backward))
        return lead, whole, is_head

    def feasible(self, batch: Batch) -> Array:
        """(C,) whether every stage keeps its limit."""
        if self.allowed is None:
            return self.numpy.ones(len(batch.sizes), dtype=bool)
        first, stop, is_forward = self.ranges(batch)
        is_head = self.numpy.arange(len(first))[:, None] == batch.num_forward[None, :]
        kind = self.numpy.where(is_forward, 0, self.numpy.where(is_head, 2, 1))
        fits: Array = self.allowed[kind, first, stop].all(axis=0)
        return fits

    def score(self, batch: Batch, chain: Chain) -> Array:
        """(C,) time per step; infinite where a stage is over its limit."""
        numpy = self.numpy
        parts = []
        for begin in range(0, len(batch.sizes), 1024):
            part = Batch(batch.sizes[begin : begin + 1024], batch.num_forward[begin : begin + 1024])
            parts.append(numpy.where(self.feasible(part), self._step_s(part, chain), INFEASIBLE))
        return numpy.concatenate(parts) if parts else numpy.zeros(0)

    def _step_s(self, batch: Batch, chain: Chain) -> Array:
        numpy = self.numpy
        lead, whole, is_head = self.works(batch)
        self.evaluations += lead.size * sum(chain.round_sizes)
        rest = numpy.where(is_head, whole - lead, whole)
        counts = (lead + rest > 0).all()
        free = numpy.zeros((self.num_workers, lead.shape[1]))
        makespan = numpy.zeros(lead.shape[1])
        marks = {}
        for index, size in enumerate(chain.round_sizes):
            if index:
                start = numpy.argmin(free, axis=0)
                turn = (numpy.arange(self.num_workers)[:, None] + start) % self.num_workers
                free = numpy.take_along_axis(free, turn, axis=0)
            else:
                start = numpy.zeros(lead.shape[1], dtype=int)
                turn = numpy.arange(self.num_workers)[:, None] + start
            if not self.equal:
                lead, rest = self._at_speed(batch, turn)
            self._round(free, size, lead, rest, None if counts else makespan)
            if counts:
                numpy.maximum(makespan, free.max(axis=0), out=makespan)
            if index:
                back = (numpy.arange(self.num_workers)[:, None] - start) % self.num_workers
                free = numpy.take_along_axis(free, back, axis=0)
            marks[index + 1] = makespan.copy() if index + 1 in (chain.first_end, chain.half_end) else makespan
        result: Array = chain.step_s(marks[chain.first_end], marks.get(chain.half_end, 0.0), makespan)
        return result

    def _at_speed(self, batch: Batch, turn: Array) -> tuple[Array, Array]:
        numpy = self.numpy
        lead, whole, is_head = self.works(batch)
        speed = numpy.take(self.speeds, turn[numpy.arange(len(lead)) % self.num_workers])
        lead = lead / speed
        return lead, numpy.where(is_head, whole / speed - lead, whole / speed)

    def _round(self, free: Array, size: int, lead: Array, rest: Array, makespan: Array | None) -> None:
        """One round; row 0 of `free` is the worker it starts on. Updates `free` in place, and `makespan` if given."""
        numpy = self.numpy
        add, maximum = numpy.add, numpy.maximum
        ends = numpy.zeros((size, free.shape[1]))
        ready = numpy.empty(free.shape[1])
        for position in range(len(lead)):
            if position:
                ends += self.hop_s
            clock, before, after = free[position % self.num_workers], lead[position], rest[position]
            for end in ends:
                add(clock, before, out=ready)
                maximum(ready, end, out=end)
                end += after
                clock = end
            free[position % self.num_workers] = clock
            if makespan is not None:
                maximum(makespan, numpy.where(before + after > 0, clock, 0.0), out=makespan)


def _allowed(numpy: Any, sums: StageSums, limits: StageLimits) -> Array:
    """(3, L + 1, L + 1) whether a forward, backward or head stage of the layers first:stop keeps its limit."""
    forward = numpy.array(sums.param_bytes)
    backward = forward + numpy.array(sums.grad_bytes) + numpy.array(sums.activation_bytes)
    head_bytes = limits.backward_bytes if limits.head_bytes is None else limits.head_bytes
    tables = ((forward, limits.forward_bytes), (backward, limits.backward_bytes), (backward, head_bytes))
    return numpy.array([table <= (INFEASIBLE if most is None else most) for table, most in tables])
