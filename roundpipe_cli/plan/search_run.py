"""The search for the fastest partition: even cuts for every number of stages, then single moves from the best ones.

The work of a search is counted, not timed, so that the same costs always give the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_cli.plan.evaluate import Chain
from roundpipe_cli.plan.search_batch import INFEASIBLE, Array, Batch, BatchScorer
from roundpipe_cli.plan.search_bound import lower_bounds
from roundpipe_cli.plan.search_local import neighbours
from roundpipe_cli.plan.search_seeds import PATTERNS, Cells, make_cells, seeds

SAME = 1e-9
"""Relative difference below which two times are the same."""
BLOCK = 2048


@dataclass(frozen=True)
class Effort:
    """How much a search may do. Work is counted in stage visits of one microbatch, about five nanoseconds each."""

    cell_work: float = 1.0e8
    pattern_cells: int = 400
    num_starts: int = 10
    local_work: float = 1.0e8


@dataclass(frozen=True, order=True)
class Candidate:
    """A partition and its time per step."""

    value_s: float
    num_stages: int
    num_forward: int
    sizes: tuple[int, ...]


class Search:
    """One search: a model, a number of workers, a chain of rounds."""

    def __init__(self, scorer: BatchScorer, bounds: list[int], chain: Chain, effort: Effort) -> None:
        self.scorer, self.bounds, self.chain, self.effort = scorer, bounds, chain, effort
        self.numpy = scorer.numpy
        self.best_s = INFEASIBLE
        self.found: dict[tuple[int, ...], Candidate] = {}
        self.work = 0.0
        self.least_s = INFEASIBLE
        """The smallest bound of all cells."""

    def run(self) -> list[Candidate]:
        """The best partitions found, the fastest first; empty if none keeps the limits."""
        cells = make_cells(self.scorer, self.bounds, self.chain)
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
            if self.work > limit:
                break
        return values

    def _try_cells(self, cells: Cells, patterns: tuple[str, str]) -> Array:
        batch, index = seeds(self.scorer, self.bounds, cells, patterns)
        values = self.numpy.full(len(cells), INFEASIBLE)
        values[index] = self.score(batch)
        return values

    def score(self, batch: Batch, keep: int = 8) -> Array:
        """(C,) times of those that could beat the best one so far, infinite for the others; remembers the best."""
        numpy = self.numpy
        values = numpy.full(len(batch.sizes), INFEASIBLE)
        works, fits = self.scorer.works(batch)
        fits &= lower_bounds(self.scorer, works, self.chain) < self.best_s * 1.002
        index = numpy.flatnonzero(fits)
        if not len(index):
            return values
        self.work += len(index) * works.lead_s.shape[0] * sum(self.chain.round_sizes)
        values[index] = self.scorer.step_s(works.take(index), self.chain)
        for best in numpy.argsort(values, kind="stable")[:keep]:
            self._remember(float(values[best]), batch.sizes[best], int(batch.num_forward[best]))
        return values

    def _remember(self, value: float, sizes: Array, num_forward: int) -> None:
        if value < INFEASIBLE:
            key = tuple(int(size) for size in sizes if size)
            self.found[(num_forward, *key)] = Candidate(value, len(key), num_forward, key)
            self.best_s = min(self.best_s, value)

    def _improve(self) -> None:
        """Single moves from the best partitions, at most a few with the same numbers of stages."""
        starts: list[Candidate] = []
        per_shape: dict[tuple[int, int], int] = {}
        for candidate in sorted(self.found.values()):
            shape = (candidate.num_stages, candidate.num_forward)
            per_shape[shape] = per_shape.get(shape, 0) + 1
            if per_shape[shape] <= 2:
                starts.append(candidate)
        limit = self.work + self.effort.local_work
        for start in starts[: self.effort.num_starts]:
            while self.work < limit and self.best_s > self.least_s * (1 + SAME):
                better = self._step(start)
                if better is None:
                    break
                start = better

    def _step(self, start: Candidate) -> Candidate | None:
        """The best partition one move away, if it is better."""
        numpy = self.numpy
        sizes = neighbours(numpy, numpy.array(start.sizes), start.num_forward)
        count = len(sizes)
        if not count:
            return None
        batch = Batch(sizes, numpy.full(count, start.num_forward), numpy.full(count, start.num_stages))
        values = self.score(batch, keep=1)
        best = int(numpy.argmin(values))
        if values[best] >= start.value_s * (1 - SAME):
            return None
        return Candidate(float(values[best]), start.num_stages, start.num_forward, tuple(int(n) for n in sizes[best]))


FIRST_PATTERNS = (("smaller first", "larger first"), ("spread", "larger first"))
"""Even cuts that are tried for every cell: a short fill and a short drain."""
