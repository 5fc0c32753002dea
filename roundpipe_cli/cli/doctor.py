"""`roundpipe doctor`: can this machine train, what would slow it down, and the command that mends each thing."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not try to reach the hub.")] = False,
) -> None:
    """Check driver, torch, GPUs, links, memory, disk, hub and libraries. Exit code 2 if this machine cannot train.

    Example: roundpipe doctor --json
    """
    from roundpipe_cli.cli.checks import all_checks
    from roundpipe_cli.cli.output import say_data
    from roundpipe_cli.errors import RefusedError
    from roundpipe_cli.units import counted

    checks = all_checks(offline=offline)
    can_train = not any(check.state == "fails" for check in checks)
    if json_:
        import json
        from dataclasses import asdict

        say_data(json.dumps({"can_train": can_train, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            say_data(f"{check.state:5}  {check.name:{width}}  {check.found}")
            if check.fix:
                say_data(f"{'':5}  {'':{width}}  fix: {check.fix}")
        problems = sum(check.fix is not None for check in checks)
        verdict = "Training can run here" if can_train else "Training cannot run here"
        rest = f"; {counted(problems, 'thing')} to look at" if problems else ""
        say_data(f"{verdict}{rest}.")
    if not can_train:
        raise typer.Exit(RefusedError.exit_code)
