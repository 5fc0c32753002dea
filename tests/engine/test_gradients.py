"""Gradient sums on the host between steps: who clears them, and when."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable

import pytest
import torch

from roundpipe_cli.engine import gradients, weights
from roundpipe_cli.engine.backends.cpu import LiveBytes
from roundpipe_cli.engine.gradients import SQUARED_ELEMENTS, add_to, square_sum
from roundpipe_cli.train.optim.optimizer import AdamW16
from tests.support.simulated_cases import roundpipe
from tests.support.tiny import make_rig, random_microbatches


@pytest.mark.parametrize("copies", [False, True])
def test_sums_are_cleared_while_workers_compute(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step cleared the sums of all layers first, in the caller's thread: seconds for 8 billion parameters."""
    rig, microbatches = make_rig("llama", "full", num_hidden_layers=2), random_microbatches([(1, 5), (2, 4)])
    places = {flat.data_ptr(): layer for layer, flat in enumerate(rig.store.gradients)}
    cleared: dict[int, str] = {}
    zero = torch.Tensor.zero_

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() in places:
            cleared[places[tensor.data_ptr()]] = threading.current_thread().name
        return zero(tensor)

    found = []
    with rig.engine(2, copy=copies) as engine:
        for old in (0.0, float("nan")):
            for flat in rig.store.gradients:
                flat.fill_(old)
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "zero_", noted)
                engine.run_step(microbatches, roundpipe(rig, 2), step=0)
            found.append([flat.clone() for flat in rig.store.gradients])
    assert all(map(torch.equal, *found)), "something of the step before was left"
    by_caller = [layer for layer, thread in cleared.items() if thread == threading.current_thread().name]
    assert by_caller == [0], "the embed layer's, which is added up at the end, when the workers have begun"
    if copies:
        assert set(cleared) == {0}, "the others come down from the devices, as a whole"


def test_the_norm_of_a_large_layer_needs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: its float64 copy, 224 MB for the head of a 135M model, was counted nowhere."""
    monkeypatch.setattr(gradients, "SQUARED_ELEMENTS", 1 << 14)
    monkeypatch.setattr(weights, "_OWN", weights._Own())
    flat, live = torch.ones(1 << 21), LiveBytes()
    with live:
        assert float(square_sum(flat)) == 1 << 21
    assert live.peak_bytes + weights._OWN.scratch[torch.float64].nbytes < flat.nbytes / 8


def row_by_row(flat: torch.Tensor) -> float:
    """The sum of squares as it is defined: each row's by itself, then their sum."""
    rows = [torch.linalg.vector_norm(row, 2, dtype=torch.float64).square() for row in flat.split(SQUARED_ELEMENTS)]
    return float(torch.stack(rows).sum())


@pytest.mark.covering(1)
@pytest.mark.parametrize("rest", [0, 1, 77_777])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7])
def test_squares_have_the_same_bits_with_any_number_of_threads(num_rows: int, rest: int) -> None:
    """An embedding of 622M parameters was squared by one thread, for 2.4 s at the end of every step."""
    generator = torch.Generator().manual_seed(rest)
    flat = torch.randn(max(1, num_rows * SQUARED_ELEMENTS + rest), generator=generator)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 6):
            torch.set_num_threads(count)
            assert float(square_sum(flat)).hex() == row_by_row(flat).hex()
    finally:
        torch.set_num_threads(threads)


SHAPES = [(5,), (30, 50), (3, 20, 7), (2, 3, 4, 50)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_turned", [False, True])
def test_additions_in_parts_are_torchs(
    shape: tuple[int, ...], dtype: torch.dtype, is_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are cut between rows, and within them where a row is larger than a part."""
    generator = torch.Generator().manual_seed(0)
    total, gradient = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator).to(dtype)
    if is_turned:
        gradient = gradient.permute(*reversed(range(len(shape)))).contiguous().permute(*reversed(range(len(shape))))
    expected = total + gradient
    for size in (1, 60, 1 << 18):
        monkeypatch.setattr(gradients, "ADDED_ELEMENTS", size)
        found = total.clone()
        add_to(found, gradient)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["squares", "addition", "update in bfloat16"])
def test_host_arithmetic_takes_no_fresh_pages(name: str) -> None:
    """Temporaries with pages of their own, which the system clears, took most of the time of all three."""
    rule, flat = AdamW16(), torch.zeros(1 << 20)
    half = flat.bfloat16()
    moments = {moment: half.clone() for moment in ("exp_avg", "exp_avg_sq")}
    work: Callable[[], object] = {
        "squares": lambda: square_sum(flat),
        "addition": lambda: add_to(flat, half),
        "update in bfloat16": lambda: rule.update(flat, flat, moments, 1e-3, number=1, salt=0),
    }[name]
    faults = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        work()
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    assert min(faults[1:]) < 100, "it would take 1,024 pages and more"
