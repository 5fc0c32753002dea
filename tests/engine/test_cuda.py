"""The CUDA backend against plain PyTorch and against itself. Needs a GPU; skipped, visibly, without one.

`scripts/gpu_checks/correctness.py` compares every feature with the processor, and a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.base import DeviceEvent, Pair
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.model.attention import sink_attention
from roundpipe_cli.planning.resident import resident_cut
from roundpipe_cli.schedule.actions import equal_costs
from roundpipe_cli.schedule.builders import Options
from tests.support.e2e import fresh, make_model, make_workspace
from tests.support.schedules import dealt
from tests.support.simulated_cases import page_locked
from tests.support.tiny import Rig, make_rig, random_microbatches, schedule_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.num_devices() == 0, reason="no CUDA device here: run scripts/gpu_check where there is one"),
]


def run(rig: Rig, devices: Sequence[int], sizes: Any, make: type[cuda.CudaBackend] = cuda.CudaBackend) -> StepResult:
    with page_locked(rig), Engine(rig.skeleton, rig.split, rig.store, [make(index) for index in devices]) as engine:
        schedule = schedule_for(rig, len(devices), len(sizes))
        return engine.run_step(random_microbatches(sizes), schedule, step=0)


def assert_gradients_alike(rig: Rig, usual: Rig) -> None:
    for name in usual.store.trainable_names:
        assert torch.allclose(rig.store.gradient(name), usual.store.gradient(name), rtol=1e-4, atol=1e-6), name


def late_in(late: str) -> type[cuda.CudaBackend]:
    """A backend of which one stream is slow."""

    def sleep(stream: str) -> None:
        if stream == late:
            torch.cuda._sleep(2_000_000)  # cycles: a millisecond

    class Late(cuda.CudaBackend):
        def copy_up(self, pairs: Sequence[Pair]) -> DeviceEvent:
            with torch.cuda.stream(self._up):
                sleep("up")
            return super().copy_up(pairs)

        def copy_down(self, pairs: Sequence[Pair]) -> DeviceEvent:
            with torch.cuda.stream(self._down):
                sleep("down")
            return super().copy_down(pairs)

        def compute(self) -> AbstractContextManager[None]:
            sleep("compute")
            return nullcontext()

    return Late


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("devices", [[0], [0, 0]])
@pytest.mark.parametrize("late", ["up", "down", "compute"])
def test_one_stream_behind_the_others_changes_nothing(late: str, devices: list[int], method: str) -> None:
    """What reads before it may, and what is written over before it was read, shows where its stream is made slow."""
    sizes = [(2, 12), (2, 12), (1, 7), (2, 9)]
    rigs = [make_rig("llama", method) for _ in range(2)]
    usual, slow = run(rigs[0], devices, sizes), run(rigs[1], devices, sizes, late_in(late))
    assert slow.loss == pytest.approx(usual.loss, rel=1e-6)
    assert_gradients_alike(rigs[1], rigs[0])


@pytest.mark.parametrize("late", ["none", "up", "down", "compute"])
@pytest.mark.parametrize("kept", [1, 4])
def test_microbatches_that_stay_on_one_worker(late: str, kept: int) -> None:
    sizes = [(2, 12), (2, 12), (1, 7), (2, 9)]
    rigs = [make_rig("llama", "lora") for _ in range(2)]
    usual = run(rigs[0], [0], sizes)
    rig = rigs[1]
    least = max(0, rig.num_layers - 1 - kept)
    found = resident_cut(equal_costs(rig.num_layers), 2, lambda cut: cut.backward_stages[0][0] >= least)
    assert found is not None
    options = found.dealing or Options()
    schedule = dealt(found.forward_stages, found.backward_stages, 2, len(sizes), options=options)
    backends = [late_in(late)(0) for _ in range(2)]
    options = EngineOptions(weight_cache_bytes=10**9)
    with page_locked(rig), Engine(rig.skeleton, rig.split, rig.store, backends, options=options) as engine:
        for step in range(3):
            result = engine.run_step(random_microbatches(sizes), schedule, step=step)
            assert result.loss == pytest.approx(usual.loss, rel=1e-6)
            assert_gradients_alike(rig, rigs[0])
        engine.grant_weight_cache(0)
        assert engine.run_step(random_microbatches(sizes), schedule, step=3).loss == result.loss


def test_many_steps_through_reused_staging_give_one_loss() -> None:
    """Page-locked boundaries are used again and again, by two workers at once: a copy that is overtaken would show."""
    rig = make_rig("llama", "lora", num_hidden_layers=8, hidden_size=512, intermediate_size=1024)
    sizes = [(2, 64)] * 8
    with Engine(rig.skeleton, rig.split, rig.store, [cuda.CudaBackend(0), cuda.CudaBackend(0)]) as engine:
        schedule = schedule_for(rig, 2, len(sizes))
        losses = [engine.run_step(random_microbatches(sizes), schedule, step=0).loss for _ in range(20)]
    assert losses == pytest.approx([losses[0]] * 20, rel=1e-6)


def test_copies_keep_their_order() -> None:
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
    backend.synchronize()


def test_generate_answers_on_the_gpu_as_on_the_processor(tmp_path: Path) -> None:
    """The same tokens in float32; it always answered on the processor."""
    folder = make_workspace(tmp_path / "work", make_model(tmp_path / "model"))
    fresh(folder, "finetune", "recipe.yaml", "--offline", "--no-dashboard", "pipeline.devices=[cpu]").expect(0)
    words = ("generate", "out", "Say x1: ", "--max-new-tokens", "12", "--dtype", "float32", "--offline")
    done = fresh(folder, *words).expect(0)
    assert "on cuda:0 in float32" in done.err
    alone = fresh(folder, *words, environment={"CUDA_VISIBLE_DEVICES": ""}).expect(0)
    assert "on the processor" in alone.err and alone.out == done.out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_sinks_goes_through_a_kernel_that_keeps_no_scores(dtype: torch.dtype) -> None:
    heads, length, place = 32, 2048, torch.device("cuda:0")
    query, key, value = (torch.randn(1, n, length, 64, device=place, dtype=dtype) for n in (heads, 8, 8))
    mask = torch.ones(length, length, dtype=torch.bool, device=place).tril()[None, None]
    sinks = torch.randn(heads, device=place, dtype=dtype)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, sinks)]
    torch.cuda.reset_peak_memory_stats(place)
    before = torch.cuda.memory_allocated(place)
    made, _ = sink_attention(torch.nn.Module(), query, key, value, mask, 0.0, 0.125, s_aux=sinks)
    made.backward(torch.ones_like(made))
    taken = torch.cuda.max_memory_allocated(place) - before
    assert taken < heads * length**2 * dtype.itemsize, "scores of all heads"
    assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in leaves)
