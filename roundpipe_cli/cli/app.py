"""The program `roundpipe`: its commands, imported when they are chosen, mistyped ones, and exit codes."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from roundpipe_cli import __version__
from roundpipe_cli.cli.output import open_closed_streams, run_command, say, say_at_once, say_data
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.files import keep_private
from roundpipe_cli.hub.ask import listen
from roundpipe_cli.train.result.gguf_types import GGUF_TYPES

# A command line that imports only the chosen command's modules: imports are most of the time of `--help`.


def _stands_for_a_command() -> None:
    raise AssertionError("LazyGroup puts the command itself in its place")


class CommandGroup(TyperGroup):
    """A group that reads options of its own only where there are some.

    Typer converts them by a library (pydantic) that takes longer to import than help takes to print.
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
        return name, None if command is None else self.loaded(command), rest

    def loaded(self, command: Any) -> Any:
        """The command itself, where `command` stands for it."""
        return command


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


# Messages for mistyped commands and options, and for words in the wrong place. Exit code 2.

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

_KEYS_OF_BENCH = {
    "--head-workers": "pipeline.head_workers={}",
    "--earliest-free": "pipeline.dispatch=earliest_free",
    "--skip-projection": "pipeline.skip_last_projection=true",
    "--keep-activations": "pipeline.keep_activations={}",
}
"""Recipe keys in place of options that `bench` had, which scripts/bench_emulated.py has for costs files."""


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
        hint = f"roundpipe finetune {word}"
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
    elif program.endswith("bench") and option in _KEYS_OF_BENCH:
        key = _KEYS_OF_BENCH[option].format(_typed_value(typed, words))
        hint = f"in a recipe that is a key: roundpipe bench RECIPE {key}"
        if any(word.startswith("--costs") for word in words):
            hint = f"for a costs file, in a clone of the repository: python scripts/bench_emulated.py ... {option}"
    elif any(param.name == "overrides" for param in error.ctx.command.params):
        key = typed.partition("=")[0].lstrip("-").replace("-", "_")
        if _is_recipe_key(key) or not nearest:
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


def _is_recipe_key(key: str) -> bool:
    """Whether a key path begins with a key of recipes, by its name here or elsewhere."""
    from roundpipe_cli.recipe.aliases import ALIASES
    from roundpipe_cli.recipe.check import hints_of
    from roundpipe_cli.recipe.schema import Recipe

    return key in ALIASES or key.partition(".")[0].partition("[")[0] in hints_of(Recipe)


# Output of `roundpipe --version`: this program, torch and what it was built for, the driver. Loads no torch.


def version_lines() -> list[str]:
    """One line each for roundpipe, torch and driver."""
    return [f"roundpipe {__version__}", _torch_line(), _driver_line()]


def _torch_line() -> str:
    """torch's version and its CUDA, read from the file that its build writes."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        return f"torch has no version file: {error.strerror}"
    found = dict(re.findall(r"^(\w+)(?:\s*:[^=]+)?\s*=\s*'([^']*)'", text, re.MULTILINE))
    names = (("cuda", "CUDA"), ("hip", "ROCm"))
    built_for = next((f"{name} {found[key]}" for key, name in names if key in found), "the processor only")
    return f"torch {found.get('__version__', 'of unknown version')}, built for {built_for}"


def _driver_line() -> str:
    from roundpipe_cli.costs.nvidia_smi import ask_nvidia_smi

    try:
        done = ask_nvidia_smi(["driver_version"])
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"driver: nvidia-smi does not answer ({type(error).__name__})"
    if done is None:
        return "driver: none (no nvidia-smi)"
    finds_none = done.returncode or not done.stdout.split()
    return "driver: nvidia-smi finds no GPU" if finds_none else f"driver: NVIDIA {done.stdout.split()[0]}"


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
