"""`roundpipe doctor`: whether this machine can train, which models, what slows it down, and how to fix it."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe_cli.cli.output import CHECKS, say, say_data, say_json, terminal_width
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe_cli.cli.checks import Check

NAME_WIDTH = 19
"""Columns of a check's name."""


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not try to reach the hub.")] = False,
) -> None:
    """Check driver, torch, GPUs, links, memory, disk, hub and libraries, and say what can be trained here.

    Exit code 2 if this machine cannot train.

    Example: roundpipe doctor --json
    """
    say("checking this machine ...")
    from roundpipe_cli.cli.checks import all_checks

    checks = []
    for check in all_checks(offline=offline):  # each is shown as soon as it is known: torch takes seconds to load
        checks.append(check)
        if not json_:
            for line in check_lines(check, terminal_width()):
                say_data(line, colours=CHECKS)
    can_train = not any(check.state == "fails" for check in checks)
    if json_:
        say_json({"can_train": can_train, "checks": [asdict(check) for check in checks]})
    else:
        problems = sum(check.fix is not None and check.state != "good" for check in checks)
        verdict = "Training can run here" if can_train else "Training cannot run here"
        rest = f"; {counted(problems, 'thing')} to look at" if problems else ""
        say_data(f"{verdict}{rest}.")
    if not can_train:
        raise typer.Exit(RefusedError.exit_code)


def check_lines(check: Check, width: int | None) -> Iterator[str]:
    """The lines of a check, of at most `width` columns; None: no limit."""
    name = f"{check.state:5}  {check.name:{NAME_WIDTH}}  "
    indent = " " * len(name)
    for first, text in ((name, check.found), (indent, f"fix: {check.fix}" if check.fix else "")):
        yield from textwrap.wrap(
            text,
            max(width, len(indent) + 20) if width is not None else sys.maxsize,
            initial_indent=first,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
