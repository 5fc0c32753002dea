"""The program `roundpipe`: its commands, imported when they are chosen, and its exit codes."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from roundpipe_cli.cli.output import open_closed_streams, run_command, say, say_at_once, say_data
from roundpipe_cli.cli.usage_errors import UsageError, explain_usage
from roundpipe_cli.cli.versions import version_lines
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import keep_private
from roundpipe_cli.hub.ask import listen
from roundpipe_cli.library_settings import count_by_bus, hide_bars, spin_briefly
from roundpipe_cli.train.result.gguf_types import GGUF_TYPES


def _stands_for_a_command() -> None:
    raise AssertionError("LazyGroup puts the command itself in its place")


PLAIN: Mapping[Any, Any] = {
    hint: make for kind, make in ((str, str), (Path, Path), (list[str], list)) for hint in (kind, kind | None)
}
"""Annotations of options whose words need no check, with what makes their values."""


class CommandGroup(TyperGroup):
    """A group that converts plain values itself, and reads options of its own only where there are some.

    Typer does both by a library (pydantic) that takes longer to import than help takes to print.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the command's name, if there are any; click's signature."""
        if args and not args[0].startswith("-"):
            self.params, self.add_help_option = [], False
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the words name; click's signature."""
        name, command, rest = super().resolve_command(ctx, args)
        rest = with_gguf_type(rest) if name == "export" else rest
        if command is not None:
            command = self.loaded(command)
            hints = get_type_hints(command.callback)
            for param in command.get_params(ctx):  # help too
                make, convert = PLAIN.get(hints.get(param.name)), param.process_value
                param.process_value = partial(plain_value, param=param, make=make, convert=convert)
        return name, command, rest

    def loaded(self, command: Any) -> Any:
        """The command itself, where `command` stands for it."""
        return command


def plain_value(ctx: Any, value: Any, *, param: Any, make: Any, convert: Any) -> Any:
    """The value that a command's function gets for an option or argument: typer's, without typer where that is plain.

    Args:
        ctx, value: those of click's `process_value`. The value is None where the line lacks the option, of which no
            callback hears, and a number where that is its default.
        make: of `PLAIN`; None: the option's words have to be checked.
        convert: typer's `process_value`.
    """
    if value is None and not param.required:
        return () if param.multiple or param.nargs == -1 else None
    if type(value) in (int, float):
        return value
    if make is Path and value == "":  # which would be the working directory
        name = param.opts[0] if param.param_type_name == "option" else param.metavar or param.name
        raise RefusedError(f"{name} is empty", hint="a path; . is the working directory")
    return make(value) if make and value else convert(ctx, value)


GGUF_TYPE = re.compile(r"(bf|f|t?i?q)\d\w*|mxfp\w*|auto", re.IGNORECASE)


def with_gguf_type(words: Sequence[str]) -> list[str]:
    """The words with a type behind each `--gguf` that has none: typer knows no option with a value that may be left
    out."""
    found: list[str] = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        found += [word, GGUF_TYPES[0]] if word == "--gguf" and not GGUF_TYPE.fullmatch(following) else [word]
    return found


class LazyGroup(CommandGroup):
    """A group whose help and completion list names; only the command that is chosen is imported."""

    def loaded(self, command: Any) -> Any:
        """The command `roundpipe NAME`, imported."""
        implementation = getattr(import_module(f"roundpipe_cli.cli.{command.name}"), command.name)
        if isinstance(implementation, typer.Typer):
            return typer.main.get_command(implementation)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        alone.command(command.name)(implementation)
        return typer.main.get_command(alone)


COMMANDS = {
    "finetune": "Fine-tune a model as a recipe says.",
    "plan": "Does a recipe fit, how is it cut, how long does it take?",
    "bench": "Compare pipeline schedules on a recipe or a costs file.",
    "watch": "Follow a running or finished run from its files.",
    "runs": "List runs side by side: losses, speed, what differs.",
    "data": "Show what training would see: rows, lengths, tokens.",
    "download": "Fetch a hub model before it is trained.",
    "recipes": "List, show, copy and check recipes; list every recipe key.",
    "init": "Write a recipe from three answers: model, data, hardware.",
    "doctor": "Check this machine: driver, torch, GPUs, memory, disk.",
    "convert": "Turn a file of axolotl, LLaMA-Factory, TRL or Unsloth into a recipe.",
    "export": "Write the result of a run as a folder for other programs.",
    "score": "Loss of each row, and what the model found probable.",
    "eval": "Tasks of lm-eval on a model, before and after training.",
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


for _name, _text in COMMANDS.items():
    app.command(_name, short_help=_text)(_stands_for_a_command)


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
    count_by_bus()
    spin_briefly()
    hide_bars()
    listen(lambda text: say(f"note: {text}"))
    keep_private()  # state, logs and caches hold private data; results are opened to others one by one
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
