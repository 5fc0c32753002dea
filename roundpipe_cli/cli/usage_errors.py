"""Errors for mistyped commands and options, and for words in the wrong place. Exit code 2."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import typer

from roundpipe_cli.errors import RefusedError, closest

UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""The class of click, or of the copy of click that newer versions of typer contain."""

OTHER_NAMES = ("train", "tune", "sft", "fit", "run", "lora")
"""Names that other programs use for `finetune`."""

_OPTION_EXAMPLES = {
    "--demo": "roundpipe watch --demo 8x4090 qwen3-32b",
    "--hardware": "--hardware 2x3090,host_memory_gib=64, for instance",
    "--costs": "roundpipe bench --costs costs.json --workers 8 --microbatches 16",
}
"""Shown where the value of an option is missing."""


def explain_usage(error: Any, words: Sequence[str]) -> RefusedError:
    """The error to show in place of click's, for the words behind the program's name."""
    context = error.ctx
    program = context.command_path if context else "roundpipe"
    kind = type(error).__name__
    if kind == "MissingParameter" and error.param is not None and error.param.param_type_name == "argument":
        name = str(error.param.metavar or error.param.name).lower()
        article = "an" if name[0] in "aeiou" else "a"
        example = re.search(r"Example: (.+)", context.command.help or "")
        hint = example[1] if example is not None else f"{program} --help"
        return RefusedError(f"{program} needs {article} {name}", hint=hint)
    if kind == "BadParameter" and error.param is not None:
        return _bad_value(error, program, words)
    if kind == "BadOptionUsage":
        named = program if context else f"roundpipe {words[0]}"
        hint = _OPTION_EXAMPLES.get(str(error.option_name), f"{named} --help")
        return RefusedError(f"{error.option_name} needs a value", where=named, hint=hint)
    if kind == "NoSuchOption":
        return _no_such_option(error, program, words)
    commands = getattr(context.command, "commands", None) if context else None
    if commands:
        inside = program.split()[1:]  # `recipes` of `roundpipe recipes`
        return _no_such_command(program, list(commands), words[len(inside) :])
    return RefusedError(error.format_message().rstrip("."), hint=f"{program} --help")


def _bad_value(error: Any, program: str, words: Sequence[str]) -> RefusedError:
    """A value of an option that is no number, or out of range, in place of the words of typer's library."""
    option = next((name for name in error.param.opts if name.startswith("--")), str(error.param.name))
    following = dict(zip(words, words[1:], strict=False))
    found = next((word.split("=", 1)[1] for word in words if word.startswith(f"{option}=")), following.get(option))
    descriptor = getattr(error.param, "type_descriptor", None)
    kind, limits = getattr(descriptor, "annotation", str).__name__, getattr(descriptor, "parameter_info", None)
    if descriptor is None:  # typer before it had these: click's own types, such as `integer range`
        limits = error.param.type if hasattr(error.param.type, "min") else None
        kind = {"integer": "int", "float": "float"}.get(str(error.param.type.name).split()[0], "str")
    expected = {"int": "an integer", "float": "a number"}.get(kind)
    if expected and limits is not None and limits.min is not None:
        expected += f" of at least {limits.min:g}" if limits.max is None else f" from {limits.min:g} to {limits.max:g}"
    if expected is None:
        return RefusedError(error.format_message().rstrip("."), hint=f"{program} --help")
    what = f"{option} has a value that is not accepted"
    return RefusedError(what, found=found, expected=expected, hint=f"{program} --help")


def _no_such_command(program: str, commands: list[str], words: Sequence[str]) -> RefusedError:
    word = next((word for word in words if not word.startswith("-")), "")
    is_top = program == "roundpipe"
    nearest = closest(word, [*commands, *(OTHER_NAMES if is_top else ())])
    nearest = "finetune" if nearest in OTHER_NAMES else nearest
    hint = f"did you mean {program} {nearest}?" if nearest else f"{program} --help"
    if is_top and word.endswith((".yaml", ".yml")):
        hint = f"roundpipe finetune {shlex.quote(word)}"
    what = f"there is no command {f'{program} {word}'.removeprefix('roundpipe ')}"
    return RefusedError(what, expected=", ".join(commands), hint=hint)


def _no_such_option(error: Any, program: str, words: Sequence[str]) -> RefusedError:
    option = str(error.option_name)
    typed = next((word for word in words if word.split("=", 1)[0] == option), option)
    known = [name for param in error.ctx.command.params for name in param.opts if name.startswith("--")]
    nearest = closest(option, known)
    hint = f"did you mean {nearest}?" if nearest else f"{program} --help"
    if option in ("--recipe", "--config"):
        hint = f"the recipe is named without an option: {program} recipes/quickstart.yaml"
    elif any(param.name == "overrides" for param in error.ctx.command.params):
        key, is_known = _recipe_key(typed.partition("=")[0].lstrip("-").replace("-", "_"))
        if is_known or not nearest:
            word = shlex.quote(f"{key}={_typed_value(typed, words)}")
            hint = f"keys of the recipe are written without dashes: {word}"
    return RefusedError(f"{program} has no option {option}", hint=hint)


def _typed_value(typed: str, words: Sequence[str]) -> str:
    """The value behind the option in the word `typed`, or in the next one; `VALUE` where there is none."""
    _, equals, value = typed.partition("=")
    if equals:
        return value
    after = words[words.index(typed) + 1 :][:1] if typed in words else ()
    return next((word for word in after if "=" not in word and re.match(r"[^-]|-[\d.]", word)), "VALUE")


def _recipe_key(name: str) -> tuple[str, bool]:
    """The key of recipes that a name means, in a section of theirs too, and whether there is one."""
    from roundpipe_cli.recipe.aliases import ALIASES
    from roundpipe_cli.recipe.check import known_keys
    from roundpipe_cli.recipe.schema import Recipe

    known = known_keys(Recipe)
    inner = [key for key in known if key.endswith(f".{name}") and "[]" not in key]
    is_known = name in ALIASES or name.partition(".")[0].partition("[")[0] in known
    return (inner[0], True) if len(inner) == 1 and not is_known else (name, is_known)
