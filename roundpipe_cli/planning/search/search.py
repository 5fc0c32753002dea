"""The search for the fastest partition: even cuts for every number of stages, then single moves from the best ones.

Layers are counted in units of about equal work: a usual block is one unit, an embedding without cost is none and joins
its neighbour. `unit_bounds[t]` is the layer at which t units have been passed. A cell is a number of forward stages, of
backward stages behind the one with the head, and of units in the head's stage. Shapes as in `search/batch.py`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from roundpipe_cli.planning.search.batch import INFEASIBLE, Array, Batch, BatchScorer, RoundChain, Works
from roundpipe_cli.planning.search.stages import StageSums

PATTERNS = ("smaller first", "larger first", "spread")
"""Places of the stages that hold one unit more than the others."""
COARSE = 12
"""A deep model is first cut into every so many of these numbers of stages."""
DENSE = 72
"""Every number of stages up to this is tried; of more, where stages are all small, only some."""


def unit_bounds(sums: StageSums) -> list[int]:
    """Layer bounds of units of about equal work; the first is 0, the last leaves out only the head."""
    body = sums.num_layers - 1
    work = [sums.forward_s[i][i + 1] + sums.recompute_s[i][i + 1] + sums.backward_s[i][i + 1] for i in range(body)]
    total, usual = sum(work), sorted(work)[body // 2] if body else 0.0
    if usual <= 0:
        return list(range(body + 1))
    num_units = min(sum(seconds > 0 for seconds in work), max(1, round(total / usual)))
    bounds, passed, layer = [0], 0.0, 0
    for unit in range(1, num_units):
        while layer < body and passed + work[layer] / 2 <= (unit + 1e-6) * total / num_units:
            passed += work[layer]
            layer += 1
        bounds.append(layer)
    return sorted({*bounds, body})


def layer_bounds(sums: StageSums) -> list[int]:
    """Bounds with a unit for every layer, for tight limits; layers without work join the next one."""
    body = sums.num_layers - 1
    work = [sums.forward_s[i][i + 1] + sums.recompute_s[i][i + 1] + sums.backward_s[i][i + 1] for i in range(body)]
    return [0, *(layer + 1 for layer in range(body - 1) if work[layer] > 0), *([body] if body else [])]


@dataclass(frozen=True)
class Cells:
    """Numbers of stages and of units in the head's stage, each (C,), the most promising first."""

    forward: Array
    later: Array
    head: Array
    bound_s: Array
    """About what the cell's best partition takes at least, seconds per step."""
    guess_s: Array
    """The bound, and the idle time of workers that wait for a head's stage longer than all others."""

    def __len__(self) -> int:
        return len(self.forward)

    def take(self, which: Array) -> Cells:
        """Some of the cells."""
        return Cells(self.forward[which], self.later[which], self.head[which], self.bound_s[which], self.guess_s[which])


def make_cells(scorer: BatchScorer, bounds: list[int], chain: RoundChain) -> Cells:
    """All cells that may keep the limits, in the order of their guesses, ties in that of the number of stages."""
    numpy = scorer.numpy
    units = len(bounds) - 1
    count = _counts(numpy, units)
    forward, later, head = (axis.ravel() for axis in numpy.meshgrid(count, count, count, indexing="ij"))
    body = units - head
    keep = (forward <= body) & (later <= body) & (forward > 0) & (later > 0) | (units + forward + later == 0)
    if scorer.allowed is not None:
        keep &= _may_fit(scorer.numpy, scorer.allowed, bounds, (forward, later, head))
    forward, later, head, body = forward[keep], later[keep], head[keep], body[keep]
    bound, guess = _cell_bounds(scorer, bounds, chain, forward, later=later, head=head)
    order = numpy.lexsort((head, forward, forward + later, guess))
    return Cells(forward, later, head, bound, guess).take(order)


def _counts(numpy: Any, most: int) -> Array:
    """Numbers from 0 to `most` to try: every one up to `DENSE`, from there on in steps of a twelfth and the last."""
    dense = numpy.arange(min(most, DENSE) + 1)
    if most <= DENSE:
        return dense
    sparse = DENSE * (1 + 1 / 12) ** numpy.arange(1, 200)
    return numpy.concatenate([dense, numpy.unique(sparse[sparse < most].astype(int)), [most]])


def _may_fit(numpy: Any, allowed: Array, bounds: list[int], cells: tuple[Array, Array, Array]) -> Array:
    """(C,) whether the head's stage keeps its limit, and some stages of as many units as an even cut needs keep theirs.

    Without this most of a search's time would go to cuts that no device can hold.

    Args:
        allowed: see `BatchScorer`.
        cells: numbers of forward and later stages, units in the head's stage, each (C,).
    """
    (forward, later, head), units = cells, len(bounds) - 1
    table = numpy.array(bounds)
    most = [
        max((size for size in range(1, units + 1) if allowed[kind, table[:-size], table[size:]].any()), default=0)
        for kind in (0, 1)
    ]
    body = units - head
    holds = allowed[2, table[body], -1]
    return holds & (forward * most[0] >= body) & (later * most[1] >= body)


def _cell_bounds(
    scorer: BatchScorer, bounds: list[int], chain: RoundChain, forward: Array, *, later: Array, head: Array
) -> tuple[Array, Array]:
    """Bounds like those of `lower_bounds`, from averages, and guesses."""
    numpy = scorer.numpy
    units, layers, workers = len(bounds) - 1, scorer.num_layers, scorer.num_workers
    unit_f, unit_r, unit_b = (
        table[0, layers - 1] / max(units, 1) for table in (scorer.forward_s, scorer.recompute_s, scorer.backward_s)
    )
    body, size = units - head, max(chain.round_sizes)
    lead = scorer.forward_s[layers - 1, layers] + head * unit_f
    rest = scorer.backward_s[layers - 1, layers] + head * unit_b
    speed, fastest = scorer.speeds.sum(), scorer.speeds.max()
    busy = lead + rest + body * (unit_f + unit_r + unit_b)
    carried = _carried_s(scorer, numpy.array(bounds)[body], chain)
    longest = -(-body // numpy.maximum(later, 1)) * (unit_r + unit_b)
    waiting = size * numpy.maximum(lead + rest - longest, 0.0) / fastest * (workers - 1) / workers / 2
    waiting = (waiting + numpy.maximum(forward - workers, 0) * scorer.hop_s) * chain.rounds_per_step
    through = body * (unit_f + unit_b) / fastest + (forward + later) * scorer.hop_s
    single = through + (size * (lead + rest) - lead) / fastest
    if chain.from_round:
        bound = numpy.maximum(carried, busy * sum(chain.round_sizes[: chain.rounds_per_step]) / speed)
        if chain.waits:  # two steps are under way at most
            longest = size * numpy.maximum(longest, unit_f * -(-body // numpy.maximum(forward, 1))) / fastest
            bound = numpy.maximum(bound, numpy.maximum(single, through + longest) / 2)
        return bound, bound + waiting
    up = unit_f * (body // numpy.maximum(forward, 1)) / fastest + scorer.hop_s
    down = unit_b * (body // numpy.maximum(later, 1)) / fastest + scorer.hop_s
    first, last = numpy.minimum(forward, workers - 1), numpy.minimum(later, workers - 1)
    idle = up * first * (first + 1) / 2 + down * last * (last + 1) / 2
    idle = numpy.where(forward + later + 1 >= workers, idle, 0.0) * fastest
    bound = numpy.maximum(numpy.maximum(carried, single), (busy * sum(chain.round_sizes) + idle) / speed)
    return bound, bound + waiting


def _carried_s(scorer: BatchScorer, top: Array, chain: RoundChain) -> Array:
    """(C,) seconds of a step in which all links carry weights up, and gradients from the second round on.

    Args:
        top: the first layer of the head's stage, whose forward needs no weights of its own.
    """
    if scorer.link_bytes_per_s is None:
        return 0.0 * top
    layers, rounds = scorer.num_layers, chain.rounds_per_step
    up_bytes = rounds * (scorer.param_bytes[0, top] + scorer.param_bytes[0, layers])
    up_bytes = up_bytes + (rounds - 1) * scorer.grad_bytes[0, layers]
    return up_bytes / scorer.link_bytes_per_s / scorer.num_workers


def seeds(scorer: BatchScorer, bounds: list[int], cells: Cells, patterns: tuple[str, str]) -> tuple[Batch, Array]:
    """The partition of one pattern (forward, backward) for each cell that has one, and the cells' indices."""
    numpy = scorer.numpy
    forward, later, head = cells.forward, cells.later, cells.head
    num_stages = forward + 1 + later
    body = len(bounds) - 1 - head
    position = numpy.arange(int(num_stages.max()) + 1)[:, None]
    up = _passed(numpy, numpy.clip(position, 0, forward), body, numpy.maximum(forward, 1), pattern=patterns[0])
    down = _passed(
        numpy, numpy.clip(position - forward - 1, 0, later), body, numpy.maximum(later, 1), pattern=patterns[1]
    )
    table = numpy.array(bounds)
    top = table[body]
    sizes = numpy.diff(table[up], axis=0) - numpy.diff(table[body - down], axis=0)
    sizes[forward, numpy.arange(len(forward))] = scorer.num_layers - top
    whole = numpy.flatnonzero(((sizes > 0) | (position[:-1] >= num_stages)).all(axis=0))
    return Batch(sizes.T[whole], forward[whole], num_stages[whole]), whole


def _passed(numpy: Array, index: Array, total: Array, parts: Array, *, pattern: str) -> Array:
    """Units in the first `index` of `parts` stages."""
    size, larger = total // parts, total % parts
    if pattern == "spread":
        return index * total // parts
    if pattern == "larger first":
        return index * size + numpy.minimum(index, larger)
    return index * size + numpy.maximum(index - (parts - larger), 0)


# Partitions near a given one: a layer moved or traded with the head's stage, stages split or merged.


def neighbours(numpy: Any, sizes: Array, num_forward: int) -> Array:
    """(C, N) partitions with the same numbers of stages, one move away from `sizes` (N,)."""
    count = len(sizes)
    eye = numpy.eye(count, dtype=sizes.dtype)
    most = max(2, MOST_MOVED // count)
    forward, later = (
        group if len(group) <= most else group[numpy.linspace(0, len(group) - 1, most).astype(int)]
        for group in (numpy.arange(num_forward), numpy.arange(num_forward + 1, count))
    )
    moves = [numpy.zeros((0, count), dtype=sizes.dtype)]
    for group in (forward, later):
        source, target = (axis.ravel() for axis in numpy.meshgrid(group, group, indexing="ij"))
        keep = (source != target) & (sizes[source] > 1)
        moves.append(eye[target[keep]] - eye[source[keep]])
        change = sizes[target] - sizes[source]
        swap = (source < target) & (abs(change) > 1)
        moves.append((eye[source[swap]] - eye[target[swap]]) * change[swap, None])
    one, other = (axis.ravel() for axis in numpy.meshgrid(forward, later, indexing="ij"))
    out = (sizes[one] > 1) & (sizes[other] > 1)
    trade = eye[num_forward] - eye[one] - eye[other]
    moves.append(trade[out])
    if sizes[num_forward] > 1:
        moves.append(-trade)
    return sizes + numpy.concatenate(moves)


def _recut(sizes: list[int]) -> list[list[int]]:
    """One direction's stages with two neighbours merged, one split, or two split in halves."""
    cuts = [[*sizes[:i], sizes[i] + sizes[i + 1], *sizes[i + 2 :]] for i in range(len(sizes) - 1)]
    for i, size in enumerate(sizes):
        cuts += [[*sizes[:i], size - part, part, *sizes[i + 1 :]] for part in range(1, size)]
    halves = {size: [size - size // 2, size // 2] if size > 1 else [size] for size in sizes}
    split = [i for i, size in enumerate(sizes) if size > 1][-MOST_SPLIT:]
    for index, i in enumerate(split):
        for j in split[:index]:
            cuts.append([*sizes[:j], *halves[sizes[j]], *sizes[j + 1 : i], *halves[sizes[i]], *sizes[i + 1 :]])
    return cuts


MOST_MOVED = 20_000
"""Stages times those of a direction that trade layers: with many stages only some do."""
MOST_SPLIT = 12
"""Only so many stages at the end are split in pairs: there a short drain gains most."""


# A time that a partition with given stage sizes cannot beat, much cheaper than its time. Seconds.
#
# Every worker is busy for its share of the work. Before its first action it waits for the stages before (fill), after
# its last one the stages behind still have to run (drain):
#
#       worker 0  FFFFFFFF ....................
#       worker 1  ~~FFFFFFFF ...............        ~~ fill: the first microbatch has to come through
#       worker 2  ~~~~FFFFFFFF .......... BBB__     __ drain: the last one still has to go on


def lower_bounds(scorer: BatchScorer, works: Works, chain: RoundChain) -> Array:
    """(C,) seconds per step."""
    numpy = scorer.numpy
    lead, rest = works.lead_s, numpy.where(works.is_head, works.whole_s - works.lead_s, works.whole_s)
    whole, workers = lead + rest, scorer.num_workers
    speed, fastest = scorer.speeds.sum(), scorer.speeds.max()
    busy = whole.sum(axis=0) * sum(chain.round_sizes[: chain.rounds_per_step])
    if chain.from_round and not chain.waits:
        return busy / speed
    hop = numpy.where(works.real, works.hop_s, 0.0)
    passed = numpy.cumsum(rest / fastest + hop, axis=0)
    before = passed - (rest + lead) / fastest
    behind = passed[-1] - passed
    single = numpy.where(works.real, before + max(chain.round_sizes) * whole / fastest + behind, 0.0).max(axis=0)
    if chain.from_round:  # two steps are under way at most
        return numpy.maximum(single / 2, busy / speed)
    if not scorer.equal or len(lead) < workers or not works.real[workers - 1].all():
        return numpy.maximum(single, busy / speed)
    fill = numpy.maximum(before[:workers], 0.0).sum(axis=0)
    rank = works.real.sum(axis=0) - numpy.arange(len(lead))[:, None]
    drain = numpy.where((rank >= 1) & (rank <= workers), behind, 0.0).sum(axis=0)
    return numpy.maximum(single, (busy + fill + drain) / workers)


# The work of a search is counted, not timed, so that the same costs always give the same plan.

SAME = 1e-9
"""Times with a smaller relative difference count as equal."""
BLOCK = 512
"""Cells that are scored before the best time is looked at again."""
MOST_WORK = 5e7
"""Most work of one batch, a fraction of a second."""
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
        *,
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
            limit = self.work + 2 * self.effort.cell_work
            for patterns in [(forward, later) for later in PATTERNS for forward in PATTERNS]:
                if patterns not in FIRST_PATTERNS and self.work < limit:
                    self._try_cells(chosen, patterns)
        seen: set[tuple[int, ...]] = set()
        handicaps = self.effort.handicaps
        for handicap in handicaps:  # first near the fastest, then in more breadth
            self._best_first(handicap, seen, self.work + self.effort.local_work / len(handicaps))
        return sorted(self.found.values())

    def _even_cuts(self, cells: Cells) -> Array:
        """(cells,) the best time of each cell under the first patterns."""
        numpy = self.numpy
        values = numpy.full(len(cells), INFEASIBLE)
        blocks = [numpy.arange(begin, min(begin + BLOCK, len(cells))) for begin in range(0, len(cells), BLOCK)]
        if len(self.bounds) > DENSE:  # guesses know little of deep models: look everywhere before looking closely
            coarse = _counts(numpy, len(self.bounds) - 1)[1::COARSE]
            is_coarse = numpy.isin(cells.forward, coarse) & numpy.isin(cells.later, coarse)
            is_coarse &= (cells.head <= 1) | numpy.isin(cells.head, coarse)
            blocks.insert(0, numpy.flatnonzero(is_coarse))
        limit = self.work + self.effort.cell_work
        for index in blocks:
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
        """(C,) times of those that could beat the best one so far, infinite for the others; and the best of them. Of a
        batch with more than `MOST_WORK` only as many as that, of the least bounds."""
        numpy = self.numpy
        values = numpy.full(len(batch.sizes), INFEASIBLE)
        works, fits = self.scorer.works(batch)
        bound_s = lower_bounds(self.scorer, works, self.chain)
        index = numpy.flatnonzero(fits & (bound_s < self.best_s))
        if not len(index):
            return values, []
        each = works.lead_s.shape[0] * (sum(self.chain.round_sizes) + 10)
        if len(index) * each > MOST_WORK:
            index = numpy.sort(index[numpy.argsort(bound_s[index], kind="stable")[: 1 + int(MOST_WORK) // each]])
        self.work += (len(index) + OVERHEAD) * each
        values[index] = self.scorer.step_s(works.take(index), self.chain)
        order = numpy.argsort(values, kind="stable")[: self.effort.keep]
        best = [self._candidate(values[i], batch, i) for i in order if values[i] < INFEASIBLE]
        self.best_s = min([self.best_s, *(candidate.value_s for candidate in best)])
        return values, best

    @staticmethod
    def _candidate(value: float, batch: Batch, index: int) -> Candidate:
        sizes = tuple(int(size) for size in batch.sizes[index] if size)
        return Candidate(float(value), len(sizes), int(batch.num_forward[index]), sizes)

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
        forward_sizes, (head, *later) = [*start.sizes[: start.num_forward]], start.sizes[start.num_forward :]
        found = [(len(cut), (*cut, head, *later)) for cut in _recut(forward_sizes)]
        found += [(start.num_forward, (*forward_sizes, head, *cut)) for cut in _recut(later)]
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
