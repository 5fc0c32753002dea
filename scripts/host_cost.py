"""What the engine costs the host per layer call and per layer upload: one table, in microseconds of processor time.

    python scripts/host_cost.py [--steps 32] [--hidden 64]

Tensors are tiny, so that only Python and dispatch count; a thread's processor time is taken, not the clock's, so that
other programs disturb less. A call is compared with the same block called directly with the same arguments: `adds` is
what the engine's own call of it takes more, `whole` is from the start of an operation in the worker's thread to the
start of the next one, all that the thread does. An upload is the copying thread's whole time and that of binding the
modules to what it brought, per transfer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli.engine.profile import profile_schedule
from roundpipe_cli.model import worker_model
from roundpipe_cli.model.split import BlockCall
from roundpipe_cli.model.worker_model import WorkerModel
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.builders import build_forward
from tests.tiny import Rig, make_rig, random_microbatches

NUM_MICROBATCHES, TOKENS, WARM_UP = 8, 8, 4
EXPERTS, EXPERT_TOKENS = 128, 128


def microseconds(call: Callable[[], object], times: int) -> float:
    """Median processor time of `call` in this thread."""
    taken = []
    for index in range(times + WARM_UP):
        start = time.thread_time_ns()
        call()
        if index >= WARM_UP:
            taken.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(taken)


def direct(rig: Rig, times: int) -> tuple[float, float]:
    """Blocks called by themselves: forward; forward with graph, backward and the addition to float32 sums."""
    found = [direct_block(rig, layer, times // rig.num_layers) for layer in range(2, rig.num_layers - 1)]
    return statistics.median(item[0] for item in found), statistics.median(item[1] for item in found)


def direct_block(rig: Rig, layer: int, times: int) -> tuple[float, float]:
    model, call, hidden = bound_block(rig, TOKENS, layer)
    block = model.blocks[layer - 1]
    gradient, parameters = torch.randn_like(hidden), [p for p in block.parameters() if p.requires_grad]
    sums = [torch.zeros(parameter.shape) for parameter in parameters]

    def forward() -> None:
        with torch.no_grad():
            call.run(block, hidden)

    def backward() -> None:
        leaf = hidden.detach().requires_grad_()
        output = call.run(block, leaf)
        gradients = torch.autograd.grad(output, [leaf, *parameters], gradient, allow_unused=True)
        for total, part in zip(sums, gradients[1:], strict=True):
            if part is not None:
                total.add_(part)

    return microseconds(forward, times), microseconds(backward, times)


def bound_block(rig: Rig, tokens: int, layer: int = 1) -> tuple[WorkerModel, BlockCall, torch.Tensor]:
    """A worker's model with the weights of one block, how that is called, and hidden states for it."""
    model = WorkerModel(rig.skeleton, rig.split, rig.store.views, rig.store.trainable_names, torch.device("cpu"))
    layout = rig.store.layouts[layer]
    model.bind(layer, {place.name: place.parameter(rig.store.buffers[layer]) for place in layout.places})
    call = model.prologue(torch.arange(tokens)[None] % 128).calls[layer - 1]
    return model, call, torch.randn(1, tokens, rig.skeleton.config.hidden_size)


def through_engine(rig: Rig, steps: int) -> dict[str, float]:
    """Medians per block call of an engine with one worker: `F` and `R+B` alone, then the thread's whole time."""
    schedule = profile_schedule(rig.num_layers, 1, NUM_MICROBATCHES)
    microbatches = random_microbatches([(1, TOKENS)] * NUM_MICROBATCHES)
    starts: list[tuple[Kind, int, int, int]] = []
    taken: dict[str, list[float]] = defaultdict(list)
    with rig.engine(1) as engine:
        runner = engine._workers[0].runner
        run = runner.run

        def timed(context: Any, op: Any, *rest: Any) -> Any:
            start = time.thread_time_ns()
            result = run(context, op, *rest)
            starts.append((op.kind, op.stage, start, time.thread_time_ns()))
            return result

        runner.run = timed  # type: ignore[method-assign]
        for step in range(steps + WARM_UP):
            starts.clear()
            engine.run_step(microbatches, schedule, step=step)
            if step >= WARM_UP:
                collect(starts, rig.num_layers, taken)
    return {name: statistics.median(values) for name, values in taken.items()}


def collect(starts: list[tuple[Kind, int, int, int]], num_layers: int, taken: dict[str, list[float]]) -> None:
    """Times of the blocks' operations; block 0 is left out, for the embedding is in its stage."""
    recompute: tuple[float, float] | None = None
    for (kind, stage, start, end), (_, _, following, _) in zip(starts, starts[1:], strict=False):
        alone, whole = (end - start) / 1e3, (following - start) / 1e3
        if kind is Kind.FORWARD and stage > 0:
            taken["F"].append(alone)
            taken["F whole"].append(whole)
        elif kind is Kind.RECOMPUTE:
            recompute = alone, whole
        elif recompute is not None and stage < num_layers - 2:
            taken["R+B"].append(recompute[0] + alone)
            taken["R+B whole"].append(recompute[1] + whole)
            recompute = None


def upload(rig: Rig, steps: int) -> float:
    """Of the lane's thread and of the binding in the compute thread, per transfer, in a pass forward of one microbatch.

    Half of its transfers are a layer's weights, half are hidden states.
    """
    stages = [(0, 1), *((layer, layer) for layer in range(2, rig.num_layers - 1))]
    schedule = build_forward([*stages, (rig.num_layers - 1, rig.num_layers - 1)], num_workers=1, num_microbatches=1)
    microbatches = random_microbatches([(1, TOKENS)])
    lanes: dict[str, float] = {}
    binding: list[float] = []
    engine = rig.engine(1, copy=True)
    worker = engine._workers[0]
    lane_thread, bind_slot = worker.lane_thread, worker._bind_slot

    @contextmanager
    def timed_lane() -> Iterator[None]:
        with lane_thread():
            start = time.thread_time_ns()
            yield
            lanes[threading.current_thread().name] = (time.thread_time_ns() - start) / 1e3

    def timed_bind(*arguments: Any) -> None:
        start = time.thread_time_ns()
        bind_slot(*arguments)
        binding.append((time.thread_time_ns() - start) / 1e3)

    worker.lane_thread, worker._bind_slot = timed_lane, timed_bind  # type: ignore[method-assign]
    with engine:
        for step in range(steps + WARM_UP):
            engine.score(microbatches, schedule, step=step)
    num_transfers = (steps + WARM_UP) * (2 * rig.num_layers - 3)
    return lanes["up-0"] / num_transfers + statistics.median(binding)


def experts(hidden: int, times: int) -> tuple[float, float, float]:
    """A layer of 128 experts with adapters at 128 tokens: forward, forward and backward, upload."""
    rig = make_rig(
        "qwen3_moe",
        "lora",
        num_experts=EXPERTS,
        num_experts_per_tok=8,
        hidden_size=hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=2,
    )
    for name, view in rig.store.views.items():
        if view.dim() > 1 and "norm" not in name:
            view.normal_(std=0.02)
    model, call, states = bound_block(rig, EXPERT_TOKENS)

    def forward() -> None:
        with torch.no_grad():
            call.run(model.blocks[0], states)

    def both() -> None:
        leaf = states.detach().requires_grad_()
        call.run(model.blocks[0], leaf).sum().backward()

    return microseconds(forward, times), microseconds(both, times), upload(rig, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="steps of 32 calls of each kind (32: 1,024 calls)")
    parser.add_argument("--hidden", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| per call, microseconds of processor time | direct | engine | adds | whole: adds |")
    print("|---|---:|---:|---:|---:|")
    for method in ("lora", "full"):
        rig = make_rig("llama", method, hidden_size=arguments.hidden, num_hidden_layers=6)
        forward, backward = direct(rig, 32 * arguments.steps)
        found = through_engine(rig, arguments.steps)
        for name, key, base in (("forward", "F", forward), ("recompute and backward", "R+B", backward)):
            alone, whole = found[key], found[f"{key} whole"]
            cells = [base, alone, alone - base, whole - base]
            print(f"| dense layer, {method}: {name} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |")
        print(f"| dense layer, {method}: upload | | | {upload(rig, 32 * arguments.steps // 4):.0f} | |")
    forward, both, up = experts(arguments.hidden, 4 * arguments.steps)
    print(f"| {EXPERTS} experts, LoRA, {EXPERT_TOKENS} tokens: forward | {forward:.0f} | | | |")
    print(f"| {EXPERTS} experts, LoRA, {EXPERT_TOKENS} tokens: forward and backward | {both:.0f} | | | |")
    print(f"| {EXPERTS} experts, LoRA: upload | | | {up:.0f} | |")
    with mock.patch.object(worker_model, "isolate_expert_adapters", lambda model: None):
        theirs, theirs_both, _ = experts(arguments.hidden, 4 * arguments.steps)
    print(f"| the same by PEFT as shipped: forward | {theirs:.0f} | | | |")
    print(f"| the same by PEFT as shipped: forward and backward | {theirs_both:.0f} | | | |")


if __name__ == "__main__":
    main()
