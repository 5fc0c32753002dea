#!/usr/bin/env python3
"""Attention with sinks (gpt-oss) by fused kernels against transformers' own: time and what autograd keeps of a layer.

    scripts/bench_sinks.py
    scripts/bench_sinks.py --device cuda --dtype bfloat16 --lengths 2048 8192

Heads of gpt-oss-20b by default, random values, forward and backward of one layer's attention in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli.model.attention import sink_attention
from roundpipe_cli.model.worker_model import saved_sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--window", type=int, default=128, help="tokens of the sliding window, of every other row")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--key-value-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.device}, {options.dtype}, {options.heads} heads of {options.head_dim}, {options.rounds} rounds")
    print("| tokens | window | transformers' own | fused | ratio | kept | kept, fused |\n|---|---|---|---|---|---|---|")
    for length in options.lengths:
        for window in (None, options.window):
            try:
                cells = compared(options, length, window)
            except torch.OutOfMemoryError:
                cells = ["out of memory"] * 5
            print("| " + " | ".join([f"{length:,}", f"{window or 'none'}", *cells]) + " |", flush=True)


def compared(options: argparse.Namespace, length: int, window: int | None) -> list[str]:
    """The cells of a row."""
    ways = both(options, length, window)
    taken: list[list[float]] = [[], []]
    for turn in range(options.rounds + 1):
        for own, (run, _) in zip(taken, ways, strict=True):
            seconds = timed(run, options.device)
            if turn:
                own.append(seconds)
    theirs_s, ours_s = (statistics.median(own) for own in taken)
    kept = [f"{sum(saved_sizes(run, known)) / 1e6:,.0f} MB" for run, known in ways]
    return [f"{theirs_s * 1e3:,.0f} ms", f"{ours_s * 1e3:,.0f} ms", f"{theirs_s / ours_s:.2f}x", *kept]


Way = tuple[Callable[[], torch.Tensor], list[torch.Tensor]]
"""A forward, and the tensors that are there before it."""


def both(options: argparse.Namespace, length: int, window: int | None) -> tuple[Way, Way]:
    """transformers' own and ours, on the same values."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    place: dict[str, Any] = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    widths = options.heads, options.key_value_heads, options.key_value_heads
    query, key, value = (torch.randn(1, n, length, options.head_dim, **place).requires_grad_() for n in widths)
    sinks = torch.randn(options.heads, **place)
    position = torch.arange(length, device=options.device)
    mask = position[:, None] >= position
    if window is not None:
        mask &= position[:, None] - position < window
    mask = mask[None, None]
    added = torch.zeros(mask.shape, **place).masked_fill(~mask, torch.finfo(place["dtype"]).min)
    module: Any = SimpleNamespace(
        num_key_value_groups=options.heads // options.key_value_heads, sinks=sinks, training=True
    )
    scale, given = options.head_dim**-0.5, [query, key, value, sinks]
    return (
        (lambda: eager_attention_forward(module, query, key, value, added, scale)[0], [*given, added]),
        (lambda: sink_attention(module, query, key, value, mask, 0.0, scale, s_aux=sinks)[0], [*given, mask]),
    )


def timed(run: Callable[[], torch.Tensor], device: str) -> float:
    """Seconds of a forward and its backward."""
    start = time.perf_counter()
    made = run()
    made.backward(torch.ones_like(made))
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
