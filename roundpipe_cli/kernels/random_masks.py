"""Dropout masks and uniform numbers from a counter, the same on every device: our Triton kernel's and torch's.

    keep_mask   a mask, bool
    drop        m * x, and perhaps total += s m * product in the same pass

The second never writes the mask m to memory: each element's is a function of the draw and its place. On a GPU each is
one kernel, on cards that Triton compiles for; elsewhere torch's operators compute the same.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from roundpipe_cli.kernels.capability import MIN_CAPABILITY, why_no_triton

# Random numbers from a counter: each is a hash of (key, index), the same on every device and number of threads.
#
# A generator of torch's deals its numbers to the threads of a launch, so that they depend on the processor's kind. Here
# element i of a draw, counted row by row through the tensor's shape whatever its strides, depends on the draw's 64-bit
# key and i alone, by whole numbers that wrap around:
#
#     splitmix64(s, j) = mix(s + (j + 1) * 0x9E3779B97F4A7C15)                          all mod 2^64
#     mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  return z ^ (z >> 31)
#
#     row r = i >> 16                a = low, m = high 32 bits of splitmix64(key, r)
#     column c = i & 0xFFFF          b = (splitmix64(0, c) >> 49 << 17) + 2 c + 1       a constant table, always odd
#     word(i) = b * (a + m * b)  mod 2^32
#
#     a mask keeps element i with probability q where word(i), as a signed number, is at most round(q 2^32) - 1 - 2^31
#     a uniform number is ((word(i) as a signed number >> 8) + 2^23) / 2^24, in [0, 1)
#
# Why this is enough: (a, m) of each row are fresh words of SplitMix64 (Steele, Lea and Flood, "Fast splittable
# pseudorandom number generators", 2014). A polynomial without a constant term, with random coefficients, is a pairwise
# independent hash (Carter and Wegman, "Universal classes of hash functions", 1979): as b is odd, every word is uniform,
# and words of two columns are independent but for as many low bits as the two b have in common, at most 16. Words of
# two rows share nothing. Within a row the lowest bits repeat, as those of all products mod 2^32 do: a comparison reads
# the highest first, and a uniform number leaves the 8 lowest out. And it is cheap without a kernel of its own: two
# passes over 32-bit words and a comparison, in blocks, so that no more than a block of words exists. The kernel
# (`pointwise_triton.py`) computes the same numbers.

COLUMNS = 1 << 16
"""Elements that share a row's two words."""
CPU_ROWS = 4
"""Rows in a block of words on a processor: 1 MiB, which stays in its cache."""
DEVICE_ROWS = 64
"""Rows in a block elsewhere: 16 MiB, so that launches do not count."""
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shifts and factors of `mix`."""
_WORD = 1 << 32


def _signed(value: int, bits: int = 64) -> int:
    """`value` mod 2^bits as a signed number, as torch has them."""
    half = 1 << bits - 1
    return (value + half) % (2 * half) - half


def _splitmix64(key: int, count: int) -> torch.Tensor:
    """The first `count` words of SplitMix64 from the state `key`, int64 on the host."""
    words = torch.arange(1, count + 1, dtype=torch.int64, device="cpu")
    words.mul_(_signed(_GAMMA)).add_(_signed(key))
    for shift, factor in _MIX:
        # torch's shift to the right repeats the sign
        words ^= (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        words *= _signed(factor)
    return words


@functools.cache
def _columns(device: torch.device) -> torch.Tensor:
    """The constant table b, int32 [COLUMNS] on `device`."""
    high = _splitmix64(0, COLUMNS).bitwise_right_shift_(49).bitwise_left_shift_(17)
    columns = high + torch.arange(1, 2 * COLUMNS, 2, dtype=torch.int64, device="cpu")
    return columns.to(torch.int32).to(device)


def _draw(result: torch.Tensor, key: int, write: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """Give `write` each block of the contiguous `result` [N] and its words, int32, both [rows, columns]."""
    device, count = result.device, result.numel()
    whole, rest = divmod(count, COLUMNS)
    block = CPU_ROWS if device.type == "cpu" else DEVICE_ROWS
    words = _splitmix64(key, whole + 1)
    if whole:
        low, high = (part[:-1].to(torch.int32)[:, None].to(device, non_blocking=True) for part in (words, words >> 32))
    spans = [(first, min(block, whole - first), COLUMNS) for first in range(0, whole, block)]
    spans += [(whole, 1, rest)] if rest else []
    buffer = torch.empty(min(count, block * COLUMNS), dtype=torch.int32, device=device)
    for first, rows, columns in spans:
        table, own = _columns(device)[:columns], slice(first, first + rows)
        part = buffer[: rows * columns].view(rows, columns)
        if first < whole:
            torch.addcmul(low[own], high[own], table, out=part).mul_(table)
        else:  # a row alone, the only one of a small tensor: two numbers of the host's are no copies to a device
            word = int(words[-1])
            torch.mul(table, _signed(word >> 32, 32), out=part[0]).add_(_signed(word, 32)).mul_(table)
        begin = first * COLUMNS
        write(result[begin : begin + rows * columns].view(rows, columns), part)


@dataclass(frozen=True)
class Draw:
    """A mask that is not in memory."""

    key: int
    """64 bits: of which draw."""
    keep: float
    """Probability that an element is kept, to 32 bits."""

    @property
    def threshold(self) -> int:
        """Largest signed word that keeps its element."""
        return min(round(self.keep * _WORD), _WORD) - 1 - _WORD // 2


def keep_mask(shape: Sequence[int], keep: float, key: int, device: torch.device) -> torch.Tensor:
    """A mask, bool of `shape`, of which each element is true with probability `keep`, to 32 bits."""
    mask = torch.empty(shape, dtype=torch.bool, device=device)
    draw = Draw(key, keep)
    if draw.threshold < -_WORD // 2:
        return mask.zero_()
    _fill_mask_(mask, _signed(key), draw.threshold)
    return mask


def drop(
    x: torch.Tensor,
    draw: Draw,
    total: torch.Tensor | None = None,
    product: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """x where the mask of `draw` keeps an element, 0 elsewhere. Has no graph.

    Also adds `scale` m * product to `total`, in place: the backward of m * x. All contiguous.
    """
    kept: torch.Tensor = _drop(x, total, product, scale, _signed(draw.key), draw.threshold)
    return kept


@torch.library.custom_op("roundpipe::fill_mask_", mutates_args=("mask",))
def _fill_mask_(mask: torch.Tensor, key: int, threshold: int) -> None:
    if has_kernel(mask):
        from roundpipe_cli.kernels.pointwise_triton import launch_mask

        return launch_mask(mask, _halves(key), threshold)
    return _draw(mask.view(-1), key, lambda part, words: torch.le(words, threshold, out=part))


@torch.library.custom_op("roundpipe::drop", mutates_args=("total",))
def _drop(
    x: torch.Tensor, total: torch.Tensor | None, product: torch.Tensor | None, scale: float, key: int, threshold: int
) -> torch.Tensor:
    beside = None if total is None or product is None else (total, product, scale)
    assert all(one.is_contiguous() and one.shape == x.shape for one in (x, *(beside or ())[:2]))
    if has_kernel(x):
        from roundpipe_cli.kernels.pointwise_triton import launch_drop

        return launch_drop(x, _halves(key), threshold, beside=beside)
    mask = _mask_of(x, key, threshold)
    if total is not None and product is not None:
        total.addcmul_(product, mask, value=scale)
    return x * mask


_fill_mask_.register_fake(lambda *_: None)
_drop.register_fake(lambda x, *_: torch.empty_like(x))


def _mask_of(x: torch.Tensor, key: int, threshold: int) -> torch.Tensor:
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    _draw(mask.view(-1), key, lambda part, words: torch.le(words, threshold, out=part))
    return mask


def _halves(key: int) -> tuple[int, int]:
    """Low and high 32 bits, signed: one type for all keys, so that no kernel is compiled anew for one."""
    return _signed(key, 32), _signed(key >> 32, 32)


def has_kernel(tensor: torch.Tensor) -> bool:
    """Whether kernels that read each element once take it."""
    if tensor.device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1"
    return _compiles_for(tensor.device)


@functools.cache
def _compiles_for(device: torch.device) -> bool:
    if why_no_triton() is not None:
        return False
    from roundpipe_cli.kernels.pointwise_triton import capability_of

    return capability_of(device) >= MIN_CAPABILITY


@torch.no_grad()
def uniform(shape: Sequence[int], key: int, device: torch.device) -> torch.Tensor:
    """Uniform numbers in [0, 1), float32 of `shape`, multiples of 2^-24."""
    numbers = torch.empty(shape, dtype=torch.float32, device=device)

    def write(part: torch.Tensor, words: torch.Tensor) -> None:
        part.copy_(words.bitwise_right_shift_(8)).add_(1 << 23).mul_(2.0**-24)

    _draw(numbers.view(-1), key, write)
    return numbers
