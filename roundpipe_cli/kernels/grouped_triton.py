"""Triton kernels of grouped products. The only file that needs triton: import it where a kernel is launched.

Rows [S, K] are sorted by group; `ends` [E] on the device says where each group's rows end. The launch grid is a pure
function of shapes, so the host never reads `ends`:

    tiles of rows    | group 0, tile 0 | group 0, tile 1 | (none) | group 1, tile 0 | ... | behind the last group |
    of M rows each   group e begins at tile  start_e // M + e,  which leaves it at least  ceil(count_e / M)  tiles

S // M + E + 1 tiles suffice; a tile that has no rows returns at once. Each element is summed in float32 in one order,
from the first row or column to the last, and is written by one program: nothing is added by atomics.

S: rows, E: groups, K: columns that are summed over, N: columns of the result, R: rank of an adapter, M: rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from roundpipe_cli.kernels.pointwise_triton import first_alone

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter multiplies bfloat16 as integers and rounds to it towards zero: there, operands are cast to
float32, which changes no product, and results are rounded by torch."""
VARYING = ("num_rows", "num_groups", "rank")
"""Arguments whose values no kernel is compiled for anew."""
SMALLEST, LARGEST = 16, 128
"""Sides of a tile; tensor cores take no fewer than 16."""


@dataclass(frozen=True)
class Tiles:
    """How a product is cut. Nothing is chosen by timing, and all fit the 99 KB of shared memory of sm86, 89 and 120."""

    m: int
    """Rows of a tile of the result."""
    n: int
    """Columns of it."""
    depth: int
    """Elements of the sum that are taken at once; no function of the number of rows, so that a row's result is none."""
    num_warps: int
    num_stages: int
    """Copies of both operands' tiles in shared memory."""


def choose_tiles(rows: int, columns: int, dtype: torch.dtype) -> Tiles:
    """Tiles of a result of `rows` (of a group) by `columns`; a pure function of these."""
    largest = LARGEST if dtype.itemsize == 2 else LARGEST // 2
    m, n = (min(largest, max(SMALLEST, triton.next_power_of_2(count))) for count in (rows, columns))
    depth = 64 if dtype.itemsize == 2 and n < 64 else 32
    return Tiles(m, n, depth, num_warps=8 if m * n >= LARGEST**2 else 4, num_stages=4 if dtype.itemsize == 2 else 2)


@triton.jit
def _find_rows(ends, tile, num_rows, num_groups, M: tl.constexpr, GROUPS: tl.constexpr):
    """(group, first row, row behind the group's last) of a tile; group E are rows behind the last group."""
    groups = tl.arange(0, GROUPS)
    stops = tl.load(ends + groups, mask=groups < num_groups, other=0).to(tl.int32)
    is_before = (groups < num_groups) & (stops // M + groups + 1 <= tile)
    group = tl.sum(is_before.to(tl.int32), 0)
    start = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int32)
    end = tl.load(ends + group, mask=group < num_groups, other=num_rows).to(tl.int32)
    return group, start + (tile - start // M - group) * M, end


@triton.jit
def _multiply(left, right, total):
    """total + left @ right, in float32."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit(do_not_specialize=VARYING)
def _grouped_mm_kernel(
    x, w, low, b, out, ends, num_rows, num_groups, width, columns, rank, scale,
    x_row, x_column, w_group, w_row, w_column, low_row, low_column, b_group, b_row, b_column,
    M: tl.constexpr, N: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr,
    HAS_LOW: tl.constexpr,
):  # fmt: skip
    """out = scale x @ w, or x @ w + scale low @ b, a tile of rows of one group and of columns."""
    tiles_across = tl.cdiv(columns, N)
    tile, across = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    group, first, end = _find_rows(ends, tile, num_rows, num_groups, M, GROUPS)
    if first >= end:
        return
    rows = first + tl.arange(0, M)
    places = across * N + tl.arange(0, N)
    has_row, has_column = rows[:, None] < end, places[None, :] < columns
    far = rows[:, None].to(tl.int64)
    total = tl.zeros((M, N), tl.float32)
    if group < num_groups:
        if HAS_LOW:
            ranks = tl.arange(0, RANK)
            for r in range(0, rank, RANK):
                own = low + far * low_row + (r + ranks)[None, :] * low_column
                theirs = b + group.to(tl.int64) * b_group + (r + ranks)[:, None] * b_row + places[None, :] * b_column
                left = tl.load(own, mask=has_row & ((r + ranks)[None, :] < rank), other=0.0)
                right = tl.load(theirs, mask=has_column & ((r + ranks)[:, None] < rank), other=0.0)
                total = _multiply(left, right, total)
            total *= scale
        steps = tl.arange(0, DEPTH)
        for k in range(0, width, DEPTH):
            own = x + far * x_row + (k + steps)[None, :] * x_column
            theirs = w + group.to(tl.int64) * w_group + (k + steps)[:, None] * w_row + places[None, :] * w_column
            left = tl.load(own, mask=has_row & ((k + steps)[None, :] < width), other=0.0)
            right = tl.load(theirs, mask=has_column & ((k + steps)[:, None] < width), other=0.0)
            total = _multiply(left, right, total)
        if not HAS_LOW:
            total *= scale
    tl.store(out + far * columns + places[None, :], total.to(out.dtype.element_ty), mask=has_row & has_column)


@triton.jit
def _grouped_outer_kernel(
    left, right, out, ends, height, columns, scale, left_row, left_column, right_row, right_column,
    M: tl.constexpr, N: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[group] = scale left[rows of group]^T @ right[rows of group], one tile of it; zero for a group of no rows."""
    tiles_down, tiles_across = tl.cdiv(height, M), tl.cdiv(columns, N)
    tile, across = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    group, down = tile // tiles_down, tile % tiles_down
    start = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int32)
    end = tl.load(ends + group).to(tl.int32)
    heights, places = down * M + tl.arange(0, M), across * N + tl.arange(0, N)
    has_height, has_column = heights[:, None] < height, places[None, :] < columns
    steps = tl.arange(0, DEPTH)
    total = tl.zeros((M, N), tl.float32)
    for row in range(start, end, DEPTH):
        far = (row + steps).to(tl.int64)
        one = left + far[None, :] * left_row + heights[:, None] * left_column
        other = right + far[:, None] * right_row + places[None, :] * right_column
        is_row = row + steps < end
        total = _multiply(
            tl.load(one, mask=has_height & is_row[None, :], other=0.0),
            tl.load(other, mask=has_column & is_row[:, None], other=0.0),
            total,
        )
    target = out + group.to(tl.int64) * height * columns + heights[:, None].to(tl.int64) * columns + places[None, :]
    tl.store(target, (total * scale).to(out.dtype.element_ty), mask=has_height & has_column)


def _new_result(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.float32 if INTERPRETED.value else like.dtype)


def launch_rows(
    x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, scale: float, *, beside: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """scale x W per group, or x W + scale low B: x [S, K], W [E, K, N], `beside` = (low [S, R], B [E, R, N]) or ()."""
    (num_rows, width), (num_groups, _, columns) = x.shape, w.shape
    out = _new_result(x, num_rows, columns)
    if not out.numel():
        return out.to(x.dtype)
    low, b = beside or (x, w)
    tiles = choose_tiles(-(-num_rows // num_groups), columns, x.dtype)
    rank = low.shape[1]
    grid = (num_rows // tiles.m + num_groups + 1) * triton.cdiv(columns, tiles.n)
    strides = (*x.stride(), *w.stride(), *low.stride(), *b.stride())
    with first_alone("rows", x.device, x.dtype, tiles, width, columns, rank, num_groups, strides, bool(beside)):
        _grouped_mm_kernel[(grid,)](
            x, w, low, b, out, ends, num_rows, num_groups, width, columns, rank, scale, *strides,
            M=tiles.m, N=tiles.n, DEPTH=tiles.depth, RANK=min(32, max(SMALLEST, triton.next_power_of_2(rank))),
            GROUPS=max(SMALLEST, triton.next_power_of_2(num_groups)), HAS_LOW=bool(beside),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out.to(x.dtype)


def launch_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, scale: float) -> torch.Tensor:
    """scale left^T right per group: left [S, M], right [S, N] -> [E, M, N]."""
    num_groups, height, columns = ends.numel(), left.shape[1], right.shape[1]
    out = _new_result(left, num_groups, height, columns)
    if not out.numel():
        return out.to(left.dtype)
    tiles = choose_tiles(height, columns, left.dtype)
    grid = num_groups * triton.cdiv(height, tiles.m) * triton.cdiv(columns, tiles.n)
    strides = (*left.stride(), *right.stride())
    with first_alone("outer", left.device, left.dtype, tiles, height, columns, num_groups, strides):
        _grouped_outer_kernel[(grid,)](
            left, right, out, ends, height, columns, scale, *strides,
            M=tiles.m, N=tiles.n, DEPTH=tiles.depth, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out.to(left.dtype)
