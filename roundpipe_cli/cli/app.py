"""The program `roundpipe`: its commands and their exit codes. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from roundpipe_cli.cli.lazy import LazyGroup, add_commands
from roundpipe_cli.cli.output import open_closed_streams, run_command, say, say_at_once
from roundpipe_cli.cli.usage import UsageError, explain_usage
from roundpipe_cli.hub.ask import listen

COMMANDS = {
    "finetune": "Fine-tune a model as a recipe says.",
    "plan": "Does a recipe fit, how is it cut, how long does it take?",
    "bench": "Compare pipeline schedules on a recipe or a costs file.",
    "watch": "Follow a running or finished run from its files.",
    "data": "Show what training would see: rows, lengths, tokens.",
    "download": "Fetch a hub model before it is trained.",
    "recipes": "List, show, copy and check recipes; list every recipe key.",
    "init": "Write a recipe from three answers: model, data, hardware.",
    "doctor": "Check this machine: driver, torch, GPUs, memory, disk.",
    "convert": "Turn a file of axolotl, LLaMA-Factory or TRL into a recipe.",
    "export": "Write the result of a run as a folder for other programs.",
    "generate": "Answer a prompt with the result of a run.",
}
"""Texts of `roundpipe --help` for each command."""

app = typer.Typer(
    cls=LazyGroup,
    name="roundpipe",
    help="Fine-tune language models larger than your GPUs, from one YAML recipe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from roundpipe_cli.cli.output import say_data
        from roundpipe_cli.cli.version import version_lines

        for line in version_lines():
            say_data(line)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Versions of roundpipe, torch, CUDA, driver."),
    ] = False,
) -> None:
    """Fine-tune language models larger than your GPUs, from one YAML recipe."""


add_commands(app, COMMANDS)


def _interrupt_once() -> None:
    """The first Ctrl-C raises KeyboardInterrupt; a second one, while the first is handled, ends the process at once."""

    def leave(*_: object) -> None:
        say_at_once("stopped at once by a second SIGINT")
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)  # shells show 130

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, leave)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless the caller ignores it
        signal.signal(signal.SIGINT, interrupt)


def main() -> None:
    """Entry point of the console script; leaves with the documented exit code."""
    _interrupt_once()
    open_closed_streams()
    listen(lambda text: say(f"note: {text}"))
    os.umask(0o077)  # state, logs and caches hold private data; results are opened to others one by one
    code = 0

    def command() -> None:
        nonlocal code
        try:
            code = app(prog_name="roundpipe", standalone_mode=False) or 0
        except typer.Exit as leave:
            code = leave.exit_code
        except typer.Abort:
            code = 130
        except UsageError as error:
            if len(sys.argv) > 1:
                raise explain_usage(error, sys.argv[1:]) from None
            say(error.message)  # the help text
            code = error.exit_code
        if code == 130:  # typer turns a KeyboardInterrupt into this
            say("stopped by SIGINT")

    try:
        code = run_command(command) or code
    except KeyboardInterrupt:  # the first, while an error was shown
        code = 130
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # while Python leaves, they end it without a traceback
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    sys.exit(code)
