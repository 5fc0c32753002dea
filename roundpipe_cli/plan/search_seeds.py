"""Where the search starts: stages of nearly equal work, for every number of stages worth trying.

Layers are counted in units of about equal work: a block is one unit, an embedding without cost is none and joins its
neighbour. `unit_bounds[t]` is the layer at which t units have been passed. Shapes as in `search_batch`.
"""

from __future__ import annotations

from collections.abc import Iterator

from roundpipe_cli.plan.search_batch import Array, Batch, BatchScorer
from roundpipe_cli.plan.stages import StageSums

PATTERNS = ("smaller first", "larger first", "spread")
"""Where the stages stand that hold one unit more than the others."""

MAX_HEAD_UNITS = 8


def unit_bounds(sums: StageSums) -> list[int]:
    """Layer bounds of units of about equal work; the first is 0, the last leaves out only the head."""
    body = sums.num_layers - 1
    work = [sums.forward_s[i][i + 1] + sums.recompute_s[i][i + 1] + sums.backward_s[i][i + 1] for i in range(body)]
    total = sum(work)
    if total <= 0:
        return list(range(body + 1))
    num_units = max(1, sum(1 for value in work if value > 0.05 * total / body))
    bounds, passed, layer = [0], 0.0, 0
    for unit in range(1, num_units):
        while layer < body and passed + work[layer] <= (unit + 1e-6) * total / num_units:
            passed += work[layer]
            layer += 1
        bounds.append(layer)
    return [*bounds, body]


def head_units(sums: StageSums, bounds: list[int]) -> int:
    """The most units that are tried in the head's stage."""
    return min(MAX_HEAD_UNITS, len(bounds) - 1)


def seeds(
    scorer: BatchScorer, bounds: list[int], num_stages: int, patterns: tuple[str, str], most_head: int
) -> Batch | None:
    """All partitions of one pattern (forward, backward) with so many stages in all, or None if there is none."""
    numpy = scorer.numpy
    units = len(bounds) - 1
    forward, head = numpy.meshgrid(numpy.arange(0, num_stages), numpy.arange(0, most_head + 1), indexing="ij")
    forward, head = forward.ravel(), head.ravel()
    later = num_stages - 1 - forward
    body = units - head
    keep = (forward <= body) & (later <= body) & ((forward > 0) == (body > 0)) & ((later > 0) == (body > 0))
    forward, head, later, body = forward[keep], head[keep], later[keep], body[keep]
    if not len(forward):
        return None
    position = numpy.arange(num_stages + 1)[:, None]
    up = _passed(numpy, numpy.clip(position, 0, forward), body, numpy.maximum(forward, 1), patterns[0])
    down = _passed(numpy, numpy.clip(position - forward - 1, 0, later), body, numpy.maximum(later, 1), patterns[1])
    table = numpy.array(bounds)
    top = table[body]
    up, down = table[up], top - table[body - down]
    sizes = numpy.diff(up, axis=0) + numpy.diff(down, axis=0)
    sizes[forward, numpy.arange(len(forward))] = scorer.num_layers - top
    whole = (sizes > 0).all(axis=0)
    return Batch(sizes.T[whole], forward[whole]) if whole.any() else None


def _passed(numpy: Array, index: Array, total: Array, parts: Array, pattern: str) -> Array:
    """Units in the first `index` of `parts` stages."""
    size, larger = total // parts, total % parts
    if pattern == "spread":
        return index * total // parts
    if pattern == "larger first":
        return index * size + numpy.minimum(index, larger)
    return index * size + numpy.maximum(index - (parts - larger), 0)


def stage_counts(sums: StageSums, bounds: list[int]) -> Iterator[int]:
    """Numbers of stages per round that are possible."""
    return iter(range(1, 2 * (len(bounds) - 1) + 2))
