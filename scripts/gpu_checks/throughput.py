"""Tokens per second: streamed, cached and resident weights, beside loops that a user would write."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.schedule.program import WEIGHTS
from roundpipe_cli.schedule.timeline import UP
from roundpipe_cli.train.measure import STEPS, step_s_of_run, write_run
from scripts.gpu_checks.models import configuration
from scripts.gpu_checks.place import Check, CheckPlace, Figures, SkippedCheckError, check, require
from scripts.gpu_checks.ways import (
    MANY_TOKENS,
    MICROBATCHES,
    TOKENS,
    Trial,
    engine_steps,
    make_trial,
    plain_copy,
    plain_seconds,
    speed_figures,
)
from tests.support.emulated import covered_s

LIMIT_S = 240.0
LOOPS = (
    *("all-resident loop", "all-resident loop with updates", "all-resident loop without checkpointing"),
    *("compiled loop without checkpointing", "FSDP2 with CPU offload"),
)
PUBLISHED = "roundpipe"
"""Name of the published package."""


def checks(place: CheckPlace) -> Iterator[Check]:
    if place.is_quick:
        make = functools.partial(make_trial, place, "lora")
        yield check(f"lora, streamed, on {len(place.indices)}", engine, place, make, "streamed", limit_s=LIMIT_S)
        return
    for method in ("lora", "full"):
        trial = functools.cache(functools.partial(make_trial, place, method))
        yield check(f"trace, {method}", traced, place, method, limit_s=LIMIT_S)
        ways = ("streamed", "cached", "resident") if method == "lora" else ("streamed", "cached")
        for way in ways:
            yield check(f"{method}, {way}", engine, place, trial, way, limit_s=LIMIT_S)
        for way in LOOPS:
            yield check(f"{method}, {way}", loop, place, trial, way, limit_s=LIMIT_S)
        tokens = MANY_TOKENS[place.scale]
        longer = functools.cache(functools.partial(make_trial, place, method, tokens))
        for way in (*ways, LOOPS[0]):
            function = loop if way in LOOPS else engine
            yield check(f"{method}, {way}, {tokens} tokens", function, place, longer, way, limit_s=LIMIT_S)
        for way in ("finetune", "TRL's trainer"):
            yield check(f"{method}, {way}, with updates", whole_run, place, method, way, limit_s=LIMIT_S)
    yield check("published package", published, place)


def whole_run(place: CheckPlace, method: str, way: str) -> Figures:
    """Wall time of a step, updates included, of a run as a user starts it, from a model's files."""
    if way == "TRL's trainer":
        require("trl")
    tokens, rows = TOKENS[place.scale], MICROBATCHES
    dtype = "bfloat16" if place.scale == "full" else "float32"
    devices = [f"cuda:{index}" for index in place.indices]
    keys = {"rows": rows, "tokens": tokens, "method": method, "pipeline": {"devices": devices}}
    with tempfile.TemporaryDirectory() as folder, place.devices():
        loaded = write_run(Path(folder), configuration(speed_figures(place)), dtype, **keys)
        step_s = step_s_of_run(loaded) if way == "finetune" else trainer_step_s(Path(folder), place, method, dtype)
    return {"tokens_per_s": rows * tokens / step_s, "step_s": step_s, "peak_bytes": 0}


def trainer_step_s(folder: Path, place: CheckPlace, method: str, dtype: str) -> float:
    """Median time of the steps of TRL's trainer, with its own defaults apart from rows, tokens and method."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    ends: list[float] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            if not place.is_simulated:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    tokens, is_cpu = TOKENS[place.scale], place.is_simulated
    arguments = SFTConfig(
        output_dir=str(folder / "trl"), max_steps=1 + STEPS, per_device_train_batch_size=1, max_length=tokens,
        gradient_accumulation_steps=MICROBATCHES, report_to=[], save_strategy="no", use_cpu=is_cpu,
        bf16=dtype == "bfloat16", model_init_kwargs={"dtype": dtype}, disable_tqdm=True,
    )  # fmt: skip
    lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = Dataset.from_list([{"text": "one word " * tokens}] * 16 * MICROBATCHES)
    config = lora if method == "lora" else None
    SFTTrainer(str(folder / "model"), arguments, train_dataset=rows, peft_config=config, callbacks=[Ends()]).train()
    return statistics.median(end - start for start, end in itertools.pairwise(ends))


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


def traced(place: CheckPlace, method: str) -> Figures:
    """A step of the engine in torch's profiler, written as a file that ui.perfetto.dev shows."""
    from torch.profiler import ProfilerActivity, profile

    trial, path = make_trial(place, method), place.trace.replace(".json", f".{method}.json")
    activities = [ProfilerActivity.CPU] if place.is_simulated else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with place.devices(), profile(activities=activities) as profiler:
        engine_steps(place, trial, "streamed", count=1)
    profiler.export_chrome_trace(path)
    return {"trace": Path(path).name, "bytes": Path(path).stat().st_size}


def loop(place: CheckPlace, make: Any, way: str) -> Figures:
    """The same forward and backward in a loop without an engine."""
    trial: Trial = make()
    device = torch.device("cpu") if place.is_simulated else torch.device("cuda", place.first)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if way in LOOPS[:-1]:
        plain = plain_copy(trial.model, device, checkpoints=way in (LOOPS[0], LOOPS[1]))
        plain = torch.compile(plain) if way == LOOPS[3] else plain
        seconds = plain_seconds(plain, trial.microbatches, device, place.scale, updates=way == LOOPS[1])
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
