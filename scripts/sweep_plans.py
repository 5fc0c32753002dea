"""Plan every shipped model and every causal type of transformers, whole rows and chunks: no internal error.

python scripts/sweep_plans.py                # a covering selection in one process, minutes; exit 1 if one fails
python scripts/sweep_plans.py llama Qwen3-8B # models and types whose names contain these

Every pair of values (method, tokens, cards, chunks) is planned of some shipped model, each type once, at tiny size: the
plan, remedies, `--solve`, text and JSON. Cuts are even ones: the search has tests of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from roundpipe_cli.cli.parameter_counts import build_counts
from roundpipe_cli.cli.plan import plan_document, plan_text
from roundpipe_cli.costs.find_model import shipped_figures
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.planning import choose
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.solve import remedies, solve, speedups
from roundpipe_cli.recipe.load import load_text
from tests.support.covering import covering
from tests.support.every_type import NoTinyConfigError, causal_types, tiny_config_of

METHODS = ("method=lora", "method=full", "load_in_4bit=true")
TOKENS = (2048, 8192, 32768, 131072)
CARDS = (1, 4, 8)
CHUNKS = ("auto", "8")
THIRDS = 3
"""A shipped model is planned in a third of the shapes, the next one in the next third."""


def plan_once(model: str, method: str, tokens: int, cards: int, chunks: str) -> None:
    """All that `plan` says of one case; a refusal is an answer."""
    words = [method, f"max_seq_length={tokens}", f"pipeline.sequence_chunks={chunks}", "gradient_accumulation_steps=4"]
    try:
        loaded = load_text(f"model: {model}\ndatasets: [{{path: rows.jsonl}}]\n", "recipe.yaml", words)
        plan = make_plan(loaded, f"{cards}x4090", build_counts)
    except (RefusedError, ResourceError):
        return
    found, solution = remedies(plan) or speedups(plan), solve(plan)
    json.dumps(plan_document(plan, solution, found))
    assert plan_text(plan, solution, found=found)


def sweep(shipped: list[str], types: list[str], folder: Path, *, strength: int = 2) -> tuple[list[str], int]:
    """The cases that ended in an internal error, with its last line, and the number of all.

    Args:
        folder: for the configurations of types.
        strength: every combination of so many values is planned.
    """
    places = dict[str, str]()
    for name in types:
        try:
            config = tiny_config_of(name)
        except NoTinyConfigError:
            continue
        places[name] = str(folder / name)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config.to_json_string())
    values = (METHODS, TOKENS, CARDS, CHUNKS)
    shapes = list(product(*values))
    every = [dict(zip("mtcn", numbers, strict=True)) for numbers in product(*(range(len(one)) for one in values))]
    chosen = [shapes[number] for number in sorted(covering(every, strength))]
    cases = [(name, shape) for n, name in enumerate(shipped) for shape in chosen[n % THIRDS :: THIRDS]]
    cases += [(name, chosen[n % len(chosen)]) for n, name in enumerate(places)]
    failed = []
    for name, (method, tokens, cards, chunks) in cases:
        try:
            plan_once(places.get(name, name), method, tokens, cards, chunks)
        except Exception:
            failed.append(f"{name} {method} {tokens} {cards} {chunks}: {traceback.format_exc().splitlines()[-1]}")
            print(failed[-1], flush=True)
    return failed, len(cases)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts of names; none: all")
    parts = parser.parse_args().parts
    choose.MAX_SEARCHED_LAYERS = 0
    shipped, types = (
        [name for name in names if not parts or any(part in name for part in parts)]
        for names in (shipped_figures(), causal_types())
    )
    with tempfile.TemporaryDirectory() as folder:
        failed, count = sweep(shipped, types, Path(folder))
    print(f"{count} plans, {len(failed)} ended in an internal error")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
