"""`roundpipe recipes`: list, show, copy and check recipes; list their keys. No torch."""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundpipe_cli.cli.app import CommandGroup
from roundpipe_cli.cli.output import say, say_data, say_json, show_error, terminal_width
from roundpipe_cli.errors import DISK_ERRORS, RefusedError, ResourceError
from roundpipe_cli.units import GIB, aligned

if TYPE_CHECKING:
    from roundpipe_cli.recipe.shipped import ShippedRecipe

recipes = typer.Typer(
    cls=CommandGroup, name="recipes", invoke_without_command=True, add_completion=False, rich_markup_mode=None
)


@recipes.callback()
def list_without_a_word(context: typer.Context) -> None:
    """List, show, copy and check recipes; list every recipe key. Alone it lists the recipes.

    Example: roundpipe recipes cp qwen3-8b mine.yaml
    """
    if context.invoked_subcommand is None:
        list_recipes(None, False)


@recipes.command("ls", short_help="List the recipes that come with the tool, with figures.")
def list_recipes(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="WORD", help="Only recipes with all of these: qwen3 full 3090.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """List the recipes that come with the tool, with what `plan` says of each.

    Example: roundpipe recipes ls lora 2x24gb
    """
    from roundpipe_cli.recipe.shipped import shipped_recipes

    found = [recipe for recipe in shipped_recipes() if all(word.lower() in _text_of(recipe) for word in words or ())]
    if json_:
        say_json([recipe_document(recipe) for recipe in found])
        return
    for line in table(found, terminal_width()):
        say_data(line)
    if not found:
        say(f"no recipe has {' and '.join(words or ())} in name, method, machine or purpose; `recipes ls` lists all")


def _text_of(recipe: ShippedRecipe) -> str:
    """All that a recipe can be looked for by, in lower case."""
    hardware = "" if recipe.verdict is None else recipe.verdict.hardware
    return " ".join((recipe.name, recipe.short_name or "", recipe.method, hardware, recipe.purpose)).lower()


@recipes.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="For instance qwen3-8b or qwen3/8b_lora_2x24gb.")],
) -> None:
    """Print a recipe that comes with the tool.

    Example: roundpipe recipes show qwen3-8b
    """
    from roundpipe_cli.recipe.shipped import find_shipped

    say_data(find_shipped(name).read_text(encoding="utf-8").rstrip("\n"))


@recipes.command("cp")
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="For instance qwen3-8b or qwen3/8b_lora_2x24gb.")],
    dest: Annotated[Path, typer.Argument(metavar="DESTINATION", help="File to write, or a folder.")],
) -> None:
    """Copy a recipe that comes with the tool, to be changed. Nothing is overwritten.

    Example: roundpipe recipes cp qwen3-8b mine.yaml
    """
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.recipe.shipped import find_shipped

    source = find_shipped(name)
    target = dest / source.name if dest.is_dir() else dest
    beside = [one.path for one in load_recipe(source).recipe.datasets if (source.parent / one.path).is_file()]
    for old, new in [(source, target), *((source.parent / path, target.parent / path) for path in beside)]:
        write_new(new, old.read_bytes())
        say(f"wrote {new}")
    say(f"next: roundpipe plan {shlex.quote(str(target))}")


@recipes.command("validate")
def validate(
    words: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Recipe files, or names of shipped ones; key=value for all.")
    ],
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Check recipes without training: every mistake is listed. Exit code 2 if there is one.

    Example: roundpipe recipes validate mine.yaml other.yaml lora.r=32
    """
    from roundpipe_cli.recipe.load import load_recipe

    overrides = [word for word in words if ("=" in word or word.startswith("~")) and not Path(word).exists()]
    files = [word for word in words if word not in overrides]
    if not files:
        raise RefusedError("no recipe to check", found=" ".join(words), hint="roundpipe recipes validate mine.yaml")
    documents: list[dict[str, Any]] = []
    for file in files:
        document: dict[str, Any] = {"file": file, "valid": True, "problems": [], "notices": []}
        documents.append(document)
        try:
            document["notices"] = list(load_recipe(file, overrides).notices)
        except RefusedError as error:
            document |= {"valid": False, "problems": [asdict(problem) for problem in error.problems]}
            if not json_:
                show_error(error)
        if not json_:
            for notice in document["notices"]:
                say(f"note: {notice}")
            say_data(f"{file}: {'is a good recipe' if document['valid'] else 'has mistakes'}")
    if json_:
        say_json(documents)
    if not all(document["valid"] for document in documents):
        raise typer.Exit(RefusedError.exit_code)


@recipes.command("resolve", short_help="Print a recipe with every value in force, without a run.")
def resolve(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe file, or the name of a shipped one.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="key=value, or ~key to remove one.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Print a recipe as a run would save it: with aliases read, overrides applied and every default written out.

    Example: roundpipe recipes resolve mine.yaml lora.r=32 ~val_set_size
    """
    from roundpipe_cli.recipe.load import load_recipe, resolved_yaml
    from roundpipe_cli.recipe.schema import plain_data

    loaded = load_recipe(recipe, overrides or ())
    for notice in loaded.notices:
        say(f"note: {notice}")
    if json_:
        say_json(plain_data(loaded.recipe))
        return
    say_data(resolved_yaml(loaded.recipe).rstrip("\n"))


@recipes.command("keys")
def keys(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD", help="Only keys with all of these, in any trainer's words: lora, qlora, context."
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="A Markdown table on stdout.")] = False,
) -> None:
    """List every recipe key with its type, default and meaning.

    Example: roundpipe recipes keys lora
    """
    from roundpipe_cli.recipe.keys import as_markdown, as_text, find_keys

    if json_ and markdown:
        raise RefusedError("--json and --markdown exclude each other", hint="give one of them")
    found = find_keys(words or ())
    if json_:
        say_json([asdict(key) for key in found])
        return
    for line in as_markdown(found) if markdown else as_text(found, min(100, terminal_width() or 100)):
        say_data(line)
    if not found:
        say(f"no key has {' and '.join(words or ())} in its name or meaning; `roundpipe recipes keys` lists all")


@recipes.command("schema", short_help="Print the JSON Schema of recipes, for editors.")
def schema() -> None:
    """Print the JSON Schema of recipes, for editors that complete and check YAML by it.

    Example: roundpipe recipes schema > recipe.schema.json
    """
    from roundpipe_cli.recipe.keys import recipe_json_schema

    say_json(recipe_json_schema())


def recipe_document(recipe: ShippedRecipe) -> dict[str, Any]:
    """One entry of `recipes ls --json`. Bytes and seconds."""
    verdict = recipe.verdict
    named = {
        "name": recipe.name,
        "short_name": recipe.short_name,
        "path": str(recipe.path),
        "purpose": recipe.purpose,
        "method": recipe.method,
    }
    if verdict is None:
        return {**named, "hardware": None, "predicted": None}
    predicted = {
        "step_s": verdict.step_s,
        "tokens_per_s": verdict.tokens_per_s,
        "device_peak_bytes": int(verdict.device_bytes),
        "host_bytes": int(verdict.host_bytes),
        "disk_bytes": int(verdict.disk_bytes),
    }
    return {**named, "hardware": verdict.hardware, "predicted": predicted}


COLUMNS = ("NAME", "SHORT NAME", "METHOD", "PLANNED FOR", "TOKENS/S", "GPU", "HOST")
LEFT_OUT = ("SHORT NAME", "HOST", "GPU", "TOKENS/S", "METHOD")
"""Columns to leave out where the terminal is too narrow, the first one first; --json has all."""


def table(found: list[ShippedRecipe], width: int | None = None) -> list[str]:
    """A line a recipe: name, short name, the machine it is for, predicted speed and memory.

    Args:
        width: columns of the terminal; where they do not suffice, columns of `LEFT_OUT` are. None: any number.
    """
    rows = [COLUMNS] if found else []
    for recipe in found:
        verdict = recipe.verdict
        planned = ("", "", "", "")
        if verdict is not None:
            machine, _, host = verdict.hardware.partition(",host_memory_gib=")
            planned = (
                f"{machine} {host} GiB",
                f"{verdict.tokens_per_s:,.0f}",
                f"{verdict.device_bytes / GIB:.1f} GiB",
                f"{verdict.host_bytes / GIB:.0f} GiB",
            )
        rows.append((recipe.name, recipe.short_name or "", recipe.method, *planned))
    return aligned(rows, 4, LEFT_OUT, width)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, all of it or nothing; folders around it are made.

    Raises:
        RefusedError: it exists, or cannot be written.
        ResourceError: the disk is full or failing.
    """
    from roundpipe_cli.files import TEMPORARY_PREFIX, shared_mode, write_new_file

    if path.is_dir():
        raise RefusedError(f"{path} is a folder", expected="a file to write", hint=f"name one: {path / 'mine.yaml'}")
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.urandom(4).hex()}-{path.name}"[:255])
    try:
        with contextlib.suppress(FileExistsError):  # a file, where a folder should be: opening says so
            path.parent.mkdir(parents=True, exist_ok=True)
        write_new_file(temporary, [content], shared_mode(0o666))  # others may read it, as the umask says
        try:
            os.link(temporary, path)  # unlike a rename it replaces nothing
        except OSError:  # the name is taken, or the file system has no hard links
            if os.path.lexists(path):
                raise FileExistsError from None
            temporary.rename(path)
    except FileExistsError:
        hint = "name another file, or remove it first"
        raise RefusedError(f"{path} is there already and is not overwritten", hint=hint) from None
    except OSError as error:
        hint = f"name a file in a folder that can be written, such as {path.name}"
        kind = ResourceError if error.errno in DISK_ERRORS else RefusedError
        raise kind("the recipe cannot be written", where=str(path), found=error.strerror, hint=hint) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
