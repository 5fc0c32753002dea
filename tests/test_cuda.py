"""The CUDA backend against plain PyTorch and against itself. Needs a GPU; skipped, visibly, without one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.step import StepResult
from tests.tiny import Rig, make_rig, plain_step, random_microbatches, schedule_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.num_devices() == 0, reason="no CUDA device here: run scripts/gpu_check where there is one"),
]


def run(rig: Rig, devices: Sequence[int], sizes: Sequence[tuple[int, int]]) -> StepResult:
    backends = [cuda.CudaBackend(index) for index in devices]
    with Engine(rig.skeleton, rig.split, rig.store, backends) as engine:
        schedule = schedule_for(rig, len(devices), len(sizes))
        return engine.run_step(random_microbatches(sizes), schedule, step=0)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def test_step_agrees_with_plain_pytorch(model_type: str, method: str) -> None:
    """Loss and gradient norm of a float32 step, GPU against the plain loop on the processor."""
    rig = make_rig(model_type, method)
    sizes = [(2, 12), (2, 12), (1, 7)]
    result = run(rig, [0], sizes)
    loss = plain_step(rig, random_microbatches(sizes))
    assert result.loss == pytest.approx(loss, rel=1e-5)
    norm = torch.stack([p.grad.double().norm() for p in rig.plain.parameters() if p.grad is not None]).norm()
    assert result.gradient_norm == pytest.approx(float(norm), rel=1e-3)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_workers_on_one_gpu_give_the_loss_of_one(method: str) -> None:
    """`[cuda:0, cuda:0]` exercises the paths of several devices."""
    sizes = [(2, 12), (2, 12), (1, 7), (2, 9)]
    one = run(make_rig("llama", method), [0], sizes)
    two = run(make_rig("llama", method), [0, 0], sizes)
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    assert two.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-5)


@pytest.mark.parametrize("devices", [[0], [0, 0]])
def test_weight_cache_and_kept_activations_change_nothing(devices: list[int]) -> None:
    sizes = [(2, 12), (2, 12), (1, 7), (2, 9)]
    plain = run(make_rig("llama", "lora"), devices, sizes)
    rig = make_rig("llama", "lora")
    options = {"weight_cache_bytes": 10**9, "keep_blocks": 2}
    with Engine(rig.skeleton, rig.split, rig.store, [cuda.CudaBackend(i) for i in devices], **options) as engine:
        schedule = schedule_for(rig, len(devices), len(sizes))
        results = [engine.run_step(random_microbatches(sizes), schedule, step=0) for _ in range(3)]
    for result in results:
        assert result.loss == pytest.approx(plain.loss, rel=1e-6)
        assert result.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-5)
    assert results[2].upload_bytes < results[0].upload_bytes < plain.upload_bytes


def test_many_steps_through_reused_staging_give_one_loss() -> None:
    """Page-locked boundaries are used again and again, by two workers at once: a copy that is overtaken would show."""
    rig = make_rig("llama", "lora", num_hidden_layers=8, hidden_size=512, intermediate_size=1024)
    sizes = [(2, 64)] * 8
    with Engine(rig.skeleton, rig.split, rig.store, [cuda.CudaBackend(0), cuda.CudaBackend(0)]) as engine:
        schedule = schedule_for(rig, 2, len(sizes))
        losses = [engine.run_step(random_microbatches(sizes), schedule, step=0).loss for _ in range(20)]
    assert losses == pytest.approx([losses[0]] * 20, rel=1e-6)


def test_copies_keep_their_order() -> None:
    """A tensor goes up, is changed behind its event and comes down again, while its host memory is already reused."""
    backend = cuda.CudaBackend(0)
    host = backend.host_like(torch.zeros(2**22, device="cuda:0"))
    assert host.is_pinned()
    with backend.worker_thread():
        for value in range(20):
            host.fill_(float(value))
            device = backend.device_like(host)
            arrived = backend.copy_up([(device, host)])
            backend.wait(arrived)
            result = device * 2
            made = backend.record()
            while backend.happens_in_s(arrived) > 0:
                pass
            host.fill_(-1.0)  # it has been read
            backend._down.wait_event(made)
            back = backend.host_like(result)
            backend.copy_down([(back, result)]).synchronize()
            assert back.unique().tolist() == [2.0 * value]
            backend.give_back(back)
    backend.synchronize()


def test_uploads_are_counted_and_memory_is_bounded() -> None:
    """Weights stream through slots: the device never holds the model."""
    rig = make_rig("llama", "lora", num_hidden_layers=24, hidden_size=512, intermediate_size=2048)
    result = run(rig, [0], [(1, 16)] * 4)
    model_bytes = sum(layout.num_bytes for layout in rig.store.layouts)
    assert result.upload_bytes > model_bytes
    assert result.device_peak_bytes[0] < model_bytes / 2
