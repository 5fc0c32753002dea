#!/usr/bin/env python3
"""What seeded dropout costs on this processor: a mask, and a LoRA step, against torch's own dropout.

    PYTHONPATH=. python scripts/bench_dropout.py [--repeats 9]

The ways take turns and medians are printed, so that a busy machine disturbs all alike. On a GPU nothing is measured
here: counted by hand, a mask and its use move about 26 bytes of memory an element in 16 bit, torch's fused dropout 5.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from roundpipe_cli.model.dropout import SeededDropout
from tests.support.tiny import make_rig, plain_step, random_microbatches

NUM_ELEMENTS = 1 << 22


def medians(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each way, taken in turns after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, run in ways.items():
            started_s = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - started_s)
    return {name: statistics.median(values) for name, values in seconds.items()}


def seeded(run: Callable[[], object], seed: int | None) -> Callable[[], object]:
    def call() -> object:
        with nullcontext() if seed is None else SeededDropout(seed):
            return run()

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        drop = partial(functional.dropout, torch.ones(NUM_ELEMENTS, dtype=dtype), 0.1)
        found = medians({"seeded": seeded(drop, 1), "torch": seeded(drop, None)}, repeats)
        print(dtype, *(f"{name} {s / NUM_ELEMENTS * 1e9:.1f} ns an element" for name, s in found.items()), sep=", ")
    changes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408}
    rigs = {share: make_rig("llama", "lora", lora_dropout=share, **changes) for share in (0.0, 0.1)}
    microbatches = random_microbatches([(2, 128)])
    steps = {
        "seeded": lambda: plain_step(rigs[0.1], microbatches, seed=1),
        "torch": lambda: plain_step(rigs[0.1], microbatches),
        "none": lambda: plain_step(rigs[0.0], microbatches),
    }
    found = medians(steps, repeats)
    print("LoRA step", *(f"{name} {s * 1e3:.0f} ms" for name, s in found.items()), sep=", ")


if __name__ == "__main__":
    main()
