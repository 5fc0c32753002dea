"""An update by AdamW on pages of 2 MiB against ordinary ones, in turn, one thread. One table.

echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled      # as root; `roundpipe doctor` says how it is
python scripts/bench_pages.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from roundpipe_cli.costs.machine import HostLayout, host_layout
from roundpipe_cli.engine import weights
from roundpipe_cli.train.optim.optimizer import AdamW, RuleSettings

WAYS = {"ordinary": "never", "2 MiB": "advise"}


def update_s(num_elements: int, huge: str) -> float:
    """Processor seconds of the second update of that many parameters, whose memory is made anew."""
    with mock.patch.object(weights, "layout", lambda: HostLayout((0,), huge)):
        values, gradient, first, second = (weights.page_aligned(4 * num_elements).view(torch.float32) for _ in range(4))
    rule = AdamW.of(RuleSettings())
    state = {"exp_avg": first, "exp_avg_sq": second}
    taken = []
    for number in (1, 2):
        start_s = time.process_time()
        rule.update(values, gradient, state, 1e-3, number=number, salt=0)
        taken.append(time.process_time() - start_s)
    return taken[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=64 * 1024**2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not host_layout().gives_huge_pages:
        raise SystemExit("this system gives no pages of 2 MiB to shared memory; `roundpipe doctor` says how it would")
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(args.rounds):
        for name, huge in WAYS.items():
            found[name].append(update_s(args.elements, huge))
    base = statistics.median(found["ordinary"])
    print(f"{args.elements:,} parameters, {args.rounds} rounds\n\n| pages | an update | of ordinary |\n|---|---:|---:|")
    for name, times in found.items():
        median = statistics.median(times)
        print(f"| {name} | {1e3 * median:.1f} ms | {base / median:.2f}x |")


if __name__ == "__main__":
    main()
