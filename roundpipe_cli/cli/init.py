"""`roundpipe init`: makes a recipe from three answers, with settings by `plan`'s cost model. No torch."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe_cli.cli.output import say, terminal_width, wrapped
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import named_path

if TYPE_CHECKING:
    from roundpipe_cli.cli.init_choice import Choice

HERE = "here"
"""The answer to the question for the hardware that means this machine."""


def init(
    model: Annotated[str | None, typer.Option(help="Hub id, local folder, .gguf file or package:NAME.")] = None,
    data: Annotated[str | None, typer.Option(help="Your rows: a file (jsonl, csv, parquet ...) or a hub id.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="`here`, or another machine: 2x3090,host_memory_gib=64.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Recipe to write; not given: the model's name.yaml.")
    ] = None,
) -> None:
    """Write a recipe from three answers: model, data, hardware. What no flag says is asked; nothing is overwritten.

    Example: roundpipe init --model Qwen/Qwen3-8B --data rows.jsonl --hardware here --output mine.yaml
    """
    model = model or _ask("model", "Model (hub id, local folder or .gguf file)", "Qwen/Qwen3-8B")
    data = data or _ask("data", "Your rows (a file, or a hub id)", "data/train.jsonl")
    hardware = hardware or _ask("hardware", "Hardware (`here`, or for instance 2x3090,host_memory_gib=64)", HERE)
    for flag, value in (("model", model), ("data", data), ("hardware", hardware)):
        _check_text(f"--{flag}", value)
    path = output or Path(f"{_file_stem(model)}.yaml")
    say(f"choosing settings for {model} ...")
    from roundpipe_cli.cli.init_choice import choose_settings
    from roundpipe_cli.cli.recipes import write_new
    from roundpipe_cli.data.rows import DatasetSpec
    from roundpipe_cli.data.sources import count_dataset
    from roundpipe_cli.recipe.load import load_recipe

    if path.exists():
        raise RefusedError(f"{path} is there already and is not overwritten", hint="--output names another file")
    rows = count_dataset(DatasetSpec(data), path.absolute().parent)
    machine = None if hardware.strip().lower() == HERE else hardware.strip()
    choice = choose_settings(model, machine, path, rows.num_rows if rows is not None else None)
    for line in wrapped(choice.reasons, terminal_width(2)):
        say(line)
    write_new(path, recipe_text(choice, data, path).encode())
    load_recipe(path)
    say(f"wrote {path}")
    if _is_local_file(data) and not named_path(data).exists():
        say(f"put your rows into {data}: a JSON object a line, with messages, or prompt and completion")
    say(f"next: roundpipe {'finetune' if choice.is_here else 'plan'} {path}")


def recipe_text(choice: Choice, data: str, path: Path) -> str:
    """The recipe: a header with the reasons, then the keys."""
    from roundpipe_cli.data.rows import printable
    from roundpipe_cli.recipe.strict_yaml import parse_scalar

    def text(value: str) -> str:
        plain = re.fullmatch(r"[A-Za-z0-9_./-]+(:[A-Za-z0-9_./-]+)?", value) and isinstance(parse_scalar(value), str)
        return value if plain else "'" + value.replace("'", "''") + "'"

    header = [f"# Written by `roundpipe init` for {choice.machine}.", "#"]
    header.append(f"#   roundpipe finetune {shlex.quote(str(path))}")
    header += ["#", *(line for reason in choice.reasons for line in textwrap.wrap(
        reason, 116, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    ))]  # fmt: skip
    recipe = choice.recipe
    keys = [f"model: {text(recipe.model)}", f"method: {recipe.method}"]
    if recipe.method == "lora":
        lora = recipe.lora
        keys.append(f"lora: {{r: {lora.r}, alpha: {lora.alpha:g}, dropout: 0.0, target_modules: all-linear}}")
    written = ("method", "lora.r", "max_seq_length", "dtype", "micro_batch_tokens")
    overrides = (override.partition("=") for override in choice.overrides)
    keys += [f"{key}: {value}" for key, _, value in overrides if key not in written]
    tokens = f"micro_batch_tokens: {recipe.micro_batch_tokens}"
    if recipe.micro_batch_tokens == "auto":
        tokens += "  # a microbatch has as many rows as the smallest device has room for"
    keys += [
        "",
        "datasets:",
        f"  - {{path: {text(data)}, type: auto}}",
        "",
        f"max_seq_length: {recipe.max_seq_length}",
        "packing: auto  # short rows fill whole sequences",
        "micro_batch_size: 1",
        f"gradient_accumulation_steps: {recipe.gradient_accumulation_steps}",
        tokens,
        "num_train_epochs: 1",
        f"learning_rate: {choice.learning_rate}",
        f"dtype: {recipe.dtype}",
        "",
        f"output_dir: outputs/{_file_stem(path.stem)}",
    ]
    if choice.hardware is not None:
        keys += [
            "",
            f"hardware: {text(choice.hardware)}  # what `plan` assumes; `finetune` takes the machine it runs on",
        ]
    return "\n".join([*map(printable, header), "", *keys]) + "\n"


def _check_text(flag: str, value: str) -> None:
    """
    Raises:
        RefusedError: no recipe can hold it.
    """

    if not value.isprintable():  # bytes that are no UTF-8 are lone surrogates here
        shown = value.encode("unicode_escape").decode("ascii")
        raise RefusedError(
            "a recipe cannot hold this text", where=flag, found=shown[:200], expected="text in UTF-8, on one line"
        )


def _ask(flag: str, question: str, default: str) -> str:

    if not sys.stdin.isatty():
        raise RefusedError(
            f"init needs to know the {flag}, and there is no terminal to ask on",
            expected="--model, --data and --hardware",
            hint=f"roundpipe init --model Qwen/Qwen3-8B --data data/train.jsonl --hardware {HERE}",
        )
    return str(typer.prompt(question, default=default, err=True)).strip()


def _file_stem(model: str) -> str:
    """`Qwen/Qwen3-8B -> qwen3-8b`."""
    last = model.rstrip("/").rpartition("/")[2].rpartition(":")[2].removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip(".-") or "recipe"


def _is_local_file(data: str) -> bool:
    return data.startswith((".", "/", "~")) or bool(re.search(r"\.(jsonl?|csv|tsv|parquet)(\.gz)?$", data))
