"""Partitions near a given one: a layer moved from one stage to another, or traded with the head's stage."""

from __future__ import annotations

from typing import Any

from roundpipe_cli.plan.search_batch import Array


def neighbours(numpy: Any, sizes: Array, num_forward: int) -> Array:
    """(C, N) partitions with the same numbers of stages, one move away from `sizes` (N,)."""
    count = len(sizes)
    eye = numpy.eye(count, dtype=sizes.dtype)
    forward = numpy.arange(num_forward)
    later = numpy.arange(num_forward + 1, count)
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
