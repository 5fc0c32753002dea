"""What the CUDA backend says and does of devices, their memory and page-locked memory, on simulated cards."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from roundpipe_cli.costs.machine import HostMemory
from roundpipe_cli.costs.memory import ALLOCATOR_VARIABLES, PINNED_RING_BYTES
from roundpipe_cli.engine import gradients, link_speed
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.base import is_device_error, is_out_of_memory
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.backends.cuda_process import WORKSPACE, counts
from roundpipe_cli.engine.engine import Engine, launch_bound_s
from roundpipe_cli.engine.live import ComputeInterval, WorkerStep
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.attention import has_flash
from roundpipe_cli.recipe.load import load_text
from roundpipe_cli.train import page_locks
from roundpipe_cli.train.prepare import devices
from roundpipe_cli.train.prepare.devices import choose_devices, make_backends, with_dtype_of
from roundpipe_cli.train.result import generate
from tests.support.e2e import make_tokenizer
from tests.support.simulated_cases import CASES, Bits, backends_of, engine_of, is_equal, page_locked, simulated
from tests.support.simulated_cuda import GIB, SMALL_CARD, Card
from tests.support.tiny import Rig, make_rig

MIB = 1024**2
FULL = replace(CASES["full"], num_steps=1)


@pytest.fixture(scope="module")
def expected() -> Bits:
    return FULL.on_processor()


def step(engine: Engine, rig: Rig, expected: Bits) -> StepResult:
    """One of `FULL`, with the processor's bits."""
    result = engine.run_step(FULL.microbatches, FULL.schedule(rig, len(FULL.microbatches)), step=0)
    assert is_equal([result.loss, result.gradient_norm, *rig.store.gradients], expected[:-1])
    return result


def test_what_is_said_of_a_card() -> None:
    with simulated(cards=[Card(total_bytes=64 * MIB), SMALL_CARD]):
        assert cuda.num_devices() == 2 and choose_devices("auto") == (("cuda:0", "cuda:1"), None)
        assert choose_devices(["cuda:1", "cuda:1"]) == (("cuda:1", "cuda:1"), None)
        with pytest.raises(RefusedError, match="no such device") as missing:
            choose_devices(["cuda:2"])
        assert missing.value.problems[0].expected == "cpu or one of cuda:0, cuda:1"
        with pytest.raises(RefusedError, match="cannot work in one pool"):
            choose_devices(["cpu", "cuda:0"])
        assert cuda.describe_device(1) == "Simulated 75, 4 GiB" and cuda.uuid(1) == "GPU-0000-24"
        kept = cuda.CudaBackend(0).allocate(30 * MIB)
        assert cuda.memory_use(0) == (kept.nbytes, 64 * MIB) and cuda.memory_bytes(0) == 34 * MIB
        assert cuda.memory_use(1)[0] == 0
        cuda.release_workspaces()
    assert cuda.num_devices() == 0
    with simulated(cards=[]):
        assert choose_devices("auto")[0] == ("cpu", "cpu")


def test_a_card_of_another_maker_has_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives AMD's numbers in the same place, where they would choose NVIDIA's kernels and attention."""
    with simulated(cards=[Card("Simulated gfx1030", capability=(10, 3))]):
        ours = cuda.CudaBackend(0).capability
        make_backends(["cuda:0"], 1)
        assert has_flash(torch.bfloat16)
        monkeypatch.setattr(torch.version, "hip", "6.3")
        assert ours is not None and cuda.CudaBackend(0).capability is None
        make_backends(["cuda:0"], 1)
        assert not has_flash(torch.bfloat16)


def test_memory_is_counted_and_given_back() -> None:
    with simulated():
        backend = cuda.CudaBackend(1)
        backend.reset_peak()
        held = backend.allocate(5 * MIB)
        del held
        assert backend.peak_bytes == 5 * MIB and cuda.memory_use(1)[0] > 0
        assert backend.peak_reserved_bytes == cuda.memory_use(1)[0] > backend.peak_bytes
        backend.release_unused()
        assert cuda.memory_use(1)[0] == 0
        backend.reset_peak()
        assert backend.peak_bytes == backend.peak_reserved_bytes == 0


@pytest.mark.parametrize(
    ("dtype", "names", "becomes"),
    [
        ("bfloat16", ("cuda:0", "cuda:1"), "float16"),
        ("bfloat16", ("cuda:0", "cuda:0"), "bfloat16"),
        ("float32", ("cuda:1",), "float32"),
        ("bfloat16", ("cpu", "cpu"), "bfloat16"),
    ],
)
def test_a_card_without_bfloat16_trains_in_float16(dtype: str, names: tuple[str, ...], becomes: str) -> None:
    """`plan` said float16 while the run emulated bfloat16, many times slower."""
    recipe = load_text(f"model: m\ndatasets: [{{path: rows.jsonl}}]\ndtype: {dtype}\n", "r.yaml").recipe
    with simulated():
        found, notice = with_dtype_of(recipe, names)
    assert found == replace(recipe, dtype=becomes)
    assert (notice is None) == (dtype == becomes) and ("cuda:1 (Simulated 75" in (notice or "")) == (dtype != becomes)


@pytest.mark.parametrize(
    ("card", "variable", "grows"),
    [
        (Card(), None, True),
        (Card(), "PYTORCH_CUDA_ALLOC_CONF", False),
        (Card(), "PYTORCH_ALLOC_CONF", False),
        (Card(maps_memory=False), None, False),
        (Card(total_bytes=0), None, True),
    ],
)
def test_changes_of_torch(card: Card, variable: str | None, grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that grow, no plans of cuDNN, narrow sums of float16 where a recipe says so."""
    before_s = sys.getswitchinterval()
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:128")
    with simulated(cards=[card]) as simulation:
        with pytest.raises(torch.OutOfMemoryError) if not card.total_bytes else contextlib.nullcontext():
            for narrow in (True, False):
                made = make_backends(["cuda:0", "cuda:0"], 1, float16_accumulation=narrow)
                assert torch.backends.cuda.matmul.allow_fp16_accumulation is narrow
            assert not torch.backends.cuda.cudnn_sdp_enabled() and made[0].allocate(5).nbytes == 5
        assert simulation.machine.grows_segments is grows
    assert sys.getswitchinterval() < 1e-3
    sys.setswitchinterval(before_s)
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(("found", "becomes"), [(None, ":4096:8"), (":16:8", ":16:8"), (":0:0", ":4096:8")])
def test_torch_adds_up_in_order_only_where_a_recipe_says_so(
    found: str | None, becomes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention and packed rows ask torch's switch; torch refuses products without cuBLAS' workspace."""
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    if found is not None:
        monkeypatch.setenv(WORKSPACE, found)
    with simulated():
        make_backends(["cuda:0"], 1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled(), "flash attention then only warns"
        assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::histc", "CUDA")
        assert not torch.utils.deterministic.fill_uninitialized_memory and os.environ[WORKSPACE] == becomes
        make_backends(["cuda:0"], 1)
        assert not torch.are_deterministic_algorithms_enabled()


def test_experts_tokens_are_counted_as_torch_counts_them() -> None:
    chosen = torch.tensor([[0, 3], [3, 7], [8, 1]], dtype=torch.int32)  # 8: of no expert
    found = counts(chosen, bins=8, min=0, max=7)
    assert found.dtype == torch.int32 and torch.equal(found.float(), torch.histc(chosen.float(), 8, 0, 7))
    with pytest.raises(RuntimeError, match="no deterministic implementation"):
        counts(chosen.float(), bins=8, min=0, max=7)


def test_page_locked_memory_refused() -> None:
    """The driver's error stays behind, and would come up in the next kernel that starts."""
    with simulated(max_locked_bytes=4096) as simulation:
        fits, large, nothing = torch.zeros(4096, dtype=torch.uint8), torch.zeros(1), torch.zeros(0)
        assert cuda.register_host_buffer(fits, 0) and cuda.register_host_buffer(nothing, 0)
        assert len(simulation.machine.registered) == 1
        assert not cuda.register_host_buffer(large, 0)
        assert torch.ones(2, device="cuda:0").add_(1).tolist() == [2, 2]
        cuda.unregister_host_buffer(fits)
        cuda.unregister_host_buffer(nothing)
        assert cuda.register_host_buffer(large, 0)
        cuda.unregister_host_buffer(large)


def test_page_locked_memory_refused_for_transfers(expected: Bits) -> None:
    """What a run asked for beside its weights ended it: now ordinary memory does, said once, with the same bits."""
    rig = FULL.rig()
    room = sum(buffer.nbytes for buffer in rig.store.transferred)
    with simulated(max_locked_bytes=room), page_locked(rig), engine_of(rig, backends_of((0, 1))) as engine:
        first, again = step(engine, rig, expected), step(engine, rig, expected)
    assert again.loss == first.loss
    assert [text for text in first.notices if "page-lock" in text] == list(first.notices) and len(first.notices) == 1
    assert not again.notices


@pytest.mark.parametrize("on_wsl", [False, True])
def test_weights_leave_page_locked_memory_to_boundaries(
    on_wsl: bool, expected: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On WSL2 weights took all that may be locked: cards waited for each copy. The rest goes through a locked ring."""
    assert cuda.NUM_RING_PIECES * cuda.RING_PIECE_BYTES == PINNED_RING_BYTES, "what plan counts"
    monkeypatch.setattr(page_locks, "LOCKED_FOR_BOUNDARIES_BYTES", 32 * 1024)
    monkeypatch.setattr(cuda, "RING_PIECE_BYTES", 512)
    monkeypatch.setattr("platform.release", lambda: "6.6.87-microsoft-standard-WSL2" if on_wsl else "6.8.0")
    rig, said = FULL.rig(), list[str]()
    room = sum(buffer.nbytes for buffer in rig.store.transferred) - 1
    with simulated(max_locked_bytes=room, lazy=on_wsl) as simulation, engine_of(rig, backends_of((0, 1))) as engine:
        with page_locks.PageLocks(rig.store, ["cuda:0"], "auto", lambda event: said.append(str(event))):
            locked = sum(end - first for first, end in simulation.machine.registered)
            result = step(engine, rig, expected)
        assert not simulation.machine.registered
        assert not [waited for waited in simulation.machine.host_waits if "pageable" in waited[1]]
    assert 0 < locked <= room - 32 * 1024 and not result.notices and len(said) == 1
    assert ("WSL2 lets a process page-lock 0.5 to 2 GiB" in said[0]) == on_wsl


def test_updates_leave_a_core_for_each_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_cores", lambda: 4)
    asked = [("cpu", "cpu"), ("cuda:0",), ("cuda:0", "cuda:1"), ("cuda:0",) * 9]
    assert [devices.updater_threads(names) for names in asked] == [4, 3, 2, 1]


@pytest.mark.parametrize(("second", "is_ordered"), [((2, 3), True), ((1, 2), False)])
def test_threads_may_add_to_other_rows_of_one_table(second: tuple[int, int], is_ordered: bool) -> None:
    rows = [torch.tensor([0, 1]), torch.tensor(second)]
    outcome = contextlib.nullcontext() if is_ordered else pytest.raises(AssertionError, match="nothing orders")
    with outcome, simulated(), ThreadPoolExecutor(2) as pool:
        total, begun = torch.zeros(4, 2), list[int]()

        def add(some: torch.Tensor) -> None:
            begun.append(1)
            while len(begun) < 2:  # a lock would hand on what one thread has done
                time.sleep(0.001)
            gradients.add_rows(total, some, torch.ones(2, 2))

        list(pool.map(add, rows))


def test_squares_of_a_large_sum_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "SQUARED_ELEMENTS", 10)
    values = torch.arange(35, dtype=torch.float32)
    with simulated():
        found = float(gradients.square_sum(values.to("cuda:1")))
    assert found == pytest.approx(float(values.double().square().sum()), rel=1e-6)


def test_a_result_answers_on_the_card_with_most_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` stayed on the processor; a model without room still does, and says so."""
    model, said = make_rig("llama", "full", num_hidden_layers=1, vocab_size=20_000).plain.eval(), []
    ids = torch.arange(1, 6)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with simulated(cards=[Card(total_bytes=GIB // 2), Card(total_bytes=2 * GIB)]):
            moved = generate.move_to_gpu(model, said.append)
            assert str(moved.device) == "cuda:1" and not said
            assert generate.describe_answer(moved, make_tokenizer(), 0.0).startswith("on cuda:1 in float32: ")
            found = moved(input_ids=ids.to("cuda:1")).logits.cpu()
            model = moved.to("cpu")
        with simulated(cards=[Card(total_bytes=4 * MIB)]):
            for roomy in (generate.roomy_device, lambda model_bytes, free_bytes: 0):  # what was free is not any more
                monkeypatch.setattr(generate, "roomy_device", roomy)
                assert generate.move_to_gpu(model, said.append).device.type == "cpu"
                assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert torch.equal(found, expected) and all("no GPU has room" in text for text in said) and len(said) == 2


@pytest.mark.parametrize(
    ("is_slow", "free_gib", "dtype"), [(True, 8, "float32"), (True, 0, "bfloat16"), (False, 8, "bfloat16")]
)
def test_a_processor_that_is_slow_in_16_bit_answers_in_float32(
    is_slow: bool, free_gib: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without AVX-512 an answer took ten times as long; where memory is short it still does."""
    model = make_rig("llama", "full", num_hidden_layers=1).plain.eval().bfloat16()
    monkeypatch.setattr(generate, "slow_in_16_bit", lambda dtype: "slow" if is_slow and dtype == "bfloat16" else None)
    monkeypatch.setattr(generate, "host_memory", lambda: HostMemory(8 * GIB, free_gib * GIB, "the machine"))
    moved = generate.move_to_gpu(model, pytest.fail)
    assert {parameter.dtype for parameter in moved.parameters()} == {getattr(torch, dtype)}
    assert f"on the processor in {dtype}: " in generate.describe_answer(moved, make_tokenizer(), 0.0)


def test_the_speed_of_a_link_is_that_of_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((2.0, 4.0, 1.0))
    monkeypatch.setattr(link_speed, "_timed", lambda *_: next(seconds))
    (found,) = link_speed.measure_links([CpuBackend(1, copy=True)], 1000)
    assert found == link_speed.LinkSpeed(2000.0, 1000.0, 2000.0)


def test_time_in_which_the_host_was_late_is_counted_apart() -> None:
    """A GPU that is done as soon as its last launch comes may have waited: that was shown as arithmetic."""
    op: Any = None  # which one does not matter
    with simulated():
        backend = cuda.CudaBackend(0)
        started_s, start = time.perf_counter(), backend.mark()
        issued_early_s = time.perf_counter()
        time.sleep(0.02)
        end = backend.mark()
        issued_late_s = time.perf_counter()
        backend.synchronize()
        took_s = backend.seconds_between(start, end)
        for issued_s, expected_s in ((issued_early_s, 0.0), (issued_late_s, took_s)):
            step = WorkerStep(backend, [ComputeInterval(op, start, end, issued_s)], start, started_s)
            assert launch_bound_s(step) == expected_s and took_s > 0.01
            assert launch_bound_s(WorkerStep(CpuBackend(1))) == 0


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: an illegal memory access was encountered",
    ],
)
def test_out_of_memory_has_many_faces(text: str) -> None:
    """Page-locked memory, kernels loaded late and libraries report it in words of their own: `adapt` ignored those."""
    error, is_lost = RuntimeError(text), "illegal" in text
    assert (is_out_of_memory(error), is_device_error(error)) == (not is_lost, is_lost)
