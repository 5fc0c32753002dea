"""Every feature of the engine on GPUs against the same steps on the processor; `finetune` and its resume."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.cuda_process import set_up_process
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.errors import OutOfDeviceMemoryError
from roundpipe_cli.model.attention import has_flash, try_other_ends
from roundpipe_cli.schedule.actions import Schedule
from scripts.gpu_checks.place import WATCHDOG_S, Check, CheckPlace, Figures, check, require, skip_unless_real
from tests.support.simulated_cases import CASES, MORE_SIZES, Bits, Case, is_equal, narrow_sums, page_locked
from tests.support.tiny import Rig, random_microbatches, schedule_for

EXACT, ROUNDED, SIMULATED = 1e-3, 6e-2, 1e-5
"""Relative differences that are allowed: on a real card of float32, and of 16 bit or packed weights; of simulated
cards, whose substitute for flash attention adds up in another order."""
ROUNDED_CASES = ("float16", "bfloat16", "4-bit", "8-bit", "fp8")
OOM_FRACTION = 1e-5
"""Of a card's memory: no slot fits."""
QUICK_CASES = ("lora", "full", "bfloat16", "dropout", "packing-by-rows", "expert-adapters", "cache-whole")
MORE_CASES = {
    "20 lengths": Case("llama", "lora", microbatches=random_microbatches([(1, 2 + n) for n in range(20)])),
    "sliding-windows": Case("gemma3_text", "lora", microbatches=random_microbatches([(1, 19), (2, 11), (1, 6)])),
    "sinks-and-windows": Case("gpt_oss", "lora", microbatches=random_microbatches([(1, 19), (2, 11)])),
    "biases": Case("gpt2", "full", {"n_layer": 2}, microbatches=random_microbatches(MORE_SIZES)),
}


def checks(place: CheckPlace) -> Iterator[Check]:
    for kind in ("packed",) if place.is_quick else ("whole", "packed", "experts"):  # before cuBLAS reads its variable
        yield check(f"deterministic, {kind}", same_bits, place, kind)
    yield check("chunks without a mask", chunks_without_mask, place)
    cases = {name: CASES[name] for name in QUICK_CASES} if place.is_quick else {**CASES, **MORE_CASES}
    for name in cases:
        for devices in place.pairs if name in ("lora", "full") else place.pairs[-1:]:
            yield check(f"{name} on {list(devices)}", same_as_processor, place, name, cases[name], devices)
    if place.is_quick:
        return
    yield check("out of memory, then with less", less_memory, place)
    for change in ("finetune", "resume", "packing", "micro_batch_tokens", "on_oom: adapt", "float16_accumulation"):
        yield check(change, finetune, place, change)
    yield check("tests/engine/test_cuda.py", tests_for_gpus, place, limit_s=300.0)


def same_as_processor(place: CheckPlace, name: str, case: Case, devices: Sequence[int]) -> Figures:
    """Loss, gradient norm and all gradients of the case's steps."""
    if case.model.get("packed_as") in ("4bit", "8bit"):
        require("bitsandbytes")
    case = replace(case, engine={"watchdog_s": WATCHDOG_S, **case.engine})
    expected, rig = case.on_processor(), case.rig()
    if len(devices) != len(case.devices):
        case = replace(case, schedule=partial(on_workers, len(devices)))
    with place.devices(), page_locked(rig), narrow_sums(case.float16_accumulation):
        found = case.on(rig, [cuda.CudaBackend(index) for index in devices])
    error = worst_difference(found, expected)
    limit = ROUNDED if name in ROUNDED_CASES or case.bound else EXACT
    limit = max(case.bound, SIMULATED) if place.is_simulated else limit
    assert error <= limit, f"{error:.1e} off the processor's, at most {limit:.0e} is allowed"
    return {"error": error, "same_bits": is_equal(found, expected)}


def same_bits(place: CheckPlace, kind: str) -> Figures:
    """`deterministic: true` in 16 bit: a step twice, and with one worker."""
    length, attends = 1500 if place.scale == "full" else 12, {"attends_in_rows": True} if kind == "packed" else {}
    microbatches = random_microbatches([(1, length), (1, length - 5)])
    if kind == "packed":
        starts = [torch.cat([torch.arange(5), torch.arange(one.input_ids.shape[1] - 5)])[None] for one in microbatches]
        microbatches = [replace(one, position_ids=ids) for one, ids in zip(microbatches, starts, strict=True)]
    model = "qwen3_moe" if kind == "experts" else "llama"
    case = Case(model, "full", {"dtype": torch.bfloat16}, microbatches=microbatches, engine=attends)
    found = []
    try:
        for devices in (place.pairs[-1], place.pairs[-1], (place.first,)):
            rig = case.rig()
            one = replace(case, schedule=partial(on_workers, len(devices)))
            with place.devices(), page_locked(rig):
                set_up_process(place.pairs[-1], deterministic=True)
                found.append(one.on(rig, [cuda.CudaBackend(index) for index in devices]))
    finally:
        torch.use_deterministic_algorithms(False)
    errors = [worst_difference(one, found[0]) for one in found[1:]]
    assert all(is_equal(one, found[0]) for one in found[1:]), f"again and with one worker: {errors} off"
    return {"errors": errors}


def chunks_without_mask(place: CheckPlace) -> Figures:
    """Variable-length attention as a chunk behind others needs it; two packed rows in chunks by it, in 16 bit."""
    with place.devices():
        set_up_process(place.pairs[-1])
        has_kernel, notice = has_flash(torch.bfloat16), try_other_ends(f"cuda:{one}" for one in place.pairs[-1])
    assert not has_kernel or notice is None, notice
    base = CASES["packed-chunks"]
    case = replace(base, method="full", model={**base.model, "dtype": torch.bfloat16}, bound=ROUNDED)
    return {"notice": notice, **same_as_processor(place, "packed-chunks", case, place.pairs[-1])}


def on_workers(count: int, rig: Rig, num_microbatches: int) -> Schedule:
    return schedule_for(rig, count, num_microbatches)


def worst_difference(found: Bits, expected: Bits) -> float:
    """Largest relative difference of two runs' results, of tensors in the 2-norm; infinite where one is missing."""
    if len(found) != len(expected):
        return float("inf")
    pairs = zip(map(numbers, found), map(numbers, expected), strict=True)
    return max((difference(one, other) for one, other in pairs), default=0.0)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape or not bool(one.isfinite().all()):
        return float("inf")
    size = float((one - other).norm())
    return size / max(float(other.norm()), 1e-6) if size else 0.0


def numbers(value: object) -> torch.Tensor:
    """A result as float64: of a tensor, a number, or the numbers in a text."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().double()
    texts = re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?|nan|inf", str(value))
    return torch.tensor([float(text) for text in texts], dtype=torch.float64)


def less_memory(place: CheckPlace) -> Figures:
    """`on_oom: adapt` in the engine: a step that no slot fits is refused, and runs when there is room again."""
    case = CASES["full"]
    rig, expected = case.rig(), case.on_processor()
    schedule = case.schedule(rig, len(case.microbatches))
    options = EngineOptions(seed=3, head_chunk_tokens=8, watchdog_s=WATCHDOG_S, fused=rig.fused)
    with place.devices(), page_locked(rig):
        backends = [cuda.CudaBackend(place.first), cuda.CudaBackend(place.first)]
        with Engine(rig.skeleton, rig.split, rig.store, backends, options=options) as engine:
            backends[0].release_unused()
            torch.cuda.set_per_process_memory_fraction(OOM_FRACTION, place.first)
            try:
                engine.run_step(case.microbatches, schedule, step=0)
                raise AssertionError("a step that cannot fit was not refused")
            except OutOfDeviceMemoryError as error:
                words = str(error)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0, place.first)
            engine.use_less_memory()
            result = engine.run_step(case.microbatches, schedule, step=0)
    error_now = worst_difference([result.loss, result.gradient_norm], expected[:2])
    assert error_now <= EXACT, error_now
    return {"refused": words[:200], "error": error_now}


def finetune(place: CheckPlace, change: str) -> Figures:
    """Whole runs in this process, on the processor and on GPUs: losses of all steps."""
    require("omegaconf")
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.train.finetune import run_finetune
    from roundpipe_cli.train.signals import Reporting, Start, StopSignals
    from tests.support.e2e import make_model, make_workspace, metrics

    def run(folder: Path, resume: bool, *words: str) -> list[float]:
        out = folder / "out"
        loaded = load_recipe(str(folder / "recipe.yaml"), [f"output_dir={out}", *words])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's, when it saves
            run_finetune(loaded, Start(resume=resume, offline=True), Reporting(lambda event: None), StopSignals())
        return [row["loss"] for row in metrics(out)]

    losses = []
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model", num_hidden_layers=2)
        for kind in ("cpu", "cuda"):
            devices = ["cpu", "cpu"] if kind == "cpu" else [f"cuda:{index}" for index in place.pairs[-1]]
            changes = changes_of(change, devices)
            folder = make_workspace(Path(name) / kind, model, **changes)
            if kind == "cpu":
                with place.processor():
                    losses.append(run(folder, False))
                continue
            with place.devices():
                if change == "resume":
                    run(folder, False, "max_steps=2")
                losses.append(run(folder, change == "resume"))
    pair = [torch.tensor(one, dtype=torch.float64) for one in losses]
    error = difference(pair[1], pair[0])
    limit = 0.0 if place.is_simulated else ROUNDED if change == "float16_accumulation" else EXACT
    assert error <= limit, f"losses {losses[1]}, on the processor {losses[0]}"
    return {"steps": len(losses[0]), "error": error, "losses": losses[1], "losses_on_processor": losses[0]}


def changes_of(change: str, devices: list[str]) -> dict[str, Any]:
    """What a recipe says besides."""
    own: dict[str, Any] = {"pipeline": {"devices": devices, "threads_per_worker": 1}, "watchdog_s": WATCHDOG_S}
    if change == "packing":
        own["packing"] = True
    if change == "micro_batch_tokens":  # steps differ in the number of their microbatches
        own |= {"micro_batch_tokens": 128, "micro_batch_size": 1, "gradient_accumulation_steps": 8}
    if change == "float16_accumulation":  # which the processor does not have: it shows the loss without
        own |= {"dtype": "float16", "float16_accumulation": True}
    if change == "on_oom: adapt":
        own["on_oom"] = "adapt"
    return own


def tests_for_gpus(place: CheckPlace) -> Figures:
    """The suite's tests that only a GPU can run: each stream made slow in turn, reused staging, `generate`."""
    skip_unless_real(place, "a pytest process")
    require("pytest")
    words = ["-m", "pytest", "-W", "default", "--tb=short", "-q", "-rs", "tests/engine/test_cuda.py"]
    changed = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a borrowed machine's plugins are not ours
    done = subprocess.run([sys.executable, *words], env=changed, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return {"last_line": done.stdout.strip().splitlines()[-1]}
