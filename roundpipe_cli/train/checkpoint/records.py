"""Whether a run's rows are as it wrote them: a running SHA-256, held by each checkpoint and compared at resume."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundpipe_cli.events import Say
from roundpipe_cli.files import write_atomically
from roundpipe_cli.train.checkpoint.output_dir import EVAL_NAME, METRICS_NAME
from roundpipe_cli.train.checkpoint.reading import peek
from roundpipe_cli.train.checkpoint.step_folders import list_checkpoints

RECORDS_KEY = "records"
"""Where a checkpoint's `meta` holds the `RowDigest.state` of each file of rows. Earlier releases have none."""


class RowDigest:
    """Size and SHA-256 of the rows of a file, kept up to date row by row.

    It follows what the run writes, not the file: a change by anybody else shows as a difference.
    """

    def __init__(self, path: Path) -> None:
        """Begin with the rows that the file holds now; without a file, with none."""
        data = path.read_bytes() if path.exists() else b""
        self._digest = hashlib.sha256(data)
        self._num_bytes = len(data)

    def add(self, line: bytes) -> None:
        """Add a row, with its line break."""
        self._digest.update(line)
        self._num_bytes += len(line)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as plain JSON values."""
        return {"num_bytes": self._num_bytes, "sha256": self._digest.hexdigest()}


def keep_edited_rows(run_dir: Path, output_dir: Path, say: Say) -> None:
    """Copy each file of rows in `run_dir` that somebody changed to `output_dir`, before any row is cut from it.

    The newest checkpoint that can be read knows the rows up to its step; behind them only rows of that step or later
    ones may follow, and one torn line. The copy has a name of its own content, so that a resume that is killed and
    repeated makes one.

    Raises:
        ResourceError: disk full or failing; the files are as they were.
    """
    metas = ((step, peek(folder)) for step, folder in list_checkpoints(run_dir))
    step, known = next(((step, meta[RECORDS_KEY]) for step, meta in metas if meta and RECORDS_KEY in meta), (0, {}))
    for name in (METRICS_NAME, EVAL_NAME):
        path = run_dir / name
        saved = known.get(name) if isinstance(known, dict) else None
        if not isinstance(saved, dict) or not path.exists():  # missing rows are reported where rows are counted
            continue
        data = path.read_bytes()
        if not _is_as_saved(data, saved, step):
            copy = output_dir / f"{path.stem}-edited-{hashlib.sha256(data).hexdigest()[:8]}.jsonl"
            if not copy.exists():
                write_atomically(copy, data)
            say(
                f"{path} was changed by another program since step {step} was saved; the run continues with its rows "
                f"as they are now, and a copy of the whole file is in {copy.name}"
            )


def _is_as_saved(data: bytes, saved: Mapping[str, Any], step: int) -> bool:
    """Whether `data` begins with the rows saved at `step`, and what follows can be this program's."""
    num_bytes = saved.get("num_bytes")
    if type(num_bytes) is not int or hashlib.sha256(data[:num_bytes]).hexdigest() != saved.get("sha256"):
        return False
    later = [_row_step(line) for line in data[num_bytes:].split(b"\n")[:-1]]  # behind the last line break: torn
    return all(found is not None and found >= step for found in later)


def truncate_metrics(path: Path, step: int) -> int:
    """Cut `metrics.jsonl` back to the rows of steps before `step`, the next to run. Returns the number of rows kept.

    A torn last line goes too, and so does any row that repeats a step: one row per step, always. Atomic.

    Raises:
        ResourceError: disk full or failing; the file is as it was.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    kept: list[bytes] = []
    seen: set[int] = set()
    for line in data.split(b"\n")[:-1]:  # text behind the last line break is torn, or empty
        found = _row_step(line)
        if found is not None and found < step and found not in seen:
            seen.add(found)
            kept.append(line + b"\n")
    rest = b"".join(kept)
    if rest != data:
        write_atomically(path, rest)
    return len(kept)


def losses_by_step(path: Path) -> dict[int, float]:
    """Step -> loss of the rows in `metrics.jsonl`, NaN where it was not finite; empty where there is no file."""
    losses: dict[int, float] = {}
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        step = _row_step(line)
        if step is not None:
            loss = json.loads(line).get("loss")
            losses[step] = float(loss) if isinstance(loss, (int, float)) else math.nan
    return losses


def _row_step(line: bytes) -> int | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if type(step) is int else None
