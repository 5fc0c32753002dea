"""What the reduction of gradients over machines adds to a step: overlapped with the backward, and after it.

    torchrun --nproc-per-node 2 scripts/bench_nodes.py                    sleeps: the overlap itself, on any machine
    torchrun --nproc-per-node 2 scripts/bench_nodes.py --compute          real work on real cores
    torchrun --nproc-per-node 2 scripts/bench_nodes.py --method full --vocab 8192

Each process is a machine with one worker and its own microbatches. Three ways take turns, so that a slow minute meets
all of them: `alone` sums nothing, `overlapped` sums each layer as soon as it is complete, as training does, `after`
sums all of them when the backward is done. A step takes as long as that of the slowest process. Medians are printed,
and what overlapped reduction adds as a share of what the reduction after the backward adds.

On one machine processes and gloo fight for the same cores, so by default operations of the workers sleep (a tiny model,
the `compute:slow` fault point) and so does the link: a sum is carried out by gloo and then takes the time that its
bytes would need, once there and once back, at `--gigabits`. With `--compute` nothing sleeps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli import faults
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import GradientOptions, OnGradient
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.schedule.builders import build_schedule
from roundpipe_cli.schedule.dealing import Rounds
from roundpipe_cli.train.nodes.group import Nodes, Sharing
from tests.support.tiny import make_rig, random_microbatches

WATCHDOG_S = 120.0


class SlowLink(Nodes):
    """Processes whose sums take the time of a link."""

    link_bytes_per_s = 0.0

    def add_up(self, tensor: torch.Tensor, owner: int | None = None) -> None:
        started_s = time.perf_counter()
        super().add_up(tensor, owner)
        if self.link_bytes_per_s:  # a ring sends all but a share of it twice
            needed_s = 2 * tensor.nbytes * (self.count - 1) / self.count / self.link_bytes_per_s
            time.sleep(max(0.0, started_s + needed_s - time.perf_counter()))


class Bench:
    """One process' model and microbatches."""

    def __init__(self, args: argparse.Namespace, nodes: Nodes, engine: Engine, sharing: Sharing) -> None:
        self.nodes, self.engine, self.sharing = nodes, engine, sharing
        sizes = [(1, args.tokens)] * (args.microbatches * nodes.count)
        self.mine, self.part = sharing.own(random_microbatches(sizes, vocab=args.vocab))
        self.layers = [i for i, layout in enumerate(engine.store.layouts) if layout.num_trainable_elements]
        last = engine.num_layers - 1
        stages = {
            "forward_stages": [(layer, layer) for layer in range(last)],
            "backward_stages": [(last, last), *((layer, layer) for layer in range(last - 1, -1, -1))],
        }
        self.schedule = build_schedule(
            "roundpipe", **stages, num_workers=engine.num_workers, rounds=Rounds(args.microbatches)
        )

    def step(self, on_gradient: OnGradient | None = None) -> StepResult:
        gradients = GradientOptions(on_complete=on_gradient)
        return self.engine.run_step(self.mine, self.schedule, step=0, part=self.part, gradients=gradients)

    def alone(self) -> None:
        self.step()

    def overlapped(self) -> None:
        self.sharing.begin(0)
        self.sharing.finish(self.step(self.sharing.complete), 1.0)

    def after(self) -> None:
        result = self.step()
        self.sharing.begin(0)
        for layer in self.layers:
            self.sharing.complete(layer, lambda: 0.0)
        self.sharing.finish(result, 1.0)

    def seconds(self, way: Callable[[], None]) -> float:
        """Of the slowest process, from a common start."""
        self.nodes.most([0])
        started_s = time.perf_counter()
        way()
        return self.nodes.most([round((time.perf_counter() - started_s) * 1e6)])[0] / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--compute", action="store_true", help="no sleeps")
    parser.add_argument("--method", choices=("lora", "full"), default="full")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=128)
    parser.add_argument("--tokens", type=int, help="of a microbatch; 4, with --compute 256")
    parser.add_argument("--microbatches", type=int, default=2, help="of each process")
    parser.add_argument("--slow", type=float, default=0.03, help="seconds that an operation sleeps")
    parser.add_argument("--gigabits", type=float, default=0.25, help="of the link, per second, each way")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.tokens = args.tokens or (256 if args.compute else 4)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2")
    if not args.compute:
        os.environ[faults.ENVIRONMENT_VARIABLE] = f"compute:slow={args.slow}"
        faults.load_faults()
    nodes = SlowLink(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), WATCHDOG_S)
    nodes.link_bytes_per_s = 0.0 if args.compute else args.gigabits * 1e9 / 8
    sizes = {"hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, "vocab_size": args.vocab}
    rig = make_rig("llama", args.method, num_hidden_layers=args.blocks, **sizes)
    table = f"{rig.split.embedding_path}.weight"
    with rig.engine(1) as engine, nodes, Sharing(nodes, rig.store, sorted(engine.late_layers), table) as sharing:
        bench = Bench(args, nodes, engine, sharing)
        ways = {"alone": bench.alone, "overlapped": bench.overlapped, "after": bench.after}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds + 1):
            for name, way in ways.items():
                taken[name].append(bench.seconds(way))
        if nodes.is_first:
            report(args, nodes, {name: statistics.median(times[1:]) for name, times in taken.items()})


def report(args: argparse.Namespace, nodes: Nodes, step_s: dict[str, float]) -> None:
    """The table."""
    asleep = f"operations of {args.slow} s and a link of {args.gigabits} Gbit/s, both asleep"
    what = "real computations" if args.compute else asleep
    each = f"{args.blocks} blocks, {args.microbatches} microbatches each"
    print(f"{nodes.count} processes, {args.method}, {each}: {what}\n")
    print("| reduction | step | added | of the one after the backward |")
    print("|---|---:|---:|---:|")
    alone_s, whole_s = step_s["alone"], step_s["after"] - step_s["alone"]
    for name, seconds in step_s.items():
        added_s = seconds - alone_s
        share = "" if name == "alone" else f"{100 * added_s / whole_s:.1f} %"
        print(f"| {name} | {seconds:.3f} s | {added_s:.3f} s | {share} |")


if __name__ == "__main__":
    main()
