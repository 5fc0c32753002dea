"""Workers of different speed against what they could do together: one table.

    python scripts/unequal_workers.py                 # about two minutes, mostly asleep
    python scripts/unequal_workers.py --repetitions 1 --layer-ms 5

CPU workers: a tiny model on the real engine, worker 1 half as fast. A layer takes what the `work` fault point adds to
it, so that a busy machine disturbs little. As in training, the first steps measure the layers and the workers, then the
planner cuts and deals (`auto`); it does so for the fast worker alone as well, which is what the bound is taken from.

Emulated: 4 fast and 2 half-speed workers with layer times like those of an 8B model, links of 12.5 GB/s. The bound is
that no worker ever waits; what is reached is the work of all workers, each second weighed by its speed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli import faults
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.engine.rough_costs import AssumedDevice, LayerSizes, rough_costs
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import SimulationCase, make_schedule
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.schedule.timeline import busy_s
from tests.support.emulated import run_emulated
from tests.support.tiny import Rig, make_rig, random_microbatches

MICROBATCHES, BLOCKS = 12, 6
DISPATCHES = ("round_robin", "auto")


def cpu_step_s(rig: Rig, num_workers: int, dispatch: str, repetitions: int) -> tuple[float, tuple[float, ...] | None]:
    """Median seconds of a step once the first ones have been looked at, and the speeds they showed."""
    layouts = rig.store.layouts
    sizes = LayerSizes(layouts, [layout.num_bytes // 4 for layout in layouts], boundary_columns=16)
    costs = rough_costs(sizes, AssumedDevice("cpu"), method="lora", tokens=4)
    planner = AdaptivePlanner(costs, num_workers, PipelineConfig(dispatch=dispatch))  # type: ignore[arg-type]
    microbatches = random_microbatches([(1, 4)] * MICROBATCHES)
    with rig.engine(num_workers) as engine:
        while not planner.measured:
            planner.observe(engine.run_step(microbatches, planner.schedule(MICROBATCHES), step=0).timeline)
        schedule = planner.schedule(MICROBATCHES)
        times = [engine.run_step(microbatches, schedule, step=0).step_s for _ in range(repetitions)]
    return statistics.median(times), planner.costs.worker_speed


def cpu_rows(layer_s: float, repetitions: int) -> None:
    """The fast worker alone, then both."""
    slow = (f"work:slow={layer_s}:worker=0", f"work:slow={2 * layer_s}:worker=1")
    os.environ[faults.ENVIRONMENT_VARIABLE] = ",".join(slow)
    faults.load_faults()
    rig = make_rig("llama", "lora", hidden_size=16, intermediate_size=16, num_hidden_layers=BLOCKS)
    alone_s, _ = cpu_step_s(rig, 1, "auto", repetitions)
    print(f"| the fast CPU worker alone | {alone_s:.2f} s | | |")
    for dispatch in DISPATCHES:
        step_s, speeds = cpu_step_s(rig, 2, dispatch, repetitions)
        shown = "equal" if speeds is None else ", ".join(f"{speed:.2f}" for speed in speeds)
        part = alone_s / step_s / 1.5
        print(f"| two CPU workers, one half as fast, {dispatch} | {step_s:.2f} s | {part:.1%} | {shown} |", flush=True)


def emulated_rows(compress: float, repetitions: int) -> None:
    """4 fast and 2 half-speed workers."""
    block = LayerCost(
        "block", 0.0185 / compress, 0.0412 / compress, True, param_bytes=436_000_000, boundary_bytes=67_000_000
    )
    head = LayerCost("head", 0.0372 / compress, 0.0745 / compress, False, param_bytes=1_050_000_000)
    speeds = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5)
    costs = CostModel(
        "8B",
        (*[block] * 32, head),
        hop_s=1e-4 / compress,
        link_bytes_per_s=12.5e9 * compress,
        device_memory_bytes=24 * 10**9,
        worker_speed=speeds,
    )
    for dispatch in DISPATCHES:
        question = SimulationCase(costs, len(speeds), 24, auto_dealing=dispatch == "auto")
        schedule = make_schedule("roundpipe", choose("roundpipe", question), question)
        runs = [run_emulated(schedule, costs) for _ in range(repetitions)]
        reached = [
            sum(busy * speed for busy, speed in zip(busy_s(run.timeline), speeds, strict=True))
            / (sum(speeds) * run.makespan_s)
            for run in runs
        ]
        step_s, late = (
            statistics.median(figures)
            for figures in ([run.makespan_s for run in runs], [max(run.late_s) / run.makespan_s for run in runs])
        )
        print(
            f"| 4 fast and 2 half-speed workers, emulated, {dispatch} | {step_s:.2f} s | "
            f"{statistics.median(reached):.1%} | given (late {late:.1%}) |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layer-ms", type=float, default=20.0, help="of a layer on the fast CPU worker")
    parser.add_argument("--compress", type=float, default=2.0, help="how much faster the emulated clock goes")
    args = parser.parse_args()
    print("| workers and dispatch | step | of the bound | speeds found |")
    print("|---|---:|---:|---|")
    cpu_rows(args.layer_ms / 1e3, args.repetitions)
    emulated_rows(args.compress, args.repetitions)


if __name__ == "__main__":
    main()
