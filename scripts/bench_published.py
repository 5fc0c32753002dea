"""Tokens a second as the published evaluation measures them: random weights, random tokens, whole steps with updates.

    python scripts/bench_published.py --model meta-llama/Llama-3.1-8B --devices '[cuda:0, cuda:1]'
    python scripts/bench_published.py --model Qwen/Qwen3-32B --sequences 128 --devices auto --method lora
    python scripts/bench_published.py --tiny llama --tokens 64 --sequences 8          # a try on two CPU workers

As published: float16 with float16 accumulation, sequences of 2,048 tokens, 256 of them a step (128 for the 32B model),
full recompute, 5 iterations before 10 that count; exact, where theirs computes with weights one update old. A run of
`roundpipe finetune` in this process:
its planner, its data, its loop. Only the weights are filled with random numbers instead of a checkpoint's, whose file
is made here with a header and holes and takes no disk space; nothing is saved. The host needs the memory that `plan`
says. `--model` is one that the program ships figures of, or `--config` names a config.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import struct
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from roundpipe_cli.cli.output import quiet_libraries
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.events import Event, Notice, StepFinished, Tell
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import initial_values
from roundpipe_cli.model.stored.tensors import is_adapter
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.finetune import run_finetune
from roundpipe_cli.train.prepare import setup
from roundpipe_cli.train.signals import Reporting, Start, StopSignals
from scripts.gpu_checks.models import SCALE, configuration, shipped, tiny
from tests.support.e2e import make_tokenizer

WARM_UP, COUNTED = 5, 10
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:"
PUBLISHED = {
    "meta-llama/Llama-3.1-8B": (3142.17, 6259.09, 9221.6, 12277.77, 15342.93, 18363.22, 21296.67, 24274.54),
    "Qwen/Qwen3-32B": (740.46, 1476.11, 2203.82, 2897.08, 3599.81, 4290.25, 4913.34, 5516.22),
}
"""Tokens/s of full fine-tuning on 1 to 8 RTX 4090, arXiv 2604.27085."""


class EnoughStepsError(Exception):
    """All steps that count are done; the run ends without a result."""


def write_model(folder: Path, figures: Mapping[str, Any]) -> None:
    """A model's folder whose weights are a hole in a file."""
    folder.mkdir()
    config = configuration(figures)
    config.save_pretrained(str(folder))
    make_tokenizer().save_pretrained(str(folder))
    skeleton = build_skeleton(config, torch.float16)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parameter in skeleton.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "F16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def fill_with_random(
    store: WeightStore, source: ModelSource, model: nn.Module, recipe: Recipe, *, tell: Tell, **_: object
) -> None:
    """In the place of `fill_store`: norms are ones, all else is normal, adapters as ever."""
    some = torch.randn(2**20 + 1, generator=torch.Generator().manual_seed(0)) * SCALE  # repeated
    for layout in store.layouts:
        for place in layout.places:
            if is_adapter(place.name):
                continue
            count = torch.Size(place.shape).numel()
            values = some.repeat(-(-count // some.numel()))[:count].reshape(place.shape)
            store.set_parameter(place.name, torch.ones(place.shape) if "norm" in place.name else values)
    if recipe.method == "lora":
        for name, values in initial_values(model, recipe.seed, store.base_weight, recipe.lora.init):
            store.set_parameter(name, values)
    tell(Notice("weights are random numbers"))


def write_recipe(folder: Path, args: argparse.Namespace) -> Path:
    """Rows of full length and the published settings."""
    letters = random.Random(0)
    rows = ["".join(letters.choices(LETTERS, k=args.tokens - 1)) for _ in range(args.sequences)]  # and an end token
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    on_gpu = "cuda" in args.devices or args.devices == "auto"
    recipe = {
        "model": "model",
        "method": args.method,
        "datasets": [{"path": "rows.jsonl", "type": "text"}],
        "max_seq_length": args.tokens,
        "packing": False,
        "micro_batch_size": args.micro_batch_size,
        "gradient_accumulation_steps": args.sequences // args.micro_batch_size,
        "max_steps": WARM_UP + COUNTED,
        "num_train_epochs": WARM_UP + COUNTED,
        "learning_rate": 1e-6,
        "dtype": args.dtype,
        "float16_accumulation": args.dtype == "float16" and on_gpu,
        "check_longest_rows": False,
        "output_dir": "out",
        "save_steps": 1000,
        "pipeline": {"devices": args.devices, "recompute": "stage"},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe).replace('"[', "[").replace(']"', "]"), encoding="utf-8")
    return folder / "recipe.yaml"


def measured(recipe: Path, overrides: list[str]) -> list[StepFinished]:
    """The steps that count."""
    steps: list[StepFinished] = []

    def tell(event: Event) -> None:
        if isinstance(event, Notice):
            print(event.text, file=sys.stderr)
        if isinstance(event, StepFinished):
            steps.append(event)
            if event.step == WARM_UP + COUNTED:
                raise EnoughStepsError

    loaded = load_recipe(str(recipe), [f"output_dir={recipe.parent / 'out'}", *overrides])
    random_weights = mock.patch.object(setup, "fill_store", fill_with_random)
    with random_weights, suppress(EnoughStepsError), StopSignals() as signals:
        run_finetune(loaded, Start(offline=True), Reporting(tell), signals)
    return steps[WARM_UP:]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--model", default="meta-llama/Llama-3.1-8B", help="one with shipped figures")
    shape.add_argument("--config", type=Path, help="a config.json")
    shape.add_argument("--tiny", metavar="TYPE", help="a model of a few thousand weights")
    parser.add_argument("--method", default="full", choices=["full", "lora"])
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=256, help="of a step")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--devices", default="[cpu, cpu]", help="as in a recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args(words)
    if args.sequences % args.micro_batch_size:
        parser.error(f"--sequences {args.sequences} is no multiple of --micro-batch-size {args.micro_batch_size}")
    return args


def run(args: argparse.Namespace) -> tuple[str, list[StepFinished]]:
    """The model's name, and the steps that count."""
    if args.tiny:
        figures, name = tiny(args.tiny, vocab_size=300, max_position_embeddings=args.tokens), f"tiny {args.tiny}"
    elif args.config:
        figures, name = json.loads(args.config.read_text(encoding="utf-8")), str(args.config)
    else:
        figures, name = shipped(args.model), args.model
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", figures)
        return name, measured(write_recipe(folder, args), args.overrides)


def main() -> None:
    quiet_libraries()
    args = parse()
    name, steps = run(args)
    step_s = statistics.median(step.step_s for step in steps)
    tokens_per_s = statistics.median(step.tokens / step.step_s for step in steps)
    num_workers = len(steps[0].utilization)
    known = PUBLISHED.get(name, ())[num_workers - 1 : num_workers] if args.method == "full" else ()
    print(
        "| model | method | dtype | devices | sequences x tokens | step | tokens/s | bubble | published on RTX 4090 |"
    )
    print("|---|---|---|---|---|---:|---:|---:|---:|")
    bubble = statistics.median(step.bubble_ratio for step in steps)
    what = f"| {name} | {args.method} | {args.dtype} | {args.devices} | {args.sequences} x {args.tokens} "
    reference = f"{known[0]:,.0f}" if known else "not known"
    print(f"{what}| {step_s:.3g} s | {tokens_per_s:,.0f} | {100 * bubble:.1f} % | {reference} |")


if __name__ == "__main__":
    main()
