"""Names of a run's folders with a step number in them. Apart from `store.py`, since finding them needs no torch.

step-00000020               a checkpoint
best-00000012               weights of the best evaluation
set-aside-step-00000020     either of them, of a future that the run has left (see `rewind.py`)
result-00000020             the result of a finished run that was continued
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import ResourceError

STEP_FOLDER = re.compile(r"^step-(\d{8,})$")
BEST_FOLDER = re.compile(r"^best-(\d{8,})$")
SET_ASIDE_PREFIX = "set-aside-"
SET_ASIDE_FOLDER = re.compile(rf"^{SET_ASIDE_PREFIX}(?:step|best)-(\d{{8,}})(?:-\d+)?$")
BEST_NOTE = "best.json"
"""In a folder of the best weights; a folder without it is not ours."""


def step_folder(output_dir: Path, step: int) -> Path:
    """`step_folder(Path("out"), 20)` is `out/step-00000020`."""
    return output_dir / f"step-{step:08d}"


def best_folder(output_dir: Path, step: int) -> Path:
    """`best_folder(Path("out"), 12)` is `out/best-00000012`."""
    return output_dir / f"best-{step:08d}"


def kept_weights(state: Mapping[str, Any] | None) -> tuple[int | None, float]:
    """(step, loss) of the kept weights in a checkpoint's state; those of the best evaluation where it does not say."""
    state = state or {}
    step, loss = (state.get(key, state.get(f"best_{key[5:]}")) for key in ("kept_step", "kept_loss"))
    return (None, math.inf) if step is None or loss is None else (int(step), float(loss))


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders named `step-...`, valid or not, newest first."""
    return _list(output_dir, STEP_FOLDER)


def list_best(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the best weights, newest first."""
    return [(step, folder) for step, folder in _list(output_dir, BEST_FOLDER) if (folder / BEST_NOTE).is_file()]


def list_set_aside(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders that were set aside, newest first."""
    return _list(output_dir, SET_ASIDE_FOLDER)


def free_name(path: Path) -> Path:
    """`path`, with a number at its end where something has this name already."""
    name, attempt = path, 1
    while os.path.lexists(name):
        attempt += 1
        name = path.with_name(f"{path.name}-{attempt}")
    return name


def _list(output_dir: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """
    Raises:
        ResourceError: the folder is there and cannot be read.
    """
    try:
        entries = list(output_dir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ResourceError(
            "could not look for checkpoints",
            where=str(output_dir),
            found=error.strerror or str(error),
            hint="look at the disk (dmesg), then run again with --resume",
        ) from error
    matches = ((pattern.match(entry.name), entry) for entry in entries)
    return sorted(((int(match.group(1)), entry) for match, entry in matches if match), reverse=True)
