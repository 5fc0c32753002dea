"""A command line that imports only the chosen command's modules: imports are most of the time of `--help`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

KNOWN_TYPER = "0.29."
"""Versions whose way to convert values is known; older ones convert without pydantic, newer ones as they like."""
PLAIN: Mapping[Any, Any] = {str: str, Path: Path, list[str]: list, int: int}
"""Types of options whose values need little check, with what makes these."""


def add_commands(app: typer.Typer, short_helps: Mapping[str, str]) -> None:
    """Register commands of a `LazyGroup` by name; the function of `NAME` is `roundpipe_cli.cli.NAME.NAME`."""
    for name, short_help in short_helps.items():
        app.command(name, short_help=short_help)(_stands_for_a_command)


def _stands_for_a_command() -> None:
    raise AssertionError("LazyGroup puts the command itself in its place")


class PlainGroup(TyperGroup):
    """A group whose commands convert plain options themselves, and only those that are given.

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
        if command is not None:
            command = self.loaded(command)
            for param in command.get_params(ctx) if typer.__version__.startswith(KNOWN_TYPER) else ():
                if hasattr(param, "_runtime_param"):
                    param._runtime_param = PlainValue()
        return name, command, rest

    def loaded(self, command: Any) -> Any:
        """The command itself, where `command` stands for it."""
        return command


class LazyGroup(PlainGroup):
    """A group made by `add_commands`: its help and its completion list names, and only one command is imported."""

    def loaded(self, command: Any) -> Any:
        """The command `roundpipe NAME`, imported."""
        implementation = getattr(import_module(f"roundpipe_cli.cli.{command.name}"), command.name)
        if isinstance(implementation, typer.Typer):
            return typer.main.get_command(implementation)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        alone.command(command.name)(implementation)
        return typer.main.get_command(alone)


class PlainValue:
    """Converts an option's value as typer does, and leaves to typer what has to be checked."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value that the command's function gets; typer's signature."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        annotation = param.type_descriptor.annotation
        if type(value) is annotation:  # a default
            return value
        if annotation in PLAIN and not param.type_descriptor.is_ranged:
            with contextlib.suppress(ValueError):
                return PLAIN[annotation](value)
        param._runtime_param = None  # typer converts it, or refuses it with its own message
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)
