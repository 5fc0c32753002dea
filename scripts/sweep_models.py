"""Try every causal type of transformers at tiny size, each in a forked child of a warm process with a time limit.

python scripts/sweep_models.py                      # prints one line a type, then the totals
python scripts/sweep_models.py llama zaya --jobs 1  # these types
python scripts/sweep_models.py --table-of LOG       # the table of what it printed: recipes/models.md
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from roundpipe_cli.model.load import is_encoder
from roundpipe_cli.model.stored.packed_weights import import_bitsandbytes
from tests.support.every_type import NoTinyConfigError, causal_types, tiny_config_of
from tests.support.try_type import COLUMNS, try_type

LONGEST = 220
"""Characters of an answer in the table."""


def try_one(model_type: str) -> dict[str, str]:
    """The answers for one type."""
    try:
        config = tiny_config_of(model_type)
    except NoTinyConfigError as error:
        return {"no config": str(error)}
    if is_encoder(config):
        return {"encoder": "attention looks both ways"}
    return try_type(config)


def in_child(attempt: Callable[[str], dict[str, str]], model_type: str, limit_s: float, pipe: Any) -> None:
    """Entry of a child."""
    signal.alarm(int(limit_s))
    torch.set_num_threads(1)
    started = time.process_time()
    answers: dict[str, Any] = attempt(model_type)
    answers["cpu_s"] = round(time.process_time() - started, 1)
    pipe.send(answers)


def sweep(
    types: list[str], jobs: int, limit_s: float, attempt: Callable[[str], dict[str, str]] = try_one
) -> dict[str, dict[str, Any]]:
    """What `attempt` answers for each type, in children forked from this process; a line a type."""
    context = multiprocessing.get_context("fork")
    waiting, running, results = list(types), {}, {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            here, there = context.Pipe(duplex=False)
            child = context.Process(target=in_child, args=(attempt, name, limit_s, there))
            child.start()
            there.close()
            running[name] = (child, here)
        for name, (child, here) in list(running.items()):
            if not here.poll(0.05):
                continue
            try:
                answers = here.recv()
            except EOFError:
                child.join()
                answers = {"died": f"exit code {child.exitcode}"}
            child.join()
            del running[name]
            results[name] = answers
            print(name, json.dumps(answers), flush=True)
    return results


SIZES = (
    "Sizes of the newer ones that come with `plan`: GPT-OSS, Qwen3-Next-80B-A3B, Qwen3.5-9B and 35B-A3B, "
    "whose figures transformers' configurations document. Of others they do not, so `plan` reads "
    "config.json, of a folder or of the hub: `gemma4` calls its defaults similar to gemma-4-e2b-it's, whose "
    "width they are not by its own audio part; `deepseek_v4` names V4-Flash-Base, with layers that it calls "
    "V4-Pro's; `minimax_m2` names MiniMax-Text-01, another type; `glm4_moe` names GLM-4.5 and an example of "
    "100B-A10B, without the width of its heads."
)
"""Of what figures are known without a configuration, and of what not."""


def table(files: list[Path]) -> str:
    """The support table from lines that runs of this script printed; later lines of a type replace earlier ones."""
    found: dict[str, dict[str, Any]] = {}
    for line in (line for file in files for line in file.read_text().splitlines() if " {" in line):
        name, _, answers = line.partition(" ")
        found[name] = json.loads(answers)
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch", "peft"))
    lines = [
        "# Model types",
        "",
        f"Made by `scripts/sweep_models.py` on {date.today()} with {versions}, each type at tiny size in float32.",
        "`full`, `lora`, `packing` and `chunks` (sequences in chunks): largest relative error of loss and gradients "
        "against the model's own code, with `kernels: reference` and `auto`. `not fused`: a run leaves `auto` there, "
        "and says so. `UNPROVEN`: a run says what could not be compared. `count`: `plan`'s count of parameters is that "
        "of the model.",
        "",
        _totals(list(found.values())),
        "",
        SIZES,
        "",
        f"| type | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    for name in sorted(found):
        cells = _cells(found[name])
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _totals(answers: list[dict[str, Any]]) -> str:
    """How many types do what, in one line."""
    tried = [answer for answer in answers if "full" in answer]
    both = sum(all(answer[way].startswith("yes") for way in ("full", "lora")) for answer in tried)
    crashes = sum("CRASH" in str(answer) for answer in tried) + sum("died" in answer for answer in answers)
    parts = [f"{len(answers)} types: {both} train by LoRA and fully"]
    parts += [f"{sum(answer[way].startswith('yes') for answer in tried)} {way}" for way in COLUMNS[2:5]]
    parts.append(f"{sum(answer['count'] == 'yes' for answer in tried)} counted to the last parameter")
    return ", ".join([*parts, f"{len(answers) - len(tried)} not tried, {crashes} crashes"]) + "."


def _cells(answers: dict[str, Any]) -> list[str]:
    """A row of the table; a reason that holds for all columns stands once."""
    if "full" not in answers:
        return ["not tried: " + _short(next(iter(answers.values()))), *["not tried"] * (len(COLUMNS) - 1)]
    same = not answers["full"].startswith("yes")
    cells = [_short(answers[column]) for column in COLUMNS]
    return [cells[0], *("refused" if same and not cell.startswith("yes") else cell for cell in cells[1:])]


def _short(answer: object) -> str:
    text = " ".join(str(answer).replace("|", "/").split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def warm_up() -> None:
    """Import what every child needs."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import peft  # noqa: F401
    import transformers

    import_bitsandbytes()
    transformers.logging.set_verbosity_error()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=300)
    parser.add_argument("--table-of", type=Path, nargs="+", help="only print the table of these outputs")
    arguments = parser.parse_args()
    if arguments.table_of:
        print(table(arguments.table_of), end="")
        return
    warm_up()
    sweep(arguments.types or causal_types(), arguments.jobs, arguments.limit_s)


if __name__ == "__main__":
    main()
