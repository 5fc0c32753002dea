"""Before a run continues from a checkpoint: what it did after that one is set aside, then cut out of its records.

    metrics.jsonl, eval.jsonl       -> a copy beside them, if they were changed by another program
    report.json, adapter or model   -> result-00000012/          if steps are left to train
    step-00000012, best-00000010    -> set-aside-step-00000012   one rename each, newest first
    fsync of the folder
    metrics.jsonl, eval.jsonl       -> the rows up to the checkpoint's step

Rows are cut last: whenever a kill comes, each folder that still counts as a checkpoint has a row for each of its steps,
so the next resume leaves no gap. What is set aside goes when a checkpoint of its step, or a later one, is saved
(`store.py`); a result stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roundpipe_cli.events import Say
from roundpipe_cli.files import disk_error, read_json_of_ours, sync_folder
from roundpipe_cli.train.checkpoint.output_dir import EVAL_NAME, LAST_NAMES, METRICS_NAME, REPORT_NAME
from roundpipe_cli.train.checkpoint.records import keep_edited_rows, truncate_metrics
from roundpipe_cli.train.checkpoint.step_folders import (
    SET_ASIDE_PREFIX,
    free_name,
    list_best,
    list_checkpoints,
    list_set_aside,
)


def rewind(output_dir: Path, step: int, *, num_steps: int, say: Say) -> None:
    """Make `step` the last one of which `output_dir` says anything.

    Args:
        step: updates done by the checkpoint to continue from; 0 at the start of a run.
        num_steps: of the whole run.
        say: is told what was set aside, and where rows are missing.

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
            raise disk_error(error, output_dir, "what came after the checkpoint") from error
    num_rows = truncate_metrics(output_dir / METRICS_NAME, step + 1)
    truncate_metrics(output_dir / EVAL_NAME, step + 1)
    if num_rows < step:
        say(f"{METRICS_NAME} has rows of only {num_rows} of the {step} steps so far; the others were lost earlier")


def _set_later_aside(output_dir: Path, step: int, say: Say) -> None:
    """Rename every checkpoint and best weights of a later step, the newest first."""
    later = sorted([*list_checkpoints(output_dir), *list_best(output_dir)], key=lambda item: item[0], reverse=True)
    later = [(other, folder) for other, folder in later if other > step]
    for _, folder in later:
        folder.rename(free_name(folder.with_name(f"{SET_ASIDE_PREFIX}{folder.name}")))
    if later:
        sync_folder(output_dir)
        names = _listed([folder for _, folder in later])
        say(f"continuing after step {step}: {names} and the rows of later steps belong to a future that is left")
    aside = [folder for _, folder in list_set_aside(output_dir)]
    if aside:
        rule = "each goes when a checkpoint of its step or a later one is saved, or when the disk is full"
        say(f"set aside: {_listed(aside)}; {rule}; move them elsewhere to keep them")


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
        say(f"the run continues: its result after step {last} is kept in {target}")
    for report in sorted(output_dir.glob(f"result-*/{REPORT_NAME}")):
        names = [name for name in _result_names(output_dir, report) if (output_dir / name).is_file()]
        for name in names:
            if not (report.parent / name).exists():
                (output_dir / name).rename(report.parent / name)
        if names:
            sync_folder(report.parent)
            sync_folder(output_dir)


def _result_names(output_dir: Path, report: Path) -> list[str]:
    """Files of the result that has this report, the configuration first: without it nobody takes them for a model.

    Reports of earlier releases do not list them: of those the weights.
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
