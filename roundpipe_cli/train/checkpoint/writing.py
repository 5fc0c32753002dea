"""Checkpoints written beside the training, tensor by tensor, through a small ring of buffers; complete or absent.

    training     | step k | update: layer 0 waits for its copy, 1, 2 ... | step k + 1 | ...
    copy thread  | layer 0 -> ring | layer 1 -> ring (full: waits) | ...           a layer copied may change again
    writer       |   ring -> files, SHA-256 | ...                | fsync, manifest, rename, prune

The ring holds at most a part of the state, never a second copy of it. A save that fails leaves no trace but its error,
which the next call raises in the training thread.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.engine.backends.base import set_own_threads
from roundpipe_cli.errors import NoCheckpointError, ResourceError, RoundpipeError, as_ours
from roundpipe_cli.events import CheckpointSaved, Notice, Say, Tell
from roundpipe_cli.faults import fault
from roundpipe_cli.files import (
    DELETED_PREFIX,
    RESUME_AGAIN,
    STATE_FOLDER_MODE,
    TEMPORARY_PREFIX,
    NewFile,
    disk_error,
    free_bytes,
    remove_tree,
    require_free_bytes,
    sync,
    write_new_file,
)
from roundpipe_cli.model.stored.tensors import DTYPES
from roundpipe_cli.train.checkpoint.manifest import STATE_NAME, DamagedError, FileRecord
from roundpipe_cli.train.checkpoint.output_dir import free_name, list_checkpoints, list_set_aside, step_folder
from roundpipe_cli.train.checkpoint.reading import FORMAT_NAME, FORMAT_VERSION, MANIFEST_NAME, verify_checkpoint
from roundpipe_cli.watchdog import at_work

# Writing the safetensors format tensor by tensor, so that no second copy of the whole state is ever in memory.
#
# The format (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length N (little endian),
# N bytes of JSON `{"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}` that begins with `{`
# and may end in spaces, then the tensors' bytes without gaps, offsets counted from the end of the header.
# The library's own `serialize` needs all bytes at once; its `safe_open` reads what is written here.

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "F4"}
"""Names for the header; not of F4, whose shape there counts single values and in torch pairs of them."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's entry in the header, known before its bytes are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


def encode_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and JSON header, padded so that the tensors begin at a multiple of 8 bytes.

    Raises:
        ValueError: two tensors of one name, or a tensor that would not be aligned.
        KeyError: safetensors has no name for a dtype.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        if spec.name in header or spec.name == "__metadata__":
            raise ValueError(f"two tensors named {spec.name!r} in one group")
        if offset % spec.dtype.itemsize:
            raise ValueError(f"tensor {spec.name!r} would begin at byte {offset}: put larger element sizes first")
        end = offset + spec.num_bytes
        header[spec.name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stream_file(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of the file, header first, then one piece a tensor (its own memory where it is contiguous, on the CPU).

    Args:
        specs: of all tensors.
        tensors: come into being one after the other, in this order; run through once. A tensor may be overwritten by
            its owner as soon as the next one is asked for.
        metadata: of the header; transformers wants `{"format": "pt"}`.

    Raises:
        ValueError: `tensors` does not yield what `specs` announces.
    """
    yield encode_header(specs, metadata)
    num_seen = 0
    for name, tensor in tensors:
        expected = specs[num_seen] if num_seen < len(specs) else None
        if TensorSpec.of(name, tensor) != expected:
            raise ValueError(f"tensor {num_seen} is {TensorSpec.of(name, tensor)}, announced was {expected}")
        num_seen += 1
        flat: Any = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        yield memoryview(flat)
        del tensor, flat  # not beside the next one
    if num_seen != len(specs):
        raise ValueError(f"{len(specs)} tensors were announced, {num_seen} came")


# Checkpoints: `OUTPUT_DIR/step-00000020/` holds everything that a run needs to continue bit-identically.
#
#     step-00000020/
#       masters.safetensors     one file per tensor group
#       moments.safetensors
#       state.json              all that is not a tensor: cursor, schedule, hashes of recipe and data, versions
#       manifest.json           name, size and SHA-256 of every file above; written last
#
# A folder is built as `.tmp-step-...` and renamed when every byte is on the disk: what is named `step-...` is complete.
# Loading nevertheless verifies every byte first: disks flip bits, people edit and copy. No pickle anywhere.

_FILE_SYSTEM_SLACK_BYTES = 64 * 1024
"""Bytes of disk for folder entries and partly filled blocks, beside the files' own."""


Specs = Mapping[str, tuple[TensorSpec, ...]]
"""Tensor group, which becomes a file of this name -> its tensors, in their order."""
Pieces = Iterable[tuple[str, memoryview]]
"""(group, next bytes of its tensors) of several files in one run, for instance all that belongs to one layer, then the
next layer. Run through once; a piece may be overwritten by its owner as soon as the next one is asked for."""


def save_checkpoint(
    output_dir: Path, step: int, specs: Specs, pieces: Pieces, *, meta: Mapping[str, Any], keep: int, warn: Say
) -> Path:
    """Write `step-<step>` durably, then remove all but the newest `keep` checkpoints. Returns the folder.

    Args:
        meta: plain JSON values (no NaN).
        keep: at least 2: if the only one were damaged, there would be nothing to fall back on.
        warn: told about old checkpoints that could not be removed.

    Raises:
        ResourceError: disk full or failing; nothing was committed, older checkpoints are as they were.
    """
    state = _encode_json({"format_version": FORMAT_VERSION, "step": step, "meta": dict(meta)})
    needed_bytes = sum(map(_file_bytes, specs.values())) + len(state) + _FILE_SYSTEM_SLACK_BYTES
    target = step_folder(output_dir, step)
    _make_room(output_dir, needed_bytes, warn)
    require_free_bytes(output_dir, needed_bytes, f"the checkpoint of step {step}", again=RESUME_AGAIN)
    temporary = output_dir / f"{TEMPORARY_PREFIX}{target.name}"
    try:
        records = _write_folder(temporary, step, specs, pieces, state=state)
        if _already_there(target, step, records):
            remove_tree(temporary)
        else:
            _commit(output_dir, temporary, step)
    except BaseException as error:
        with contextlib.suppress(OSError):  # what stays behind is removed at the next start
            remove_tree(temporary)
        if isinstance(error, OSError):
            raise disk_error(
                error, target, f"the checkpoint of step {step}", needed_bytes, again=RESUME_AGAIN
            ) from error
        raise
    prune_checkpoints(output_dir, step, keep, warn)
    return target


def _file_bytes(specs: Sequence[TensorSpec]) -> int:
    return len(encode_header(specs)) + sum(spec.num_bytes for spec in specs)


def _write_folder(temporary: Path, step: int, specs: Specs, pieces: Pieces, *, state: bytes) -> list[FileRecord]:
    if os.path.lexists(temporary):
        remove_tree(temporary)
    temporary.mkdir(mode=STATE_FOLDER_MODE)
    records = _write_tensors(temporary, step, specs, pieces)
    _pass_fault(step)
    records.append(FileRecord(STATE_NAME, *write_new_file(temporary / STATE_NAME, [state])))
    head = {"format": FORMAT_NAME, "format_version": FORMAT_VERSION, "step": step}
    manifest = _encode_json({**head, "files": [asdict(record) for record in records]})
    write_new_file(temporary / MANIFEST_NAME, [manifest])
    sync(temporary)
    return records


def _write_tensors(temporary: Path, step: int, specs: Specs, pieces: Pieces) -> list[FileRecord]:
    """Write and fsync the tensor files, all of them at once, in the order in which their bytes come."""
    _pass_fault(step)
    files: dict[str, NewFile] = {}
    try:
        for group, tensors in specs.items():
            files[group] = NewFile(temporary / f"{group}.safetensors")
            files[group].write(encode_header(tensors))
        for group, piece in pieces:
            files[group].write(piece)
        records: list[FileRecord] = []
        for group, file in files.items():
            if records:
                _pass_fault(step)
            assert file.num_bytes == _file_bytes(specs[group]), f"{group}: not as many bytes as announced"
            records.append(FileRecord(f"{group}.safetensors", *file.finish()))
        return records
    finally:
        for file in files.values():
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
            sync(output_dir)
        except OSError:
            target.rename(temporary)  # its name may not be durable, so it must not count as committed
            raise
    except BaseException:
        for folder, deleted in set_aside:
            deleted.rename(folder)
        raise


def prune_checkpoints(output_dir: Path, step: int, keep: int, warn: Say) -> None:
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
        warn(f"could not look for old checkpoints in {output_dir}: {found}")
        return
    for folder in mine[keep:]:
        _pass_fault(step)
        try:
            doomed.append(folder.rename(_free_deleted_name(folder)))
        except OSError as error:
            warn(f"could not remove the old checkpoint {folder}: {error.strerror}")
    for folder in doomed:
        try:
            remove_tree(folder)
        except OSError as error:
            warn(f"could not remove {folder}: {error.strerror}")


def _make_room(output_dir: Path, needed_bytes: int, warn: Say) -> None:
    """Remove what was set aside, the newest first, as long as the disk has no room for a checkpoint."""
    for _, folder in list_set_aside(output_dir):
        if free_bytes(output_dir) >= needed_bytes:
            return
        try:
            remove_tree(folder)
            warn(f"{folder} was removed: the disk has no room for it and another checkpoint")
        except OSError as error:
            warn(f"could not remove {folder}: {error.strerror}")


def _free_deleted_name(folder: Path) -> Path:
    """`.del-step-...`, with a number where an earlier removal was cut short."""
    return free_name(folder.with_name(f"{DELETED_PREFIX}{folder.name}"))


def _encode_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"


RING_BUFFERS = 32
MAX_BUFFER_BYTES = 8 * 1024**2
"""The ring takes at most 256 MiB, and at most half of what is saved."""
MIN_BUFFER_BYTES = 4096
STILL_S = 3.0
"""If a run ends by an error, it waits for a save in flight that makes progress at least this often."""

Failed = Callable[[RoundpipeError], None]
State = list[tuple[str, str, torch.Tensor]]
"""(file, tensor name, tensor) of one layer."""


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint, and functions that give them layer by layer."""

    step: int
    layers: Sequence[int]
    """Layers in the order in which they are copied, which is the order of the next update."""
    state_of: Callable[[int], State]
    """State of one layer; called again when it is copied, in the copying thread."""
    wait_ready: Callable[[int], None]
    """Blocks until a layer's state is that of `step`; called in the copying thread."""
    meta: Mapping[str, Any]
    """Plain JSON values."""
    contents_of: Callable[[int], Iterable[tuple[str, str, torch.Tensor]]] | None = None
    """Contents of one layer, called when it is copied in place of `state_of`, whose tensors may then be on the meta
    device."""
    is_written: bool = True
    """False: `contents_of` sends each layer to the process that writes, and gives nothing."""


class _StoppedError(Exception):
    """The other thread of a save failed, or the run was interrupted."""


@dataclass
class _Buffer:
    data: torch.Tensor
    """uint8"""
    num_bytes: int = 0
    parts: list[tuple[str, int, int]] = field(default_factory=list)
    """(file, start, end)"""


class _Ring:
    """Buffers that pass from the copying thread to the writing thread and back."""

    def __init__(self, total_bytes: int) -> None:
        size = min(MAX_BUFFER_BYTES, max(MIN_BUFFER_BYTES, total_bytes // 8))
        count = min(RING_BUFFERS, max(2, total_bytes // 2 // size))
        self.num_bytes = size * count
        self._free: queue.Queue[_Buffer | None] = queue.Queue()
        self._full: queue.Queue[_Buffer | None] = queue.Queue()
        self._filling: _Buffer | None = None
        for _ in range(count):
            self._free.put(_Buffer(torch.empty(size, dtype=torch.uint8)))

    def put(self, file: str, tensor: torch.Tensor) -> None:
        """Copy a contiguous tensor, which may change when this returns, into the ring; waits for room."""
        rest = tensor.detach().reshape(-1).view(torch.uint8)
        while rest.numel():
            buffer = self._filling = self._filling or self._next()
            start = buffer.num_bytes
            count = min(rest.numel(), buffer.data.numel() - start)
            buffer.data[start : start + count].copy_(rest[:count])
            buffer.parts.append((file, start, start + count))
            buffer.num_bytes += count
            rest = rest[count:]
            if buffer.num_bytes == buffer.data.numel():
                self._hand_over()

    def _next(self) -> _Buffer:
        buffer = self._free.get()
        if buffer is None:
            self._free.put(None)
            raise _StoppedError
        buffer.num_bytes = 0
        buffer.parts.clear()
        return buffer

    def _hand_over(self) -> None:
        self._full.put(self._filling)
        self._filling = None

    def finish(self) -> None:
        if self._filling is not None:
            self._hand_over()
        self._full.put(None)

    def pieces(self) -> Iterator[tuple[str, memoryview]]:
        while (buffer := self._full.get()) is not None:
            array: Any = buffer.data.numpy()
            for file, start, end in buffer.parts:
                yield file, memoryview(array)[start:end]
            self._free.put(buffer)

    def stop(self) -> None:
        self._free.put(None)
        self._full.put(None)


class _Save:
    """One checkpoint on its way to the disk."""

    def __init__(
        self, snapshot: Snapshot, output_dir: Path, keep: int, tell: Tell, *, pause_s: float, failed: Failed
    ) -> None:
        self.snapshot, self._failed = snapshot, failed
        self.error: RoundpipeError | None = None
        self.moved_s = time.monotonic()
        self._output_dir, self._keep, self._tell = output_dir, keep, tell
        self._started_s = time.monotonic()
        self._pause_s = pause_s
        self._stopped = False
        self._changed = threading.Condition()
        self._waiting = set(snapshot.layers)
        """Layers that must not change yet."""
        self._held_s: dict[int, float] = {}
        """Layer -> the time since when its update waits."""
        specs: dict[str, list[TensorSpec]] = {}
        for layer in snapshot.layers if snapshot.is_written else ():
            for file, name, tensor in snapshot.state_of(layer):
                specs.setdefault(file, []).append(TensorSpec.of(name, tensor))
        self._specs = {file: tuple(items) for file, items in specs.items()}
        self.ring = _Ring(sum(spec.num_bytes for items in specs.values() for spec in items))
        works = {"ckpt-copy": self._copy, **({"ckpt-writer": self._write} if snapshot.is_written else {})}
        carry_out = partial(threading.Thread, target=self._carry_out, daemon=True)
        self.threads = [carry_out(args=(work,), name=name) for name, work in works.items()]
        for thread in self.threads:
            thread.start()

    def before_layer(self, layer: int, version: int) -> None:
        """Block until `layer` has been copied, or never will be; not for the version that is itself to be copied."""
        with self._changed:
            if layer in self._waiting and version > self.snapshot.step:
                self._held_s[layer] = time.monotonic()
                while layer in self._waiting:
                    self._changed.wait()

    def stop(self) -> None:
        """Give up, and remove what was written."""
        self._stopped = True
        self.ring.stop()
        self._release(self.snapshot.layers)

    def _release(self, layers: Iterable[int]) -> None:
        """Let layers change again, and count how long that was waited for: an update may wake up after the report."""
        with self._changed:
            self._waiting.difference_update(layers)
            for layer in self._held_s.keys() - self._waiting:
                self._pause_s += time.monotonic() - self._held_s.pop(layer)
            self._changed.notify_all()

    def _carry_out(self, work: Callable[[], None]) -> None:
        set_own_threads(1)
        try:
            work()
        except BaseException as error:  # travels as a value
            is_first = self.error is None and not isinstance(error, _StoppedError)
            if is_first:
                self.error = as_ours(error, "saving", f"the checkpoint of step {self.snapshot.step}")
            self.stop()
            if is_first and self.error is not None:
                self._failed(self.error)

    def _copy(self) -> None:
        contents_of = self.snapshot.contents_of or self.snapshot.state_of
        for layer in self.snapshot.layers:
            self.snapshot.wait_ready(layer)
            for file, _, tensor in contents_of(layer):
                self.moved_s = time.monotonic()
                self.ring.put(file, tensor)
            self._release([layer])
        self.ring.finish()

    def _pieces(self) -> Iterator[tuple[str, memoryview]]:
        for piece in self.ring.pieces():
            yield piece
            self.moved_s = time.monotonic()
        if self._stopped:
            raise _StoppedError

    def _write(self) -> None:
        step, meta, pieces = self.snapshot.step, self.snapshot.meta, self._pieces()

        def warn(text: str) -> None:
            self._tell(Notice(text))

        folder = save_checkpoint(self._output_dir, step, self._specs, pieces, meta=meta, keep=self._keep, warn=warn)
        self._tell(CheckpointSaved(step, str(folder), time.monotonic() - self._started_s, self._pause_s))


class Saver:
    """Writes checkpoints in the background, one at a time; owns its threads inside `with`."""

    def __init__(
        self,
        output_dir: Path,
        keep: int,
        tell: Tell,
        saved: Callable[[Mapping[str, Any]], None],
        *,
        failed: Failed = lambda error: None,
    ) -> None:
        """
        Args:
            tell: is told of each checkpoint, from a thread of the saver's.
            saved: called in the owner's thread, some time after a checkpoint has become durable, with its `meta`.
            failed: called with the error of a save as soon as it fails, from a thread of the saver's.
        """
        self.output_dir, self._keep, self._tell, self._saved = output_dir, keep, tell, saved
        self._failed = failed
        self._save: _Save | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        save = self._save
        if save is None:
            return
        if error is None:
            self.wait()
            return
        if not isinstance(error, Exception):  # stopped at once
            save.stop()
        save.moved_s = time.monotonic()
        for thread in save.threads:
            while thread.is_alive() and time.monotonic() - save.moved_s < STILL_S:
                thread.join(0.05)
        save.stop()

    def begin(self, snapshot: Snapshot, started_s: float) -> None:
        """Start to save, after the save before; `started_s`: monotonic time since when the training waits."""
        self.wait()
        pause_s = time.monotonic() - started_s
        self._save = _Save(snapshot, self.output_dir, self._keep, self._tell, pause_s=pause_s, failed=self._failed)

    def before_layer(self, layer: int, version: int) -> None:
        """Block until the save in flight, if any, has copied `layer`, which the calling thread is about to make that of
        step `version`."""
        save = self._save
        if save is not None:
            save.before_layer(layer, version)

    def poll(self) -> None:
        """Note the end of a save that has finished."""
        save = self._save
        if save is not None and not any(thread.is_alive() for thread in save.threads):
            self.wait()

    def wait(self) -> None:
        """Block until nothing is being saved.

        Raises:
            ResourceError: disk full or failing; older checkpoints are as they were.
            InternalError: saving failed otherwise.
        """
        save = self._save
        if save is None:
            return
        for thread in save.threads:
            thread.join()
        self._save = None
        if save.error is None:
            self._saved(save.snapshot.meta)
            return
        raise save.error
