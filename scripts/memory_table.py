"""Peak of a card's memory against `plan`, for 46 forms of training: a table, made by the simulated allocator.

    python scripts/memory_table.py             # all forms, a few minutes
    python scripts/memory_table.py --only moe  # those with the word in their name, e.g. "chunks"

Peaks are what torch would allocate, without the driver's context. A form that lies outside 0.75 to 1.0 of the plan is
marked, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from roundpipe_cli.costs.analytic import Case, analytic_costs, case_of, with_gains
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.costs.memory import CONTEXT, device_need
from roundpipe_cli.costs.models import parse_config
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.model import attention
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from roundpipe_cli.train.prepare.devices import make_backends
from scripts.gpu_checks.models import build, random_rows, tiny
from tests.support.simulated_cuda import Simulation

LEAST, MOST = 0.75, 1.0
"""Peak over plan: less refuses what fits, more lets through what does not."""
SIZES = {"vocab_size": 32_000, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
WIDTHS = {"intermediate_size": 1024, "moe_intermediate_size": 256}
TYPES = {"llama": {}, "qwen3": {}, "gemma2": {}, "moe": {"model_type": "qwen3_moe"}}
WAYS: dict[str, dict[str, Any]] = {
    "stage": {"recompute": "stage"},
    "layer": {"recompute": "layer"},
    "keep": {"recompute": "stage", "keep_blocks": 2},
    "whole head": {"recompute": "stage", "head_chunk_tokens": 512},
}
TOKENS, CHUNK_TOKENS = 512, 128
NUM_BLOCKS, BLOCKS_PER_STAGE = 4, 2
MICROBATCHES, PER_ROUND = 4, 2
SEQUENCE_TOKENS = 2048
"""Tokens of the sequence of a step in chunks."""
CHUNKS: tuple[tuple[str, str, int, Mapping[str, Any]], ...] = (
    ("llama", "lora", 2, {}),
    ("llama", "full", 8, {}),
    ("llama", "lora", 16, {"num_key_value_heads": 1}),
    ("llama", "full", 4, {"num_key_value_heads": 8}),
    ("llama", "lora", 8, {"packed": True}),
    ("qwen3", "full", 16, {"packed": True}),
    ("gemma3_text", "lora", 8, {"sliding_window": 128}),
    ("mistral", "full", 4, {"sliding_window": 512, "packed": True}),
    ("gpt_oss", "lora", 8, {"sliding_window": 128, "intermediate_size": 256}),
    ("gpt_oss", "full", 4, {"sliding_window": 128, "packed": True, "intermediate_size": 256}),
    ("gemma2", "lora", 8, {}),
    ("qwen3_moe", "full", 8, {}),
    ("llama", "lora", 8, {"masked": True}),
    ("qwen3_next", "lora", 8, {"packed": True}),
)
"""(model type, method, number of chunks, the type's changes; `masked`: no kernel takes other ends of queries)."""


@dataclass(frozen=True)
class Form:
    """One way of training one kind of model."""

    kind: str
    method: str
    way: str
    chunks: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.method}, {self.way}"


def forms() -> Iterator[Form]:
    """All of the table."""
    for kind, method, way in product(TYPES, ("lora", "full"), WAYS):
        yield Form(kind, method, way, changes=TYPES[kind])
    for kind, method, chunks, changes in CHUNKS:
        words = "".join(f", {name} {value}" for name, value in changes.items())
        yield Form(kind, method, f"{chunks} chunks{words}", chunks, changes)


def planned_and_peak(form: Form) -> tuple[int, int, dict[str, int]]:
    """Bytes that `plan` counts and that a step takes, both without the driver's context, and the plan's parts."""
    changes = dict(form.changes)
    model_type, packed, masked = changes.pop("model_type", form.kind), "packed" in changes, "masked" in changes
    sizes = {**SIZES, **WIDTHS, "num_hidden_layers": NUM_BLOCKS, "max_position_embeddings": SEQUENCE_TOKENS}
    figures = {**tiny(model_type), **sizes, **{name: changes[name] for name in changes.keys() - {"packed", "masked"}}}
    architecture = parse_config(figures, name=form.name, source="memory_table")
    way = {"head_chunk_tokens": CHUNK_TOKENS, "method": form.method, **WAYS.get(form.way, {})}
    tokens, count, per_round = TOKENS, MICROBATCHES, PER_ROUND
    stages = even_cut(NUM_BLOCKS + 2, BLOCKS_PER_STAGE, BLOCKS_PER_STAGE)
    if form.chunks > 1:
        tokens, count, per_round = SEQUENCE_TOKENS, form.chunks, form.chunks
        stages = [(0, 2), (3, 4)], [(5, 5), (3, 4), (0, 2)]
    settings = TrainingSettings(tokens, num_microbatches=count, lora_r=16, sequence_chunks=form.chunks, **way)
    case = case_of(architecture, settings, hardware := parse_hardware("1xh100"))
    if masked:
        without = replace(settings, flash_chunks=False)
        case = Case(architecture, without, hardware, analytic_costs(architecture, without, hardware))
    costs = with_gains(case.costs, settings)
    parts = {name: size for name, size in device_need(case, *stages, per_round).parts.items() if name != CONTEXT}
    model = build(figures, form.method)
    rows = random_rows(count // form.chunks, tokens, figures["vocab_size"])
    if form.chunks > 1:  # the head of one chunk takes as much as all, in less time
        rows = [
            replace(row, labels=row.labels.index_fill(1, torch.arange(tokens - 2 * CHUNK_TOKENS), -100)) for row in rows
        ]
    if packed:
        rows = [in_rows(row) for row in rows]
    schedule = build_schedule(
        "roundpipe",
        forward_stages=stages[0],
        backward_stages=stages[1],
        num_workers=1,
        rounds=Rounds(count, per_round=per_round, sequence_chunks=form.chunks),
        costs=costs,
    )
    options = EngineOptions(
        recompute=settings.recompute,
        keep_blocks=settings.keep_blocks,
        head_chunk_tokens=settings.head_chunk_tokens,
        fused=model.fused,
        attends_in_rows=form.chunks > 1,
    )
    with Simulation(), Engine(model.skeleton, model.split, model.store, backends(masked), options=options) as engine:
        peak = max(
            max(engine.run_step(rows, schedule, step=step).device_peak_bytes)
            for step in range(1 if form.chunks > 1 else 2)
        )
    return sum(parts.values()), peak, parts


def backends(masked: bool) -> Sequence[Backend]:
    """The card, as a run sets it up."""
    found = make_backends(["cuda:0"], 1)
    attention._takes_other_ends = False
    assert masked or attention.try_other_ends(["cuda:0"]) is None
    return found


def in_rows(row: Microbatch) -> Microbatch:
    """The same tokens as a short row and two long ones."""
    tokens = row.input_ids.shape[1]
    lengths = (tokens // 9, tokens // 2, tokens - tokens // 9 - tokens // 2)
    return replace(row, position_ids=torch.cat([torch.arange(length) for length in lengths])[None])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of the name")
    parser.add_argument("--parts", action="store_true", help="the plan's parts too")
    options = parser.parse_args()
    wrong = 0
    print("| form | planned | peak | peak over plan |\n|---|---:|---:|---:|")
    torch.set_num_threads(1)  # rows that threads add at once are the whole table to the simulation
    chosen = [form for form in forms() if options.only in form.name]
    pool = multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1)  # each leaves a gigabyte behind
    for form, (planned, peak, parts) in zip(chosen, pool.imap(planned_and_peak, chosen), strict=True):
        is_off = not LEAST <= peak / planned <= MOST
        wrong += is_off
        print(f"| {form.name} | {planned / 1e6:.1f} MB | {peak / 1e6:.1f} MB | {peak / planned:.2f}{' !' * is_off} |")
        if options.parts:
            print(*(f"    {name}: {size / 1e6:.1f}" for name, size in parts.items() if size), sep="\n")
        sys.stdout.flush()
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
