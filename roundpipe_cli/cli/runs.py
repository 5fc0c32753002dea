"""`roundpipe runs`: every run below a folder in one table, and what differs between their recipes."""

from __future__ import annotations

from typing import Annotated

import typer

from roundpipe_cli.cli.output import say, say_data, say_json, terminal_width
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import write_named
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.units import aligned, counted

NARROW = ("bubble", "tokens/s", "rows", "method", "model")
"""Columns to leave out where the terminal is too narrow, the first one first; --json has all."""


def runs(
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="FOLDER", help="Folders with runs in them; without one, this folder.")
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write the table and all loss curves as a page.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """List runs side by side: state, steps, losses, speed, and the keys in which their recipes differ.

    Example: roundpipe runs outputs --html runs.html
    """
    from roundpipe_cli.dashboard.runs import RunSummary, differing_keys, find_folders, read_run, runs_page, table
    from roundpipe_cli.recipe.schema import dotted_values
    from roundpipe_cli.train.checkpoint.output_dir import read_values

    found: list[RunSummary] = []
    num_foreign = 0
    for given in folders or ["."]:
        folder = named_path(given)
        if not folder.is_dir():
            raise RefusedError(
                "runs are looked for in folders",
                where=given,
                found="a file" if folder.exists() else "no such folder",
                expected="a folder with output directories of runs, such as outputs",
            )
        for place in find_folders(folder, lambda error: say(f"note: {error.filename} left out: {error.strerror}")):
            try:
                run = read_run(place, str(place), dotted_values(read_values(place / "recipe.yaml")))
            except RefusedError as error:  # one folder hides no other
                problem = error.problems[0]
                say(f"note: {problem.where} left out: {problem.what}")
                continue
            num_foreign += run is None
            found += [run] if run is not None else []
    if num_foreign:
        say(f"note: {counted(num_foreign, 'folder')} left out: files with the names of a run's, and no line of one")
    if not found:
        raise RefusedError(
            "there is no run here",
            where=" ".join(folders or ["."]),
            hint="`roundpipe finetune RECIPE` starts one, in its output_dir",
        )
    differs = differing_keys(found)
    if html is not None:
        write_named(named_path(html), runs_page(found, differs))
        say(f"wrote {html}")
    if json_:
        say_json({"runs": [run.document(differs) for run in found]})
    elif html is None:
        cells = table(found, differs)
        for line in aligned(cells, 2, [name for name in NARROW if name in cells[0]], terminal_width()):
            say_data(line)
