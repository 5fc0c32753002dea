"""Two workers, one half as fast, against the fast one alone: what round-robin and earliest-free dispatch make of them.

    python scripts/unequal_workers.py

A tiny model, so that an operation takes what the `slow` fault point adds to it and a busy machine disturbs little.
Together the workers could do 1.5 times the work of the fast one.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli import faults
from roundpipe_cli.plan.cost import CostModel, LayerCost
from roundpipe_cli.schedule.builders import build_schedule
from roundpipe_cli.schedule.dealing import Options
from tests.tiny import Rig, make_rig, random_microbatches

OPERATION_S, NUM_MICROBATCHES, REPETITIONS = 0.05, 12, 3


def step_s(rig: Rig, num_workers: int, options: Options) -> float:
    """Median seconds of a step whose every forward, recompute and backward takes `OPERATION_S`, or twice that."""
    layer = LayerCost("block", OPERATION_S, OPERATION_S, recompute=True)
    head = LayerCost("head", OPERATION_S / 2, OPERATION_S / 2, recompute=False)
    costs = CostModel("slowed", (*[layer] * (rig.num_layers - 1), head), worker_speed=(1.0, 0.5)[:num_workers])
    last = rig.num_layers - 1
    schedule = build_schedule(
        "roundpipe",
        forward_stages=[(0, 0), *((layer, layer) for layer in range(1, last))],
        backward_stages=[(last, last), *((layer, layer) for layer in range(last - 1, -1, -1))],
        num_workers=num_workers,
        num_microbatches=NUM_MICROBATCHES,
        microbatches_per_round=NUM_MICROBATCHES,
        costs=costs,
        options=options,
    )
    with rig.engine(num_workers) as engine:
        microbatches = random_microbatches([(1, 4)] * NUM_MICROBATCHES)
        return statistics.median(engine.run_step(microbatches, schedule, step=0).step_s for _ in range(REPETITIONS))


def main() -> None:
    slow = (f"compute:slow={OPERATION_S}:worker=0", f"compute:slow={2 * OPERATION_S}:worker=1")
    os.environ[faults.ENVIRONMENT_VARIABLE] = ",".join(slow)
    faults.load_faults()
    rig = make_rig("llama", "lora", hidden_size=16, intermediate_size=16)
    alone_s = step_s(rig, 1, Options())
    print("| dispatch | step | against the fast worker alone | of 1.5x |")
    print("|---|---:|---:|---:|")
    print(f"| fast worker alone | {alone_s:.2f} s | 1.00x | |")
    for name, options in (("round-robin", Options()), ("earliest free", Options(earliest_free=True))):
        gain = alone_s / step_s(rig, 2, options)
        print(f"| {name} | {alone_s / gain:.2f} s | {gain:.2f}x | {100 * gain / 1.5:.0f} % |")


if __name__ == "__main__":
    main()
