"""What the CUDA backend says and does of devices, their memory and page-locked memory, on simulated cards."""

from __future__ import annotations

import pytest
import torch

from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.link_speed import measure_links
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.errors import InternalError, OutOfDeviceMemoryError
from roundpipe_cli.model.counter_random import keep_mask, uniform
from tests.support.simulated_cases import CASES, is_equal, page_locked, simulated
from tests.support.simulated_cuda import SMALL_CARD, Card

MIB = 1024**2


def test_what_is_said_of_a_card() -> None:
    with simulated(cards=[Card(total_bytes=64 * MIB), SMALL_CARD]):
        assert cuda.num_devices() == 2
        assert cuda.describe_device(1) == "Simulated 75, 4 GiB" and cuda.uuid(1) == "GPU-0000-24"
        kept = cuda.CudaBackend(0).allocate(30 * MIB)
        assert cuda.memory_use(0) == (kept.nbytes, 64 * MIB) and cuda.memory_bytes(0) == 34 * MIB
        assert cuda.memory_use(1)[0] == 0
        cuda.release_workspaces()
    assert cuda.num_devices() == 0


def test_memory_is_counted_and_given_back() -> None:
    with simulated():
        backend = cuda.CudaBackend(1)
        backend.reset_peak()
        held = backend.allocate(5 * MIB)
        del held
        assert backend.peak_bytes == 5 * MIB and cuda.memory_use(1)[0] > 0
        backend.release_unused()
        assert cuda.memory_use(1)[0] == 0
        backend.reset_peak()
        assert backend.peak_bytes == 0


def test_a_mark_has_passed_once_the_host_has_seen_it() -> None:
    cuda.release_workspaces()  # where there is no card
    with simulated():
        backend = cuda.CudaBackend(0)
        with backend.worker_thread():
            backend.wait(None)
            start = backend.mark()
            torch.ones(3, device="cuda").add_(1)
            end = backend.mark()
        with pytest.raises(RuntimeError, match="not ready"):
            backend.seconds_between(start, end)
        while not backend.has_passed(end):
            pass
        assert backend.seconds_between(start, end) >= 0


def test_page_locked_memory_refused() -> None:
    """The driver's error stays behind, and would come up in the next kernel that starts."""
    with simulated(max_locked_bytes=4096):
        fits, large, nothing = torch.zeros(4096, dtype=torch.uint8), torch.zeros(1), torch.zeros(0)
        assert cuda.register_host_buffer(fits, 0) and cuda.register_host_buffer(nothing, 0)
        assert not cuda.register_host_buffer(large, 0)
        assert torch.ones(2, device="cuda:0").add_(1).tolist() == [2, 2]
        cuda.unregister_host_buffer(fits)
        cuda.unregister_host_buffer(nothing)
        assert cuda.register_host_buffer(large, 0)
        cuda.unregister_host_buffer(large)


def test_links_are_measured() -> None:
    with simulated(lazy=True):
        speeds = measure_links([cuda.CudaBackend(0), cuda.CudaBackend(1)], 4096)
    assert all(speed.up_bytes_per_s > 0 and speed.down_bytes_per_s > 0 for speed in speeds)


@pytest.mark.parametrize("shape", [(3, 5), (70, 1000)])
def test_dropout_masks_are_equal_on_unlike_cards(shape: tuple[int, int]) -> None:
    """A generator of torch's deals its numbers to multiprocessors: a recompute on another card drew another mask."""
    drawn = []
    with simulated(cards=[Card(multi_processors=132), Card(multi_processors=24)]):
        counts = [torch.cuda.get_device_properties(index).multi_processor_count for index in range(2)]
        for index in range(2):
            place = torch.device("cuda", index)
            drawn.append((keep_mask(shape, 0.9, 7, place).cpu(), uniform(shape, 8, place).cpu()))
    host = torch.device("cpu")
    drawn.append((keep_mask(shape, 0.9, 7, host), uniform(shape, 8, host)))
    assert counts == [132, 24]
    for mask, numbers in drawn[1:]:
        assert torch.equal(mask, drawn[0][0]) and torch.equal(numbers, drawn[0][1])


def test_a_step_that_runs_out_of_memory_is_run_again_with_less() -> None:
    """`on_oom: adapt`: slots that do not fit are refused before anything runs; with room the bits are as usual."""
    case = CASES["full"]
    rig, expected = case.rig(), case.on_processor()
    schedule = case.schedule(rig, len(case.microbatches))
    with simulated(), page_locked(rig):
        backends = [cuda.CudaBackend(0), cuda.CudaBackend(1)]
        with Engine(rig.skeleton, rig.split, rig.store, backends, EngineOptions(seed=3, head_chunk_tokens=8)) as engine:
            torch.cuda.set_per_process_memory_fraction(1e-4, 1)
            with pytest.raises(OutOfDeviceMemoryError, match="cuda:1"):
                engine.run_step(case.microbatches, schedule, step=0)
            torch.cuda.set_per_process_memory_fraction(1.0, 1)
            engine.use_less_memory()
            result = engine.run_step(case.microbatches, schedule, step=0)
    found = [result.loss, result.gradient_norm, *rig.store.gradients_of(0)]
    assert is_equal(found, expected[: len(found)])


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: an illegal memory access was encountered",
    ],
)
def test_out_of_memory_has_many_faces(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory, kernels loaded late and libraries report it in words of their own: `adapt` ignored those."""
    case = CASES["full"]
    rig = case.rig()

    def refuse(backend: cuda.CudaBackend, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(text)

    monkeypatch.setattr(cuda.CudaBackend, "host_like", refuse)
    expected = InternalError if "illegal" in text else OutOfDeviceMemoryError
    with simulated(), page_locked(rig):
        backends = [cuda.CudaBackend(0), cuda.CudaBackend(1)]
        with pytest.raises(expected), Engine(rig.skeleton, rig.split, rig.store, backends) as engine:
            engine.run_step(case.microbatches, case.schedule(rig, len(case.microbatches)), step=0)
