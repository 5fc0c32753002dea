"""Compare `plan`'s parameter count with the model's own, for every causal type of transformers and every recipe.

python scripts/parameter_counts.py                   # default and tiny sizes, shipped models; exit 1 if one is off
python scripts/parameter_counts.py llama bamba --size tiny

The model's own count is that of transformers' modules without weights. A type that `plan` refuses counts as right if
`finetune` refuses it with the same words. Each is tried in a forked child of a warm process with a time limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from accelerate import init_empty_weights

from roundpipe_cli.costs.exact_counts import is_counted_exactly
from roundpipe_cli.costs.find_model import find_config, shipped_figures
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.load import auto_class, build_skeleton, load_config
from roundpipe_cli.model.meta_counts import counts_of
from roundpipe_cli.model.split import split_model
from roundpipe_cli.planning.admission import check_model
from roundpipe_cli.planning.question import counted_architecture
from roundpipe_cli.recipe.load import load_recipe
from tests.support.every_type import NoTinyConfigError, causal_types, tiny_config_of

SHIPPED = "shipped"


def configuration(name: str, size: str) -> dict[str, Any]:
    """What config.json holds.

    Raises:
        NoTinyConfigError: no such size is known of the type.
    """
    from transformers import CONFIG_MAPPING

    if size == SHIPPED:
        return shipped_figures()[name]
    config = tiny_config_of(name) if size == "tiny" else CONFIG_MAPPING[name]()
    return json.loads(config.to_json_string())


def compare(name: str, size: str, folder: Path) -> str:
    """The verdict on one model: a line that begins with `exact`, `refused`, `skipped` or `WRONG`."""
    try:
        (folder / "config.json").write_text(json.dumps(configuration(name, size)))
    except NoTinyConfigError as error:
        return f"skipped: no tiny configuration: {str(error)[:100]}"
    (folder / "recipe.yaml").write_text(f"model: {folder}\ndatasets: [{{path: rows.jsonl}}]\noutput_dir: out\n")
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    found = find_config(str(folder), folder)
    try:
        check_model(found, load_recipe(folder / "recipe.yaml").recipe)
        planned = counted_architecture(found, lambda _: counts_of(folder, str(folder)))
    except RefusedError as refusal:
        return _refused_alike(folder, refusal)
    config = load_config(ModelSource(str(folder), folder))
    with init_empty_weights():
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    real = sum(parameter.numel() for parameter in model.parameters())
    how = "by the tables" if is_counted_exactly(found.config) else "built"
    if planned.parameters == real and not planned.is_guess:
        return f"exact, {how}: {real:,}"
    return f"WRONG, {how}: {planned.parameters:,} in place of {real:,}"


def _refused_alike(folder: Path, refusal: RefusedError) -> str:
    said = refusal.problems[0].what
    try:
        split_model(build_skeleton(load_config(ModelSource(str(folder), folder)), torch.bfloat16))
    except RefusedError as error:
        if error.problems[0].what == said:
            return f"refused by both: {said}"
        return f"refused by both, finetune: {error.problems[0].what}, plan: {said}"
    return f"refused: {said}"


def in_child(name: str, size: str, limit_s: int, pipe: Any) -> None:
    """Entry of a child."""
    signal.alarm(limit_s)
    torch.set_num_threads(1)
    started = time.process_time()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            line = compare(name, size, Path(folder))
        except Exception as error:  # whatever goes wrong is this type's line
            line = f"WRONG: {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
    pipe.send(f"{line} ({time.process_time() - started:.1f} s)")


def try_all(names: list[str], size: str, limit_s: int) -> list[str]:
    """One line a model, in order; prints them."""
    context, lines = multiprocessing.get_context("fork"), []
    for name in names:
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=in_child, args=(name, size, limit_s, there))
        child.start()
        there.close()
        try:
            line = here.recv()
        except EOFError:
            line = "WRONG: took too long, or died"
        child.join()
        lines.append(line)
        print(f"{size} {name}: {line}", flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="none: all, and the shipped models")
    parser.add_argument("--size", choices=("default", "tiny", SHIPPED), action="append")
    parser.add_argument("--limit-s", type=int, default=120)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    wrong = 0
    for size in options.size or ("default", "tiny", SHIPPED):
        names = options.types or (list(shipped_figures()) if size == SHIPPED else causal_types())
        lines = try_all(names, size, options.limit_s)
        kinds = [line.split(":")[0].split(",")[0].split(" (")[0] for line in lines]
        print(f"{size}: " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))), flush=True)
        wrong += kinds.count("WRONG")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
