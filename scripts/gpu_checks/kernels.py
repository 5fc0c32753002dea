"""One block of five families, forward and backward: time by kind of kernel, and which attention kernel really ran."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from roundpipe_cli.engine.backends.turns import IssueTurns
from roundpipe_cli.kernels.capability import takes_triton, why_no_triton
from roundpipe_cli.model.expert_lora import use_grouped_kernel
from roundpipe_cli.model.worker_model import WorkerModel
from scripts import issue_rate
from scripts.gpu_checks.models import FAMILIES, build, of_scale, random_rows
from scripts.gpu_checks.place import Check, CheckPlace, Figures, check

TOKENS = {"tiny": 16, "full": 2048}
KINDS = (
    ("attention", ("flash", "fmha", "attention", "cutlassF", "cutlassB", "cudnn_generated_fort_native_sdpa")),
    ("product", ("gemm", "nvjet", "xmma", "cutlass", "::mm", "::bmm", "::addmm", "grouped_")),
    ("copy", ("memcpy", "memset", "copy", "CatArray", "::cat", "contiguous")),
    ("reduction", ("reduce", "softmax", "norm", "::sum", "::mean", "sort", "scan", "topk")),
    ("elementwise", ("elementwise", "vectorized", "::mul", "::add", "::silu", "::neg", "triton")),
)
"""Kind of a kernel, and parts of names that tell; the first that fits counts."""


def checks(place: CheckPlace) -> Iterator[Check]:
    for name in FAMILIES:
        for method in ("lora", "full") if name == "qwen3" else ("lora",):
            for kernels in ("auto", "reference") if name == "qwen3" else ("auto",):
                yield check(f"{name}, {method}, {kernels}", one_block, place, name, method, kernels, limit_s=180.0)

    yield check("float16 products by the width of their sums", accumulation, place)
    yield check("launches a second of threads at will and in turns", issuing, place)


def issuing(place: CheckPlace) -> Figures:
    """What the host gives to one GPU in all, by the number of threads."""
    seconds = 0.1 if place.is_simulated else 2.0
    figures: Figures = {}
    with place.devices():
        made = [issue_rate.on_processor("qwen3", "lora", f"cuda:{place.first}") for _ in range(8)]
        for passes in made:
            issue_rate.issue(passes, seconds / 10, None)
        launches = issue_rate.num_launches(made[0])
        for count in (1, 2, 4, 8):
            for way, turns in (("at will", None), ("in turns", IssueTurns())):
                rate, _ = issue_rate.by_threads(made[:count], seconds, turns)
                figures[f"{count} {way}"] = rate * launches
    return figures


def accumulation(place: CheckPlace) -> Figures:
    """Rate and worst error of one product of float16 that adds up in 32 and in 16 bits."""
    size, rounds = (64, 1) if place.scale == "tiny" else (4096, 20)
    figures: Figures = {}
    with place.devices():
        a, b = (torch.randn(size, size, dtype=torch.float16, device=torch.device("cuda", place.first)) for _ in "ab")
        exact = a.double() @ b.double()
        for is_narrow in (False, True):
            torch.backends.cuda.matmul.allow_fp16_accumulation = is_narrow
            error = float((torch.mm(a, b).double() - exact).abs().max() / exact.abs().max())
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            for _ in range(rounds):
                torch.mm(a, b)
            torch.cuda.synchronize()
            tflops = 2 * size**3 * rounds / (time.perf_counter() - start_s) / 1e12
            figures["16 bit" if is_narrow else "32 bit"] = {"error": error, "tflops": tflops}
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    return figures


def kind_of(kernel: str) -> str:
    """What a kernel, or on the processor an operator, does."""
    found = (kind for kind, parts in KINDS if any(part.lower() in kernel.lower() for part in parts))
    return next(found, "other")


def one_block(place: CheckPlace, model_type: str, method: str, kernels: str) -> Figures:
    """Profile the second of a few passes through the first block."""
    model = build(of_scale(place, model_type, num_hidden_layers=2), method)
    tokens = TOKENS[place.scale]
    ids = random_rows(1, tokens, model.figures["vocab_size"])[0].input_ids
    with place.devices():
        device = torch.device("cuda", place.first)
        fused = model.fused if kernels == "auto" else None
        worker = WorkerModel(
            model.skeleton, model.split, model.store.views, model.store.trainable_names, device=device, fused=fused
        )
        capability = torch.cuda.get_device_capability(device)
        ours = kernels == "auto" and why_no_triton() is None
        use_grouped_kernel(worker.blocks, partial(takes_triton, [capability], allowed=ours))
        host = model.store.layouts[1]
        worker.bind(1, {
            one.name: nn.Parameter(model.store.views[one.name].to(device), one.name in model.store.trainable_names)
            for one in host.places
        })  # fmt: skip
        prologue = worker.prologue(ids)
        call = prologue.calls[0].map_tensors(lambda tensor: tensor.to(device))
        hidden = prologue.hidden.detach().to(device)

        def run() -> None:
            output = worker.run_block(0, call, hidden.clone().requires_grad_())
            output.backward(torch.ones_like(output))
            torch.cuda.synchronize()

        run()
        activities = [ProfilerActivity.CPU] if place.is_simulated else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities) as profiler:
            run()
    return by_kind(profiler, is_real=not place.is_simulated)


def by_kind(profiler: Any, *, is_real: bool) -> Figures:
    """Launches and microseconds by kind; on the processor, of operators."""
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    attention: Counter[str] = Counter()
    for event in profiler.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device != is_real or (not is_real and not event.name.startswith("aten::")):
            continue
        kind, taken = kind_of(event.name), event.device_time if is_real else event.self_cpu_time_total
        counts[kind] += 1
        times[kind] += taken
        if kind == "attention":
            attention[event.name[:120]] += 1
    assert attention, "no attention kernel was seen"
    return {"launches": dict(counts), "microseconds": dict(times), "attention": dict(attention)}
