"""The output directory: who may write in it, what it already holds, and what an interrupted run left in it.

OUTPUT_DIR/
  .roundpipe          marker: made by us, so our left-overs may be removed
  .roundpipe.lock     held with flock by the run; names its process
  recipe.yaml  metrics.jsonl
  step-00000020/ ...  checkpoints (other folders with a step: below)
  report.json         written last of all: the run is finished
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import NoCheckpointError, OutputInUseError, RefusedError, ResourceError, RoundpipeError
from roundpipe_cli.events import HEADER_NAME, LOCK_NAME, REPORT_NAME, SCORES_NAME
from roundpipe_cli.files import (
    DELETED_PREFIX,
    STATE_FILE_MODE,
    TEMPORARY_PREFIX,
    disk_error,
    remove_tree,
    sync,
    write_atomically,
)
from roundpipe_cli.model.files.untrusted import check_file, read_json
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.recipe.strict_yaml import parse_bytes
from roundpipe_cli.regular_files import Holder, kind_of_file, lock_holder, named_path, open_regular, read_json_of_ours

# Names of a run's folders with a step number in them. Apart from `writing.py`, since finding them needs no torch.
#
# step-00000020               a checkpoint
# best-00000012               weights of the best evaluation
# set-aside-step-00000020     either of them, of a future that the run has left (see `rewind.py`)
# result-00000020             the result of a finished run that was continued

STEP_FOLDER = re.compile(r"^step-(\d{8,})$")
BEST_FOLDER = re.compile(r"^best-(\d{8,})$")
SET_ASIDE_PREFIX = "set-aside-"
SET_ASIDE_FOLDER = re.compile(rf"^{SET_ASIDE_PREFIX}(?:step|best)-(\d{{8,}})(?:-\d+)?$")
BEST_NOTE = "best.json"
"""In a folder of the best weights; a folder without it is not ours."""


RUN_KEY = "output_dir="
"""How users name the folder of a run."""


def step_folder(output_dir: Path, step: int) -> Path:
    """`step_folder(Path("out"), 20)` is `out/step-00000020`."""
    return output_dir / f"step-{step:08d}"


def best_folder(output_dir: Path, step: int) -> Path:
    """`best_folder(Path("out"), 12)` is `out/best-00000012`."""
    return output_dir / f"best-{step:08d}"


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders named `step-...`, valid or not, newest first."""
    return _list(output_dir, STEP_FOLDER)


def list_best(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the best weights, newest first."""
    return [(step, folder) for step, folder in _list(output_dir, BEST_FOLDER) if (folder / BEST_NOTE).is_file()]


def list_set_aside(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders that were set aside, newest first."""
    return _list(output_dir, SET_ASIDE_FOLDER)


def free_name(path: Path) -> Path:
    """`path`, with a number at its end where something has this name already."""
    name, attempt = path, 1
    while os.path.lexists(name):
        attempt += 1
        name = path.with_name(f"{path.name}-{attempt}")
    return name


@contextlib.contextmanager
def whole_folder(target: Path, what: str) -> Iterator[Path]:
    """The temporary name under which the body makes the folder `target`: it is there whole, or not at all.

    Raises:
        ResourceError: disk full or failing while `what` is written.
    """
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        yield temporary
        temporary.rename(target)
        sync(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise disk_error(error, target, what) from error
        raise


MAX_FILE_BYTES = 16 * 1024**2


def read_values(path: Path) -> dict[str, Any]:
    """The values of a small file of a result, JSON or a recipe; empty where it is missing or damaged."""
    try:
        check_file(path, MAX_FILE_BYTES)
        return read_json(path) if path.suffix == ".json" else dict(parse_bytes(path.read_bytes(), str(path)).data)
    except (OSError, RefusedError):
        return {}


def _list(output_dir: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    try:
        entries = list(output_dir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ResourceError(
            "could not look for checkpoints",
            where=str(output_dir),
            found=error.strerror or str(error),
            hint="look at the disk (dmesg), then run again with --resume",
        ) from error
    matches = ((pattern.match(entry.name), entry) for entry in entries)
    return sorted(((int(match.group(1)), entry) for match, entry in matches if match), reverse=True)


MARKER_NAME = ".roundpipe"
MADE_BY = "with RoundPipe CLI"
"""Words in each model card of ours."""
LAST_NAMES = ("config.json", "adapter_config.json")
"""Files of a result that are renamed last: without them the folder does not count as a model."""

RUN_SUFFIXES = (".json", ".jsonl", ".yaml", ".safetensors", ".html")

RESULT_FOLDER_MODE = 0o755
"""Others may read the folder, for the adapter; private files in it have stricter modes."""


class RunState(Enum):
    """State of the run in an output directory."""

    FRESH = "fresh"
    HAS_CHECKPOINT = "has_checkpoint"
    FINISHED = "finished"


def read_state(folder: Path) -> RunState:
    """The state of the folder, which is not changed. Damaged checkpoints count: they may be worth saving."""
    if (folder / REPORT_NAME).is_file():
        return RunState.FINISHED
    if list_checkpoints(folder):
        return RunState.HAS_CHECKPOINT
    return RunState.FRESH


def missing_from_result(folder: Path) -> list[str]:
    """Files of a finished run's result that are there no more."""
    names = read_values(folder / REPORT_NAME).get("files")
    return [str(name) for name in names if not (folder / str(name)).is_file()] if isinstance(names, list) else []


def named_checkpoint(recipe: Recipe) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names; None for the newest one, and where it is not set."""
    named = recipe.resume_from_checkpoint
    return None if named in (None, "auto") else named_path(str(named))


def again(recipe: Recipe) -> str:
    """Words behind a run's command that continue it from its newest checkpoint."""
    return "--resume" + (" resume_from_checkpoint=auto" if named_checkpoint(recipe) is not None else "")


def is_of_other_run(recipe: Recipe, folder: Path) -> bool:
    """Whether `resume_from_checkpoint` names a checkpoint outside of `folder`, the output directory.

    Raises:
        RefusedError: it does, and `folder` holds a run already, whose metrics are not those of the named one.
    """
    named = named_checkpoint(recipe)
    if named is None or named.parent.resolve() == folder.resolve():
        return False
    if read_state(folder) is not RunState.FRESH:
        raise RefusedError(
            "the checkpoint to resume from is of another run than the one in the output directory",
            where="resume_from_checkpoint",
            found=str(named),
            expected=f"a checkpoint in {folder}, or an output_dir= that holds no run",
            hint="resume_from_checkpoint=auto continues the run that is there",
        )
    return True


def refuse_wrong_start(recipe: Recipe, *, resume: bool) -> None:
    """Refuse to begin where a run is, and to resume where none is; see `check_start` and `is_of_other_run`."""
    folder = named_path(recipe.output_dir)
    resume = resume or recipe.resume_from_checkpoint is not None
    check_start(folder, resume and not is_of_other_run(recipe, folder))


def check_start(folder: Path, resume: bool, *, key: str = RUN_KEY) -> RunState:
    """Whether a run may start here; called before the model loads and again under the lock. Changes nothing.

    With `resume`, FINISHED means that there is nothing to do, unless the recipe asks for more steps. Without it the
    answer is always FRESH; what a run left that was killed before its first checkpoint is then overwritten.

    Args:
        key: as of `OutputDir`.

    Raises:
        RefusedError: without `resume`, where there is a checkpoint or a result, or somebody else's model, or scores.
        NoCheckpointError: with `resume`, where there is no checkpoint.
    """
    try:
        is_there = folder.exists()
    except OSError as error:  # a name that is too long
        raise _unwritable(error, folder, key) from error
    if is_there and not folder.is_dir():
        raise RefusedError(
            "the output directory is a file", where=str(folder), expected="a folder", hint=f"set {key} elsewhere"
        )
    _check_run_files(folder, key)
    state = read_state(folder)
    if resume and state is RunState.FRESH:
        raise no_checkpoint(folder, "nothing named step-*" if folder.is_dir() else "no such folder")
    if resume:
        return state
    found = {
        RunState.FINISHED: f"the result of a finished run ({REPORT_NAME})",
        RunState.HAS_CHECKPOINT: ", ".join(path.name for _, path in list_checkpoints(folder)[:3]),
        RunState.FRESH: (model := _foreign_model(folder)) or (_scores(folder) if key == RUN_KEY else None),
    }[state]
    if found is None:
        return state
    resume_hint = "add --resume to continue that run, or " if list_checkpoints(folder) else ""
    other = "the folder holds a model" if model else "the folder holds scores of rows"
    raise RefusedError(
        "the output directory already holds a run" if state is not RunState.FRESH else other,
        where=str(folder),
        found=found,
        expected="an empty or new folder",
        hint=f"{resume_hint}start another one with {key}",
    )


def no_checkpoint(where: Path, found: str) -> NoCheckpointError:
    """The error where there is nothing to resume from."""
    return NoCheckpointError(
        "no checkpoint to resume from",
        where=str(where),
        found=found,
        expected="a folder such as step-00000200",
        hint="run without --resume to start afresh, or name the run's folder with output_dir=",
    )


def refuse_if_held(folder: Path) -> None:
    """Whether another run holds the folder, asked before anything is loaded. Takes no lock unless a live process of
    this machine is named in the lock's file, so that two runs that start at once do not see each other here.

    Raises:
        OutputInUseError: it does.
    """
    holder = lock_holder(folder / LOCK_NAME)
    if holder is None or not holder.may_live:
        return
    try:
        with open_regular(folder / LOCK_NAME) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(folder, RUN_KEY) from None
    except (OSError, RefusedError):
        return  # no lock, or an unreadable one: taking it will tell


def _check_run_files(folder: Path, key: str) -> None:
    """Raise a RefusedError for what only looks like a run's file: a pipe is waited for, a device keeps no rows."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.suffix not in RUN_SUFFIXES and path.name not in (MARKER_NAME, LOCK_NAME):
            continue
        try:
            mode = path.stat().st_mode
            found = "" if stat.S_ISREG(mode) else kind_of_file(mode)
        except FileNotFoundError:  # a link to nothing: opening it will give the error
            continue
        except OSError as error:  # a link to itself
            found = str(error.strerror)
        if found:
            raise RefusedError(
                "the output directory holds something that is no regular file under the name of one",
                where=str(path),
                found=found,
                expected="a regular file, or none",
                hint=f"remove it, or set {key} elsewhere",
            )


def _foreign_model(folder: Path) -> str | None:
    """A weights file in a folder that is not ours, which the result of this run would overwrite."""
    if (folder / MARKER_NAME).exists() or not folder.is_dir():
        return None
    return next((path.name for path in sorted(folder.glob("*.safetensors"))), None)


def _scores(folder: Path) -> str | None:
    """A file of scores in a folder of ours, which `score` continues."""
    names = (SCORES_NAME, HEADER_NAME) if (folder / MARKER_NAME).exists() else (SCORES_NAME,)
    return next((f"rows that were scored ({name})" for name in names if (folder / name).exists()), None)


class OutputDir:
    """Exclusive use of an output directory, as a context manager.

    On entry: creates the folder, takes the lock, checks the start (see `check_start`; `state` keeps the answer) and
    removes what an interrupted run left half-written. The kernel drops the lock when the process ends, however it does.
    A run that is refused before it wrote anything takes the folders that it made away again.

    Raises (on entry):
        OutputInUseError: another run holds it; at once.
        RefusedError: the folder cannot be written, or holds a run and `resume` is off.
        NoCheckpointError: `resume` is on and there is no checkpoint; nothing was created.
        ResourceError: the disk is full or failing.
    """

    def __init__(self, path: Path, resume: bool = False, *, key: str = RUN_KEY) -> None:
        """
        Args:
            key: the words by which the user names the folder; other than a run's, they are those of its scores.
        """
        self.path, self.resume, self._key = path, resume, key
        self.state = RunState.FRESH
        self._lock: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> OutputDir:
        check_start(self.path, self.resume, key=self._key)
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]  # innermost first
        try:
            self._take_lock()
            for folder in self._made:
                folder.chmod(RESULT_FOLDER_MODE)
            self.state = check_start(self.path, self.resume, key=self._key)  # another run may have finished meanwhile
            if self.state is not RunState.FINISHED:
                self._clean()
        except BaseException as error:
            self._remove_if_unused()
            self._release()
            if isinstance(error, OSError):
                raise _unwritable(error, self.path, self._key) from error
            raise
        return self

    def _remove_if_unused(self) -> None:
        """Take back the folders that this run made, if it put nothing into them: it was refused before it began."""
        if not self._made or self._lock is None:
            return
        with contextlib.suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {MARKER_NAME, LOCK_NAME}:
                (self.path / MARKER_NAME).unlink(missing_ok=True)
                (self.path / LOCK_NAME).unlink()  # another process that opened it meanwhile looks again, see _take_lock
                for folder in self._made:
                    folder.rmdir()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._remove_if_unused()
        self._release()

    def _take_lock(self) -> None:
        lock_path = self.path / LOCK_NAME
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, STATE_FILE_MODE)
            except FileNotFoundError:
                if lock_path.parent.is_dir():
                    raise
                continue  # another run was refused and took its folder back
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file(lock, lock_path):
                    break
            except BlockingIOError:
                os.close(lock)
                raise _in_use(self.path, self._key) from None
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
        self._lock = lock
        # A forked child (a data worker) shares the lock and would keep it after this process died.
        os.register_at_fork(after_in_child=self._forget_lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n", 0)

    def _forget_lock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _release(self) -> None:
        """The file stays: removing it would let two runs hold two files of one name."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            self._forget_lock()

    def _clean(self) -> None:
        """Remove half-written files, but only ours: in a folder without our marker they are somebody else's.

        The marker lists those names that were there before us, so that they stay for good.
        """
        marker = self.path / MARKER_NAME
        leftovers = [path for path in self.path.iterdir() if path.name.startswith((TEMPORARY_PREFIX, DELETED_PREFIX))]
        try:
            spared = set(read_json_of_ours(marker).get("not_ours", ()))
        except FileNotFoundError:
            content = {"made_by": "roundpipe", "not_ours": sorted(path.name for path in leftovers)}
            write_atomically(marker, json.dumps(content).encode() + b"\n")
        except (OSError, ValueError, TypeError, AttributeError):  # damaged: anything may be somebody else's
            pass
        else:
            for path in leftovers:
                if path.name not in spared:
                    remove_tree(path)


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _in_use(folder: Path, key: str) -> OutputInUseError:
    for _ in range(25):  # until a holder that has just taken the lock has put its name over that of a killed run
        holder = lock_holder(folder / LOCK_NAME) or Holder(may_live=False)
        if holder.may_live:
            break
        time.sleep(0.02)
    return OutputInUseError(
        "another run is using the output directory",
        where=str(folder),
        found=f"process {holder.pid} on host {holder.host}",
        hint=f"wait for it or stop it, or start this run with another {key}",
    )


def _unwritable(error: OSError, folder: Path, key: str) -> RoundpipeError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return disk_error(error, folder, "in the output directory")
    return RefusedError(
        "the output directory cannot be written",
        where=str(error.filename or folder),
        found=error.strerror or str(error),
        expected=f"a folder at {folder} that this user may write",
        hint=f"set {key} to a folder of yours, or change the owner of this one",
    )
