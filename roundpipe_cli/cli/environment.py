"""Environment variables that a run reads; impossible values are refused before anything starts. No torch."""

from __future__ import annotations

import os

from roundpipe_cli.cli.output import say
from roundpipe_cli.costs.machine import Process, launched_without_ranks
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.faults import load_faults
from roundpipe_cli.files import cache_folder
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.nodes.group import check_processes

YES, NO = ("1", "ON", "YES", "TRUE"), ("", "0", "OFF", "NO", "FALSE")
"""As huggingface_hub reads them; it takes anything else for no."""
SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def check_environment(recipe: Recipe) -> Process:
    """This process' place in the run, when all variables make sense.

    Raises:
        RefusedError: one does not.
    """
    for name in SWITCHES:
        value = os.environ.get(name, "")
        if value.strip().upper() not in (*YES, *NO):
            raise RefusedError(
                "an environment variable is neither yes nor no, and the hub would be asked",
                where=name,
                found=repr(value),
                expected="1 or 0",
                hint=f"export {name}=1",
            )
        if not value.strip():
            os.environ.pop(name, None)  # PEFT refuses an empty value when it saves
    cache_folder("data")  # refuses a path that cannot be one
    load_faults()
    process = check_processes(recipe)
    notice = launched_without_ranks()
    if notice:
        say(f"note: {notice}")
    return process
