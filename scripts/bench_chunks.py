"""One long sequence on 8 workers at once, in chunks: utilization, by the simulator and by the engine on emulated
devices.

    python scripts/bench_chunks.py tests/facts/published_schedules.json               # about 3 minutes, mostly asleep
    python scripts/bench_chunks.py FACTS --chunks 16 --workers 4 --compress 8 --head-workers 1

A step has one sequence of 32 chunks of 8192 tokens. Layer times and hops are the published ones of an RTX 4090 for 8192
tokens, LoRA; bytes are estimated as in `simulated_gains.py`. Every second is divided by `--compress`, so that a run is
shorter; what the host itself takes is not.

Assumed: every chunk takes the same time (attention of later chunks, which sees more keys, takes longer in reality), and
keys and values of earlier chunks take no time on the links.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.costs.find_model import shipped_architecture
from roundpipe_cli.planning.chunk_shapes import chunk_cut
from roundpipe_cli.planning.compare import SimulationCase, make_schedule
from roundpipe_cli.schedule.builders import Options
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import bubble_ratio, makespan_s
from scripts.bench_dispatcher import compressed
from scripts.simulated_gains import HUB_IDS, Column
from tests.support.emulated import run_emulated
from tests.support.schedules import validate_schedule


def row(name: str, costs: CostModel, args: argparse.Namespace, head_workers: int) -> str:
    """One line of the table."""
    options = Options(head_workers=head_workers)
    question = SimulationCase(costs, args.workers, args.chunks, options=options, sequence_chunks=args.chunks)
    partition = chunk_cut(question)
    schedule = make_schedule("roundpipe", partition, question)
    validate_schedule(schedule)
    simulated = simulate(schedule, costs)
    runs = [run_emulated(schedule, costs) for _ in range(args.repetitions)]
    measured = statistics.median(1 - run.bubble_ratio for run in runs)
    seconds = statistics.median(run.makespan_s for run in runs)
    late = statistics.median(max(run.late_s) for run in runs) / seconds
    work_s = args.chunks * sum(layer.forward_s + layer.recomputed_s + layer.backward_s for layer in costs.layers)
    cells = (
        f"{len(partition.forward_stages)} + {len(partition.backward_stages)}",
        f"{100 * (1 - bubble_ratio(simulated)):.1f} %",
        f"{100 * measured:.1f} %",
        f"{work_s / makespan_s(simulated):.2f}x",
        f"{work_s / seconds:.2f}x",
        f"{100 * late:.1f} %",
    )
    return f"| {name} | {head_workers} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("facts", type=Path, help="published_schedules.json")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=32, help="of the step's one sequence")
    parser.add_argument("--head-workers", type=int, nargs="*", default=[1, 8], help="that share the head's chunks")
    parser.add_argument("--compress", type=float, default=4.0)
    parser.add_argument("--repetitions", type=int, default=1)
    args = parser.parse_args()
    print("| model | head workers | stages | utilization, simulated | emulated ", end="")
    print("| times one worker, simulated | emulated | late |\n|---|---:|---|---:|---:|---:|---:|---:|")
    models = json.loads(args.facts.read_text(encoding="utf-8"))["models"]
    for name, hub_id in HUB_IDS.items():
        architecture = shipped_architecture(hub_id)
        assert architecture is not None
        costs = compressed(Column(architecture, models[name], "lora").costs, args.compress)
        costs = replace(costs, layers=tuple(replace(layer, optimizer_s=0.0) for layer in costs.layers))
        for head_workers in args.head_workers:
            print(row(name, costs, args, min(head_workers, args.workers)), flush=True)


if __name__ == "__main__":
    main()
