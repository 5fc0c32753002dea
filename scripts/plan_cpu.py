"""Processor time of `plan` and `bench` as a multiple of `roundpipe --help`'s, for all recipes; exit 1 above a target.

python scripts/plan_cpu.py               # all recipes, on the hardware of their headers, minutes
python scripts/plan_cpu.py qwen3 --no-bench

Each recipe begins with an empty cache; `again` asks the same a second time. A cell has the multiple and the seconds.
`--help` is measured beside each recipe, since machines change their speed; the median of all counts.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from roundpipe_cli.recipe.shipped import ShippedRecipe, shipped_recipes

ROOT = Path(__file__).resolve().parent.parent
ONE_GPU, SEVERAL, BENCH, AGAIN = 6.0, 12.0, 20.0, 5.0
"""The most that a multiple may be."""


def processor_s(cache: str, *arguments: str) -> float:
    """Processor time of one `roundpipe` process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ROUNDPIPE_CACHE": cache, "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # an installed program is compiled once: 0.2 to 0.35 s
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "roundpipe_cli", *arguments]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(recipe: ShippedRecipe, *, with_bench: bool) -> list[tuple[float, float]]:
    """(processor seconds, target as a multiple) of plan, plan again, bench, bench again."""
    assert recipe.verdict is not None
    hardware = recipe.verdict.hardware
    found = []
    for command in ("plan", "bench") if with_bench else ("plan",):
        most = BENCH if command == "bench" else ONE_GPU if hardware.startswith("1x") else SEVERAL
        with tempfile.TemporaryDirectory() as cache:
            question = (cache, command, str(recipe.path), "--hardware", hardware)
            found += [(processor_s(*question), most), (processor_s(*question), AGAIN)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts of recipe names; none: all recipes")
    parser.add_argument("--no-bench", action="store_true")
    options = parser.parse_args()
    helps, rows = [processor_s("/tmp", "--help") for _ in range(5)], []
    for recipe in shipped_recipes():
        if recipe.verdict is None or (options.parts and not any(part in recipe.name for part in options.parts)):
            continue
        helps.append(processor_s("/tmp", "--help"))
        rows.append((recipe, measured(recipe, with_bench=not options.no_bench)))
    help_s = statistics.median(helps)
    print(f"`roundpipe --help` takes {help_s:.3f} s of processor time\n")
    names = ["plan", "again"] + ([] if options.no_bench else ["bench", "again"])
    print(f"| recipe | hardware | {' | '.join(names)} |")
    print(f"|---|---|{'---:|' * len(names)}")
    num_over = 0
    for recipe, found in rows:
        assert recipe.verdict is not None
        over = [seconds > most * help_s for seconds, most in found]
        cells = [
            f"{seconds / help_s:.1f}x, {seconds:.2f} s{f' (above {most:g}x)' if is_over else ''}"
            for (seconds, most), is_over in zip(found, over, strict=True)
        ]
        num_over += sum(over)
        print(f"| {recipe.name} | {recipe.verdict.hardware} | {' | '.join(cells)} |")
    print(f"\n{num_over} above their targets")
    return 1 if num_over else 0


if __name__ == "__main__":
    sys.exit(main())
