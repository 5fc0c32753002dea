"""The search for the fastest partition: even cuts for every number of stages, then single moves from the best ones.

The work of a search is counted, not timed, so that the same costs always give the same plan.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from roundpipe_cli.planning.search.batch import INFEASIBLE, Array, Batch, BatchScorer
from roundpipe_cli.planning.search.bound import lower_bounds
from roundpipe_cli.planning.search.chain import RoundChain
from roundpipe_cli.planning.search.local import neighbours, reshaped
from roundpipe_cli.planning.search.seeds import PATTERNS, Cells, make_cells, seeds

SAME = 1e-9
"""Times with a smaller relative difference count as equal."""
BLOCK = 512
"""Cells that are scored before the best time is looked at again."""
OVERHEAD = 500
"""Fixed cost of a batch, as a number of candidates."""


@dataclass(frozen=True)
class SearchEffort:
    """Limits of a search. Work is counted in stage visits of one microbatch, about five nanoseconds each."""

    cell_work: float = 1.5e8
    pattern_cells: int = 400
    local_work: float = 1.6e8
    enough: float = SAME
    """The search ends when the best time is this close to the smallest bound (relative)."""
    keep: int = 8
    """Partitions that are kept of each batch."""
    handicaps: tuple[float, ...] = (1e-3, 1e-2)
    """By how much a partition counts as slower per earlier look around one with the same numbers of stages; the local
    work is shared out among them."""


@dataclass(frozen=True, order=True)
class Candidate:
    """A partition and its time per step."""

    value_s: float
    num_stages: int
    num_forward: int
    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of stages."""
        return self.num_stages, self.num_forward

    @property
    def key(self) -> tuple[int, ...]:
        """The parts that identify the partition."""
        return (self.num_forward, *self.sizes)


class Search:
    """One search: a model, a number of workers, a chain of rounds."""

    def __init__(
        self,
        scorer: BatchScorer,
        bounds: list[int],
        chain: RoundChain,
        effort: SearchEffort,
        beat_s: float = INFEASIBLE,
    ) -> None:
        self.scorer, self.bounds, self.chain, self.effort = scorer, bounds, chain, effort
        self.numpy = scorer.numpy
        self.best_s = beat_s
        """Least time of all partitions so far, or the one to beat; partitions that cannot beat it are skipped."""
        self.found: dict[tuple[int, ...], Candidate] = {}
        self.work = 0.0
        self.least_s = INFEASIBLE
        """The smallest bound of all cells."""

    def run(self) -> list[Candidate]:
        """The best partitions found, the fastest first; empty if none keeps the limits or beats `beat_s`."""
        cells = make_cells(self.scorer, self.bounds, self.chain)
        if not len(cells):
            return []
        self.least_s = float(cells.bound_s.min())
        values = self._even_cuts(cells)
        order = self.numpy.argsort(values, kind="stable")[: self.effort.pattern_cells]
        chosen = cells.take(order[values[order] < INFEASIBLE])
        if len(chosen):
            for patterns in [(forward, later) for later in PATTERNS for forward in PATTERNS]:
                if patterns not in FIRST_PATTERNS:
                    self._try_cells(chosen, patterns)
        self._improve()
        return sorted(self.found.values())

    def _even_cuts(self, cells: Cells) -> Array:
        """(cells,) the best time of each cell under the first patterns."""
        numpy = self.numpy
        values = numpy.full(len(cells), INFEASIBLE)
        limit = self.work + self.effort.cell_work
        for begin in range(0, len(cells), BLOCK):
            index = numpy.arange(begin, min(begin + BLOCK, len(cells)))
            index = index[(cells.bound_s if self.chain.from_round else cells.guess_s)[index] < self.best_s]
            index = index[numpy.argsort((cells.forward + cells.later)[index], kind="stable")]
            for patterns in FIRST_PATTERNS if len(index) else ():
                values[index] = numpy.minimum(values[index], self._try_cells(cells.take(index), patterns))
            if self.work > limit or self._is_enough:
                break
        return values

    @property
    def _is_enough(self) -> bool:
        return self.best_s <= self.least_s * (1 + self.effort.enough)

    def _try_cells(self, cells: Cells, patterns: tuple[str, str]) -> Array:
        batch, index = seeds(self.scorer, self.bounds, cells, patterns)
        values = self.numpy.full(len(cells), INFEASIBLE)
        values[index], best = self.score(batch)
        self.found.update((candidate.key, candidate) for candidate in best)
        return values

    def score(self, batch: Batch) -> tuple[Array, list[Candidate]]:
        """(C,) times of those that could beat the best one so far, infinite for the others; and the best of them."""
        numpy = self.numpy
        values = numpy.full(len(batch.sizes), INFEASIBLE)
        works, fits = self.scorer.works(batch)
        fits &= lower_bounds(self.scorer, works, self.chain) < self.best_s
        index = numpy.flatnonzero(fits)
        if not len(index):
            return values, []
        self.work += (len(index) + OVERHEAD) * works.lead_s.shape[0] * (sum(self.chain.round_sizes) + 10)
        values[index] = self.scorer.step_s(works.take(index), self.chain)
        order = numpy.argsort(values, kind="stable")[: self.effort.keep]
        best = [self._candidate(values[i], batch, i) for i in order if values[i] < INFEASIBLE]
        self.best_s = min([self.best_s, *(candidate.value_s for candidate in best)])
        return values, best

    @staticmethod
    def _candidate(value: float, batch: Batch, index: int) -> Candidate:
        sizes = tuple(int(size) for size in batch.sizes[index] if size)
        return Candidate(float(value), len(sizes), int(batch.num_forward[index]), sizes)

    def _improve(self) -> None:
        """Look around the best partitions: first near the fastest, then in more breadth."""
        seen: set[tuple[int, ...]] = set()
        for handicap in self.effort.handicaps:
            self._best_first(handicap, seen, self.work + self.effort.local_work / len(self.effort.handicaps))

    def _best_first(self, handicap: float, seen: set[tuple[int, ...]], limit: float) -> None:
        """Look around the fastest partition that was not yet looked around; often visited shapes come later."""
        visits: dict[tuple[int, int], int] = {}
        queue = [(candidate.value_s, key) for key, candidate in self.found.items() if key not in seen]
        heapq.heapify(queue)
        while queue and self.work < limit and not self._is_enough:
            priority, key = heapq.heappop(queue)
            start = self.found[key]
            due = start.value_s * (1 + handicap * visits.get(start.shape, 0))
            if due > priority:
                heapq.heappush(queue, (due, key))
                continue
            visits[start.shape] = visits.get(start.shape, 0) + 1
            seen.add(key)
            for candidate in self._around(start):
                if candidate.key not in self.found:
                    self.found[candidate.key] = candidate
                    heapq.heappush(queue, (candidate.value_s, candidate.key))

    def _around(self, start: Candidate) -> list[Candidate]:
        """The best partitions one move away."""
        numpy = self.numpy
        sizes = neighbours(numpy, numpy.array(start.sizes), start.num_forward)
        count = len(sizes)
        batch = Batch(sizes, numpy.full(count, start.num_forward), numpy.full(count, start.num_stages))
        return self.score(batch)[1] + self._reshape(start)

    def _reshape(self, start: Candidate) -> list[Candidate]:
        """The best partitions with a few stages more or less."""
        numpy = self.numpy
        found = reshaped(start.sizes, start.num_forward)
        if not found:
            return []
        counts = [len(sizes) for _, sizes in found]
        padded = numpy.zeros((len(found), max(counts)), dtype=int)
        for row, (_, sizes) in zip(padded, found, strict=True):
            row[: len(sizes)] = sizes
        forward = numpy.array([num_forward for num_forward, _ in found])
        return self.score(Batch(padded, forward, numpy.array(counts)))[1]


FIRST_PATTERNS = (("smaller first", "larger first"), ("spread", "larger first"), ("smaller first", "smaller first"))
"""Even cuts that are tried for every cell: a short fill and a short drain."""
