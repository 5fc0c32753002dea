"""Many tiny steps: nothing grows, and the last ones take no longer than the first. One table.

    python scripts/soak.py                     20,000 steps, about ten minutes
    python scripts/soak.py --steps 500         a try

A step goes through two workers that copy all their bytes (lanes, slots, boundaries, gradient sums, weight cache) and
updates the adapters. Memory, threads and file descriptors are read at every tenth of the way; the run fails if the last
tenth has more threads or descriptors than the first, or if memory grew from the second tenth on (the first warms up) by
more than 1 MiB per 1,000 steps, or 8 MiB in a short run.
Times of the first and the last tenth are medians; that they stay within 5 % is asked of a quiet machine (--strict).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli.train.optim.optimizer import HostOptimizer
from tests.support.tiny import make_rig, random_microbatches, schedule_for

MIB = 1024**2
NUM_TENTHS = 10
GROWTH_PER_THOUSAND_BYTES, MIN_GROWTH_BYTES = 1 * MIB, 8 * MIB
MAX_SLOWER = 1.05
SIZES = [(1, 8), (2, 5), (1, 6), (1, 7)]


@dataclass(frozen=True)
class Tenth:
    """What one tenth of the steps showed."""

    step_s: float
    memory_bytes: int
    num_threads: int
    num_files: int


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(num_steps: int) -> list[Tenth]:
    """Run the steps; a few before them warm up."""
    torch.set_num_threads(1)
    rig = make_rig("llama", "lora", hidden_size=32, intermediate_size=32)
    cache = rig.store.layouts[1].num_bytes + 256
    optimizer = HostOptimizer(rig.store)
    schedule, microbatches = schedule_for(rig, 2, len(SIZES)), random_microbatches(SIZES)
    found, per_tenth, step = [], max(1, num_steps // NUM_TENTHS), 0
    with rig.engine(2, copy=True, weight_cache_bytes=cache) as engine:
        for tenth in range(-1, NUM_TENTHS):
            seconds = []
            for _ in range(per_tenth if tenth >= 0 else min(per_tenth, 20)):
                start_s = time.perf_counter()
                engine.run_step(microbatches, schedule, step=step)
                optimizer.step(1e-4)
                seconds.append(time.perf_counter() - start_s)
                step += 1
            if tenth >= 0:
                files = len(list(Path("/proc/self/fd").iterdir()))
                found.append(Tenth(statistics.median(seconds), resident_bytes(), threading.active_count(), files))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--strict", action="store_true", help="fail too if the last tenth is more than 5 %% slower")
    args = parser.parse_args()
    found = soak(args.steps)
    print(f"| tenth of {args.steps} steps | ms a step, median | MiB resident | threads | open files |")
    print("|---:|---:|---:|---:|---:|")
    for index, item in enumerate(found, 1):
        cells = (f"{1e3 * item.step_s:.2f}", f"{item.memory_bytes / MIB:.1f}", item.num_threads, item.num_files)
        print(f"| {index} | " + " | ".join(map(str, cells)) + " |")
    first, last = found[0], found[-1]
    thousands = (len(found) - 2) * args.steps / len(found) / 1000
    grown = last.memory_bytes - found[1].memory_bytes > max(GROWTH_PER_THOUSAND_BYTES * thousands, MIN_GROWTH_BYTES)
    grown |= last.num_threads > first.num_threads or last.num_files > first.num_files
    slower = last.step_s / first.step_s
    print(f"\nlast tenth against first: {slower:.3f}x the time; {'something grew' if grown else 'nothing grew'}")
    return int(grown or (args.strict and slower > MAX_SLOWER))


if __name__ == "__main__":
    sys.exit(main())
