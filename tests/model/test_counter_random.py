"""Random numbers from a counter: their formula, their statistics, and that nothing but key and place matters."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.kernels.random_masks import COLUMNS, CPU_ROWS, keep_mask, uniform
from roundpipe_cli.model.dropout import draw_key

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


def signs(mask: torch.Tensor, keep: float) -> torch.Tensor:
    """The mask as numbers of mean 0 and variance 1."""
    return (mask.double() - keep) / math.sqrt(keep * (1 - keep))


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


def test_halves_and_quarters_of_uniform_numbers_are_balanced() -> None:
    numbers = uniform((NUM,), KEY, CPU)
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    for bit in range(12):
        ones = int(((numbers * 2 ** (bit + 1)).long() & 1).sum())
        assert abs(ones - NUM / 2) < 5 * math.sqrt(NUM) / 2, f"bit {bit}"


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_no_place_follows_another_at_any_distance(keep: float) -> None:
    """Autocorrelation at every lag, rows' length included; noise of NUM / 2 values stays below 6."""
    spectrum = torch.fft.rfft(signs(keep_mask((NUM,), keep, KEY, CPU), keep))
    correlation = torch.fft.irfft(spectrum.abs().square(), n=NUM)[1 : NUM // 2] / math.sqrt(NUM)
    assert float(correlation.abs().max()) < 6
    assert float(correlation.square().mean()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("shape", [(256, 2048), (1024, 512)])
def test_tokens_and_channels_are_not_related(shape: tuple[int, int]) -> None:
    """No singular value of a mask stands out from those of noise (at most about sqrt(rows) + sqrt(columns))."""
    largest = torch.linalg.matrix_norm(signs(keep_mask(shape, 0.9, KEY, CPU), 0.9), ord=2)
    assert float(largest) < 1.02 * (math.sqrt(shape[0]) + math.sqrt(shape[1]))


def test_draws_of_other_keys_are_not_related() -> None:
    """Neither over a mask's places, for two draws of the same or of different calls, nor over draws, for two places."""
    keys = [draw_key(seed, number) for seed in range(8) for number in range(1, 9)]
    drawn = signs(torch.stack([keep_mask((COLUMNS // 4,), 0.7, key, CPU) for key in keys]), 0.7)
    for values in (drawn, drawn[:, :64].T):
        together = (values @ values.T) / math.sqrt(values.shape[1])
        assert float(together.fill_diagonal_(0).abs().max()) < 5.5


def test_a_longer_draw_begins_as_a_shorter_one() -> None:
    """Blocks are a matter of memory alone."""
    longer = keep_mask((CPU_ROWS * COLUMNS + 300,), 0.9, KEY, CPU)
    for length in (1, 300, COLUMNS, COLUMNS + 1):
        assert torch.equal(keep_mask((length,), 0.9, KEY, CPU), longer[:length])
    assert keep_mask((0, 4), 0.9, KEY, CPU).shape == (0, 4)
    assert keep_mask((), 1.0, KEY, CPU).item() is True


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_does_not_matter() -> None:
    drawn = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        drawn.append((keep_mask((3 * COLUMNS + 5,), 0.9, KEY, CPU), uniform((3 * COLUMNS + 5,), KEY, CPU)))
    assert all(torch.equal(a, b) for other in drawn[1:] for a, b in zip(drawn[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(cuda.num_devices() == 0, reason="no CUDA device here: run scripts/gpu_check where there is one")
def test_a_gpu_draws_what_a_processor_draws() -> None:
    """torch's own generators give each number of multiprocessors other masks."""
    device = torch.device("cuda", 0)
    for shape in ((7,), (3, COLUMNS), (70, COLUMNS + 7)):
        assert torch.equal(keep_mask(shape, 0.9, KEY, device).cpu(), keep_mask(shape, 0.9, KEY, CPU))
        assert torch.equal(uniform(shape, KEY, device).cpu(), uniform(shape, KEY, CPU))
