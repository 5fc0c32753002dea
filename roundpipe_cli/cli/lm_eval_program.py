"""lm-eval's own program, which then knows the model `roundpipe`: `python -m roundpipe_cli.cli.lm_eval_program`."""

from __future__ import annotations

import atexit
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api.registry import register_model

from roundpipe_cli.cli.lines import LinePrinter
from roundpipe_cli.cli.output import run_command
from roundpipe_cli.cli.score import opened_target
from roundpipe_cli.train.lm_eval_model import RoundpipeLM, with_longest_row, without_longest_row
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.score import prepare_to_score
from roundpipe_cli.watchdog import watching


@contextlib.contextmanager
def opened_setup(
    target: str, overrides: Sequence[str], base: str | None, *, offline: bool, allowed: bool, before: bool = False
) -> Iterator[Setup]:
    """What answers for lm-eval; arguments as of `opened_target` and `prepare_to_score`."""
    tell = without_longest_row(LinePrinter(1))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        rows = partial(with_longest_row, folder=Path(folder))
        opened = opened_target(target, overrides, base, rows=rows, offline=offline, before=before)
        loaded, source, asked, _ = stack.enter_context(opened)
        stack.enter_context(watching(loaded.recipe.watchdog_s))
        yield prepare_to_score(loaded, source, asked, offline=offline, allowed=allowed, tell=tell)


@register_model("roundpipe")
class RegisteredLM(RoundpipeLM):
    """The model `roundpipe` of lm-eval: `--model_args target=outputs/first`, with keys of the recipe behind it."""

    def __init__(
        self,
        target: str,
        *,
        base: str | None = None,
        offline: bool = False,
        allow_other_base: bool = False,
        batch_size: str | int | None = None,
        **overrides: Any,
    ) -> None:
        """`target`, `base`, `offline` and `allow_other_base` as of `roundpipe eval`; `batch_size` is lm-eval's."""
        for name in (
            "max_batch_size",
            "device",
        ):  # of lm-eval; the recipe says these
            overrides.pop(name, None)
        words = [f"{key}={str(one).lower() if isinstance(one, bool) else one}" for key, one in overrides.items()]
        stack = contextlib.ExitStack()
        atexit.register(stack.close)
        setup = stack.enter_context(opened_setup(target, words, base, offline=offline, allowed=allow_other_base))
        count = str(batch_size)  # also `auto`
        super().__init__(setup, LinePrinter(1), max(1, int(count)) if count.isdecimal() else 16)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(run_command(cli_evaluate))
