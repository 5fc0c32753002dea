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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from roundpipe_cli.durable import (
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
from roundpipe_cli.errors import NoCheckpointError, Problem, ResourceError
from roundpipe_cli.events import Say
from roundpipe_cli.faults import fault
from roundpipe_cli.train.checkpoint.manifest import DamagedError, FileRecord, read_own_json, read_records, verify_files
from roundpipe_cli.train.checkpoint.safetensors_stream import FileSet, TensorGroup, encode_header
from roundpipe_cli.train.checkpoint.step_folders import (
    STEP_FOLDER,
    free_name,
    list_checkpoints,
    list_set_aside,
    step_folder,
)
from roundpipe_cli.watchdog import at_work

FORMAT_NAME = "roundpipe-checkpoint"
FORMAT_VERSION = 1
"""Grows when a release writes what an older release would misread. Older versions stay readable."""

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
MIN_KEEP = 2
"""One checkpoint is too few: while the only one turns out to be damaged, there is nothing to fall back on."""

_GROUP_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
_FILE_SYSTEM_SLACK_BYTES = 64 * 1024
"""For folder entries and partly filled blocks, on top of the files' own bytes."""


class LazyTensors(Mapping[str, torch.Tensor]):
    """The tensors of one group, each read from the disk when it is asked for.

    A tensor may be a private view of the mapped file: copy it into place and let go of it.
    """

    def __init__(self, path: Path) -> None:
        self._file = cast(Any, safe_open(str(path), framework="pt", device="cpu"))
        self._names: dict[str, None] = dict.fromkeys(self._file.offset_keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path
    step: int
    """Finished optimizer updates; the next step to run has this number, counted from 0."""
    meta: dict[str, Any]
    groups: tuple[str, ...]

    def tensors(self, group: str) -> LazyTensors:
        """Raises:
        KeyError: the checkpoint has no such group.
        """
        if group not in self.groups:
            raise KeyError(group)
        return LazyTensors(self.folder / f"{group}.safetensors")


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
        return os.path.lexists(target) and _verify(target, step) == records
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
    good all the same.
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


# --- loading --------------------------------------------------------------------------------------------------------


def load_newest(output_dir: Path, path: Path | None = None, warn: Say | None = None) -> Checkpoint:
    """The newest checkpoint of `output_dir` whose every byte is as written, or the one named by `path`.

    Nothing is changed on the disk. Each damaged checkpoint passed over gives one warning that names the file, what
    was found and what was expected.

    Raises:
        NoCheckpointError: none there, none valid, or one was written by a newer release.
    """
    if path is not None:
        match = STEP_FOLDER.match(path.name)
        candidates = [(int(match.group(1)), path)] if match and os.path.lexists(path) else []
    else:
        candidates = list_checkpoints(output_dir)
    if not candidates:
        raise NoCheckpointError(
            "no checkpoint to resume from",
            where=str(path or output_dir),
            found="nothing named step-*" if path is None else "no such checkpoint",
            expected="a folder such as step-00000200",
            hint="run without --resume to start afresh, or name the run's folder with output_dir=",
        )
    damages: list[str] = []
    for step, folder in candidates:
        try:
            return _load(folder, step)
        except DamagedError as damage:
            damages.append(str(damage))
            _tell(warn, f"checkpoint {folder.name} is damaged and passed over: {damage}")
    error = NoCheckpointError(
        f"no valid checkpoint to resume from: tried {', '.join(folder.name for _, folder in candidates)}",
        where=str(path or output_dir),
        hint="nothing was deleted; restore one from a copy, or start afresh with another output_dir=",
    )
    error.problems += tuple(Problem(damage) for damage in damages)
    raise error


def peek(folder: Path) -> dict[str, Any] | None:
    """The `meta` of a checkpoint without any look at its other files; None where it cannot be read."""
    try:
        meta = read_own_json(folder / STATE_NAME).get("meta")
    except DamagedError:
        return None
    return meta if isinstance(meta, dict) else None


def _load(folder: Path, step: int) -> Checkpoint:
    records = _verify(folder, step)
    groups = []
    for record in records:
        if record.name.endswith(".safetensors"):
            groups.append(record.name.removesuffix(".safetensors"))
            _check_readable(folder / record.name)
    state = read_own_json(folder / STATE_NAME)
    if state.get("step") != step or not isinstance(state.get("meta"), dict):
        raise DamagedError(folder / STATE_NAME, f"step {state.get('step')!r}", f"step {step} and its state")
    return Checkpoint(folder, step, state["meta"], tuple(groups))


def _verify(folder: Path, step: int) -> list[FileRecord]:
    """Compare every byte of the checkpoint with its manifest.

    Raises:
        DamagedError: the first difference.
        NoCheckpointError: the format is newer than this release.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise DamagedError(folder, "not a folder of its own", "a folder")
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


def _check_readable(path: Path) -> None:
    """A header that lies must be found before any tensor is used."""
    try:
        LazyTensors(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedError(path, f"no safetensors file ({error})", "a safetensors file") from error


def _encode_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"


def _tell(warn: Say | None, message: str) -> None:
    if warn is not None:
        warn(message)
