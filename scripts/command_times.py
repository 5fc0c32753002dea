"""Processor time of every command to its first line and to its end, as multiples of `python -c 'import typer, rich'`.

python scripts/command_times.py            # about three minutes; exit 1 if a --help is above 1.5
python scripts/command_times.py --only plan

Each figure is the median of three runs, taken in turn with the command that it is compared with. The question that a
command is asked is a small one, for a model of a few thousand weights where it needs one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from roundpipe_cli.cli.app import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
HELP_MOST = 1.5
"""Most for a `--help`, as a multiple."""
NUM_RUNS = 3
BASE = (sys.executable, "-c", "import typer, rich")
RECIPES = ("ls", "show", "cp", "validate", "keys", "schema")
QUESTIONS: dict[str, tuple[str, ...]] = {
    "finetune": ("recipe.yaml", "max_steps=1", "output_dir=again"),
    "plan": ("qwen3-8b", "--hardware", "1x4090"),
    "bench": ("--costs", f"{ROOT}/recipes/example_costs.json", "--workers", "2", "--microbatches", "4"),
    "watch": ("out",),
    "runs": (),
    "data": ("recipe.yaml",),
    "recipes ls": (),
    "recipes show": ("qwen3-8b",),
    "recipes cp": ("qwen3-8b", "copies/"),
    "recipes validate": ("recipe.yaml",),
    "recipes keys": (),
    "recipes schema": (),
    "init": ("--model", "Qwen/Qwen3-0.6B", "--data", "rows.jsonl", "--hardware", "1x4090", "--output", "new.yaml"),
    "doctor": (),
    "convert": ("axolotl.yaml",),
    "export": ("out", "--merge"),
    "generate": ("out", "hello", "--max-new-tokens", "4"),
}
"""Command -> the rest of a line that it can answer in the folder of `prepare`."""
WRITTEN = ("again", "out/merged", "out-merged", "new.yaml", "copies")
"""What the questions write, removed before they are asked again."""


@dataclass(frozen=True)
class Times:
    """Processor seconds of one process and its children."""

    first_line_s: float
    end_s: float


def prepare(folder: Path) -> None:
    """A tiny model, rows, a recipe, a file of axolotl, and a finished run in `out`."""
    from tests.support.e2e import make_model, make_workspace

    make_workspace(folder, make_model(folder.parent / "tiny"), max_steps=1)
    (folder / "axolotl.yaml").write_text(
        "base_model: a/b\ndatasets: [{path: rows.jsonl, type: alpaca}]\nadapter: lora\n"
    )
    roundpipe(folder, "finetune", "recipe.yaml", check=True)


def roundpipe(folder: Path, *words: str, check: bool = False) -> Times:
    """Times of `roundpipe WORDS`."""
    return times_of((sys.executable, "-m", "roundpipe_cli", *words), folder, check=check)


def times_of(command: tuple[str, ...], folder: Path, *, check: bool = False) -> Times:
    """Times of a command, whose words and results are thrown away."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["ROUNDPIPE_CACHE"] = str(folder / "cache")
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    first_s = _processor_s(process.pid)
    rest = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if check and process.returncode:
        raise RuntimeError((first + rest).decode())
    end_s = usage.ru_utime + usage.ru_stime
    return Times(min(first_s, end_s) if first and rest else end_s, end_s)


def _processor_s(pid: int) -> float:
    """What the threads of a running process have used; 0 where it has ended."""
    try:
        tasks = [(task / "schedstat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return float("inf")
    return sum(int(text.split()[0]) for text in tasks) / 1e9


def multiples(words: tuple[str, ...], folder: Path) -> tuple[float, float]:
    """Medians of (to the first line, to the end), as multiples of BASE."""
    found = []
    for _ in range(NUM_RUNS):
        base, mine = times_of(BASE, folder).end_s, roundpipe(folder, *words)
        for name in WRITTEN:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        found.append((mine.first_line_s / base, mine.end_s / base))
    return statistics.median(one for one, _ in found), statistics.median(one for _, one in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="commands to measure; may be given several times")
    only = parser.parse_args().only
    names = [name for name in COMMANDS if name != "recipes"] + [f"recipes {name}" for name in RECIPES]
    num_over = 0
    print("| command | `--help` | question | first line | end |\n|---|---:|---|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "work"
        prepare(folder)
        for name in ["", "recipes", *names]:
            if only and name not in only:
                continue
            _, help_ = multiples((*name.split(), "--help"), folder)
            num_over += help_ > HELP_MOST
            cells = f"| `{f'roundpipe {name}'.strip()}` | {help_:.1f}{' (above 1.5)' if help_ > HELP_MOST else ''} |"
            if name in QUESTIONS:
                first, end = multiples((*name.split(), *QUESTIONS[name]), folder)
                asked = " ".join(word.replace(f"{ROOT}/", "") for word in QUESTIONS[name])
                cells += f" {f'`{asked}`' if asked else ''} | {first:.1f} | {end:.1f} |"
            else:
                cells += " | | |"
            print(cells, flush=True)
    return 1 if num_over else 0


if __name__ == "__main__":
    sys.exit(main())
