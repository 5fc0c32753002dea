"""`roundpipe eval`: tasks of lm-eval on a recipe, a result or a checkpoint; lm-eval's own program with our model."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundpipe_cli.cli.options import BaseOption, OfflineOption, OtherBaseOption
from roundpipe_cli.cli.output import go_offline, quiet_libraries, run_command, say, say_data, say_json
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.units import aligned

if TYPE_CHECKING:
    from roundpipe_cli.train.prepare.ready import Setup


def eval(
    target: Annotated[str, typer.Argument(metavar="RECIPE|RESULT", help="Also a model, or a checkpoint's folder.")],
    tasks: Annotated[str, typer.Option("--tasks", metavar="A,B", help="Names of lm-eval's tasks and groups.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of the recipe.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Documents of each task, at most.")] = None,
    include: Annotated[
        Path | None, typer.Option("--include-path", metavar="FOLDER", help="Of more tasks, as lm-eval's.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts answered together.")] = 16,
    base: BaseOption = None,
    allow_other_base: OtherBaseOption = False,
    offline: OfflineOption = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Evaluate tasks of lm-eval; of a result before training, too.

    Nothing is merged or written. Needs lm-eval: pip install 'roundpipe-cli[eval]'.

    Example: roundpipe eval outputs/quickstart --tasks arc_easy,piqa --limit 200
    """
    say(f"reading {target} ...")
    if include is not None and not include.is_dir():
        raise RefusedError("--include-path is no folder", where=str(include), hint="a folder of lm-eval's YAML files")
    names = list(dict.fromkeys(name.strip() for name in tasks.split(",")))
    if not all(names):
        raise RefusedError("a task without a name", where="--tasks", found=repr(tasks), expected="names, as in a,b")
    from roundpipe_cli.cli.score import find_target, is_result
    from roundpipe_cli.train.floors import EVAL_FLOORS, check_floors

    check_floors(EVAL_FLOORS)
    find_target(target, overrides or (), base)
    if offline:
        go_offline()
    quiet_libraries()
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.train.lm_eval_model import RoundpipeLM, found_tasks, task_results
    from roundpipe_cli.train.signals import StopSignals

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    figures = dict[str, dict[str, dict[str, float]]]()
    with StopSignals(": nothing was written"), contextlib.redirect_stdout(sys.stderr):  # lm-eval prints
        wanted = found_tasks(names, include)
        for when in ("before", "after") if is_result(target) else ("value",):
            how = {"offline": offline, "allowed": allow_other_base, "before": when == "before"}
            with opened_setup(target, overrides or (), base, **how) as setup:
                figures[when] = task_results(RoundpipeLM(setup, LinePrinter(1), batch_size), wanted, limit=limit)
    if json_:
        say_json({"limit": limit, **figures}, indent=None)
        return
    table = [["task", "metric", *figures]]
    for task, found in figures[when].items():
        keys = [key for key in found if "_stderr" not in key and key != "sample_len"]
        table += [
            [task, key.removesuffix(",none"), *(_cell(one[task], key) for one in figures.values())] for key in keys
        ]
    for line in aligned(table, 2):
        say_data(line)


def _cell(figures: dict[str, float], key: str) -> str:
    """A figure with its standard error, where lm-eval knows one."""
    metric, _, way = key.partition(",")
    error = figures.get(f"{metric}_stderr,{way}")
    return f"{figures[key]:.4f}" + ("" if error is None else f" ± {error:.4f}")


@contextlib.contextmanager
def opened_setup(
    target: str, overrides: Sequence[str], base: str | None, *, offline: bool, allowed: bool, before: bool = False
) -> Iterator[Setup]:
    """A model that is ready for lm-eval; arguments as of `opened_target` and `prepare_to_score`."""
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.cli.score import opened_target
    from roundpipe_cli.train.lm_eval_model import with_longest_row, without_longest_row
    from roundpipe_cli.train.score import prepare_to_score
    from roundpipe_cli.watchdog import watching

    tell = without_longest_row(LinePrinter(1))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        rows = partial(with_longest_row, folder=Path(folder))
        opened = opened_target(target, overrides, base, rows=rows, offline=offline, before=before)
        loaded, source, asked, _ = stack.enter_context(opened)
        stack.enter_context(watching(loaded.recipe.watchdog_s))
        yield prepare_to_score(loaded, source, asked, offline=offline, allowed=allowed, tell=tell)


def register() -> None:
    """Teach lm-eval, in this process, the model `roundpipe`: `--model_args target=outputs/first`, behind it `base`,
    `offline`, `allow_other_base` and keys of the recipe."""
    from lm_eval.api.registry import register_model

    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.train.lm_eval_model import RoundpipeLM

    @register_model("roundpipe")
    class RegisteredLM(RoundpipeLM):
        def __init__(self, target: str, base: str | None = None, **given: Any) -> None:
            offline, allowed = (bool(given.pop(name, False)) for name in ("offline", "allow_other_base"))
            size, *_ = (str(given.pop(name, "")) for name in ("batch_size", "max_batch_size", "device"))  # lm-eval's
            words = [f"{key}={str(one).lower() if isinstance(one, bool) else one}" for key, one in given.items()]
            stack = contextlib.ExitStack()
            atexit.register(stack.close)
            setup = stack.enter_context(opened_setup(target, words, base, offline=offline, allowed=allowed))
            super().__init__(setup, LinePrinter(1), max(1, int(size)) if size.isdecimal() else 16)


def _lm_eval_program() -> None:
    from lm_eval.__main__ import cli_evaluate

    register()
    cli_evaluate()


if __name__ == "__main__":
    sys.exit(run_command(_lm_eval_program))
