"""Names of checkpoint folders, `step-00000020`. Apart from `checkpoint.py` since finding them needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

STEP_FOLDER = re.compile(r"^step-(\d{8,})$")


def step_folder(output_dir: Path, step: int) -> Path:
    """`step_folder(Path("out"), 20)` is `out/step-00000020`."""
    return output_dir / f"step-{step:08d}"


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders named `step-...`, valid or not, newest first."""
    try:
        entries = list(output_dir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = ((STEP_FOLDER.match(entry.name), entry) for entry in entries)
    return sorted(((int(match.group(1)), entry) for match, entry in matches if match), reverse=True)
