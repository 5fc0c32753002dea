"""`roundpipe doctor`: whether this machine can train, which models, what slows it down, and how to fix it."""

from __future__ import annotations

import shlex
import signal
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe_cli.cli.output import CHECKS, say, say_data, say_json, terminal_width
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import disk_error, file_to_write, write_named
from roundpipe_cli.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe_cli.cli.checks import Check

NAME_WIDTH = 19
"""Columns of a check's name."""


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not try to reach the hub.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure rates for `plan`: about 5 minutes.")] = False,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="With --measure: also write them here.", show_default=False)
    ] = None,
) -> None:
    """Check driver, torch, GPUs, links, memory, disk, hub and libraries, and say what can be trained here.

    Exit code 2 if this machine cannot train.

    Example: roundpipe doctor --json
    """
    if measure:
        measure_here(file, as_json=json_)
        return
    if file is not None:
        raise RefusedError(
            "a file is for --measure", found=str(file), hint=f"roundpipe doctor --measure {shlex.quote(str(file))}"
        )
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


def measure_here(file: Path | None, *, as_json: bool) -> None:
    """Measure this machine for `plan`; `file`: for a copy that may be sent."""
    from roundpipe_cli.costs.measurement import measurement_text, own_path, read_measurement
    from roundpipe_cli.train.measure import measure_machine

    try:  # refused before minutes of work
        own_path().parent.mkdir(parents=True, exist_ok=True)
        if file is not None:
            file_to_write(file)
    except OSError as error:
        raise disk_error(error, own_path(), "this machine's own measurement") from None
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # which ends the part and removes its files
    say("measuring this machine, about 5 minutes: nothing else should run ...")
    text = measurement_text(content := measure_machine(lambda part: say(f"  {part}")))
    if file is not None:
        write_named(file, text)
    write_named(own_path(), text)
    if as_json:
        say_json(content)
        return
    found = read_measurement(own_path())
    say_data(f"{found.note}; `plan` and `finetune` use them here.")
    factor = found.workers[0].slowdown
    say_data(f"a small run's step takes {factor:.2f} times as long as by these rates alone, which `plan` takes over")
    if not 0.5 < factor < 2.0:
        say("they differ much: other programs ran, or the rates miss something; measure again when nothing else runs")
    if file is not None:
        say_data(
            f"{file}: `plan --hardware {file}` plans for this machine anywhere. It has no name and no path: send it."
        )


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
