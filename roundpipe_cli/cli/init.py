"""`roundpipe init`: makes a recipe from three answers, with settings by `plan`'s cost model. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundpipe_cli.choices import OBJECTIVES, objectives_of
from roundpipe_cli.units import either


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
        str | None,
        typer.Option(
            help=f"{either(name for name, kind in OBJECTIVES.items() if not kind.needs_teacher)}.",
            show_default=f"{objectives_of('pair')[0]} for preference pairs, else sft",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="prompt=Frage,completion=Antwort (or messages=, text=).", show_default="by names and rows"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Recipe to write; not given: the model's name.yaml.")
    ] = None,
) -> None:
    """Write a recipe from three answers: model, data, hardware. What no flag says is asked; nothing is overwritten.

    An answer is checked as it is given, and `?` explains the question.

    Example: roundpipe init --model Qwen/Qwen3-8B --data rows.jsonl --hardware here --output mine.yaml
    """
    from roundpipe_cli.cli.init_choice import ask_and_write

    answers = {"model": model or "", "data": data or "", "hardware": hardware or ""}
    ask_and_write(answers, output, method=method, objective=objective, columns=columns or "")
