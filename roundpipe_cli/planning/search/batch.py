"""Times of many partitions at once, without building schedules, by the chain of their rounds. Seconds.

The stages of a round are walked in execution order, which is also the order of every worker's list, so one pass settles
all times. A stage is a lead (what may run before the previous stage has delivered: the recompute, or the fused head's
forward) and a rest:

      end[m] = max(end[m - 1] + lead, arrival[m]) + rest

Stage k of a round runs on worker (start + k) mod workers; the next round starts on the worker that is free first. The
simulator gives the same times for the schedules that are built of these partitions.

Shapes: C candidates, N stages per round (forward then backward), W workers, R microbatches of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from roundpipe_cli.costs.cost import NUM_SLOTS, CostModel
from roundpipe_cli.planning.search.stages import StageLimits, StageSums


@dataclass(frozen=True, slots=True)
class RoundChain:
    """Rounds that are run: the microbatches of each, and between which rounds the time per step is measured."""

    round_sizes: tuple[int, ...]
    rounds_per_step: int
    from_round: int
    """Rounds before the measured ones; 0 for a single step."""
    measured_steps: int
    waits: bool = False
    """Whether a step begins no sooner than the one two before it has ended, whose update makes the weights it reads."""


def chain_of(
    num_microbatches: int, per_round: int, *, staleness: int, num_steps: int, waits: bool = False
) -> RoundChain:
    """The rounds that decide a run's time per step. With staleness 0 a barrier separates steps: one step tells all."""
    step = tuple(min(per_round, num_microbatches - first) for first in range(0, num_microbatches, per_round))
    if staleness == 0 or num_steps == 1:
        return RoundChain(step, len(step), 0, 1)
    half = num_steps // 2
    return RoundChain(step * num_steps, len(step), len(step) * half, num_steps - half, waits)


def worker_speeds(costs: CostModel, num_workers: int) -> tuple[float, ...]:
    """Relative speed of each worker; those beyond the list run at speed 1."""
    speeds = tuple(costs.worker_speed or ())[:num_workers]
    return speeds + (1.0,) * (num_workers - len(speeds))


Array = Any
"""A numpy array; numpy is imported when a search starts, not when this module is."""

INFEASIBLE = float("inf")
CHUNK = 1024
"""Candidates scored at once: what fits the processor's cache."""


@dataclass(frozen=True)
class Batch:
    """Candidates, those with fewer stages padded with stages of size 0 at the end."""

    sizes: Array
    """(C, N) layers per stage: forward stages, then backward stages, each in execution order."""
    num_forward: Array
    """(C,) how many of the N are forward stages."""
    num_stages: Array
    """(C,) how many of the N are stages."""


def one_batch(numpy: Any, sizes: Sequence[int], num_forward: int) -> Batch:
    """A batch of one candidate."""
    return Batch(numpy.array([sizes]), numpy.array([num_forward]), numpy.array([len(sizes)]))


@dataclass(frozen=True)
class Works:
    """The work of each stage on a worker of speed 1, each (N, C). Padding does nothing."""

    lead_s: Array
    whole_s: Array
    """Lead and rest together for the stage with the head, the rest for all others."""
    is_head: Array
    hop_s: Array
    """From the previous stage; minus infinity for padding, which waits for nothing."""
    real: Array
    upload_s: Array
    grad_s: Array
    """Seconds of a link for the weights, and for the gradients in one direction."""
    updated_s: Array
    """When a step's weights are there, from the end of the step before."""

    def take(self, which: Array) -> Works:
        """Some of the candidates, by mask, index or slice."""
        return Works(*(getattr(self, field.name)[:, which] for field in fields(self)))


class BatchScorer:
    """Scores batches for one model and number of workers."""

    def __init__(
        self,
        sums: StageSums,
        *,
        speeds: Sequence[float],
        hop_s: float,
        slots: int = NUM_SLOTS,
        link_bytes_per_s: float | None = None,
        limits: StageLimits | None = None,
        memory_bytes: int | None = None,
        after_update: bool = False,
    ) -> None:
        """
        Args:
            slots: stages whose weights are on a device at once.
            link_bytes_per_s: rate of each worker's link in each direction; None: transfers take no time.
            memory_bytes: of a worker's device, which holds `slots` times the weights and gradients of the largest
                stage, the activations of one microbatch and two boundary tensors per direction; None: any number.
            after_update: steps begin with the updates of the step before, as in `schedule/program.py`.
        """
        import numpy

        self.numpy = numpy
        self.num_layers = sums.num_layers
        self.num_workers = len(speeds)
        self.speeds = numpy.array(speeds)
        self.equal = min(speeds) == max(speeds) == 1.0
        self.hop_s = hop_s if self.num_workers > 1 else 0.0
        self.slots, self.link_bytes_per_s, self.memory_bytes = slots, link_bytes_per_s, memory_bytes
        self.forward_s = numpy.array(sums.forward_s)
        self.recompute_s = numpy.array(sums.recompute_s)
        self.backward_s = numpy.array(sums.backward_s)
        self.param_bytes = numpy.array(sums.param_bytes)
        self.grad_bytes = numpy.array(sums.grad_bytes)
        self.boundary_bytes = numpy.array([0.0, *sums.boundary_bytes])
        self.allowed = _allowed(numpy, sums, limits) if limits else None
        self.visit_bytes = numpy.array(sums.visit_bytes)
        self.updated_s = numpy.array(sums.updated_s) if after_update else None

    def works(self, batch: Batch) -> tuple[Works, Array]:
        """The stages' work, and (C,) whether every stage keeps its limit."""
        numpy = self.numpy
        sizes = numpy.ascontiguousarray(batch.sizes.T)  # rows of stages, else every operation strides
        ends = numpy.cumsum(sizes, axis=0)
        position = numpy.arange(len(sizes))[:, None]
        is_forward, is_head = position < batch.num_forward, position == batch.num_forward
        real = position < batch.num_stages
        forward_layers = (sizes * is_forward).sum(axis=0)
        stop = numpy.where(is_forward, ends, self.num_layers + forward_layers - ends + sizes)
        first = stop - sizes
        at, row = first * (self.num_layers + 1) + stop, self.num_layers + 1
        forward, backward = self.forward_s.take(at), self.backward_s.take(at)
        head_lead = 0.0 if self.link_bytes_per_s and self.boundary_bytes.any() else forward
        lead = numpy.where(is_head, head_lead, numpy.where(is_forward, 0.0, self.recompute_s.take(at)))
        whole = numpy.where(is_head, backward + forward, numpy.where(is_forward, forward, backward))
        hop = numpy.where(position > 0, self.hop_s, 0.0)
        upload = grad = numpy.broadcast_to(0.0, lead.shape)
        if self.link_bytes_per_s:
            upload = self.param_bytes.take(at) / self.link_bytes_per_s
            grad = numpy.where(is_forward, 0.0, self.grad_bytes.take(at)) / self.link_bytes_per_s
            arriving = self.boundary_bytes.take(numpy.where(is_forward | is_head, first, stop))
            hop = hop + numpy.where(position > 0, 2.0, 1.0) * arriving / self.link_bytes_per_s
        hop = numpy.where(real, hop, -INFEASIBLE)
        updated = numpy.broadcast_to(0.0, lead.shape) if self.updated_s is None else self.updated_s.take(at)
        works = Works(lead, whole, is_head, hop, real, upload, grad, updated)
        fits = numpy.ones(len(batch.sizes), dtype=bool)
        if self.allowed is not None:
            kind = numpy.where(is_forward, 0, numpy.where(is_head, 2, 1))
            fits &= (self.allowed.take(kind * row * row + at) | ~real).all(axis=0)
        if self.memory_bytes is not None:
            held = self.param_bytes.take(at) + numpy.where(is_forward, 0.0, self.grad_bytes.take(at))
            kept = numpy.where(is_forward, 0.0, self.visit_bytes.take(at))
            peak = self.slots * held.max(axis=0) + kept.max(axis=0) + 4 * self.boundary_bytes.max()
            fits &= peak <= self.memory_bytes
        return works, fits

    def step_s(self, works: Works, chain: RoundChain) -> Array:
        """(C,) time per step."""
        numpy = self.numpy
        parts = [
            _Walk(self, works.take(slice(begin, begin + CHUNK))).run(chain)
            for begin in range(0, works.lead_s.shape[1], CHUNK)
        ]
        return numpy.concatenate(parts) if parts else numpy.zeros(0)


class _Walk:
    """The walk of one chunk. Row w of `free` and the other states belongs to worker w between rounds."""

    def __init__(self, scorer: BatchScorer, works: Works) -> None:
        numpy = scorer.numpy
        self.numpy, self.scorer, self.works = numpy, scorer, works
        self.lead, self.rest = works.lead_s, numpy.where(works.is_head, works.whole_s - works.lead_s, works.whole_s)
        self.all_count = bool(((self.lead + self.rest > 0) | ~works.real).all())
        num_candidates = works.lead_s.shape[1]
        self.makespan = numpy.zeros(num_candidates)
        self.workers = numpy.arange(scorer.num_workers)[:, None]
        self.links = bool(scorer.link_bytes_per_s and (works.upload_s.any() or works.grad_s.any()))
        num_states = 3 + scorer.slots if scorer.link_bytes_per_s else 1
        self.states = [numpy.zeros((scorer.num_workers, num_candidates)) for _ in range(num_states)]
        """Times at which workers are free; with links also up links, down links and slots, oldest slot first."""

    def run(self, chain: RoundChain) -> Array:
        """Seconds per step of each cut of the batch over the measured steps of `chain`, float [cuts]; of two regimes,
        the slower one's."""
        numpy = self.numpy
        first: Array = 0.0
        """Makespan after the first step."""
        before: list[Array] = [0.0, 0.0]
        """Makespan before the measured steps, and when the workers are free on average."""
        step_ends: list[Array] = [0.0, 0.0]
        for index, size in enumerate(chain.round_sizes):
            if chain.waits and index % chain.rounds_per_step == 0:
                step_ends.append(0.0)
            start = numpy.argmin(self.states[0], axis=0)
            if index:
                self._turn(self.workers + start)
            if not self.scorer.equal:
                self._set_speed((self.workers + start) % self.scorer.num_workers)
            ready_s = step_ends[-3] if chain.waits else 0.0
            ends = self._round(size, index % chain.rounds_per_step > 0, ready_s)
            if chain.waits:
                step_ends[-1] = numpy.maximum(step_ends[-1], ends.max(axis=0))
            if index:
                self._turn(self.workers - start)
            if self.all_count:
                numpy.maximum(self.makespan, self.states[0].max(axis=0), out=self.makespan)
            if chain.from_round and index + 1 == chain.rounds_per_step:
                first = self.makespan.copy()
            if index + 1 == chain.from_round:
                before = [self.makespan.copy(), self.states[0].mean(axis=0)]
        if self.links:  # the last gradients still have to leave
            numpy.maximum(self.makespan, self.states[2].max(axis=0), out=self.makespan)
        after = [self.makespan, self.states[0].mean(axis=0)]
        value, average = ((to_s - from_s) / chain.measured_steps for from_s, to_s in zip(before, after, strict=True))
        if not chain.from_round:
            return value
        # Of two regimes, a slow and a fast one, between which rounds may fall at any time, the measured steps may show
        # the fast one alone; and a plan whose last worker happens to end late before them looks faster than it is.
        since_first = (self.makespan - first) / (len(chain.round_sizes) // chain.rounds_per_step - 1)
        return numpy.maximum(numpy.maximum(value, since_first), 2 * average - value)

    def _turn(self, rows: Array) -> None:
        rows = rows % self.scorer.num_workers
        self.states = [self.numpy.take_along_axis(state, rows, axis=0) for state in self.states]

    def _set_speed(self, rows: Array) -> None:
        """Leads and rests on the workers that the next round's stages meet."""
        works, numpy = self.works, self.numpy
        speed = self.scorer.speeds[rows[numpy.arange(len(works.lead_s)) % self.scorer.num_workers]]
        self.lead = works.lead_s / speed
        self.rest = works.whole_s / speed
        self.rest = numpy.where(works.is_head, self.rest - self.lead, self.rest)

    def _round(self, size: int, continues: bool, ready_s: Array) -> Array:
        """One round, from `ready_s` on; row 0 of the states is the worker it starts on.

        Stages that workers have at one time are walked together, along the diagonals on which nothing waits for its
        like: microbatch m of one stage with m - 1 of the next.

        Returns:
            (microbatches, C) when each ends, the last one first.
        """
        numpy, works = self.numpy, self.works
        ends = numpy.zeros((size, self.makespan.size)) + ready_s
        for begin in range(0, len(self.lead), self.scorer.num_workers):
            here = slice(begin, begin + self.scorer.num_workers)
            before, after, hop = self.lead[here], self.rest[here], works.hop_s[here]
            clock = self.states[0][: len(before)]
            if self.links:
                numpy.maximum(clock, self._upload(here, continues), out=clock)
            elif not continues:
                numpy.maximum(clock, works.updated_s[here], out=clock)
            for turn in range(size + len(clock) - 1):
                first, stop = max(0, turn - size + 1), min(len(clock), turn + 1)
                arrived = ends[size - 1 - turn + first : size - 1 - turn + stop]
                ready = clock[first:stop] + before[first:stop]
                arrived += hop[first:stop]
                numpy.maximum(ready, arrived, out=arrived)
                arrived += after[first:stop]
                clock[first:stop] = arrived
            if self.links:
                self._download(here)
            if not self.all_count:
                counts = works.real[here] & (before + after > 0)
                numpy.maximum(self.makespan, numpy.where(counts, clock, 0.0).max(axis=0), out=self.makespan)
        return ends

    def _upload(self, here: slice, continues: bool) -> Array:
        """Time at which the visits' weights (in later rounds also their gradients so far) are in the oldest slots."""
        numpy, seconds, updated = self.numpy, self.works.upload_s[here], self.works.updated_s[here]
        if continues:
            seconds, updated = seconds + self.works.grad_s[here], 0.0
        up, slot = (self.states[index][: len(seconds)] for index in (1, 3))
        end = numpy.where(seconds > 0, numpy.maximum(numpy.maximum(up, slot), updated) + seconds, 0.0)
        numpy.maximum(up, end, out=up)
        return numpy.maximum(end, updated)

    def _download(self, here: slice) -> None:
        """The slot of a visit is free once its gradients have left."""
        numpy, real, seconds = self.numpy, self.works.real[here], self.works.grad_s[here]
        gone, _, down, *slots = (state[: len(real)] for state in self.states)
        if seconds.any():
            landed = numpy.maximum(down, gone) + seconds
            down[:] = numpy.where(seconds > 0, landed, down)
            gone = numpy.where(seconds > 0, landed, gone)
        for older, newer in zip(slots, [*slots[1:], gone], strict=True):
            older[:] = numpy.where(real, newer, older)


def _allowed(numpy: Any, sums: StageSums, limits: StageLimits) -> Array:
    """(3, L + 1, L + 1) whether a forward, backward or head stage of the layers first:stop keeps its limit."""
    forward = numpy.array(sums.forward_bytes)
    backward = numpy.array(sums.param_bytes) + numpy.array(sums.grad_bytes) + numpy.array(sums.visit_bytes)
    head_bytes = limits.backward_bytes if limits.head_bytes is None else limits.head_bytes
    tables = ((forward, limits.forward_bytes), (backward, limits.backward_bytes), (backward, head_bytes))
    return numpy.array([table <= (INFEASIBLE if most is None else most) for table, most in tables])
