"""`roundpipe init`: makes a recipe from three answers, with settings by `plan`'s cost model. No torch."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe_cli.cli.output import say, show_error, terminal_width, wrapped
from roundpipe_cli.errors import RefusedError, RoundpipeError
from roundpipe_cli.files import named_path

if TYPE_CHECKING:
    from roundpipe_cli.cli.init_choice import Choice

HERE = "here"
"""The answer to the question for the hardware that means this machine."""


def _check_model(answer: str, folder: Path) -> None:
    from roundpipe_cli.costs.find_model import find_architecture
    from roundpipe_cli.recipe.load import resolve_path

    find_architecture(answer, resolve_path(answer, folder))


def _check_data(answer: str, folder: Path) -> None:
    from roundpipe_cli.cli.init_choice import look_at_rows

    if (folder / named_path(answer)).exists():
        look_at_rows(answer, folder)
    elif _is_local_file(answer):
        say(f"note: {answer} is not there yet")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", answer):
        raise RefusedError("this is neither a file or folder here nor the id of a hub dataset", found=answer)
    else:
        say(f"note: {answer} is not here: it is taken for the id of a hub dataset")


def _check_hardware(answer: str, folder: Path) -> None:
    from roundpipe_cli.costs.hardware import parse_hardware

    if answer.lower() != HERE:
        parse_hardware(answer)


def _check_new(answer: str, folder: Path) -> None:
    if Path(answer).exists():
        raise RefusedError(f"{answer} is there already and is not overwritten")


@dataclass(frozen=True)
class Question:
    """A question on a terminal where no flag answers it."""

    flag: str
    text: str
    default: str
    explanation: str
    """The answer to `?`."""
    check: Callable[[str, Path], None]
    """Takes the answer and the recipe's folder; refuses what could not be used."""


QUESTIONS = (
    Question(
        "model",
        "Model (hub id, local folder or .gguf file)",
        "Qwen/Qwen3-8B",
        "The model to train: a hub id such as Qwen/Qwen3-8B, a folder of safetensors, a .gguf file, or package:NAME. "
        "Its weights are not downloaded now. `roundpipe recipes ls` lists models with a recipe of their own.",
        _check_model,
    ),
    Question(
        "data",
        "Your rows (a file, or a hub id)",
        "data/train.jsonl",
        "A file (jsonl, json, csv, tsv, txt, parquet), a folder of them, or the id of a hub dataset. A row has "
        '"messages", or "prompt" and "completion", or "instruction" and "output", or "text"; a preference pair has '
        '"prompt", "chosen" and "rejected". The file may come later; '
        "`roundpipe data RECIPE` then shows what training sees.",
        _check_data,
    ),
    Question(
        "hardware",
        "Hardware (`here`, or for instance 2x3090,host_memory_gib=64)",
        HERE,
        "`here` is this machine. Another one is the number and name of its cards, then its memory: 1x4060ti-16gb, "
        "2x3090,host_memory_gib=64. The recipe's settings are chosen to fit it.",
        _check_hardware,
    ),
)


def init(
    model: Annotated[str | None, typer.Option(help="Hub id, local folder, .gguf file or package:NAME.")] = None,
    data: Annotated[str | None, typer.Option(help="Your rows: a file (jsonl, csv, parquet ...) or a hub id.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="`here`, or another machine: 2x3090,host_memory_gib=64.", show_default=False)
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="lora, qlora (4-bit base weights) or full.", show_default="by size and memory")
    ] = None,
    objective: Annotated[
        str | None, typer.Option(help="sft, dpo, orpo or simpo.", show_default="dpo for preference pairs, else sft")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Recipe to write; not given: the model's name.yaml.")
    ] = None,
) -> None:
    """Write a recipe from three answers: model, data, hardware. What no flag says is asked; nothing is overwritten.

    An answer is checked as it is given, and `?` explains the question.

    Example: roundpipe init --model Qwen/Qwen3-8B --data rows.jsonl --hardware here --output mine.yaml
    """
    answers = {"model": model or "", "data": data or "", "hardware": hardware or ""}
    missing = [question for question in QUESTIONS if not answers[question.flag]]
    folder = output.absolute().parent if output is not None else Path.cwd()
    try:
        for question in missing:
            answers[question.flag] = _ask(question, folder)
        for flag, value in answers.items():
            _check_text(f"--{flag}", value)
        path = output or Path(f"{_file_stem(answers['model'])}.yaml")
        if missing and path.exists():
            path = Path(_ask(_another_file(path), folder))
        _write_recipe(answers["model"], answers["data"], answers["hardware"], path, method=method, objective=objective)
    except (typer.Abort, RoundpipeError):
        if missing and sys.stdin.isatty():
            named = {**answers, "method": method, "objective": objective, "output": str(output or "")}
            given = (f"--{flag} {shlex.quote(value)}" for flag, value in named.items() if value)
            say(f"\nthe answers so far: roundpipe init {' '.join(given)}")
        raise


def _write_recipe(
    model: str, data: str, hardware: str, path: Path, *, method: str | None, objective: str | None
) -> None:
    say(f"choosing settings for {model} ...")
    from roundpipe_cli.cli.init_choice import choose_objective, choose_settings, look_at_rows
    from roundpipe_cli.cli.recipes import write_new
    from roundpipe_cli.data.rows import DatasetSpec
    from roundpipe_cli.data.sources import count_dataset
    from roundpipe_cli.recipe.load import load_recipe

    if path.exists():
        raise RefusedError(f"{path} is there already and is not overwritten", hint="--output names another file")
    folder = path.absolute().parent
    pairs, unknown = look_at_rows(data, folder)
    chosen, why = choose_objective(objective, method, pairs)
    rows = count_dataset(DatasetSpec(data), folder)
    num_rows = rows.num_rows if rows is not None else None
    machine = None if hardware.strip().lower() == HERE else hardware.strip()
    choice = choose_settings(model, machine, path, num_rows, method=method, objective=chosen)
    choice = replace(choice, reasons=(*choice.reasons, *filter(None, [why, unknown])))
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
    keys += [f"objective: {recipe.objective}"] if recipe.trains_pairs else []
    keys += ["load_in_4bit: true"] if recipe.load_in_4bit else []
    written = ("method", "load_in_4bit", "max_seq_length", "dtype")
    overrides = (override.partition("=") for override in choice.overrides)
    sections: dict[str, list[str]] = {}
    for key, _, value in overrides:
        section, _, inner = key.partition(".")
        if inner:
            sections.setdefault(section, []).append(f"{inner}: {value}")
        elif key not in written:
            keys.append(f"{key}: {value}")
    keys += [f"{section}: {{{', '.join(inner)}}}" for section, inner in sections.items()]
    keys += ["", "datasets:", f"  - {{path: {text(data)}}}", "", f"max_seq_length: {recipe.max_seq_length}"]
    keys += [f"gradient_accumulation_steps: {recipe.gradient_accumulation_steps}  # rows of a step"]
    keys += [f"dtype: {recipe.dtype}"] if recipe.dtype != "bfloat16" else []
    keys += ["", f"output_dir: outputs/{_file_stem(path.stem)}"]
    if recipe.pipeline.devices != "auto":
        keys += ["", f"pipeline: {{devices: [{', '.join(recipe.pipeline.devices)}]}}"]
    if choice.hardware is not None:
        why = "what `plan` assumes; `finetune` takes the machine it runs on"
        keys += ["", f"hardware: {text(choice.hardware)}  # {why}"]
    return "\n".join([*map(printable, header), "", *keys]) + "\n"


def _check_text(flag: str, value: str) -> None:
    if not value.isprintable():  # bytes that are no UTF-8 are lone surrogates here
        found, expected = value.encode("unicode_escape").decode("ascii")[:200], "text in UTF-8, on one line"
        raise RefusedError("a recipe cannot hold this text", where=flag, found=found, expected=expected)


def _another_file(path: Path) -> Question:
    free = next(name for count in itertools.count(2) if not (name := path.with_stem(f"{path.stem}-{count}")).exists())
    explanation = "The recipe is written to a new file; what is there already is not touched."
    return Question("output", f"{path} is there already. Recipe to write", str(free), explanation, _check_new)


def _ask(question: Question, folder: Path) -> str:
    """The answer to a question, asked again until it can be used; refuses to ask where there is no terminal."""
    if not sys.stdin.isatty():
        raise RefusedError(
            f"init needs to know the {question.flag}, and there is no terminal to ask on",
            expected="--model, --data and --hardware",
            hint=f"roundpipe init --model Qwen/Qwen3-8B --data data/train.jsonl --hardware {HERE}",
        )
    while True:
        answer = str(typer.prompt(question.text, default=question.default, err=True)).strip()
        if answer == "?":
            say(f"note: {question.explanation}")
            continue
        try:
            _check_text("the answer", answer)
            question.check(answer, folder)
        except RefusedError as error:
            show_error(error)
        else:
            return answer


def _file_stem(model: str) -> str:
    """`Qwen/Qwen3-8B -> qwen3-8b`."""
    last = model.rstrip("/").rpartition("/")[2].rpartition(":")[2].removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip(".-") or "recipe"


def _is_local_file(data: str) -> bool:
    return data.startswith((".", "/", "~")) or bool(re.search(r"\.(jsonl?|csv|tsv|parquet)(\.gz)?$", data))
