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
from roundpipe_cli.files import RESUME_AGAIN, disk_error
from roundpipe_cli.train.checkpoint.rewind import RowDigest


def metrics_row(event: StepFinished) -> dict[str, Any]:
    """The row of a step. `loss_hex` is exact; a value that is not finite is null."""
    same = "tokens", "tokens_per_s", "step_s", "bubble_ratio", "utilization", "launch_bound_ratio", "mfu"
    return {
        "step": event.step,
        "epoch": event.epoch,
        "loss": event.loss if math.isfinite(event.loss) else None,
        "loss_hex": event.loss.hex(),
        "learning_rate": event.learning_rate,
        "grad_norm": event.grad_norm if math.isfinite(event.grad_norm) else None,
        **{name: getattr(event, name) for name in (*same, "upload_bytes", "device_peak_bytes")},
        **(event.preference or {}),
    }


class MetricsFile:
    """The rows of a run's steps in metrics.jsonl, open for more of them inside `with`."""

    def __init__(self, path: Path) -> None:
        self._path, self._digest = path, RowDigest(path)

    def __enter__(self) -> MetricsFile:
        self._file = self._path.open("ab", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one more row.

        Raises:
            ResourceError: the disk is full or does not take it, or the file is no longer where it was.
        """
        _check_place(self._file, self._path)
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            if self._file.write(line) < len(line):  # the rest does not fit; --resume cuts off a torn line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise disk_error(error, self._path, f"the metrics of step {row['step']}", again=RESUME_AGAIN) from error
        self._digest.add(line)

    def sync(self) -> None:
        """All rows are on the disk when this returns.

        Raises:
            ResourceError: the disk does not take them.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_error(error, self._path, "the metrics", again=RESUME_AGAIN) from error

    def state(self) -> dict[str, Any]:
        """Size and digest of the rows, for a checkpoint."""
        return self._digest.state()


def _check_place(file: FileIO, path: Path) -> None:
    """Refuse to write to a file that was moved or removed: the row, and the run's result, would be lost."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return
    folder = path.parent
    if not folder.is_dir():
        what, hint = "the output directory was removed or moved during the run", "--resume continues where it is now"
    else:
        what, hint = f"{path.name} was removed or replaced during the run", "--resume continues from a checkpoint"
    raise ResourceError(what, where=str(path if folder.is_dir() else folder), hint=hint)
