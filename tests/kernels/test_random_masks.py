"""Dropout's Triton kernel in the interpreter: the bits of torch's operators for any key, share, shape and type."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_cli.kernels import random_masks
from roundpipe_cli.kernels.random_masks import COLUMNS, Draw, drop, drop_and_add_, keep_mask
from tests.support.launches import LaunchCounter

CPU = torch.device("cpu")
KEYS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_torch(shape: tuple[int, ...], draw: Draw) -> torch.Tensor:
    """The mask, never by the kernel."""
    return random_masks._mask_of(torch.empty(shape), random_masks._signed(draw.key), draw.threshold)


@pytest.fixture
def wide(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs of more columns: the interpreter takes as long for each program, whatever its size."""
    from roundpipe_cli.kernels import pointwise_triton

    monkeypatch.setattr(pointwise_triton, "BLOCK", COLUMNS // 4)
    yield


def check(shape: tuple[int, ...], draw: Draw, dtype: torch.dtype) -> None:
    expected = by_torch(shape, draw)
    assert torch.equal(keep_mask(shape, draw.keep, draw.key, CPU), expected)
    generator = torch.Generator().manual_seed(expected.numel())
    x, total, product = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    sums = total.clone().addcmul_(product, expected, value=0.75)
    assert torch.equal(drop(x, draw), x * expected)
    assert torch.equal(drop_and_add_(x, draw, total, product, scale=0.75), x * expected)
    assert torch.equal(total, sums)


@pytest.mark.usefixtures("wide")
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 2 * COLUMNS + 5)], ids=str)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Nothing, less than a program, and more rows than a program has, the last of them short."""
    check(shape, Draw(0xF123456789ABCDEF, 0.9), dtype)


@pytest.mark.usefixtures("interpreter")
@given(
    key=KEYS,
    keep=st.one_of(st.floats(2.0**-31, 1.0), st.just(1.0)),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=12, deadline=None)
def test_any_draw(key: int, keep: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(shape, Draw(key, keep), dtype)


@pytest.mark.usefixtures("wide")
def test_columns_of_every_program() -> None:
    """The numbers of 65,536 columns are a function of their place, not a table."""
    draw = Draw(12345, 0.5)
    assert torch.equal(keep_mask((COLUMNS + 9,), 0.5, draw.key, CPU), by_torch((COLUMNS + 9,), draw))


def test_a_mask_is_one_launch() -> None:
    """It was 53 to 56, by their number of blocks."""
    with LaunchCounter() as counter:
        keep_mask((8192, 4096), 0.95, 1, torch.device("meta"))
    assert counter.launches.num_launches == 1 and counter.launches.traffic_bytes == 8192 * 4096


def test_the_first_launch_of_a_variant_is_alone(interpreter: None) -> None:
    """Eight GPUs' threads compiled the same kernel at the same time, each for itself."""
    from roundpipe_cli.kernels.pointwise_triton import _launched, first_alone

    def launch(name: str, inside: threading.Event, go_on: threading.Event) -> threading.Thread:
        def run() -> None:
            with first_alone(name):
                inside.set()
                go_on.wait(60)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    with pytest.raises(ZeroDivisionError), first_alone("a"):
        _ = 1 / 0  # not compiled: the next one is alone again
    events = [threading.Event() for _ in range(4)]
    threads = [launch("a", *events[:2])]
    assert events[0].wait(60)
    threads.append(launch("a", *events[2:]))
    assert not events[2].wait(0.05)
    events[1].set()
    threads[0].join(60)
    assert events[2].wait(60)
    with first_alone("a"):  # compiled: nobody waits for anybody
        events[3].set()
    threads[1].join(60)
    drop(torch.ones(32, dtype=torch.bfloat16), Draw(1, 0.5))
    assert {("a",), ("dropout", CPU, torch.bfloat16, False, False, True)} <= _launched
