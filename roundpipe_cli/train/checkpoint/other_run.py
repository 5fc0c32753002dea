"""A run that continues from a checkpoint of another run, in an output directory that is still free.

The other run's folder is only read. Its rows up to the checkpoint are copied, so that the metrics have no gap, and its
best weights so far. Until the first checkpoint of its own, the new run is one that has not begun: the same command does
all of this again.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundpipe_cli.events import Say
from roundpipe_cli.files import TEMPORARY_PREFIX, disk_error, read_regular, remove_tree, sync_folder, write_atomically
from roundpipe_cli.train.checkpoint.output_dir import EVAL_NAME, EVENTS_NAME, METRICS_NAME
from roundpipe_cli.train.checkpoint.records import keep_edited_rows
from roundpipe_cli.train.checkpoint.step_folders import best_folder, kept_weights

MAX_ROWS_BYTES = 1 << 30
"""A thousand bytes a row, a million rows."""


def copy_records(checkpoint: Path, meta: Mapping[str, Any], output_dir: Path, say: Say) -> None:
    """Copy what a run wrote before `checkpoint` into `output_dir`: its rows and events, and the best weights that
    `meta` names.

    Rows of later steps are copied too and cut later.

    Raises:
        RefusedError: the other run's rows are no regular file.
        ResourceError: disk full or failing.
    """
    run_dir = checkpoint.parent
    keep_edited_rows(run_dir, output_dir, say)
    for name in (METRICS_NAME, EVAL_NAME, EVENTS_NAME):
        if (run_dir / name).exists():
            write_atomically(output_dir / name, read_regular(run_dir / name, MAX_ROWS_BYTES))
    kept_step, _ = kept_weights(meta.get("evaluation"))
    if kept_step is not None:
        _copy_folder(best_folder(run_dir, kept_step), best_folder(output_dir, kept_step))
    say(f"{run_dir} stays as it is; its rows up to {checkpoint.name} are copied to {output_dir}")


def _copy_folder(source: Path, target: Path) -> None:
    """Copy all of `source` or nothing; nothing if there is no such folder, or `target` exists."""
    if not source.is_dir() or target.exists():
        return
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}-{secrets.token_hex(4)}")
    try:
        shutil.copytree(source, temporary)
        temporary.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise disk_error(error, target, "a copy of the best weights") from error
    finally:
        if temporary.exists():
            remove_tree(temporary)
