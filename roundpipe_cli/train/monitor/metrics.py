"""Rows of `metrics.jsonl`: one a step, each whole or, after a crash, cut off by `--resume`."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import ResourceError
from roundpipe_cli.events import StepFinished
from roundpipe_cli.files import disk_error


def metrics_row(event: StepFinished) -> dict[str, Any]:
    """The row of a step. `loss_hex` is exact; a value that is not finite is null."""
    return {
        "step": event.step,
        "loss": event.loss if math.isfinite(event.loss) else None,
        "loss_hex": event.loss.hex(),
        "learning_rate": event.learning_rate,
        "grad_norm": event.grad_norm if math.isfinite(event.grad_norm) else None,
        "tokens": event.tokens,
        "tokens_per_s": event.tokens_per_s,
        "step_s": event.step_s,
        "bubble_ratio": event.bubble_ratio,
        "utilization": list(event.utilization),
        "upload_bytes": event.upload_bytes,
        "device_peak_bytes": event.device_peak_bytes,
        **(event.preference or {}),
    }


def append_row(file: FileIO, path: Path, row: Mapping[str, Any]) -> bytes:
    """Write one more row; returns its line.

    Raises:
        ResourceError: the disk is full or does not take it, or the file is no longer where it was.
    """
    _check_place(file, path)
    line = (json.dumps(row, allow_nan=False) + "\n").encode()
    try:
        if file.write(line) < len(line):  # the rest does not fit; --resume cuts off a torn line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise disk_error(error, path, f"the metrics of step {row['step']}") from error
    return line


def _check_place(file: FileIO, path: Path) -> None:
    """Refuse to write to a file that was moved or removed: the row, and the run's result, would be lost.

    Raises:
        ResourceError: as said.
    """
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return
    folder = path.parent
    if not folder.is_dir():
        what, hint = "the output directory was removed or moved during the run", "--resume continues where it is now"
    else:
        what, hint = f"{path.name} was removed or replaced during the run", "--resume continues from a checkpoint"
    raise ResourceError(what, where=str(path if folder.is_dir() else folder), hint=hint)


def sync_rows(file: FileIO, path: Path) -> None:
    """All rows are on the disk when this returns.

    Raises:
        ResourceError: the disk does not take them.
    """
    try:
        os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path, "the metrics") from error
