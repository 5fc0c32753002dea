"""`micro_batch_tokens: auto` against the simulation of every budget; exit 1 where a choice is more than 3 % slower.

    python scripts/auto_microbatches.py                                  # all cases, an hour of processor time
    python scripts/auto_microbatches.py --models 8B,70B --cards 4090 --counts 1,8 --rows 16
    python scripts/auto_microbatches.py --kept FILE                      # a line a case; known ones are not made again

Rows are counted as of 2,048 tokens each and simulated as twice as many of 1,024, so that all five budgets differ. The
host has 1 TiB. A table says for each case what `auto` takes, and how much slower that is than the fastest that fits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli.planning.predict import best_plan
from roundpipe_cli.planning.question import ask, ask_again
from roundpipe_cli.planning.token_budget import BUDGETS
from roundpipe_cli.recipe.load import load_text

MODELS = {
    "1.7B": "model: Qwen/Qwen3-1.7B",
    "8B": "model: Qwen/Qwen3-8B",
    "32B": "model: Qwen/Qwen3-32B",
    "70B": "model: meta-llama/Llama-3.3-70B-Instruct",
    "30B-A3B": "model: Qwen/Qwen3-30B-A3B",
    "8B full": "model: Qwen/Qwen3-8B\nmethod: full",
    "8B 4 bit": "model: Qwen/Qwen3-8B\nload_in_4bit: true",
}
CARDS = ("3060", "4060ti-16gb", "3090", "4090", "5090", "a100-40gb", "h100")
COUNTS = (1, 4, 8)
ROWS = (16, 128)
ROW_TOKENS = 2048
MOST_SLOWER = 0.03


def measured(model: str, machine: str, rows: int) -> dict[str, Any]:
    """The seconds of each budget, None where it does not fit, and the budget of `auto`."""
    keys = f"datasets: [{{path: rows.jsonl}}]\noutput_dir: out\nmax_seq_length: {BUDGETS[0]}\nmicro_batch_size: 1\n"
    keys += f"gradient_accumulation_steps: {rows * ROW_TOKENS // BUDGETS[0]}\n{MODELS[model]}\n"
    question = ask(load_text(f"{keys}micro_batch_tokens: auto\n", "r.yaml"), f"{machine},host_memory_gib=1024")
    seconds: dict[str, float | None] = {}
    for tokens in BUDGETS:
        plan = best_plan(ask_again(question, load_text(f"{keys}micro_batch_tokens: {tokens}\n", "r.yaml")))[1]
        seconds[str(tokens)] = plan.step_s if plan.verdict.fits else None
    return {"auto": question.loaded.recipe.token_budget, "seconds": seconds}


def slower(figures: dict[str, Any]) -> float | None:
    """How much slower the choice is than the fastest that fits; None where none does."""
    fitting = [one for one in figures["seconds"].values() if one is not None]
    if not fitting:
        return None
    chosen: float | None = figures["seconds"][str(figures["auto"])]
    return float("inf") if chosen is None else chosen / min(fitting) - 1


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """(model, machine, rows of a step) that were asked for."""
    models, cards = options.models.split(","), options.cards.split(",")
    counts, rows = (map(int, text.split(",")) for text in (options.counts, options.rows))
    for model, count, each, card in product(models, list(counts), list(rows), cards):
        yield model, f"{count}x{card}", each


def row_of(case: tuple[str, str, int], figures: dict[str, Any]) -> str:
    """A row of the table."""
    model, machine, rows = case
    off = slower(figures)
    cells = ["-" if one is None else f"{one:,.2f}" for one in figures["seconds"].values()]
    last = ["none fits", ""] if off is None else [f"{figures['auto']:,}", f"{100 * off:.1f} %"]
    return f"| {' | '.join([model, machine, str(rows), *cells, *last])} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cards", default=",".join(CARDS))
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--kept", type=Path, help="file of earlier cases, to which new ones are added")
    options = parser.parse_args()
    lines = options.kept.read_text().splitlines() if options.kept is not None and options.kept.exists() else []
    known = {tuple(case): figures for case, figures in map(json.loads, lines)}
    print(f"| model | machine | rows | {' | '.join(f'{tokens:,}' for tokens in BUDGETS)} | auto | slower |")
    print(f"|---|---|{'---:|' * (len(BUDGETS) + 3)}")
    found = []
    for case in cases(options):
        figures = known.get(case) or measured(*case)
        if options.kept is not None and case not in known:
            with options.kept.open("a") as file:
                file.write(json.dumps([case, figures]) + "\n")
        found.append(slower(figures))
        print(row_of(case, figures), flush=True)
    fitting = [off for off in found if off is not None]
    num_over = sum(off > MOST_SLOWER for off in fitting)
    print(f"\n{len(found)} cases, {len(fitting)} of which fit; at most {100 * max(fitting, default=0):.1f} % slower")
    return 1 if num_over else 0


if __name__ == "__main__":
    sys.exit(main())
