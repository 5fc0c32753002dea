"""How long OpenMP threads of the host's arithmetic spin when they wait: what an AdamW update costs, by that.

    python scripts/host_waits.py [--rounds 5] [--busy 2]

Between two parallel regions the threads of torch's OpenMP (GNU's) spin, by default as many times as take some
milliseconds, and hold the processor that another program, or the thread they wait for, needs. Each row is a process of
its own with one number of spins; the rows take turns. Printed are medians in ns a parameter: by the clock and in
processor time, alone and beside as many busy loops as `--busy` says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections import defaultdict

SPINS: tuple[str | None, ...] = (None, "0", "1000", "10000", "30000", "100000")
"""GOMP_SPINCOUNT of each row; None: GNU's default."""
PARAMETERS, BLOCKS, UPDATES = 16_800_000, 24, 5
CHILD = f"""
import time, torch
from roundpipe_cli.train.optim.optimizer import AdamW
torch.set_num_threads(2)
rule, size = AdamW(), {PARAMETERS} // {BLOCKS}
blocks = [(torch.ones(size), torch.full((size,), 1e-3), rule.make_state(torch.Size([size]))) for _ in range({BLOCKS})]
for number in range(1, {UPDATES} + 2):
    if number == 2:
        started = time.monotonic(), time.process_time()
    for values, gradient, state in blocks:
        rule.update(values, gradient, state, 1e-4, number=number, salt=0)
ended = time.monotonic(), time.process_time()
print(*((end - start) / {UPDATES} / {PARAMETERS} * 1e9 for start, end in zip(started, ended)))
"""


def measure(spins: str | None) -> tuple[float, float]:
    """(ns a parameter by the clock, of processor time) of one process."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}
    environment = own if spins is None else own | {"GOMP_SPINCOUNT": spins}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True)
    clock, processor = map(float, done.stdout.split())
    return clock, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=2, help="busy loops beside")
    options = parser.parse_args()
    found: dict[tuple[str | None, bool], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for beside in (False, True):
            loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy * beside)]
            try:
                for spins in SPINS:
                    found[spins, beside].append(measure(spins))
            finally:
                for loop in loops:
                    loop.kill()
    print(f"load {os.getloadavg()[0]:.1f}; ns a parameter, medians of {options.rounds}")
    print("| spins | alone: clock | processor | beside: clock | processor |\n|---|---:|---:|---:|---:|")
    for spins in SPINS:
        rows = [found[spins, beside] for beside in (False, True)]
        cells = [statistics.median(column) for row in rows for column in zip(*row, strict=True)]
        print(f"| {spins or 'default'} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
