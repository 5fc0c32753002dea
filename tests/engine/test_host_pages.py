"""Host buffers: where they lie, what is asked of the system, what `doctor` tells; and arithmetic on gradient sums."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli import heap as heap_module
from roundpipe_cli.cli import checks
from roundpipe_cli.costs import machine
from roundpipe_cli.costs.machine import NODES, SWITCH, HostLayout, host_layout
from roundpipe_cli.engine import gradients, host_memory
from roundpipe_cli.engine.backends.cpu import LiveBytes
from roundpipe_cli.engine.gradients import SQUARED_ELEMENTS, StepGradients, add_rows, add_to, square_sum
from roundpipe_cli.engine.host_memory import mapped_buffers
from roundpipe_cli.errors import InternalError, RefusedError
from roundpipe_cli.events import Event
from roundpipe_cli.heap import UnusedHeap
from roundpipe_cli.model.block_calls import Prologue
from roundpipe_cli.planning import choose, run_plan
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.question import ask
from roundpipe_cli.planning.run_plan import check_fits
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe
from roundpipe_cli.train.optim.optimizer import AdamW, AdamW16, HostOptimizer
from roundpipe_cli.train.prepare import setup
from roundpipe_cli.train.prepare.proof import Proof
from tests.support.e2e import STAGES, finetune, make_model, make_workspace, numbers
from tests.support.simulated_cases import roundpipe
from tests.support.tiny import make_rig, random_microbatches


def fake_system(folder: Path, memory: str | None, huge: str | None, online: str = "0") -> Path:
    (folder / NODES).mkdir(parents=True)
    (folder / NODES / "online").write_text(online + "\n")
    if memory is not None:
        (folder / NODES / "has_memory").write_text(memory + "\n")
    if huge is not None:
        (folder / SWITCH).parent.mkdir(parents=True)
        (folder / SWITCH).write_text(huge + "\n")
    return folder


@pytest.mark.parametrize(
    ("memory", "huge", "expected", "gives"),
    [
        ("0-1", "always [madvise] never", HostLayout((0, 1), "madvise"), True),
        ("0,2-3", "always madvise [never]", HostLayout((0, 2, 3), "never"), False),
        (None, None, HostLayout((0,), None), False),
        ("", "garbage", HostLayout((0,), None), False),
        ("0-x", "[always]", HostLayout((), "always"), True),
    ],
)
def test_what_the_system_says(memory: Any, huge: Any, expected: HostLayout, gives: bool, tmp_path: Path) -> None:
    found = host_layout(fake_system(tmp_path, memory, huge))
    assert (found, found.gives_huge_pages) == (expected, gives)
    assert host_layout(tmp_path / "nowhere") == HostLayout((), None)


def test_large_buffers_ask_and_small_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []
    monkeypatch.setattr(host_memory, "layout", lambda: HostLayout((0, 1), "madvise"))
    monkeypatch.setattr(host_memory, "interleave", lambda address, size, nodes: asked.append((size, nodes)))
    large, small = host_memory.page_aligned(host_memory.LEAST_BYTES + 5), host_memory.page_aligned(4096)
    assert asked == [(host_memory.LEAST_BYTES + 5, (0, 1))]
    assert large.nbytes == host_memory.LEAST_BYTES + 5 and not large.any() and not small.any()
    assert large.data_ptr() % mmap.PAGESIZE == 0 and host_memory.page_aligned(0).nbytes == 0


SMAPS = Path("/proc/self/smaps")
needs_smaps = pytest.mark.skipif(not SMAPS.exists(), reason="the system does not tell what lies where")


def mapping_at(address: int) -> dict[str, str]:
    """What `/proc/self/smaps` says of this process' memory at `address`; empty where it has none."""
    for block in re.split(r"\n(?=[0-9a-f]+-)", SMAPS.read_text()):
        head, *lines = block.splitlines()
        begin, end = (int(border, 16) for border in head.split()[0].split("-"))
        if begin <= address < end:
            found = dict(line.split(":", 1) for line in lines)
            return {**found, "rights": head.split()[1], "name": head.split()[-1]}
    return {}


@needs_smaps
@pytest.mark.skipif(not host_layout().gives_huge_pages, reason="the system has no pages of 2 MiB")
def test_buffers_are_private_and_get_large_pages() -> None:
    """They were shared, and an ordinary system gives no pages of 2 MiB to shared memory."""
    rig = make_rig("llama", "full", dtype=torch.bfloat16, vocab_size=32_768, num_hidden_layers=1)
    moments = HostOptimizer(rig.store, AdamW()).moments_of(0)
    large = [rig.store.masters[0], rig.store.gradients[0], rig.store.buffers[0], moments[0][1]]
    for tensor in large:
        assert tensor.nbytes >= 2 * host_memory.LEAST_BYTES
        tensor.view(torch.uint8).fill_(1)
        found = mapping_at(tensor.data_ptr())
        assert found["rights"].endswith("p") and {"hg", "dc"} <= set(found["VmFlags"].split())
        assert int(found["AnonHugePages"].split()[0]) >= 2048


@needs_smaps
def test_a_forked_child_takes_no_pages_away() -> None:
    """A child would share a private page until its parent, not the child, is given a copy on the next write."""
    tensor = host_memory.page_aligned(host_memory.LEAST_BYTES)
    tensor.fill_(1)
    child = os.fork()
    if child == 0:
        os._exit(bool(mapping_at(tensor.data_ptr())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and mapping_at(tensor.data_ptr())


@pytest.mark.skipif(0 not in host_layout().nodes, reason="the system does not tell its nodes")
def test_the_system_takes_the_call_and_refuses_nodes_that_are_not_there() -> None:
    buffer = mmap.mmap(-1, host_memory.LEAST_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    if not host_memory.interleave(address, len(buffer), (0,)):
        pytest.skip("this container may not place memory")
    assert not host_memory.interleave(address, len(buffer), (63,))
    torch.frombuffer(buffer, dtype=torch.uint8).fill_(1)


def test_other_machines_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert not host_memory.interleave(0, 4096, (0, 1))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (HostLayout((0, 1), "madvise"), {"memory nodes": "good", "large pages": "good"}),
        (HostLayout((0,), "never"), {"large pages": "note"}),
        (HostLayout((), None), {}),
    ],
)
def test_doctor_says_what_it_is(layout: HostLayout, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_layout", lambda: layout)
    found = list(checks._host_layout())
    assert {check.name: check.state for check in found} == expected
    assert all(check.fix and "echo madvise" in check.fix for check in found if check.state == "note")


HEAP_PROGRAM = """
import ctypes, threading, torch
from roundpipe_cli.heap import UnusedHeap, settle_heap

settle_heap()
for _ in range(3): place = torch.empty(25_000_000, dtype=torch.uint8)
heaps = [line.split()[0].split("-") for line in open("/proc/self/maps") if "[heap]" in line]
print(any(int(low, 16) <= place.data_ptr() < int(high, 16) for low, high in heaps))

libc, gate = ctypes.CDLL(None), threading.Barrier(5)
libc.malloc.restype = ctypes.c_void_p; libc.free.argtypes = [ctypes.c_void_p]
def work(): libc.malloc(ctypes.c_size_t(50_000)); gate.wait()
for _ in range(4): threading.Thread(target=work).start()
gate.wait(); libc.malloc_stats()

def kib(): return next(int(line.split()[1]) for line in open("/proc/self/status") if "RssAnon" in line)
held = [libc.malloc(ctypes.c_size_t(50_000)) for _ in range(2000)]
for place in held: ctypes.memset(place, 1, 50_000)
for place in held[:-1]: libc.free(place)
before = kib(); UnusedHeap().give_back(); print(before - kib())
"""
"""Prints whether a large tensor lies in the heap, and how much was given back of a heap that is not used. The C library
itself counts the heaps of four threads that all hold memory."""


def heap_of(**changes: str) -> tuple[int, bool, bool]:
    """KiB given back, whether large tensors are in the heap, whether threads share one, as the user has set things."""
    environment = {key: text for key, text in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    environment |= changes
    words = [sys.executable, "-c", HEAP_PROGRAM]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    in_heap, given_back = done.stdout.split()
    return int(given_back), in_heap == "True", done.stderr.count("Arena ") == 1


SET_BY_THE_USER = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=8", "MALLOC_MMAP_THRESHOLD_": "33554432"}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_threads_share_one_heap_and_large_tensors_lie_outside_it_unless_the_user_says_otherwise() -> None:
    """glibc itself raises the limit to 32 MB once such a tensor was freed."""
    given_back_kib, *where = heap_of()
    assert where == [False, True] and given_back_kib > 80_000
    assert heap_of(**SET_BY_THE_USER)[1:] == (True, False)


NEW_PAGES = """
import resource, sys, numpy
from roundpipe_cli.heap import keep_heap

if sys.argv[1:]: keep_heap()
def work(): one, two = numpy.ones(400_000), numpy.ones(400_000); return one + two
for _ in range(3): work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_process_that_plans_keeps_the_pages_of_its_temporaries() -> None:
    words = [sys.executable, "-c", NEW_PAGES]
    usual, kept = (int(subprocess.run([*words, *more], capture_output=True, check=True).stdout) for more in ([], ["-"]))
    assert kept < 500 < usual


def test_unused_heap_is_given_back_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trims = [0.0], []
    monkeypatch.setattr(heap_module.time, "monotonic", lambda: now[0])
    heap = UnusedHeap()

    def trim(pad: object) -> int:
        trims.append(now[0])
        now[0] += 0.01
        return 1

    monkeypatch.setattr(heap, "_trim", trim)
    while now[0] < 5:
        heap.give_back()
        now[0] += 0.1
    assert 4 <= len(trims) <= 6


# -- gradient sums between steps --------------------------------------------------------------------------------------
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
    flat, live = torch.ones(1 << 21), LiveBytes()
    with live:
        assert float(square_sum(flat)) == 1 << 21
    assert live.peak_bytes < flat.nbytes / 64


@pytest.mark.parametrize(("num_rows", "rest"), [(0, 0), (0, 1), (1, 777), (40_000, 5)])
def test_squares_have_the_same_bits_with_any_number_of_threads(num_rows: int, rest: int) -> None:
    """One thread squared an embedding of 622M parameters, for 2.4 s a step. Up to more rows than torch sums by one."""
    generator = torch.Generator().manual_seed(rest)
    flat = torch.randn(num_rows * SQUARED_ELEMENTS + rest, generator=generator) * 1e-4
    threads, found = torch.get_num_threads(), set[str]()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(float(square_sum(flat)).hex())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    exact = float(torch.linalg.vector_norm(flat, dtype=torch.float64).square())
    assert float.fromhex(found.pop()) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("shape", [(5,), (30, 50), (3, 20, 7), (2, 3, 4, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_turned", [False, True])
def test_additions_in_parts_are_torchs(
    shape: tuple[int, ...], dtype: torch.dtype, is_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 37])
def test_rows_are_added_as_torch_adds_them(num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "ADDED_ELEMENTS", 50)
    generator = torch.Generator().manual_seed(0)
    total, rows = torch.randn(90, 20, generator=generator), torch.randperm(90, generator=generator)[:num_rows]
    gradient = torch.randn(num_rows, 20, generator=generator).to(dtype)
    expected = total.index_add(0, rows, gradient.float())
    add_rows(total, rows, gradient)
    assert torch.equal(total, expected)


def test_a_step_lasts_until_its_gradients_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the sums of the embedding and the norm of a tied table, 0.4 s a step, were in no step's time."""
    rig, ends = make_rig("llama", tie_word_embeddings=True), list[float]()
    finish = StepGradients.finish

    def timed(*arguments: Any) -> list[float]:
        squares = finish(*arguments)
        ends.append(time.perf_counter())
        return squares

    monkeypatch.setattr(StepGradients, "finish", timed)
    with rig.engine(2) as engine:
        result = engine.run_step(random_microbatches([(1, 5), (2, 4)]), roundpipe(rig, 2), step=0)
    assert result.started_s + result.step_s >= ends[0]


def test_an_error_in_the_embeddings_backward_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed in a thread of its own, whose error would be lost."""

    def failing(*_: object) -> None:
        raise ValueError("planted")

    rig = make_rig("llama")
    monkeypatch.setattr(Prologue, "backward", failing)
    with rig.engine(2) as engine, pytest.raises(InternalError, match="the embedding's backward failed.*planted"):
        engine.run_step(random_microbatches([(1, 5), (2, 4)]), roundpipe(rig, 2), step=0)


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


# -- weights mapped from a file: the same bits, nothing left behind, a plan that counts disk in place of memory -------
def test_a_run_on_mapped_weights_gives_the_same_numbers(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "w", make_model(tmp_path / "model"), max_steps=2, **STAGES)
    finetune(folder).expect(0)
    mapped = finetune(folder, "weights=mmap", "output_dir=mapped").expect(0)
    assert "are mapped from a file in mapped" in mapped.err + mapped.out
    assert numbers(folder / "out") == numbers(folder / "mapped")
    assert {path.name for path in (folder / "out").iterdir()} == {path.name for path in (folder / "mapped").iterdir()}
    with pytest.raises(RefusedError, match="weights") as refused:
        load_recipe(folder / "recipe.yaml", ["weights=mmap", "method=full"])
    assert "weights=mmap" in str(refused.value) and "method: full" in str(refused.value)


def test_buffers_are_separate_aligned_and_on_no_named_file(tmp_path: Path) -> None:
    buffers = mapped_buffers(tmp_path, [5000, 0, 4096, 1])
    assert [len(buffer) for buffer in buffers] == [5000, 0, 4096, 1]
    for value, buffer in enumerate(buffers):
        buffer.fill_(value + 1)
        assert buffer.numel() == 0 or buffer.data_ptr() % 4096 == 0
    assert all(torch.equal(buffer, torch.full_like(buffer, value + 1)) for value, buffer in enumerate(buffers))
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError):
        mapped_buffers(tmp_path / "missing", [1])


def load(folder: Path, *overrides: str) -> LoadedRecipe:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    recipe = folder / "recipe.yaml"
    recipe.write_text("model: Qwen/Qwen3-32B\ndatasets: [{path: rows.jsonl}]\n")
    return load_recipe(recipe, [f"output_dir={folder / 'out'}", *overrides])


def test_the_plan_maps_weights_where_host_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # even cuts: which are best is not asked here
    machine = "2x4090,host_memory_gib="
    enough, short = make_plan(load(tmp_path), machine + "128"), make_plan(load(tmp_path), machine + "32")
    assert enough.verdict.fits and short.verdict.fits
    assert not enough.question.settings.weights_on_disk and short.question.settings.weights_on_disk
    assert short.verdict.host.total_bytes < 20e9 and short.verdict.disk.total_bytes > 60e9
    assert short.step_s > 3 * enough.step_s, "the disk is the link"
    assert any("mapped from disk and read anew" in line for line in short.assumptions)
    assert any("at 1 GB/s (`--hardware ...,disk_gb_per_s=` corrects it)" in line for line in short.assumptions)
    fast = make_plan(load(tmp_path), machine + "32,disk_gb_per_s=7")
    assert any("at 7 GB/s" in line for line in fast.assumptions)
    assert short.step_s / 8 < fast.step_s < short.step_s / 2, "and the step by about as much shorter"
    pinned = make_plan(load(tmp_path, "weights=pageable"), machine + "32")
    assert not pinned.verdict.fits and "host memory" in pinned.verdict.reasons[0]
    asked = ask(load(tmp_path, "weights=mmap"), machine + "128")
    assert any("stay in memory" in note for note in asked.hardware.notes)
    assert asked.costs.link_bytes_per_s == ask(load(tmp_path), machine + "128").costs.link_bytes_per_s


def test_a_run_maps_weights_where_its_plan_does_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or where other programs have the room, though the weights alone had room in memory."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 8192}
    folder = make_workspace(tmp_path / "w", make_model(tmp_path / "model", **sizes))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(setup, "prove_once", lambda *_: Proof(0.0, 0.0))
    monkeypatch.setattr(machine.host_memory, "__defaults__", (Path("/proc"), tmp_path))
    loaded, told, used = load_recipe("recipe.yaml"), list[Event](), 1 << 26
    monkeypatch.setattr(run_plan, "process_bytes", lambda: used)  # this process' own changes in between
    needed = judge_coarsest(ask(loaded)).host.total_bytes
    for more, others, is_mapped in ((256, 0, False), (-64, 0, True), (1024, 1024 + 64, True)):
        (tmp_path / "memory.max").write_text(str(int((needed + (more << 20)) / 0.95)))
        (tmp_path / "memory.current").write_text(str(used + (others << 20)))
        assert setup.prepare(loaded, offline=True, tell=told.append).store.is_mapped == is_mapped
        assert any("the run has no room" in str(event) for event in told) == is_mapped


def test_full_fine_tuning_is_never_mapped(tmp_path: Path) -> None:
    answer = make_plan(load(tmp_path, "method=full"), "2x4090,host_memory_gib=64")
    assert not answer.verdict.fits and not answer.question.settings.weights_on_disk
    check_fits(ask(load(tmp_path, "model=HuggingFaceTB/SmolLM2-135M-Instruct", "pipeline.devices=[cpu]"), here=True))
