"""Weights from codes and scales: the common part of the quantised formats.

Everything is computed in float32, some rows at a time, and rounded once to the type that is asked for: a code times its
scale is exact in float32, or rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7 of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3); 8 to 15 are their negatives."""
E8M0_BIAS = 127
ELEMENTS_AT_ONCE = 1 << 22
ROWS_AT_ONCE = 32
"""Least rows at a time, and what their number is a multiple of: 32 numbers of b bits fill b words of 32 bits."""


def row_ranges(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Ranges of rows to compute at once."""
    step = max(ROWS_AT_ONCE, ELEMENTS_AT_ONCE // max(1, num_columns) // ROWS_AT_ONCE * ROWS_AT_ONCE)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def scaled_rows(
    values: Callable[[slice], torch.Tensor],
    scale: torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """A weight of `shape` [rows, columns] from its values and a grid of scales.

    Args:
        values: float32 of some rows.
        scale: one for all, one for each row, or one for each block.
        block: rows and columns of a block; the last ones may be cut off. None: as the shapes say.

    Raises:
        ValueError: the grid does not cover the weight.
    """
    whole = torch.empty(shape, dtype=dtype)
    grid = as_float(scale)
    grid = grid.reshape(1, 1) if grid.numel() == 1 else grid.reshape(-1, 1) if grid.ndim == 1 else grid
    rows, columns = (_block_size(shape[i], grid.shape[i], None if block is None else block[i]) for i in (0, 1))
    for part in row_ranges(*shape):
        of_rows = grid[torch.arange(part.start, part.stop) // rows]
        whole[part] = values(part) * of_rows.repeat_interleave(columns, dim=1)[:, : shape[1]]
    return whole


def _block_size(size: int, num_blocks: int, block: int | None) -> int:
    if block and -(-size // block) == num_blocks:
        return block
    if num_blocks < 1 or size % num_blocks:
        raise ValueError(
            f"{num_blocks} scales for {size} rows or columns, and the settings say no block of such a size"
        )
    return size // num_blocks


def groups_in_order(num_inputs: int, num_groups: int, sizes: Iterable[int] = ()) -> torch.Tensor:
    """Group of each input, int64 [num_inputs]: by the first of `sizes` that makes so many groups, else equal ones.

    Raises:
        ValueError: neither suits.
    """
    size = next((one for one in sizes if one > 0 and -(-num_inputs // one) == num_groups), None)
    return torch.arange(num_inputs) // _block_size(num_inputs, num_groups, size)


def as_float(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32; a byte is an exponent (E8M0)."""
    return torch.exp2(scale.float() - E8M0_BIAS) if scale.dtype == torch.uint8 else scale.float()


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """Float32 [..., 2 n] of codes [..., n], two a byte, the low half first."""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    codes = packed.contiguous().view(torch.uint8)
    return torch.stack([table[(codes & 15).int()], table[(codes >> 4).int()]], dim=-1).flatten(-2)


def unpack_bits(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Int64 [..., count]: numbers of `bits` bits that lie one after the other in words of 32 bits, low bits first.

    Args:
        words: int32 [..., n].

    Raises:
        ValueError: too few words.
    """
    if words.shape[-1] * 32 < count * bits:
        raise ValueError(f"{words.shape[-1]} words of 32 bits for {count} numbers of {bits} bits")
    wide = words.long() & 0xFFFFFFFF
    start = torch.arange(count) * bits
    word, offset = start // 32, start % 32
    after = (word + 1).clamp(max=words.shape[-1] - 1)
    both = wide[..., word] | (wide[..., after] << 32)
    return (both >> offset) & ((1 << bits) - 1)
