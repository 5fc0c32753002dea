"""One model through the engine in several ways, and through plain loops; seconds a step and bytes at the peak."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.costs.hardware import Device, Hardware, catalogue, gpu_device
from roundpipe_cli.costs.machine import this_machine
from roundpipe_cli.costs.memory import with_cached_weights
from roundpipe_cli.costs.models import parse_config
from roundpipe_cli.costs.nvidia_smi import visible_gpus
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.planning.compare import SimulationCase, StageCut
from roundpipe_cli.planning.partition import plan_partition
from roundpipe_cli.planning.resident import DEALING, resident_cut
from roundpipe_cli.schedule.builders import Options, Rounds, build_schedule
from roundpipe_cli.train.prepare.devices import make_backends
from scripts.gpu_checks.models import SPEED_MODEL, BuiltModel, build, random_rows, shipped, tiny
from scripts.gpu_checks.place import WATCHDOG_S, CheckPlace

EVERYTHING = 1 << 62
"""Bytes of a weight cache that holds any model."""
WARM_UP = 2
NUM_STEPS = {"tiny": 1, "full": 5}
TOKENS = {"tiny": 16, "full": 2048}
MANY_TOKENS = {"tiny": 32, "full": 8192}
MICROBATCHES = 8


@dataclass(frozen=True)
class Trial:
    """A model, its microbatches and what the planner knows of both."""

    model: BuiltModel
    microbatches: list[Microbatch]
    method: str
    hardware: Hardware
    costs: CostModel

    @property
    def num_tokens(self) -> int:
        return sum(one.input_ids.numel() for one in self.microbatches)


def make_trial(place: CheckPlace, method: str, tokens: int = 0) -> Trial:
    """The model of the speed checks, for one worker; `tokens` of a microbatch, 0: as the scale says."""
    figures = speed_figures(place)
    tokens = tokens or TOKENS[place.scale]
    architecture = parse_config(figures, name=SPEED_MODEL, source="gpu_check")
    count = max(MICROBATCHES, 2 * len(place.indices)) if place.is_quick else MICROBATCHES
    settings = TrainingSettings(tokens, num_microbatches=count, method=method, lora_r=16)  # type: ignore[arg-type]
    hardware = machine_of(place)
    rows = random_rows(count, tokens, figures["vocab_size"])
    model = build(figures, method)
    return Trial(model, rows, method, hardware, analytic_costs(architecture, settings, hardware))


def speed_figures(place: CheckPlace) -> dict[str, Any]:
    return shipped(SPEED_MODEL) if place.scale == "full" else tiny("llama")


def machine_of(place: CheckPlace) -> Hardware:
    """The GPU's figures as `plan` takes them; a 4090's where the card is simulated."""
    gpus, notes = visible_gpus()
    device: Device = gpus[place.first] if gpus else gpu_device("rtx-4090", catalogue()["rtx-4090"])
    return this_machine((device,), device.name, notes, Path())


def cut_of(trial: Trial, cache_bytes: int, num_workers: int = 1) -> StageCut:
    """Stages of so many workers, as the planner cuts them."""
    costs = trial.costs
    if cache_bytes:
        costs = with_cached_weights(costs, cache_bytes, 2)
    return plan_partition(SimulationCase(costs, num_workers, len(trial.microbatches)))


def engine_steps(place: CheckPlace, trial: Trial, way: str, count: int | None = None) -> list[StepResult]:
    """Steps of `streamed`, `cached` or `resident`, those that warm up left out. Devices are there already.

    Args:
        count: of the steps that are left; None: by the place's scale.
    """
    cache = 0 if way == "streamed" else EVERYTHING
    indices = place.indices if place.is_quick else (place.first,)
    num_workers, dealing = len(indices), Options()
    cut: Any = cut_of(trial, cache, num_workers)
    if way == "resident":  # each microbatch on one worker, nothing recomputed that fits
        indices, dealing = place.indices, DEALING
        num_workers = len(indices)
        cut = resident_cut(with_cached_weights(trial.costs, EVERYTHING, 2), num_workers, lambda found: True)
        assert cut is not None
    schedule = build_schedule(
        "roundpipe",
        forward_stages=cut.forward_stages,
        backward_stages=cut.backward_stages,
        num_workers=num_workers,
        rounds=Rounds(len(trial.microbatches), per_round=cut.microbatches_per_round, options=dealing),
        costs=trial.costs,
    )
    backends = make_backends([f"cuda:{index}" for index in indices], 1)
    model, options = (
        trial.model,
        EngineOptions(weight_cache_bytes=cache, watchdog_s=WATCHDOG_S, fused=trial.model.fused),
    )
    buffers = model.store.transferred
    cuda.release_workspaces()
    try:
        for buffer in buffers:
            assert cuda.register_host_buffer(buffer, place.first), "page-locked memory is refused"
        with Engine(model.skeleton, model.split, model.store, backends, options=options) as engine:
            total = WARM_UP + (count or NUM_STEPS[place.scale])
            return [engine.run_step(trial.microbatches, schedule, step=0) for _ in range(total)][WARM_UP:]
    finally:
        for buffer in buffers:
            cuda.unregister_host_buffer(buffer)


def plain_copy(model: BuiltModel, device: torch.device | str, *, checkpoints: bool = True) -> nn.Module:
    """An ordinary module with the same weights on one device, with gradient checkpointing or without."""
    plain = copy.deepcopy(model.skeleton)
    names = {id(parameter): name for name, parameter in plain.named_parameters()}
    real: dict[str, nn.Parameter] = {}
    for module in plain.modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is not None:
                name = names[id(parameter)]
                if name not in real:
                    values = model.store.views[name].detach().clone().to(device)
                    real[name] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                module._parameters[attribute] = real[name]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    plain.train()
    if checkpoints:
        plain.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return plain


def plain_seconds(
    plain: nn.Module, rows: Sequence[Microbatch], device: torch.device | str, scale: str, *, updates: bool = False
) -> float:
    """Median seconds of forward and backward of all microbatches, and of an update by torch's fused AdamW.

    Args:
        updates: without one, as in the engine's steps, unless this is true.
    """
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True) if updates else None

    def step() -> None:
        for microbatch in rows:
            ids = microbatch.input_ids.to(device)
            logits = plain(input_ids=ids, use_cache=False).logits
            nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
        if optimizer is not None:
            optimizer.step()
        for parameter in trained:
            parameter.grad = None

    return median_s(step, device, WARM_UP, NUM_STEPS[scale])


def median_s(step: Callable[[], object], device: torch.device | str, warm_up: int, count: int) -> float:
    taken = []
    for _ in range(warm_up + count):
        start_s = time.perf_counter()
        step()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken[warm_up:])
