"""Better partitions near a given one: move a layer from one stage to another, trade layers with the head's stage."""

from __future__ import annotations

from roundpipe_cli.plan.evaluate import Chain
from roundpipe_cli.plan.search_batch import Array, Batch, BatchScorer
from roundpipe_cli.plan.search_bound import lower_bounds


def neighbours(scorer: BatchScorer, sizes: Array, num_forward: int) -> Array:
    """(C, N) partitions with the same numbers of stages, one move away from `sizes` (N,)."""
    numpy = scorer.numpy
    count = len(sizes)
    eye = numpy.eye(count, dtype=sizes.dtype)
    forward = numpy.arange(num_forward)
    later = numpy.arange(num_forward + 1, count)
    moves = []
    for group in (forward, later):
        source, target = (axis.ravel() for axis in numpy.meshgrid(group, group, indexing="ij"))
        keep = (source != target) & (sizes[source] > 1)
        moves.append(eye[target[keep]] - eye[source[keep]])
        low, high = numpy.minimum(source, target), numpy.maximum(source, target)
        swap = (source < target) & (numpy.abs(sizes[high] - sizes[low]) > 1)
        change = (sizes[high] - sizes[low])[swap, None]
        moves.append((eye[low[swap]] - eye[high[swap]]) * change)
    if num_forward and len(later):
        one, other = (axis.ravel() for axis in numpy.meshgrid(forward, later, indexing="ij"))
        out = (sizes[one] > 1) & (sizes[other] > 1)
        trade = eye[num_forward] - eye[one] - eye[other]
        moves.append(trade[out])
        if sizes[num_forward] > 1:
            moves.append(-trade)
    return sizes + numpy.concatenate(moves)


def descend(
    scorer: BatchScorer, sizes: Array, num_forward: int, value: float, chain: Chain, max_moves: int
) -> tuple[float, Array]:
    """Follow the best move while there is one that helps."""
    numpy = scorer.numpy
    for _ in range(max_moves):
        found = neighbours(scorer, sizes, num_forward)
        batch = Batch(found, numpy.full(len(found), num_forward))
        promising = lower_bounds(scorer, batch, chain) < value * (1 - 1e-9)
        batch = Batch(found[promising], batch.num_forward[promising])
        if not len(batch.sizes):
            break
        scores = scorer.score(batch, chain)
        best = int(numpy.argmin(scores))
        if scores[best] >= value * (1 - 1e-9):
            break
        value, sizes = float(scores[best]), batch.sizes[best]
    return value, sizes
