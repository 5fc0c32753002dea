"""How long OpenMP threads of the host's arithmetic spin when they wait: what an AdamW update and a norm cost, by that.

    python scripts/host_waits.py [--rounds 5] [--busy 2]

Between two parallel regions the threads of torch's OpenMP (GNU's) spin, by default as many times as take some
milliseconds, and hold the processor that another program, or the thread they wait for, needs. Each row is a process of
its own with one number of spins; the rows take turns. Printed are medians in ns a parameter, by the clock / of
processor time, alone and beside as many busy loops as `--busy` says. `norm in pieces` is the gradient's norm as it was
computed before: in float64, in pieces of 2^22.
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
WORKS = ("update", "norm", "norm in pieces")
CHILD = f"""
import time, torch
from roundpipe_cli.engine.gradients import square_sum
from roundpipe_cli.train.optim.optimizer import AdamW
torch.set_num_threads(2)
rule, size = AdamW(), {PARAMETERS} // {BLOCKS}
blocks = [(torch.ones(size), torch.full((size,), 1e-3), rule.make_state(torch.Size([size]))) for _ in range({BLOCKS})]
flat = torch.full(({PARAMETERS},), 1e-3)
def update(number):
    for values, gradient, state in blocks:
        rule.update(values, gradient, state, 1e-4, number=number, salt=0)
def in_pieces(number):
    sum(piece.double().square().sum() for piece in flat.split(2**22))
for work in (update, lambda number: square_sum(flat), in_pieces):
    for number in range(1, {UPDATES} + 2):
        if number == 2:
            started = time.monotonic(), time.process_time()
        work(number)
    ended = time.monotonic(), time.process_time()
    print(*((end - start) / {UPDATES} / {PARAMETERS} * 1e9 for start, end in zip(started, ended)))
"""


def measure(spins: str | None) -> list[float]:
    """ns a parameter by the clock and of processor time, of each of `WORKS` in one process."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}
    environment = own if spins is None else own | {"GOMP_SPINCOUNT": spins}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=2, help="busy loops beside")
    options = parser.parse_args()
    found: dict[tuple[str | None, bool], list[list[float]]] = defaultdict(list)
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
    heads = [f"{work}{where}" for where in ("", ", beside") for work in WORKS]
    print(f"| spins | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
    for spins in SPINS:
        medians = [
            [statistics.median(column) for column in zip(*found[spins, beside], strict=True)] for beside in (0, 1)
        ]
        cells = [
            f"{clock:.2f} / {used:.2f}" for some in medians for clock, used in zip(some[::2], some[1::2], strict=True)
        ]
        print(f"| {spins or 'default'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
