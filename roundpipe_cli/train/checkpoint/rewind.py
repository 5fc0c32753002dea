"""Before a run continues from a checkpoint: what it did after that one is set aside, then cut out of its records.

    metrics.jsonl, eval.jsonl       -> a copy beside them, if they were changed by another program
    report.json, adapter or model   -> result-00000012/          if steps are left to train; with card, page, recipe
    step-00000012, best-00000010    -> set-aside-step-00000012   one rename each, newest first
    fsync of the folder
    metrics.jsonl, eval.jsonl       -> the rows up to the checkpoint's step

Rows are cut last: whenever a kill comes, each folder that still counts as a checkpoint has a row for each of its steps,
so the next resume leaves no gap. What is set aside goes when a checkpoint of its step, or a later one, is saved
(`writing.py`); a result stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roundpipe_cli.events import EVAL_NAME, EVENTS_NAME, METRICS_NAME, REPORT_NAME, Say, from_json
from roundpipe_cli.files import RESUME_AGAIN, disk_error, sync, write_atomically
from roundpipe_cli.regular_files import json_objects, read_json_of_ours, read_regular
from roundpipe_cli.train.checkpoint.manifest import DamagedError, copy_folder, peek
from roundpipe_cli.train.checkpoint.output_dir import (
    LAST_NAMES,
    MADE_BY,
    SET_ASIDE_PREFIX,
    best_folder,
    free_name,
    list_best,
    list_checkpoints,
    list_set_aside,
    whole_folder,
)

# Whether a run's rows are as it wrote them: a running SHA-256, held by each checkpoint and compared at resume.

RECORDS_KEY = "records"
"""Where a checkpoint's `meta` holds the `RowDigest.state` of each file of rows."""


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
    later = [_row(line) for line in data[num_bytes:].split(b"\n")[:-1]]  # behind the last line break: torn
    return all(row is not None and row["step"] >= step for row in later)


def truncate_metrics(path: Path, step: int) -> dict[int, float]:
    """Cut `metrics.jsonl` back to the rows of steps before `step`, the next to run. Returns the loss of each step that
    is left, NaN where it was not finite.

    A torn last line goes too, and so does any row that repeats a step: one row per step, always. Atomic.

    Raises:
        ResourceError: disk full or failing; the file is as it was.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    kept, losses = list[bytes](), dict[int, float]()
    for line in data.split(b"\n")[:-1]:  # text behind the last line break is torn, or empty
        row = _row(line)
        if row is not None and row["step"] < step and row["step"] not in losses:
            losses[row["step"]] = math.nan
            with contextlib.suppress(ValueError):
                losses[row["step"]] = from_json(row.get("loss"), float)
            kept.append(line + b"\n")
    if (rest := b"".join(kept)) != data:
        write_atomically(path, rest)
    return losses


def _row(line: bytes) -> dict[str, Any] | None:
    """The row, if the line is one."""
    row = next(iter(json_objects(line)), {})
    return row if type(row.get("step")) is int else None


# A run that continues from a checkpoint of another run, in an output directory that is still free.
#
# The other run's folder is only read. Its rows up to the checkpoint are copied, so that the metrics have no gap, and
# its best weights so far. Until the first checkpoint of its own, the new run is one that has not begun: the same
# command does all of this again.

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
    kept_step = (meta.get("evaluation") or {}).get("kept_step")
    if kept_step is not None:
        source, target = (best_folder(folder, kept_step) for folder in (run_dir, output_dir))
        if source.is_dir() and not target.exists():
            try:
                with whole_folder(target, "a copy of the best weights") as temporary:
                    copy_folder(source, temporary)
            except DamagedError as damage:
                say(f"the best weights so far, of step {kept_step}, are damaged ({damage}) and stay where they are")
    say(f"{run_dir} stays as it is; its rows up to {checkpoint.name} are copied to {output_dir}")


def rewind(output_dir: Path, step: int, *, num_steps: int, say: Say) -> dict[int, float]:
    """Make `step`, 0 at the start of a run, the last one of which `output_dir` says anything; the losses until then.

    Raises:
        ResourceError: disk full or failing; what counts as a checkpoint still has all its rows.
    """
    if step:
        keep_edited_rows(output_dir, output_dir, say)
        try:
            if step < num_steps:
                _set_result_aside(output_dir, say)
            _set_later_aside(output_dir, step, say)
        except OSError as error:
            raise disk_error(error, output_dir, "what came after the checkpoint", again=RESUME_AGAIN) from error
    losses = truncate_metrics(output_dir / METRICS_NAME, step + 1)
    truncate_metrics(output_dir / EVAL_NAME, step + 1)
    if len(losses) < step:
        say(f"{METRICS_NAME} has rows of only {len(losses)} of the {step} steps so far; the others were lost earlier")
    return losses


def _set_later_aside(output_dir: Path, step: int, say: Say) -> None:
    later = sorted([*list_checkpoints(output_dir), *list_best(output_dir)], key=lambda item: item[0], reverse=True)
    later = [(other, folder) for other, folder in later if other > step]
    for _, folder in later:
        folder.rename(free_name(folder.with_name(f"{SET_ASIDE_PREFIX}{folder.name}")))
    if later:
        sync(output_dir)
        names = _listed([folder for _, folder in later])
        say(f"continuing after step {step}: {names} and the rows of later steps belong to a future that is left")
    aside = [folder for _, folder in list_set_aside(output_dir)]
    if aside:
        rule = "each is deleted when the run saves a checkpoint of its step or a later one, or when the disk is full"
        say(f"set aside: {_listed(aside)}; {rule}; move any that you need")


def _set_result_aside(output_dir: Path, say: Say) -> None:
    """Move the result of a finished run into a folder of its own: the run goes on, so it is no longer its result.

    The report goes first: without it the run is not finished, and the next resume writes the result again, or comes
    here again and moves the rest.
    """
    if (output_dir / REPORT_NAME).is_file():
        last = max((step for step, _ in list_checkpoints(output_dir)), default=0)
        target = output_dir / f"result-{last:08d}"
        if not target.is_dir() or any(target.iterdir()):
            target = free_name(target)
            target.mkdir()
        (output_dir / REPORT_NAME).rename(target / REPORT_NAME)
        for name in ("recipe.yaml", "README.md", "report.html"):  # the run that continues writes others
            path = output_dir / name
            if path.is_file() and (name != "README.md" or MADE_BY.encode() in path.read_bytes()):
                if name == "recipe.yaml":  # a run that is killed before it writes its own has this one
                    write_atomically(target / name, path.read_bytes(), mode=0o644)
                else:
                    path.rename(target / name)
        say(f"the run continues: its result after step {last} is kept in {target}")
    for report in sorted(output_dir.glob(f"result-*/{REPORT_NAME}")):
        names = [name for name in _result_names(output_dir, report) if (output_dir / name).is_file()]
        for name in names:
            if not (report.parent / name).exists():
                (output_dir / name).rename(report.parent / name)
        if names:
            sync(report.parent)
            sync(output_dir)


def _result_names(output_dir: Path, report: Path) -> list[str]:
    """Files of the result that has this report, the configuration first: without it nobody takes them for a model.

    Where the report does not list them: the weights.
    """
    try:
        files = read_json_of_ours(report)["files"]
        names = sorted(name for name in files if isinstance(name, str) and Path(name).name == name)
    except (OSError, ValueError, KeyError, TypeError):
        kinds = ("*.safetensors", "*.safetensors.index.json")
        names = sorted(path.name for kind in kinds for path in output_dir.glob(kind))
    return list(dict.fromkeys([*LAST_NAMES, *names]))


def _listed(folders: Sequence[Path]) -> str:
    return ", ".join(folder.name for folder in folders)
