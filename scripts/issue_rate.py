"""How many operators a second one interpreter can issue: 1 to 8 threads, at will and in turns, and processes.

    python scripts/issue_rate.py                    on tensors of a few numbers
    python scripts/issue_rate.py --device meta      on meta tensors of the model's real width
    python scripts/issue_rate.py --only gpt_oss --method full --rounds 5

Each thread issues forward, recompute and backward of one block, as a worker's thread would for a GPU that is never the
slower one. So this is what Python, autograd and torch's dispatcher let through, without a driver. On meta tensors many
operators are Python themselves; on the processor a launch computes a few numbers. `in turns` is how a run issues: one
thread at a time, a pass each. Processes are at most as many as there are cores. Medians of alternating rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from roundpipe_cli.engine.backends.cuda_process import SWITCH_INTERVAL_S
from roundpipe_cli.engine.backends.turns import IssueTurns
from roundpipe_cli.model.fused import find_fused_ops
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import LoraSettings, add_lora
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.taps import GradientTaps
from roundpipe_cli.model.worker_model import WorkerModel
from scripts.gpu_checks.models import FAMILIES, build, configuration, shipped, tiny
from tests.support.launches import LaunchCounter, block_passes

COUNTS = (1, 2, 4, 8)
CAPABILITY = (8, 9)
TOKENS = 8192
FEW_TOKENS = 4
Passes = tuple[Callable[[], None], Callable[[], None], Callable[[], None]]
"""Forward, recompute and backward of a block."""


def on_meta(model_type: str, method: str) -> Passes:
    """Of the real width, without arithmetic."""
    figures = shipped(FAMILIES[model_type], num_hidden_layers=2, vocab_size=1024)
    model = build_skeleton(configuration(figures), torch.bfloat16)
    split = split_model(model)
    if method == "lora":
        add_lora(model, LoraSettings(r=16, alpha=16), dtype=torch.bfloat16, base_name="issue_rate")
    passes = block_passes(model, split, TOKENS, CAPABILITY, find_fused_ops(model, split))[0]
    return passes.forward, passes.recompute, passes.backward


def on_processor(model_type: str, method: str, device: str = "cpu") -> Passes:
    """Of a few numbers, with their arithmetic, on the processor or a GPU."""
    model = build(tiny(model_type), method, torch.float32)
    views, trainable = model.store.views, model.store.trainable_names
    place, fused = torch.device(device), model.fused
    worker = WorkerModel(model.skeleton, model.split, views, trainable, device=place, fused=fused)
    worker.bind(1, {one.name: nn.Parameter(views[one.name].to(device, copy=True), one.name in trainable)
                    for one in model.store.layouts[1].places})  # fmt: skip
    prologue = worker.prologue(torch.zeros((1, FEW_TOKENS), dtype=torch.long))
    hidden, call = prologue.hidden.detach().to(device), prologue.calls[0].map_tensors(lambda one: one.to(device))
    parameters = [one for one in worker.blocks[0].parameters() if one.requires_grad]
    sums = [torch.zeros_like(one) for one in parameters]
    graph: list[torch.Tensor] = []

    def forward() -> None:
        with torch.no_grad():
            worker.run_block(0, call, hidden)

    def recompute() -> None:
        graph.append(worker.run_block(0, call, hidden.clone().requires_grad_()))

    def add(index: int, found: torch.Tensor) -> None:
        sums[index].add_(found)

    def backward() -> None:
        output = graph.pop()
        with GradientTaps(parameters, add):
            output.backward(torch.ones_like(output))

    return forward, recompute, backward


MAKERS = {"cpu": on_processor, "meta": on_meta}


def num_launches(passes: Passes) -> int:
    """Operators that write memory, of the three passes."""
    total = 0
    for run in passes:
        with LaunchCounter(CAPABILITY) as counter:
            run()
        total += counter.launches.num_launches
    return total


def issue(passes: Passes, seconds: float, turns: IssueTurns | None) -> int:
    """Issue blocks for so long; how many."""
    end_s, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end_s:
        for run in passes:
            with nullcontext() if turns is None else turns.turn():
                run()
        count += 1
    return count


def by_threads(made: list[Passes], seconds: float, turns: IssueTurns | None) -> tuple[float, float]:
    """Blocks a second of all threads together, and processor seconds a second."""
    counts = [0] * len(made)
    go = threading.Barrier(len(made) + 1)

    def work(index: int) -> None:
        go.wait()
        counts[index] = issue(made[index], seconds, turns)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(made))]
    for thread in threads:
        thread.start()
    go.wait()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - start_s
    return sum(counts) / wall_s, (time.process_time() - start_cpu_s) / wall_s


def in_child(device: str, model_type: str, method: str, seconds: float, go: Any, found: Any) -> None:
    torch.set_num_threads(1)
    passes = MAKERS[device](model_type, method)
    issue(passes, 0.1, None)
    go.wait()
    start_s = time.perf_counter()
    found.put(issue(passes, seconds, None) / (time.perf_counter() - start_s))


def by_processes(device: str, model_type: str, method: str, num_processes: int, seconds: float) -> float:
    """Blocks a second of all processes together."""
    context = multiprocessing.get_context("spawn")
    go, found = context.Barrier(num_processes), context.Queue()
    words = (device, model_type, method, seconds, go, found)
    children = [context.Process(target=in_child, args=words) for _ in range(num_processes)]
    for child in children:
        child.start()
    rates = [found.get(timeout=300) for _ in children]
    for child in children:
        child.join()
    return float(sum(rates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=MAKERS)
    parser.add_argument("--only", default="qwen3", choices=FAMILIES)
    parser.add_argument("--method", default="lora", choices=["lora", "full"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    what = arguments.only, arguments.method
    made = [MAKERS[arguments.device](*what) for _ in range(max(COUNTS))]
    launches, cores = num_launches(made[0]), len(os.sched_getaffinity(0))
    for passes in made:
        issue(passes, 0.1, None)
    print(f"{arguments.only}, {arguments.method}, {arguments.device}: {launches} launches a block; {cores} cores\n")
    ways = {"at will": lambda: None, "in turns": IssueTurns}
    rates: dict[tuple[str, int], list[float]] = {}
    busy: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for count in COUNTS:
            for way, turns in ways.items():
                rate, share = by_threads(made[:count], arguments.seconds, turns())
                rates.setdefault((way, count), []).append(rate * launches)
                busy.setdefault((way, count), []).append(share)
            if count <= cores:
                rate = by_processes(arguments.device, *what, count, arguments.seconds)
                rates.setdefault(("processes", count), []).append(rate * launches)
    print("| | threads at will: launches/s | cores used | threads in turns: launches/s | cores used | processes |")
    print("|---:|---:|---:|---:|---:|---:|")
    for count in COUNTS:
        cells = []
        for way in ways:
            cells += [f"{statistics.median(rates[way, count]):,.0f}", f"{statistics.median(busy[way, count]):.2f}"]
        found = rates.get(("processes", count))
        cells.append(f"{statistics.median(found):,.0f}" if found else "too few cores")
        print(f"| {count} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
