"""Checkpoints written beside the training: each layer's state is copied out through a small ring of buffers.

    training     | step k | update: layer 0 waits for its copy, 1, 2 ... | step k + 1 | ...
    copy thread  | layer 0 -> ring | layer 1 -> ring (full: waits) | ...           a layer copied may change again
    writer       |   ring -> files, SHA-256 | ...                | fsync, manifest, rename, prune

The ring holds at most a part of the state, never a second copy of it. A save that fails leaves no trace but its error,
which the next call raises in the training thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from roundpipe_cli.engine.backends.base import set_own_threads
from roundpipe_cli.errors import InternalError, ResourceError, RoundpipeError
from roundpipe_cli.events import CheckpointSaved, Notice, Tell
from roundpipe_cli.train.checkpoint.safetensors_stream import FileSet, TensorSpec
from roundpipe_cli.train.checkpoint.store import save_checkpoint

RING_BUFFERS = 32
MAX_BUFFER_BYTES = 8 * 1024**2
"""The ring takes at most 256 MiB, and at most half of what is saved."""
MIN_BUFFER_BYTES = 4096
STILL_S = 3.0
"""If a run ends by an error, it waits for a save in flight that makes progress at least this often."""

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
    """One place of the ring."""

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
        """Copy a contiguous tensor into the ring; waits for room. When it returns, the tensor may change.

        Raises:
            _StoppedError: nobody reads any more.
        """
        rest = tensor.detach().reshape(-1).view(torch.uint8)
        while rest.numel():
            buffer = self._filling or self._next()
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
        self._filling = buffer
        return buffer

    def _hand_over(self) -> None:
        self._full.put(self._filling)
        self._filling = None

    def finish(self) -> None:
        """Note that nothing more will be put."""
        if self._filling is not None:
            self._hand_over()
        self._full.put(None)

    def pieces(self) -> Iterator[tuple[str, memoryview]]:
        """Everything that was put, in order."""
        while (buffer := self._full.get()) is not None:
            array: Any = buffer.data.numpy()
            for file, start, end in buffer.parts:
                yield file, memoryview(array)[start:end]
            self._free.put(buffer)

    def stop(self) -> None:
        """Let both threads end."""
        self._free.put(None)
        self._full.put(None)


class _Save:
    """One checkpoint on its way to the disk."""

    def __init__(self, snapshot: Snapshot, output_dir: Path, keep: int, tell: Tell, pause_s: float) -> None:
        self.snapshot = snapshot
        self.error: BaseException | None = None
        self.moved_s = time.monotonic()
        self._output_dir, self._keep, self._tell = output_dir, keep, tell
        self._started_s = time.monotonic()
        self._pause_s = pause_s
        self._stopped = False
        self._changed = threading.Condition()
        self._waiting = set(snapshot.layers)
        """Layers that must not change yet."""
        specs: dict[str, list[TensorSpec]] = {}
        for layer in snapshot.layers if snapshot.is_written else ():
            for file, name, tensor in snapshot.state_of(layer):
                specs.setdefault(file, []).append(TensorSpec.of(name, tensor))
        self._specs = {file: tuple(items) for file, items in specs.items()}
        self.ring = _Ring(sum(spec.num_bytes for items in specs.values() for spec in items))
        self.threads = [threading.Thread(target=self._copy, name="ckpt-copy", daemon=True)]
        if snapshot.is_written:
            self.threads.append(threading.Thread(target=self._write, name="ckpt-writer", daemon=True))
        for thread in self.threads:
            thread.start()

    def before_layer(self, layer: int, version: int) -> None:
        """Block until `layer` has been copied, or never will be; not for the version that is itself to be copied."""
        with self._changed:
            if layer in self._waiting and version > self.snapshot.step:
                started_s = time.monotonic()
                while layer in self._waiting:
                    self._changed.wait()
                self._pause_s += time.monotonic() - started_s

    def stop(self) -> None:
        """Give up, and remove what was written."""
        self._stopped = True
        self.ring.stop()
        self._release_all()

    def _release_all(self) -> None:
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        if self.error is None and not isinstance(error, _StoppedError):
            self.error = error
        self.stop()

    def _copy(self) -> None:
        set_own_threads(1)
        contents_of = self.snapshot.contents_of or self.snapshot.state_of
        try:
            for layer in self.snapshot.layers:
                self.snapshot.wait_ready(layer)
                for file, _, tensor in contents_of(layer):
                    self.moved_s = time.monotonic()
                    self.ring.put(file, tensor)
                with self._changed:
                    self._waiting.discard(layer)
                    self._changed.notify_all()
            self.ring.finish()
        except BaseException as error:  # travels as a value
            self._fail(error)

    def _pieces(self) -> Iterator[tuple[str, memoryview]]:
        for piece in self.ring.pieces():
            yield piece
            self.moved_s = time.monotonic()
        if self._stopped:
            raise _StoppedError

    def _write(self) -> None:
        set_own_threads(1)
        step = self.snapshot.step
        files = FileSet(self._specs, self._pieces())
        try:
            folder = save_checkpoint(self._output_dir, step, files, self.snapshot.meta, self._keep, self._warn)
            seconds = time.monotonic() - self._started_s
            self._tell(CheckpointSaved(step, str(folder), seconds, self._pause_s))
        except BaseException as error:  # travels as a value
            self._fail(error)

    def _warn(self, text: str) -> None:
        self._tell(Notice(text))


class Saver:
    """Writes checkpoints in the background, one at a time; owns its threads inside `with`."""

    def __init__(self, output_dir: Path, keep: int, tell: Tell, saved: Callable[[Mapping[str, Any]], None]) -> None:
        """
        Args:
            output_dir: of the run.
            keep: checkpoints kept.
            tell: is told of each checkpoint, from a thread of the saver's.
            saved: called in the owner's thread, some time after a checkpoint has become durable, with its `meta`.
        """
        self._output_dir, self._keep, self._tell, self._saved = output_dir, keep, tell, saved
        self._save: _Save | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def begin(self, snapshot: Snapshot, started_s: float) -> None:
        """Start to save; waits for the save before this one.

        Args:
            started_s: monotonic time since when the training waits.

        Raises:
            as `wait`.
        """
        self.wait()
        pause_s = time.monotonic() - started_s
        self._save = _Save(snapshot, self._output_dir, self._keep, self._tell, pause_s)

    def before_layer(self, layer: int, version: int) -> None:
        """Block until the save in flight, if any, has copied `layer`, which is about to become that of step `version`.

        Called by the thread that changes it.
        """
        save = self._save
        if save is not None:
            save.before_layer(layer, version)

    def poll(self) -> None:
        """Note the end of a save that has finished.

        Raises:
            as `wait`.
        """
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
        if isinstance(save.error, RoundpipeError):
            raise save.error
        text = f"{type(save.error).__name__}: {save.error}".strip()
        where = f"the checkpoint of step {save.snapshot.step}"
        if isinstance(save.error, MemoryError):
            raise ResourceError("out of host memory while saving", where=where, found=text) from save.error
        raise InternalError(f"saving failed: {text}", where=where) from save.error
