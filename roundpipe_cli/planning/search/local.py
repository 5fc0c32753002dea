"""Partitions near a given one: a layer moved or traded with the head's stage, stages split or merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roundpipe_cli.planning.search.batch import Array


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


def reshaped(sizes: Sequence[int], num_forward: int) -> list[tuple[int, tuple[int, ...]]]:
    """Partitions with one or two stages more or one less: (forward stages, sizes)."""
    forward, head, later = list(sizes[:num_forward]), sizes[num_forward], list(sizes[num_forward + 1 :])
    found = []
    for cut in _recut(forward):
        found.append((len(cut), (*cut, head, *later)))
    for cut in _recut(later):
        found.append((num_forward, (*forward, head, *cut)))
    return found


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


MOST_SPLIT = 12
"""Only so many stages at the end are split in pairs: there a short drain gains most."""
