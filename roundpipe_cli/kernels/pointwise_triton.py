"""Triton kernels that read and write each element once. Needs triton: import it where a kernel is launched.

Dropout: the words of `random_masks.py`, where each is a polynomial of its column's number b whose coefficients belong
to its row of 65,536 elements. A program has a few rows of the same columns, so that b is computed once for them:

    row 0      | columns 0 .. 1023 | 1024 .. 2047 | ...         a, m of row 0
    row 1      |   one program     |              |             a, m of row 1
    ...        |                   |              |

Cross entropy: one program for each row of logits, which it reads for their sum and again to write their gradients over
them. Neither is more than the row itself, which stays in the device's cache.

Codes with scales: a program writes some weights in a row; both tables stay in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
"""Triton's interpreter rounds to 16 bits towards zero: there, results are float32 and rounded by torch."""
COLUMNS = tl.constexpr(1 << 16)
"""Elements of a row."""
BLOCK, ROWS = 1024, 4
"""Columns and rows of a program."""
VOCABULARY_BLOCK = 2048
"""Logits of a row that are taken at once."""
KEYS = ("low", "high", "threshold")
"""Arguments whose values no kernel is compiled for anew."""
_GAMMA, _FIRST, _SECOND = (
    tl.constexpr(factor) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


_compiling = threading.Lock()
_launched: set[tuple[Hashable, ...]] = set()


@contextmanager
def first_alone(*variant: Hashable) -> Iterator[None]:
    """Encloses a launch. The first of a kernel's variant, in which it is compiled, is alone in this process.

    Threads of other GPUs then find it in Triton's cache on disk, instead of all compiling the same at the same time.

    Args:
        variant: the kernel, its device, and what Triton compiles it anew for.
    """
    if variant in _launched:
        yield
        return
    with _compiling:
        yield
    _launched.add(variant)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) for other devices."""
    with torch.get_device_module(device).device(device):
        target = triton.runtime.driver.active.get_current_target()
    return divmod(target.arch, 10) if target.backend == "cuda" else (0, 0)


@triton.jit
def _splitmix64(state, index):
    """Word `index` of SplitMix64 from `state`, both uint64."""
    z = state + (index + 1) * _GAMMA
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=KEYS)
def _dropout_kernel(
    x, out, total, product, count, low, high, threshold, scale,
    WRITES_MASK: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out = mask, or out = mask * x and perhaps total += scale mask * product; `count` elements."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    constant = _splitmix64(tl.zeros((BLOCK,), tl.uint64), columns.to(tl.uint64)) >> 49 << 17
    b = constant.to(tl.uint32) + (2 * columns + 1).to(tl.uint32)
    key = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    for own in tl.static_range(ROWS):
        row = tl.program_id(1) * ROWS + own
        words = _splitmix64(key + tl.zeros((1,), tl.uint64), tl.zeros((1,), tl.uint64) + row)
        value = b * (words.to(tl.uint32) + (words >> 32).to(tl.uint32) * b)
        is_kept = value.to(tl.int32, bitcast=True) <= threshold
        places = tl.cast(row, tl.int64) * COLUMNS + columns
        is_inside = places < count
        if WRITES_MASK:
            tl.store(out + places, is_kept.to(tl.int8), mask=is_inside)
        else:  # all of x is loaded, so that loads are wide
            tl.store(out + places, tl.where(is_kept, tl.load(x + places, mask=is_inside), 0.0), mask=is_inside)
        if ADDS:
            added = tl.where(is_kept, tl.load(product + places, mask=is_inside).to(tl.float32), 0.0)
            sums = tl.load(total + places, mask=is_inside).to(tl.float32) + scale * added
            tl.store(total + places, sums.to(total.dtype.element_ty), mask=is_inside)


Key = tuple[int, int]
"""Low and high 32 bits, signed."""
Beside = tuple[torch.Tensor, torch.Tensor, float]
"""total, product and its scale."""


def _launch(
    x: torch.Tensor, out: torch.Tensor, key: Key, threshold: int, *, beside: Beside | None = None, mask: bool = False
) -> None:
    count = out.numel()
    if not count:
        return
    across = triton.cdiv(min(count, COLUMNS.value), BLOCK)
    down = triton.cdiv(triton.cdiv(count, COLUMNS.value), ROWS)
    total, product, scale = beside or (out, out, 1.0)
    sums = total.float() if INTERPRETED and beside else total
    with first_alone("dropout", x.device, x.dtype, mask, beside is not None, count % 16 == 0):
        _dropout_kernel[(across, down)](
            x, out, sums, product, count, *key, threshold, scale,
            WRITES_MASK=mask, ADDS=beside is not None, BLOCK=BLOCK, ROWS=ROWS,
        )  # fmt: skip
    if sums is not total:
        total.copy_(sums)


def launch_mask(mask: torch.Tensor, key: Key, threshold: int) -> None:
    """Fill a mask, bool."""
    as_bytes = mask.view(torch.int8)
    _launch(as_bytes, as_bytes, key, threshold, mask=True)


def launch_drop(x: torch.Tensor, key: Key, threshold: int, beside: Beside | None = None) -> torch.Tensor:
    """x where it is kept, otherwise 0; adds the scaled product beside it to its total where that is kept."""
    out = torch.empty_like(x)
    _launch(x, out, key, threshold, beside=beside)
    return out


@triton.jit(do_not_specialize=("num_rows",))
def _cross_entropy_kernel(
    logits, out, targets, factors, parts, num_rows, vocabulary, row_stride, smoothing, scale,
    HAS_FACTORS: tl.constexpr, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """parts [2, N]: -log p of the target, and its mean over the vocabulary; out: the scaled gradients [N, V]."""
    row = tl.program_id(0)
    far = tl.cast(row, tl.int64)
    own = logits + far * row_stride
    places = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    picked = tl.load(own + target).to(tl.float32)  # before gradients are written over it
    top = tl.full((BLOCK,), -3.0e38, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        is_inside = first + places < vocabulary
        x = tl.load(own + first + places, mask=is_inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        sums = sums * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
        if SMOOTHS:
            total += tl.where(is_inside, x, 0.0)
    peak = tl.max(top, 0)
    log_sum = peak + tl.log(tl.sum(sums * tl.exp(top - peak), 0))
    tl.store(parts + row, (log_sum - picked).to(tl.float64))
    if SMOOTHS:
        tl.store(parts + num_rows + row, (log_sum - tl.sum(total, 0) / vocabulary).to(tl.float64))
    factor = scale
    if HAS_FACTORS:
        factor *= tl.load(factors + row)
    for first in range(0, vocabulary, BLOCK):
        is_inside = first + places < vocabulary
        x = tl.load(own + first + places, mask=is_inside, other=0.0).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(first + places == target, 1.0 - smoothing, 0.0)
        if SMOOTHS:
            gradient -= smoothing / vocabulary
        tl.store(out + far * vocabulary + first + places, (gradient * factor).to(out.dtype.element_ty), mask=is_inside)


def launch_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor | None, *, smoothing: float, scale: float
) -> torch.Tensor:
    """Write the gradients over the contiguous logits [N, V]; returns `parts`, float64 [2, N]."""
    num_rows, vocabulary = logits.shape
    parts = torch.zeros((2, num_rows), dtype=torch.float64, device=logits.device)
    out = torch.empty_like(logits, dtype=torch.float32) if INTERPRETED else logits
    if num_rows:
        kind = (factors is not None, smoothing != 0.0)
        with first_alone("cross entropy", logits.device, logits.dtype, vocabulary, *kind):
            _cross_entropy_kernel[(num_rows,)](
                logits, out, targets, targets if factors is None else factors, parts,
                num_rows, vocabulary, logits.stride(0), smoothing, scale,
                HAS_FACTORS=kind[0], SMOOTHS=kind[1], BLOCK=VOCABULARY_BLOCK, num_warps=8,
            )  # fmt: skip
    if INTERPRETED:
        logits.copy_(out)
    return parts


@triton.jit(do_not_specialize=("count",))
def _unpack_kernel(
    codes, scales, values, out, count,
    PER_BYTE: tl.constexpr, GROUP: tl.constexpr, HAS_EXPONENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out: the value of each code times the scale of its `GROUP`; codes in `count` bytes."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places = first + tl.arange(0, BLOCK)
    is_inside = places < count
    code = tl.load(codes + places, mask=is_inside, other=0).to(tl.int32)
    scale = tl.load(scales + places * PER_BYTE // GROUP, mask=is_inside, other=0)
    if HAS_EXPONENTS:  # the bits of a float32; 2^-127 has none in its exponent
        scale = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if PER_BYTE == 2:
        low, high = tl.load(values + (code & 15)) * scale, tl.load(values + (code >> 4)) * scale
        both = 2 * first + tl.arange(0, 2 * BLOCK)
        tl.store(out + both, tl.interleave(low, high).to(out.dtype.element_ty), mask=both < 2 * count)
    else:
        tl.store(out + places, (tl.load(values + code) * scale).to(out.dtype.element_ty), mask=is_inside)


def launch_unpack(
    codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, count: int, *, dtype: torch.dtype
) -> torch.Tensor:
    """The weights of `unpack_codes`."""
    out = torch.empty(count, dtype=torch.float32 if INTERPRETED else dtype, device=codes.device)
    if count:
        per_byte, group, has_exponents = 1 + (len(values) == 16), count // scales.numel(), scales.dtype == torch.uint8
        with first_alone("unpack", codes.device, dtype, per_byte, group, has_exponents):
            _unpack_kernel[(triton.cdiv(codes.numel(), BLOCK),)](
                codes, scales, values, out, codes.numel(),
                PER_BYTE=per_byte, GROUP=group, HAS_EXPONENTS=has_exponents, BLOCK=BLOCK,
            )  # fmt: skip
    return out.to(dtype)
