"""`roundpipe convert`: a training file of another tool as a recipe. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from roundpipe_cli.choices import OBJECTIVES
from roundpipe_cli.cli.output import say, say_data, say_json
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.units import counted, either

if TYPE_CHECKING:
    from roundpipe_cli.recipe.convert_rules import Conversion, Job

_CONVERTED = tuple(name for name, kind in OBJECTIVES.items() if not kind.needs_teacher)


def convert(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="YAML file of axolotl, LLaMA-Factory, TRL or Unsloth.", show_default=False),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Recipe to write; without it the recipe goes to stdout.")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="axolotl, llama-factory or trl; found out where not given.")
    ] = None,
    gpus: Annotated[
        int,
        typer.Option("--gpus", min=1, max=1024, help="GPUs the file was run on: they multiply a step's rows there."),
    ] = 1,
    objective: Annotated[
        str | None,
        typer.Option("--objective", help=f"{either(_CONVERTED)}, for a file of TRL that does not say which it is."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Turn a training file of axolotl, LLaMA-Factory, TRL or Unsloth into a recipe, and list what has no counterpart.

    Example: roundpipe convert axolotl.yaml --gpus 4 --output mine.yaml
    """
    say(f"reading {file} ...")
    from roundpipe_cli.cli.recipes import write_new
    from roundpipe_cli.recipe.convert import convert_file, refuse_scripts
    from roundpipe_cli.recipe.convert_rules import TOOLS
    from roundpipe_cli.recipe.shipped import refuse_rows
    from roundpipe_cli.recipe.strict_yaml import MAX_BYTES, shown_value
    from roundpipe_cli.regular_files import read_regular

    refuse_rows(file, "a training file", "a YAML file of axolotl, LLaMA-Factory or TRL")
    refuse_scripts(file)
    try:
        raw = read_regular(file, MAX_BYTES)
    except OSError as error:
        raise RefusedError(
            "the file cannot be read",
            where=str(file),
            found=error.strerror,
            expected="a training file of axolotl, LLaMA-Factory or TRL",
            hint="roundpipe convert axolotl.yaml --output mine.yaml",
        ) from None
    tool = _chosen("--from", from_, TOOLS, f"tool {from_} to convert from")
    job: Job | None = _chosen("--objective", objective, _CONVERTED, f"objective {objective}")
    result = convert_file(raw, str(file), tool=tool, num_gpus=gpus, objective=job)
    _pack_where_the_model_may(result)
    text = result.text(file.name)
    if output is not None:
        write_new(output, text.encode())
    if json_:
        say_json(result.document())
    elif output is None:
        say_data(text.rstrip("\n"))
    with_lines = {f"{entry.key}: {entry.change}" for entry in result.left_out}
    for change in [change for change in result.changes if change not in with_lines]:
        say(f"not the same training: {change}")
    for note in result.notes:
        say(f"note: {note}")
    for entry in result.left_out:
        change = f"; not the same training: {entry.change}" if entry.change else ""
        say(f"left out: {entry.key}: {shown_value(entry.value)}: {entry.reason}{change}")
    if idle := result.without_effect:
        say(f"{counted(len(idle), 'key')} without effect here: {', '.join(idle)}")
    if output is not None:
        say(f"wrote {output}\nnext: roundpipe plan {shlex.quote(str(output))}")


def _pack_where_the_model_may(result: Conversion) -> None:
    """Leave packing to the run where a configuration here says that the model's rows would see each other."""
    from roundpipe_cli.costs.find_model import figures_of, find_config
    from roundpipe_cli.planning.admission import rows_obstacle

    recipe = result.recipe
    model, folder = str(recipe["model"]), Path(str(recipe["model"]))
    if recipe.get("packing") is not True or not ((folder / "config.json").is_file() or figures_of(model)):
        return
    config = find_config(model, folder if folder.is_dir() else None).config
    if obstacle := rows_obstacle(config, recipe.get("max_seq_length", 2048)):
        recipe["packing"] = "auto"
        result.change("packing", f"auto, which leaves rows alone: {obstacle}")


Name = TypeVar("Name", bound=str)


def _chosen(flag: str, name: str | None, known: Sequence[Name], what: str) -> Name | None:
    """The one of `known` that a flag names, in capitals or without its dash too."""
    if name is None:
        return None
    plain = name.lower().replace("-", "").replace("_", "")
    found = next((one for one in known if one.replace("-", "") == plain), None)
    if found is None:
        near = closest(name, list(known))
        hint = f"did you mean {flag} {near}?" if near else None
        raise RefusedError(f"there is no {what}", expected=", ".join(known), hint=hint)
    return found
