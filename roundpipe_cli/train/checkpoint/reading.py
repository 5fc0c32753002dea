"""Reading checkpoints: manifests, and the newest one without a damaged byte."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from roundpipe_cli.errors import NoCheckpointError, Problem
from roundpipe_cli.events import Say
from roundpipe_cli.train.checkpoint.manifest import (
    STATE_NAME,
    DamagedError,
    FileRecord,
    peek,
    read_own_json,
    read_records,
    verify_files,
)
from roundpipe_cli.train.checkpoint.output_dir import SET_ASIDE_FOLDER, STEP_FOLDER, list_checkpoints, no_checkpoint

FORMAT_NAME = "roundpipe-checkpoint"
FORMAT_VERSION = 1
"""Raised when a release writes files that older releases would misread. Older versions stay readable."""

MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path
    step: int
    """Finished optimizer updates; the next step to run has this number, counted from 0."""
    meta: dict[str, Any]
    tensors: dict[str, dict[str, torch.Tensor]]
    """By group and name: views of the mapped files, read when they are used. Whoever has copied them clears this: as
    long as it is mapped, a file keeps its place on the disk, removed or not."""


def load_newest(output_dir: Path, path: Path | None = None, warn: Say | None = None) -> Checkpoint:
    """The newest checkpoint of `output_dir` whose every byte is as written, or the one named by `path`.

    Nothing is changed on the disk. Each damaged checkpoint passed over gives one warning that names the file, what
    was found and what was expected.

    Raises:
        NoCheckpointError: none there, none valid, or one was written by a newer release.
    """
    if path is not None:
        match = STEP_FOLDER.match(path.name) or SET_ASIDE_FOLDER.match(path.name)
        candidates = [(int(match.group(1)), path)] if match and os.path.lexists(path) else []
    else:
        candidates = list_checkpoints(output_dir)
    if not candidates:
        raise no_checkpoint(path or output_dir, "nothing named step-*" if path is None else "no such checkpoint")
    damages: list[str] = []
    for step, folder in candidates:
        try:
            return _load(folder, step)
        except DamagedError as damage:
            damages.append(str(damage))
            if warn is not None:
                state = "is damaged" if os.path.lexists(folder) else "was removed meanwhile"
                warn(f"checkpoint {folder.name} {state} and passed over: {damage}")
    is_gone = not any(os.path.lexists(folder) for _, folder in candidates)
    error = NoCheckpointError(
        f"no valid checkpoint to resume from: tried {', '.join(folder.name for _, folder in candidates)}",
        where=str(path or output_dir),
        hint="a run that goes on here has removed it meanwhile; take a newer one"
        if is_gone
        else "nothing was deleted; restore one from a copy, or start afresh with another output_dir=",
    )
    error.problems += tuple(Problem(damage) for damage in damages)
    raise error


def kept_step_of(folder: Path) -> int | None:
    """The step whose weights a checkpoint counts on as the best ones kept; None: it names none, or cannot be read."""
    evaluation = (peek(folder) or {}).get("evaluation")
    state = evaluation if isinstance(evaluation, dict) else {}
    step = state.get("kept_step")
    return step if type(step) is int else None


def _load(folder: Path, step: int) -> Checkpoint:
    records = verify_checkpoint(folder, step)
    tensors = {}
    for path in (folder / record.name for record in records if record.name.endswith(".safetensors")):
        try:
            tensors[path.stem] = load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedError(path, f"no safetensors file ({error})", "a safetensors file") from error
    state = read_own_json(folder / STATE_NAME)
    if state.get("step") != step or not isinstance(state.get("meta"), dict):
        raise DamagedError(folder / STATE_NAME, f"step {state.get('step')!r}", f"step {step} and its state")
    return Checkpoint(folder, step, state["meta"], tensors)


def verify_checkpoint(folder: Path, step: int) -> list[FileRecord]:
    """Compare every byte of the checkpoint with its manifest.

    Raises:
        DamagedError: the first difference.
        NoCheckpointError: the format is newer than this release.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise DamagedError(folder, "a link or a file, not a folder", "a folder")
    records = _read_manifest(folder, step)
    verify_files(folder, records, MANIFEST_NAME)
    return records


def _read_manifest(folder: Path, step: int) -> list[FileRecord]:
    path = folder / MANIFEST_NAME
    manifest = read_own_json(path)
    version = manifest.get("format_version")
    if manifest.get("format") != FORMAT_NAME or type(version) is not int or version < 1:
        raise DamagedError(path, "no manifest of a checkpoint", f"format {FORMAT_NAME!r}, version {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise NoCheckpointError(
            "the newest checkpoint was written by a newer release of roundpipe",
            where=str(path),
            found=f"checkpoint format version {version}",
            expected=f"version {FORMAT_VERSION} or older",
            hint="upgrade roundpipe, or move that checkpoint away to resume from the one before",
        )
    if manifest.get("step") != step:
        raise DamagedError(path, f"step {manifest.get('step')!r}", f"step {step}")
    records = read_records(path, manifest.get("files"))
    names = [record.name for record in records]
    if STATE_NAME not in names:
        raise DamagedError(path, f"files {', '.join(names)}", f"{STATE_NAME} among them")
    return records
