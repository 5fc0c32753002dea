"""Random numbers from a counter: their formula, bit by bit, their share, and that nothing but key and place matters."""

from __future__ import annotations

import math

import pytest
import torch

from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.kernels.random_masks import COLUMNS, CPU_ROWS, keep_mask, uniform

CPU = torch.device("cpu")
KEY = 0xF123456789ABCDEF
NUM = 1 << 20


def splitmix64(state: int, index: int) -> int:
    """As in the module's text, in Python's own numbers."""
    mask = (1 << 64) - 1
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


def word(key: int, index: int) -> int:
    """As in the module's text, signed."""
    coefficients, column = splitmix64(key, index >> 16), index & 0xFFFF
    b = (splitmix64(0, column) >> 49 << 17) + 2 * column + 1
    value = b * ((coefficients & 0xFFFFFFFF) + (coefficients >> 32) * b) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def test_numbers_follow_the_formula() -> None:
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF, "the first number of the published generator"
    shape = (CPU_ROWS + 2, COLUMNS + 7)
    numbers, mask = uniform(shape, KEY, CPU).flatten(), keep_mask(shape, 0.9, KEY, CPU).flatten()
    edges = [row * COLUMNS + offset for row in range(1, CPU_ROWS + 2) for offset in (-1, 0, 1)]
    for index in (0, 1, 2, *edges, len(mask) - 1):
        assert numbers[index].item() == ((word(KEY, index) >> 8) + 2**23) / 2**24
        assert mask[index].item() == (word(KEY, index) <= round(0.9 * 2**32) - 1 - 2**31)


@pytest.mark.parametrize("keep", [0.0, 2.0**-33, 0.05, 0.3, 0.5, 0.9, 0.999, 1 - 2.0**-33, 1.0])
def test_share_that_is_kept(keep: float) -> None:
    """Within five standard deviations of a binomial distribution; nothing or all at the ends."""
    kept = int(keep_mask((NUM,), keep, KEY, CPU).sum())
    assert abs(kept - keep * NUM) <= 5 * math.sqrt(NUM * keep * (1 - keep)) + 1e-3
    if keep in (0.0, 1.0):
        assert kept == keep * NUM


@pytest.mark.gpu
@pytest.mark.skipif(cuda.num_devices() == 0, reason="no CUDA device here: run scripts/gpu_check where there is one")
def test_a_gpu_draws_what_a_processor_draws() -> None:
    """torch's own generators give each number of multiprocessors other masks."""
    device = torch.device("cuda", 0)
    for shape in ((7,), (3, COLUMNS), (70, COLUMNS + 7)):
        assert torch.equal(keep_mask(shape, 0.9, KEY, device).cpu(), keep_mask(shape, 0.9, KEY, CPU))
        assert torch.equal(uniform(shape, KEY, device).cpu(), uniform(shape, KEY, CPU))
