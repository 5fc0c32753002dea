"""What it is worth that steps follow each other without a barrier (`pipeline.optimizer_staleness: 1`): a table.

    python scripts/bench_overlap.py                                                8 workers, about 4 minutes
    python scripts/bench_overlap.py --workers 2 --microbatches 4 --steps 9 --rounds 1 --slow 0.002      a try

Whole runs of `roundpipe finetune`, in turn with staleness 0 and 1, on a tiny model whose workers sleep for every layer
(`work:slow`), so that two cores carry as many workers as the time that Python takes allows. The planner cuts both by
their own profiles. Seconds a step are medians behind the steps that profile; losses of both are compared step by step
where they must be equal: the first two, which read the same weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_runs import environment

from tests.support.e2e import make_model, make_workspace, write_rows

SKIPPED_STEPS = 5
"""They profile, and the one after them waits for the planner."""


def train(folder: Path, name: str, staleness: int, arguments: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """Rows of metrics.jsonl and the report of one run."""
    devices = ",".join(["cpu"] * arguments.workers)
    words = [f"output_dir={name}", f"pipeline.devices=[{devices}]", f"pipeline.optimizer_staleness={staleness}"]
    words += [f"max_steps={arguments.steps}", f"gradient_accumulation_steps={arguments.microbatches}"]
    command = [sys.executable, "-m", "roundpipe_cli", "finetune", "recipe.yaml", "--no-dashboard", *words]
    variables = {
        **environment(),
        "OMP_NUM_THREADS": "1",
        "ROUNDPIPE_CACHE": str(folder / f"cache-{name}"),
        "ROUNDPIPE_FAULT": f"work:slow={arguments.slow}",
    }
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with exit code {done.returncode}:\n{done.stderr}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads((folder / name / "report.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--slow", type=float, default=0.02, help="seconds that a layer takes")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.steps <= SKIPPED_STEPS:
        parser.error(f"--steps must be more than {SKIPPED_STEPS}")
    print(
        f"{arguments.workers} CPU workers that sleep {arguments.slow} s a layer, {arguments.blocks} blocks, "
        f"{arguments.microbatches} microbatches, {arguments.rounds} rounds\n"
    )
    print("| staleness | predicted step | measured step, median | all rounds | bubble | utilization |")
    print("|---|---:|---:|---:|---:|---:|")
    found: dict[int, list[tuple[float, float, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "work"
        make_workspace(folder, make_model(Path(name) / "model", num_hidden_layers=arguments.blocks))
        write_rows(folder / "rows.jsonl", 2 * arguments.microbatches * arguments.steps)
        for number in range(arguments.rounds):
            first = []
            for staleness in (0, 1) if number % 2 == 0 else (1, 0):
                rows, report = train(folder, f"{staleness}-{number}", staleness, arguments)
                counted = rows[SKIPPED_STEPS:]
                figures = [statistics.median(row[key] for row in counted) for key in ("step_s", "bubble_ratio")]
                found[staleness].append((figures[0], figures[1], report["predicted"]["step_s"]))
                first.append([row["loss_hex"] for row in rows[:2]])
            if first[0] != first[1]:
                raise SystemExit(f"the first two losses differ: {first}")
    medians = {}
    for staleness, figures_of in found.items():
        steps, bubbles, predicted = zip(*figures_of, strict=True)
        medians[staleness] = statistics.median(steps)
        bubble = statistics.median(bubbles)
        spread = f"{min(steps):.3f} to {max(steps):.3f} s"
        print(
            f"| {staleness} | {statistics.median(predicted):.3f} s | {medians[staleness]:.3f} s | {spread} "
            f"| {100 * bubble:.1f} % | {100 * (1 - bubble):.1f} % |"
        )
    print(f"\nwithout a barrier: {medians[0] / medians[1]:.3f}x the throughput")


if __name__ == "__main__":
    main()
