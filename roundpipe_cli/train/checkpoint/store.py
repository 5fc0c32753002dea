"""Checkpoints: `OUTPUT_DIR/step-00000020/` holds everything that a run needs to continue bit-identically.

    step-00000020/
      masters.safetensors     one file per tensor group
      moments.safetensors
      state.json              all that is not a tensor: cursor, schedule, hashes of recipe and data, versions
      manifest.json           name, size and SHA-256 of every file above; written last

A folder is built as `.tmp-step-...` and renamed when every byte is on the disk: what is named `step-...` is complete.
Loading nevertheless verifies every byte first: disks flip bits, people edit and copy. No pickle anywhere.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import NoCheckpointError, ResourceError
from roundpipe_cli.events import Say
from roundpipe_cli.faults import fault
from roundpipe_cli.files import (
    DELETED_PREFIX,
    STATE_FOLDER_MODE,
    TEMPORARY_PREFIX,
    NewFile,
    disk_error,
    free_bytes,
    remove_tree,
    require_free_bytes,
    sync_folder,
    write_new_file,
)
from roundpipe_cli.train.checkpoint.manifest import STATE_NAME, DamagedError, FileRecord
from roundpipe_cli.train.checkpoint.reading import (
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    verify_checkpoint,
)
from roundpipe_cli.train.checkpoint.safetensors_stream import FileSet, TensorGroup, encode_header
from roundpipe_cli.train.checkpoint.step_folders import (
    free_name,
    list_checkpoints,
    list_set_aside,
    step_folder,
)
from roundpipe_cli.watchdog import at_work

MIN_KEEP = 2
"""Least checkpoints kept: if the only one were damaged, there would be nothing to fall back on."""

_GROUP_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
_FILE_SYSTEM_SLACK_BYTES = 64 * 1024
"""Bytes of disk for folder entries and partly filled blocks, beside the files' own."""


# --- saving ---------------------------------------------------------------------------------------------------------


def save_checkpoint(
    output_dir: Path,
    step: int,
    files: Mapping[str, TensorGroup] | FileSet,
    meta: Mapping[str, Any],
    keep: int,
    warn: Say | None = None,
) -> Path:
    """Write `step-<step>` durably, then remove all but the newest `keep` checkpoints. Returns the folder.

    Args:
        files: tensor groups by name; `{"masters": ...}` becomes `masters.safetensors`. See `TensorStream` and `FileSet`
            for what comes layer by layer. The tensors must not change while they are written.
        meta: plain JSON values (no NaN).
        keep: at least 2.
        warn: told about old checkpoints that could not be removed.

    Raises:
        ResourceError: disk full or failing; nothing was committed, older checkpoints are as they were.
    """
    if keep < MIN_KEEP:
        raise ValueError(f"keep must be at least {MIN_KEEP}, not {keep}")
    if not isinstance(files, FileSet):
        files = FileSet.of(files)
    bad_names = [name for name in files.specs if not _GROUP_NAME.match(name)]
    if bad_names:
        raise ValueError(f"not a name for a tensor group: {bad_names[0]!r}")
    state = _encode_json({"format_version": FORMAT_VERSION, "step": step, "meta": dict(meta)})
    needed_bytes = sum(files.num_bytes(name) for name in files.specs) + len(state) + _FILE_SYSTEM_SLACK_BYTES
    target = step_folder(output_dir, step)
    _make_room(output_dir, needed_bytes, warn)
    require_free_bytes(output_dir, needed_bytes, f"the checkpoint of step {step}")
    temporary = output_dir / f"{TEMPORARY_PREFIX}{target.name}"
    try:
        records = _write_folder(temporary, step, files, state)
        if _already_there(target, step, records):
            remove_tree(temporary)
        else:
            _commit(output_dir, temporary, step)
    except OSError as error:
        _discard(temporary)
        raise disk_error(error, target, f"the checkpoint of step {step}", needed_bytes) from error
    except BaseException:
        _discard(temporary)
        raise
    prune_checkpoints(output_dir, step, keep, warn)
    return target


def _write_folder(temporary: Path, step: int, files: FileSet, state: bytes) -> list[FileRecord]:
    """Write and fsync every file of a checkpoint, the manifest last, then the folder."""
    if os.path.lexists(temporary):
        remove_tree(temporary)
    temporary.mkdir(mode=STATE_FOLDER_MODE)
    records = _write_tensors(temporary, step, files)
    _pass_fault(step)
    records.append(FileRecord(STATE_NAME, *write_new_file(temporary / STATE_NAME, [state])))
    manifest = {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "step": step,
        "files": [{"name": record.name, "size": record.size, "sha256": record.sha256} for record in records],
    }
    write_new_file(temporary / MANIFEST_NAME, [_encode_json(manifest)])
    sync_folder(temporary)
    return records


def _write_tensors(temporary: Path, step: int, files: FileSet) -> list[FileRecord]:
    """Write and fsync the tensor files, all of them at once, in the order in which their bytes come."""
    _pass_fault(step)
    open_files: dict[str, NewFile] = {}
    try:
        for group, specs in files.specs.items():
            open_files[group] = NewFile(temporary / f"{group}.safetensors")
            open_files[group].write(encode_header(specs))
        for group, piece in files.pieces:
            open_files[group].write(piece)
        records: list[FileRecord] = []
        for group, file in open_files.items():
            if records:
                _pass_fault(step)
            assert file.num_bytes == files.num_bytes(group), f"{group}: not as many bytes as announced"
            records.append(FileRecord(f"{group}.safetensors", *file.finish()))
        return records
    finally:
        for file in open_files.values():
            file.close()


def _pass_fault(step: int) -> None:
    with at_work(f"the checkpoint of step {step}"):
        fault("ckpt_writer", step=step)


def _already_there(target: Path, step: int, records: list[FileRecord]) -> bool:
    """Whether the same state was saved at this step before (resumed, then stopped before another step was done)."""
    try:
        return os.path.lexists(target) and verify_checkpoint(target, step) == records
    except (DamagedError, NoCheckpointError):
        return False


def _commit(output_dir: Path, temporary: Path, step: int) -> None:
    """Give the finished folder its name.

    Checkpoints of this step or later belong to a future that this run has left (it resumed from an earlier one):
    were they still there after the rename, the next resume would take the newest of them for the run's own.
    """
    target = step_folder(output_dir, step)
    set_aside: list[tuple[Path, Path]] = []
    try:
        for other_step, folder in list_checkpoints(output_dir):
            if other_step >= step:
                set_aside.append((folder, folder.rename(_free_deleted_name(folder))))
        _pass_fault(step)
        temporary.rename(target)
        try:
            sync_folder(output_dir)
        except OSError:
            target.rename(temporary)  # its name may not be durable, so it must not count as committed
            raise
    except BaseException:
        for folder, deleted in set_aside:
            deleted.rename(folder)
        raise


def prune_checkpoints(output_dir: Path, step: int, keep: int, warn: Say | None = None) -> None:
    """Remove what `keep` leaves out, by step number (clocks jump), and what was set aside of steps up to `step`.

    `step` was just made durable and stays. What cannot be removed is reported and left: the checkpoint just written is
    good nevertheless.
    """
    try:
        mine = [folder for other_step, folder in list_checkpoints(output_dir) if other_step <= step]
        doomed = [entry for entry in output_dir.iterdir() if entry.name.startswith(f"{DELETED_PREFIX}step-")]
        doomed += [folder for other_step, folder in list_set_aside(output_dir) if other_step <= step]
    except (OSError, ResourceError) as error:
        found = error.strerror if isinstance(error, OSError) else error.problems[0].found
        _tell(warn, f"could not look for old checkpoints in {output_dir}: {found}")
        return
    for folder in mine[keep:]:
        _pass_fault(step)
        try:
            doomed.append(folder.rename(_free_deleted_name(folder)))
        except OSError as error:
            _tell(warn, f"could not remove the old checkpoint {folder}: {error.strerror}")
    for folder in doomed:
        try:
            remove_tree(folder)
        except OSError as error:
            _tell(warn, f"could not remove {folder}: {error.strerror}")


def _make_room(output_dir: Path, needed_bytes: int, warn: Say | None) -> None:
    """Remove what was set aside, the newest first, as long as the disk has no room for a checkpoint."""
    for _, folder in list_set_aside(output_dir):
        if free_bytes(output_dir) >= needed_bytes:
            return
        try:
            remove_tree(folder)
            _tell(warn, f"{folder} was removed: the disk has no room for it and another checkpoint")
        except OSError as error:
            _tell(warn, f"could not remove {folder}: {error.strerror}")


def _free_deleted_name(folder: Path) -> Path:
    """`.del-step-...`, with a number where an earlier removal was cut short."""
    return free_name(folder.with_name(f"{DELETED_PREFIX}{folder.name}"))


def _discard(temporary: Path) -> None:
    """Remove a checkpoint that failed; what stays behind is removed at the next start."""
    try:
        if os.path.lexists(temporary):
            remove_tree(temporary)
    except OSError:
        pass


def _encode_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"


def _tell(warn: Say | None, message: str) -> None:
    if warn is not None:
        warn(message)
