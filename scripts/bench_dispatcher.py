"""The dispatcher against the simulator on 8 emulated workers, and priorities against first in, first out: two tables.

    python scripts/bench_dispatcher.py tests/facts/published_schedules.json              # 20 minutes, mostly asleep
    python scripts/bench_dispatcher.py FACTS --compress 4 --repetitions 1 --only links   # a minute

16 microbatches of 8192 tokens; layer times and hops are the published ones of an RTX 4090, bytes are estimated as in
`simulated_gains.py`; updates take 1 ns of the host for each trained parameter. Every second is divided by `--compress`
(and every link's rate multiplied), so that a run is shorter; what the host itself takes is not, so a run that is
compressed too much shows in `late`: the time that a worker's streams lost because the host issued too late, of the
worker that lost most, as a share of the makespan: of its compute stream, and of compute and both links added up.

The first table says how long the engine's own threads, queues and events took for what the simulator predicts. The
second has slow links: `exposed` is the time for which a worker's compute stood still and all it waited for was a
transfer, summed over workers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.costs.find_model import shipped_architecture
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import SimulationCase, make_schedule
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import makespan_s
from scripts.simulated_gains import HUB_IDS, MICROBATCHES, WORKERS, Column
from tests.support.emulated import Emulated, run_emulated

UPDATE_S = 1e-9
"""Of the host, for each trained parameter."""
SLOW_LINK_BYTES_PER_S = 3e9
CASES = (("roundpipe", 0, 1), ("roundpipe", 1, 2), ("looped_bfs", 0, 1))
"""(schedule, staleness, chained steps): at staleness 1 the second step overlaps the first one's updates."""


def compressed(costs: CostModel, factor: float) -> CostModel:
    """The same machine with a faster clock."""
    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s / factor,
            backward_s=layer.backward_s / factor,
            optimizer_s=layer.grad_bytes / 4 * UPDATE_S / factor,
        )
        for layer in costs.layers
    )
    rate = costs.link_bytes_per_s * factor
    return replace(costs, layers=layers, hop_s=costs.hop_s / factor, link_bytes_per_s=rate)


def late_share(runs: Sequence[Emulated]) -> str:
    """Medians of the worst worker's: compute, and all streams together."""
    compute, together = (
        statistics.median(max(late) / run.makespan_s for late, run in zip(lates, runs, strict=True))
        for lates in ([run.compute_late_s for run in runs], [run.late_s for run in runs])
    )
    return f"{100 * compute:.1f}, {100 * together:.1f} %"


def question_for(costs: CostModel, staleness: int) -> SimulationCase:
    return SimulationCase(costs, WORKERS, MICROBATCHES, staleness=1 if staleness else 0)


def against_simulator(title: str, costs: CostModel, args: argparse.Namespace) -> None:
    """A row for each of `CASES`."""
    for name, staleness, num_steps in CASES:
        question = question_for(costs, staleness)
        schedule = make_schedule(name, choose(name, question), question, num_steps)
        wanted_s = makespan_s(simulate(schedule, costs, staleness=staleness))
        runs = [run_emulated(schedule, costs, staleness=staleness) for _ in range(args.repetitions)]
        ratios = sorted(run.makespan_s / wanted_s for run in runs)
        spread = f"{statistics.median(ratios):.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f}"
        print(
            f"| {title} | {name} | {staleness} | {num_steps} | {args.compress * wanted_s:.3f} s "
            f"| {spread} | {late_share(runs)} |",
            flush=True,
        )


def exposed(schedule: Schedule, costs: CostModel, args: argparse.Namespace, *, fifo: bool) -> tuple[float, str]:
    """Exposed seconds, median, and the row's figures."""
    runs = [run_emulated(schedule, costs, fifo=fifo) for _ in range(args.repetitions)]
    seconds = args.compress * statistics.median(run.exposed_s for run in runs)
    makespan = args.compress * statistics.median(run.makespan_s for run in runs)
    return seconds, f"{seconds:.3f} s | {makespan:.3f} s | {late_share(runs)}"


def slow_links(title: str, costs: CostModel, args: argparse.Namespace) -> None:
    """Rows for priorities and for first in, first out: with the plan for fast links and with one for slow ones."""
    slow = replace(costs, link_bytes_per_s=SLOW_LINK_BYTES_PER_S * args.compress)
    for planned_for, planned in (("25 GB/s", costs), ("3 GB/s", slow)):
        question = question_for(planned, 0)
        schedule = make_schedule("roundpipe", choose("roundpipe", question), question)
        first, row = exposed(schedule, slow, args, fifo=False)
        other, fifo_row = exposed(schedule, slow, args, fifo=True)
        print(f"| {title} | {planned_for} | {row} | {fifo_row} | {first / other:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="published_schedules.json")
    parser.add_argument("--compress", type=float, default=1.0, help="run this many times as fast")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--gradients", choices=["none", "lora", "full"], default="lora", help="what is trained")
    parser.add_argument("--only", choices=["simulator", "links"], help="one of the tables")
    args = parser.parse_args()
    models = json.loads(args.figures.read_text(encoding="utf-8"))["models"]
    columns = {}
    for name, hub_id in HUB_IDS.items():
        architecture = shipped_architecture(hub_id)
        assert architecture is not None
        columns[hub_id.split("/")[1]] = compressed(
            Column(architecture, models[name], args.gradients).costs, args.compress
        )
    print(
        f"{WORKERS} emulated workers, {MICROBATCHES} microbatches, {args.gradients} gradients, links of "
        f"{next(iter(columns.values())).link_bytes_per_s / args.compress / 1e9:g} GB/s, {args.repetitions} runs, "
        f"{args.compress:g} times as fast as the clock; seconds are those of the emulated machine\n"
    )
    if args.only != "links":
        print("| model | schedule | staleness | steps | simulated | measured / simulated, median | all runs ", end="")
        print("| late: compute, all |")
        print("|---|---|---:|---:|---:|---:|---:|---:|")
        for title, costs in columns.items():
            against_simulator(title, costs, args)
    if args.only != "simulator":
        print("\n| model | links of 3 GB/s, plan for | exposed, by priority | makespan | late ", end="")
        print("| exposed, first in, first out | makespan | late | exposed: by priority / fifo |")
        print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
        for title, costs in columns.items():
            slow_links(title, costs, args)


if __name__ == "__main__":
    sys.exit(main())
