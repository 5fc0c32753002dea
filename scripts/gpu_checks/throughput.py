"""Tokens per second: streamed, cached and resident weights, beside loops that a user would write."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import socket
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.schedule.program import WEIGHTS
from roundpipe_cli.schedule.timeline import UP
from scripts.gpu_checks.place import Check, CheckPlace, Figures, SkippedCheckError, check
from scripts.gpu_checks.ways import Trial, engine_steps, make_trial, plain_copy, plain_seconds
from tests.support.emulated import covered_s

LIMIT_S = 240.0
PUBLISHED = "roundpipe"
"""Name of the published package."""


def checks(place: CheckPlace) -> Iterator[Check]:
    if place.trace:
        yield check("trace of a step", traced, place, limit_s=LIMIT_S)
    if place.is_quick:
        make = functools.partial(make_trial, place, "lora")
        yield check(f"lora, streamed, on {len(place.indices)}", engine, place, make, "streamed", limit_s=LIMIT_S)
        return
    for method in ("lora", "full"):
        trial = functools.cache(functools.partial(make_trial, place, method))
        for way in ("streamed", "cached", "resident") if method == "lora" else ("streamed", "cached"):
            yield check(f"{method}, {way}", engine, place, trial, way, limit_s=LIMIT_S)
        for way in ("all-resident loop", "FSDP2 with CPU offload"):
            yield check(f"{method}, {way}", loop, place, trial, way, limit_s=LIMIT_S)
    yield check("published package", published, place)


def engine(place: CheckPlace, make: Any, way: str) -> Figures:
    """Median step of the engine, without updates."""
    trial: Trial = make()
    with place.devices():
        results = engine_steps(place, trial, way)
    step_s = statistics.median(result.step_s for result in results)
    last = results[-1]
    uploads = [link for link in last.links if link.lane == UP and link.microbatch < 0]
    moving_s = sum(
        covered_s([(link.start_s, link.end_s) for link in uploads if link.worker == worker])
        for worker in range(last.num_workers)
    )
    return {
        "tokens_per_s": trial.num_tokens / step_s,
        "step_s": step_s,
        "idle": statistics.median(result.bubble_ratio for result in results),
        "peak_bytes": max(results[-1].device_peak_bytes),
        "weights_up_bytes": last.moved_bytes[UP, WEIGHTS],
        "up_bytes_per_s": last.upload_bytes / moving_s if moving_s else 0.0,
        "loss": results[-1].loss,
    }


def traced(place: CheckPlace) -> Figures:
    """A step of the engine in torch's profiler, written as a file that ui.perfetto.dev shows."""
    from torch.profiler import ProfilerActivity, profile

    trial = make_trial(place, "lora")
    activities = [ProfilerActivity.CPU] if place.is_simulated else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with place.devices(), profile(activities=activities) as profiler:
        engine_steps(place, trial, "streamed", count=1)
    profiler.export_chrome_trace(place.trace)
    return {"trace": place.trace, "bytes": Path(place.trace).stat().st_size}


def loop(place: CheckPlace, make: Any, way: str) -> Figures:
    """The same forward and backward in a loop without an engine."""
    trial: Trial = make()
    device = torch.device("cpu") if place.is_simulated else torch.device("cuda", place.first)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if way == "all-resident loop":
        seconds = plain_seconds(plain_copy(trial.model, device), trial.microbatches, device, place.scale)
    else:
        with process_group(device):
            plain = offloaded(plain_copy(trial.model, "cpu"), trial, device)
            seconds = plain_seconds(plain, trial.microbatches, device, place.scale)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"tokens_per_s": trial.num_tokens / seconds, "step_s": seconds, "peak_bytes": peak}


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """One process of one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def offloaded(plain: nn.Module, trial: Trial, device: torch.device) -> nn.Module:
    """The model under FSDP2, each block a unit, weights and gradients in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = torch.distributed.init_device_mesh(device.type, (1,))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if device.type == "cuda":
        options["offload_policy"] = CPUOffloadPolicy()
    for block in plain.get_submodule(trial.model.split.blocks_path).children():
        fully_shard(block, **options)
    fully_shard(plain, **options)
    return plain


def published(place: CheckPlace) -> Figures:
    """The published package, where somebody has installed it."""
    if importlib.util.find_spec(PUBLISHED) is None:
        raise SkippedCheckError(f"the published package ({PUBLISHED}) is not installed")
    raise SkippedCheckError(f"{PUBLISHED} is installed; nothing here drives it yet")
