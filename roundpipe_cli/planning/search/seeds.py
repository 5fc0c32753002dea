"""Where the search starts: stages of nearly equal work, for every number of stages worth trying.

Layers are counted in units of about equal work: a usual block is one unit, an embedding without cost is none and joins
its neighbour. `unit_bounds[t]` is the layer at which t units have been passed. A cell is a number of forward stages, of
backward stages behind the one with the head, and of units in the head's stage. Shapes as in `search/batch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roundpipe_cli.planning.search.batch import Array, Batch, BatchScorer
from roundpipe_cli.planning.search.chain import RoundChain
from roundpipe_cli.planning.stages import StageSums

PATTERNS = ("smaller first", "larger first", "spread")
"""Places of the stages that hold one unit more than the others."""


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
    count = numpy.arange(0, units + 1)
    forward, later, head = (axis.ravel() for axis in numpy.meshgrid(count, count, count, indexing="ij"))
    body = units - head
    keep = (forward <= body) & (later <= body) & (forward > 0) & (later > 0) | (units + forward + later == 0)
    if scorer.allowed is not None:
        keep &= _may_fit(scorer.numpy, scorer.allowed, bounds, (forward, later, head))
    forward, later, head, body = forward[keep], later[keep], head[keep], body[keep]
    bound, guess = _cell_bounds(scorer, bounds, chain, forward, later, head)
    order = numpy.lexsort((head, forward, forward + later, guess))
    return Cells(forward, later, head, bound, guess).take(order)


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
    scorer: BatchScorer, bounds: list[int], chain: RoundChain, forward: Array, later: Array, head: Array
) -> tuple[Array, Array]:
    """Bounds like those of `search/bound.py`, from averages, and guesses."""
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
    if scorer.links is None:
        return 0.0 * top
    layers, rounds = scorer.num_layers, chain.rounds_per_step
    up_bytes = rounds * (scorer.param_bytes[0, top] + scorer.param_bytes[0, layers])
    up_bytes = up_bytes + (rounds - 1) * scorer.grad_bytes[0, layers]
    return up_bytes / scorer.links.bytes_per_s / scorer.num_workers


def seeds(scorer: BatchScorer, bounds: list[int], cells: Cells, patterns: tuple[str, str]) -> tuple[Batch, Array]:
    """The partition of one pattern (forward, backward) for each cell that has one, and the cells' indices."""
    numpy = scorer.numpy
    forward, later, head = cells.forward, cells.later, cells.head
    num_stages = forward + 1 + later
    body = len(bounds) - 1 - head
    position = numpy.arange(int(num_stages.max()) + 1)[:, None]
    up = _passed(numpy, numpy.clip(position, 0, forward), body, numpy.maximum(forward, 1), patterns[0])
    down = _passed(numpy, numpy.clip(position - forward - 1, 0, later), body, numpy.maximum(later, 1), patterns[1])
    table = numpy.array(bounds)
    top = table[body]
    sizes = numpy.diff(table[up], axis=0) - numpy.diff(table[body - down], axis=0)
    sizes[forward, numpy.arange(len(forward))] = scorer.num_layers - top
    whole = numpy.flatnonzero(((sizes > 0) | (position[:-1] >= num_stages)).all(axis=0))
    return Batch(sizes.T[whole], forward[whole], num_stages[whole]), whole


def _passed(numpy: Array, index: Array, total: Array, parts: Array, pattern: str) -> Array:
    """Units in the first `index` of `parts` stages."""
    size, larger = total // parts, total % parts
    if pattern == "spread":
        return index * total // parts
    if pattern == "larger first":
        return index * size + numpy.minimum(index, larger)
    return index * size + numpy.maximum(index - (parts - larger), 0)
