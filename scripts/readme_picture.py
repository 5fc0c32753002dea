"""The picture of README.md, a simulated step of a shipped recipe, which says so inside the image; and its example of a
plan and its table of models.

python scripts/readme_picture.py           # compare; exit 1 if one of them is out of date
python scripts/readme_picture.py --write   # write scripts/readme_picture.svg and the figures
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from roundpipe_cli.cli.follow import watch_demo
from roundpipe_cli.cli.plan import verdict_lines
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.shipped import shipped_recipes

PICTURE = Path(__file__).with_suffix(".svg")
ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
ROW = re.compile(r"^(?P<head>\|.*\[`(?P<name>\S+)`\]\(recipes/\S+\.yaml\)) \|[^|]*\|[^|]*\|$", re.MULTILINE)
"""A row of its table: its last two cells are seconds of a step and tokens/s."""
HARDWARE, RECIPE = "8x4090,host_memory_gib=128", "qwen3/32b_lora_8x24gb"
"""A row of README.md's table."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        watch_demo(HARDWARE, [RECIPE], PICTURE)
        PICTURE.chmod(0o644)
        README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")
    elif stale := out_of_date():
        sys.exit(f"out of date: {', '.join(stale)}: python scripts/readme_picture.py --write")


def out_of_date() -> list[str]:
    """The picture and the page, where they do not say what the planner says now."""
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / PICTURE.name
        watch_demo(HARDWARE, [RECIPE], now)
        stale = [PICTURE.name] * (now.read_bytes() != PICTURE.read_bytes())
    page = README.read_text(encoding="utf-8")
    return stale + ["figures of README.md"] * (with_figures(page) != page)


def with_figures(page: str) -> str:
    """README.md with the figures of recipes' headers in its table, and the verdict that `plan` prints now below its
    command, without what follows it."""
    verdicts = {recipe.name: recipe.verdict for recipe in shipped_recipes()}

    def row(found: re.Match[str]) -> str:
        verdict = verdicts[found["name"]]
        assert verdict is not None
        speeds = verdict.tokens_per_s, *(verdict.tokens_per_step / each_s for each_s in verdict.step_range_s[::-1])
        speed, least, most = (f"{float(f'{each:.3g}'):,.0f}" for each in speeds)
        return f"{found['head']} | {verdict.step_s:.3g} s | {speed} ({least} to {most}) |"

    page = ROW.sub(row, page)
    command = re.search(r"^    \$ roundpipe plan (\S+) --hardware (\S+)\n", page, re.MULTILINE)
    assert command is not None
    question = make_plan(load_recipe(ROOT / command[1]), command[2])
    shown = "".join(f"    {line}\n" for line in [*verdict_lines(question, None), "..."])
    end = page.index("\n\n", command.end()) + 1
    return page[: command.end()] + shown + page[end:]


if __name__ == "__main__":
    main()
