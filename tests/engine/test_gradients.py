"""Gradient sums on the host between steps: who clears them, and when."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from roundpipe_cli.engine.gradients import SQUARED_ELEMENTS, square_sum
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


def test_the_norm_of_a_large_layer_needs_little_memory() -> None:
    """Story: its float64 copy, 224 MB for the head of a 135M model, was counted nowhere."""
    code = (
        "import resource, torch; from roundpipe_cli.engine.gradients import square_sum\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "flat = torch.ones(32_000_000); square_sum(flat[:1000]); before = peak()\n"
        "assert float(square_sum(flat)) == 32_000_000; print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 80_000, "KiB"
    flat = torch.randn(SQUARED_ELEMENTS + 5, generator=torch.Generator().manual_seed(0))
    assert float(square_sum(flat)) == pytest.approx(float(flat.double().square().sum()), rel=1e-12)
