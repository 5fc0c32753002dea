"""What sums, squares and updates on the host cost, in nanoseconds of processor time a parameter, and whole steps.

    python scripts/bench_host.py                          one table, of this checkout
    python scripts/bench_host.py --before ../other        the same of another checkout, in turn with this one's
    python scripts/bench_host.py --threads 16             of so many threads together
    python scripts/bench_host.py --before ../other --python       Python of updates, beside threads that issue work
    python scripts/bench_host.py --before ../other --steps 1      whole steps of full fine-tuning in bfloat16 instead

`--python` counts the blocks of an update of 8B parameters by 16 threads, and times what is not arithmetic with blocks
of a few numbers, alone and while threads issue forward, recompute and backward of a block of Qwen3-8B on meta tensors,
in turns. Shares are of `plan`'s price of AdamW's update.

A layer is one matrix of `--elements` in bfloat16. Steps are those of `roundpipe finetune`; the first is left out, which
writes masters, moments and sums for the first time. Both also compare bits: of sums, masters, moments and losses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

if __name__ == "__main__":  # behind the checkout that a child is to measure
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from scripts import bench_runs

ROOT = Path(__file__).resolve().parents[1]
ROW = 4096
REPEATS = 4
"""Updates, additions and squares of which the fastest counts; the first is left out."""
Figures = dict[str, tuple[float, str]]
"""Seconds, or nanoseconds a parameter, and a digest of what came out, by what was done."""


def fastest_ns(work: Callable[[int], object], num_elements: int) -> float:
    """Processor nanoseconds an element of the fastest of `work(2)`, `work(3)`, ...; `work(1)` comes before."""
    taken = []
    for number in range(1, REPEATS + 2):
        start_s = time.process_time()
        work(number)
        taken.append(time.process_time() - start_s)
    return 1e9 * min(taken[1:]) / num_elements


def arithmetic(num_elements: int, num_threads: int) -> Iterator[tuple[str, float, str]]:
    """(what, nanoseconds a parameter, digest), of the checkout that Python imports."""
    import torch

    from roundpipe_cli.choices import OptimizerName
    from roundpipe_cli.engine.dispatch.progress import Progress
    from roundpipe_cli.engine.gradients import GradientFold, square_sum
    from roundpipe_cli.engine.weights import WeightStore
    from roundpipe_cli.heap import settle_heap
    from roundpipe_cli.model.layout import make_layout
    from roundpipe_cli.train.optim.optimizer import HostOptimizer, make_rule

    def digest(*tensors: torch.Tensor) -> str:
        found = hashlib.sha256()
        for tensor in tensors:
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:12]

    settle_heap()
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    shape = torch.Size([num_elements // ROW, ROW])
    matrix = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
    layout = make_layout("matrix", [("weight", matrix)], torch.bfloat16)
    values, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
    for _ in range(2):  # the first also loads what it calls
        start_s = time.process_time()
        store = WeightStore([layout])
        for buffer in (store.buffers[0], store.masters[0], store.gradients[0]):
            buffer.zero_()
        touched_s = time.process_time() - start_s
    yield "first touch of weights, masters and sums", 1e9 * touched_s / num_elements, ""
    half = gradient.bfloat16()
    fold = GradientFold(0, layout, store.gradients[0], REPEATS + 1, progress=Progress())
    added = fastest_ns(lambda number: fold.fold(number - 1, [(0, half)]), num_elements)
    yield "a bfloat16 gradient added to its float32 sum", added, digest(store.gradients[0])
    squares = fastest_ns(lambda number: square_sum(store.gradients[0]), num_elements)
    yield "squares of a float32 sum", squares, float(square_sum(store.gradients[0])).hex()
    for name in get_args(OptimizerName):
        store.set_parameter("weight", values)
        optimizer = HostOptimizer(store, make_rule(name, momentum=0.9, weight_decay=0.1))
        flat = gradient.view(-1).clone()

        def update(number: int, optimizer: HostOptimizer = optimizer, flat: torch.Tensor = flat) -> None:
            optimizer.update_layer(0, flat, number, 1e-3, gradient_factor=0.999)

        taken = fastest_ns(update, num_elements)
        moments = [tensor for _, tensor in optimizer.moments()]
        yield f"an update by {name}", taken, digest(store.masters[0], store.buffers[0], *moments)


MODEL_ELEMENTS, MANY = 8_190_735_360, 16
TINY_ELEMENTS, TINY_BLOCKS = 64, 200
ISSUING = 2


def python_of_updates() -> Iterator[tuple[str, float, str]]:
    """(what, figure, digest), of the checkout that Python imports."""
    import torch

    from roundpipe_cli.choices import OPTIMIZERS
    from roundpipe_cli.costs.hardware import ASSUMED_HOST_MEMORY_BYTES_PER_S
    from roundpipe_cli.engine.backends.cuda_process import SWITCH_INTERVAL_S
    from roundpipe_cli.engine.backends.turns import IssueTurns
    from roundpipe_cli.engine.weights import WeightStore
    from roundpipe_cli.model.layout import make_layout
    from roundpipe_cli.train.optim import optimizer
    from scripts.issue_rate import num_launches, on_meta

    def make(num_elements: int) -> Callable[[], None]:
        matrix = torch.nn.Parameter(torch.empty(num_elements, dtype=torch.bfloat16, device="meta"))
        store = WeightStore([make_layout("matrix", [("weight", matrix)], torch.bfloat16)])
        host = optimizer.HostOptimizer(store)
        return lambda: host.update_layer(0, store.gradients[0], 2, 1e-3, gradient_factor=0.999)

    plain, counted = optimizer.AdamW.update, []

    def count(*given: object, **named: object) -> None:
        counted.append(1)

    optimizer.AdamW.update = count  # type: ignore[method-assign, assignment]
    torch.set_num_threads(MANY)
    make(1 << 24)()
    torch.set_num_threads(1)
    optimizer.AdamW.update = plain  # type: ignore[method-assign]
    blocks = len(counted) * MODEL_ELEMENTS / (1 << 24)
    yield "blocks", blocks, ""

    optimizer.BLOCK_ELEMENTS = TINY_ELEMENTS  # arithmetic takes next to nothing of it
    update = make(TINY_ELEMENTS * TINY_BLOCKS)

    def block_us(clock: Callable[[], float]) -> float:
        taken = []
        for _ in range(9):
            start_s = clock()
            update()
            taken.append((clock() - start_s) / TINY_BLOCKS)
        return 1e6 * statistics.median(taken)

    whole_s = OPTIMIZERS["adamw"].update_bytes * MODEL_ELEMENTS / ASSUMED_HOST_MEMORY_BYTES_PER_S
    alone_us = block_us(time.thread_time)
    yield "Python of a block, us", alone_us, ""
    yield "Python of an update, % of it", alone_us * blocks / whole_s / 1e4, ""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    turns, stop, issued = IssueTurns(), threading.Event(), [0] * ISSUING
    made = [on_meta("qwen3", "lora") for _ in range(ISSUING)]
    launches = num_launches(made[0])

    def issue(index: int) -> None:
        while not stop.is_set():
            for run in made[index]:
                with turns.turn():
                    run()
            issued[index] += launches

    def launched(seconds: float, work: Callable[[], object]) -> float:
        """Launches a second while `work` is done again and again."""
        before, start_s = sum(issued), time.perf_counter()
        while time.perf_counter() < start_s + seconds:
            work()
        return (sum(issued) - before) / (time.perf_counter() - start_s)

    threads = [threading.Thread(target=issue, args=(index,), daemon=True) for index in range(ISSUING)]
    for thread in threads:
        thread.start()
    yield "launches/s of other threads without updates", launched(3.0, lambda: time.sleep(0.1)), ""
    waited_us: list[float] = []
    launched(6.0, lambda: waited_us.append(block_us(time.perf_counter)))
    beside_us = statistics.median(waited_us)
    yield "time of a block's Python beside them, us", beside_us, ""
    yield "time of an update's Python beside them, % of it", beside_us * blocks / whole_s / 1e4, ""
    optimizer.BLOCK_ELEMENTS = 1 << 20
    real = make(1 << 24)
    yield "launches/s of other threads beside updates", launched(6.0, real), ""
    stop.set()
    for thread in threads:
        thread.join()


def steps(words: list[str]) -> None:
    """Run the recipe of this folder; print each step's processor seconds of all threads, and its loss.

    Every step but the first waits for a line from whoever reads this.
    """
    from roundpipe_cli.cli.output import quiet_libraries
    from roundpipe_cli.events import Event, StepFinished
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.train.finetune import run_finetune
    from roundpipe_cli.train.signals import Reporting, Start, StopSignals

    started_s = time.process_time()

    def tell(event: Event) -> None:
        nonlocal started_s
        if isinstance(event, StepFinished):
            print_result("a step", time.process_time() - started_s, event.loss.hex())
            sys.stdin.readline()
            started_s = time.process_time()

    quiet_libraries()
    with StopSignals() as signals:
        run_finetune(load_recipe("recipe.yaml", words), Start(offline=True), Reporting(tell), signals)


def print_result(name: str, taken: float, bits: str) -> None:
    print(json.dumps([name, taken, bits]), flush=True)


def start(checkout: Path, folder: Path, words: list[str]) -> subprocess.Popen[str]:
    """This file's figures, computed by a checkout in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True)


def in_turn(checkouts: dict[str, Path], words: list[str], rounds: int) -> dict[str, list[Figures]]:
    """Arithmetic or Python of updates, each round in new processes."""
    found: dict[str, list[Figures]] = {name: [] for name in checkouts}
    for _ in range(rounds):
        for name, checkout in checkouts.items():
            lines, _ = start(checkout, ROOT, words).communicate()
            found[name].append({what: (taken, bits) for what, taken, bits in map(json.loads, lines.splitlines())})
    return found


def step_by_step(checkouts: dict[str, Path], args: argparse.Namespace) -> dict[str, list[Figures]]:
    """Whole steps, one of each checkout in turn; the first is left out."""
    found: dict[str, list[Figures]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as where:
        shared = ["steps", "dtype=bfloat16", *bench_runs.write_workspace(Path(where), args, method="full")]
        shared.append(f"max_steps={args.rounds + 1}")
        runs = {name: start(one, Path(where), [*shared, f"output_dir={name}"]) for name, one in checkouts.items()}
        for number in range(args.rounds + 1):
            for name, run in runs.items():
                assert run.stdin is not None and run.stdout is not None
                if number:
                    run.stdin.write("\n")
                    run.stdin.flush()
                what, taken, bits = json.loads(run.stdout.readline())
                found[name] += [{what: (taken, bits)}] if number else []
        for run in runs.values():
            run.kill()
            run.communicate()
    return found


def print_table(found: dict[str, list[Figures]], unit: str) -> None:
    """Medians over the rounds, and whether bits are equal; of a step's pairs the quotients as well."""
    here, before = found["here"], found.get("before", [])
    print("| | before | here | of before | bits |\n|---|---:|---:|---:|---|" if before else "| | here |\n|---|---:|")
    for name in here[0]:
        now = statistics.median(one[name][0] for one in here)
        if not before:
            print(f"| {name} | {now:.2f} {unit} |")
            continue
        then = statistics.median(one[name][0] for one in before)
        quotients = [new[name][0] / old[name][0] for new, old in zip(here, before, strict=True)]
        is_equal = all(new[name][1] == old[name][1] for new, old in zip(here, before, strict=True))
        bits = ("equal" if is_equal else "differ") if here[0][name][1] else ""
        print(f"| {name} | {then:.2f} {unit} | {now:.2f} {unit} | {statistics.median(quotients):.2f}x | {bits} |")
        print(f"{name}, pairs: {' '.join(f'{one:.3f}' for one in quotients)}", file=sys.stderr)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        mode, *words = sys.argv[2:]
        if mode == "steps":
            steps(words)
        else:
            for result in python_of_updates() if mode == "python" else arithmetic(*map(int, words)):
                print_result(*result)
        return
    parser = bench_runs.parser_of(__doc__, steps=0)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", action="store_true")
    args = parser.parse_args()
    checkouts: dict[str, Path] = {"before": args.before.resolve()} if args.before else {}
    checkouts["here"] = ROOT
    if args.steps:
        print_table(step_by_step(checkouts, args), "s")
    elif args.python:
        print_table(in_turn(checkouts, ["python"], args.rounds), "")
    else:
        words = ["arithmetic", str(args.elements), str(args.threads)]
        print_table(in_turn(checkouts, words, args.rounds), "ns")


if __name__ == "__main__":
    main()
