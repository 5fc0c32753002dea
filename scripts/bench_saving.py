"""What saving costs: tokens per second with a checkpoint every 10 steps and with none, in alternating runs.

    python scripts/bench_saving.py [--rounds 5] [--steps 43] [--method lora] [KEY=VALUE ...]

Each round trains the same steps twice, first one way, then the other. The time is taken from the end of the third step
(they profile) to the end of the last, so that every save but the one at the very end is in it, with whatever it makes
the training wait. Printed are tokens/s of each run, the median change over rounds, and the pauses that runs report.
All runs have the plan's cut. Needs a quiet machine; --devices names others than two CPU workers; KEY=VALUE overrides
the recipe.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench_runs import PROFILE_STEPS, environment, parser_of, write_workspace

NEVER = 1_000_000
LOOK_S = 0.005


@dataclass(frozen=True)
class Run:
    """One run of the trainer."""

    tokens_per_s: float
    pauses_s: tuple[float, ...]
    """How long each save made the training wait, by its own account; the one at the end is left out."""


def train(folder: Path, name: str, save_steps: int, num_steps: int, overrides: list[str]) -> Run:
    """Train, and watch the rows of metrics.jsonl come."""
    command = [sys.executable, "-m", "roundpipe_cli", "finetune", "recipe.yaml", "--no-dashboard"]
    command += [f"output_dir={name}", f"save_steps={save_steps}", *overrides]
    metrics, log = folder / name / "metrics.jsonl", folder / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=file, stderr=file)
        moments_s = {wanted: wait_for_rows(process, metrics, wanted) for wanted in (PROFILE_STEPS, num_steps)}
        if process.wait() != 0 or None in moments_s.values():
            raise SystemExit(f"{name} ended with exit code {process.returncode}:\n{log.read_text()}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = (moments_s[num_steps] or 0.0) - (moments_s[PROFILE_STEPS] or 0.0)
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    saves = [event for event in events if event["event"] == "CheckpointSaved" and event["step"] < num_steps]
    return Run(sum(row["tokens"] for row in rows[PROFILE_STEPS:]) / seconds, tuple(save["pause_s"] for save in saves))


def wait_for_rows(process: subprocess.Popen[bytes], metrics: Path, wanted: int) -> float | None:
    """The moment (seconds, monotonic) when `wanted` steps were done; None if the run ended with fewer."""
    while True:
        ended = process.poll() is not None
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= wanted:
            return time.monotonic()
        if ended:
            return None
        time.sleep(LOOK_S)


def main() -> None:
    parser = parser_of(__doc__, steps=43)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--method", default="lora")
    arguments = parser.parse_args()
    if arguments.steps <= PROFILE_STEPS + arguments.save_steps:
        parser.error("--steps must leave room for a save after the steps that profile")
    found: dict[str, list[Run]] = {"saving": [], "plain": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = write_workspace(folder, arguments, method=arguments.method)
        for number in range(arguments.rounds):
            order = ("saving", "plain") if number % 2 == 0 else ("plain", "saving")
            for kind in order:
                save_steps = arguments.save_steps if kind == "saving" else NEVER
                name = f"{kind}-{number}"
                found[kind].append(train(folder, name, save_steps, arguments.steps, words))
            shown = ", ".join(f"{kind} {runs[-1].tokens_per_s:.2f}" for kind, runs in found.items())
            print(f"round {number + 1} of {arguments.rounds}: {shown} tokens/s", flush=True)
    pairs = zip(found["saving"], found["plain"], strict=True)
    change = statistics.median(100 * (saving.tokens_per_s / plain.tokens_per_s - 1) for saving, plain in pairs)
    pauses_ms = [1000 * pause_s for run in found["saving"] for pause_s in run.pauses_s]
    print(f"a checkpoint every {arguments.save_steps} steps: {change:+.2f} % tokens/s (median of {arguments.rounds})")
    print(f"pause of a save: median {statistics.median(pauses_ms):.1f} ms, longest {max(pauses_ms):.1f} ms")


if __name__ == "__main__":
    main()
