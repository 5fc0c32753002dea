"""Devices that fail or hang in a run: left out, and what they were at computed again, where the others can go on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

from roundpipe_cli.costs.lost_devices import note_lost_device
from roundpipe_cli.costs.machine import host_memory
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.errors import DeviceLostError, InternalError
from roundpipe_cli.events import DeviceLost, Notice
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.train.auto_cache import AutoCache
from roundpipe_cli.train.page_locks import PageLocks
from roundpipe_cli.units import counted

T = TypeVar("T")

Lasting = Callable[[bool], str | None]
"""Why a failed attempt cannot be repeated, in words: something that it did lasts; None: it can be. It is told whether
threads of the attempt may go on."""


class LostDevices:
    """Leaves devices that are lost out of a run, and computes again what they were at."""

    def __init__(
        self,
        engine: Engine,
        planner: AdaptivePlanner,
        cache: AutoCache,
        devices: Sequence[str],
        *,
        locks: PageLocks,
        stops: bool,
        lost_at: str = "",
        refused: Callable[[Sequence[int]], str | None] | None = None,
        tell: Callable[[DeviceLost | Notice], None],
        clock: Callable[[], float],
    ) -> None:
        """`devices`: of each worker; `stops`: a lost device ends the run; `lost_at`: see `Start`; `refused`: see
        `Reporting`."""
        self._engine, self._planner, self._cache = engine, planner, cache
        self._devices, self._stops, self._lost_at = tuple(devices), stops, lost_at
        self._refused, self._tell, self._clock, self._locks = refused, tell, clock, locks

    def again(self, run: Callable[[], T], at: str, *, lasting: Lasting = lambda hangs: None) -> T:
        """The result of `run`, which begins anew where a device is lost meanwhile.

        Args:
            at: `step 5`, for the user.
            lasting: see `Lasting`.

        Raises:
            DeviceLostError: the run cannot go on; says which devices another one should leave out.
            InternalError: the same was lost on another device: it is a bug.
        """
        while True:
            try:
                return run()
            except DeviceLostError as error:
                found = error.problems[0]
                lost, hangs = set(error.workers), error.is_hang
                error.__cause__ = None  # its frames hold tensors of the step
            gc.collect()
            cause = ": ".join(filter(None, [found.what, found.where, found.found]))
            if self._lost_at == at:
                text = "the same was lost on another device, so it is no device's fault"
                raise InternalError(text, where=at, found=cause, hint="please report it: this is a bug")
            self._lost_at = at
            self._leave_out(lost, at, cause, hangs=hangs, lasting=lasting(hangs))

    def _leave_out(self, shown: set[int], at: str, cause: str, *, hangs: bool, lasting: str | None) -> None:
        """Go on without the devices that are lost, or raise a DeviceLostError. An error tells of the workers `shown`:
        that of one device comes up on others too, which wait for it."""
        engine = self._engine
        self._locks.stays |= hangs
        silent = set(engine.silent(but=shown if hangs else ()))
        lost = self._of_one_device(silent | shown if hangs or not silent else silent)
        left = [worker for worker in range(engine.num_workers) if worker not in lost]
        reasons = (
            (self._stops, "on_device_loss: stop"),
            (not left and silent, "no device of this process answers any more"),
            (not left, "no other device is left"),
            (lasting is not None, lasting),
            (hangs and not self._has_room(), "too little host memory for other gradients than those that it may write"),
        )
        reason = next((words for holds, words in reasons if holds), None)
        if reason is None and self._refused is not None:
            reason = self._refused([engine.lanes[worker] for worker in left])
        if reason is not None:
            raise self._end(lost if left else self._of_one_device(shown), reason, at, cause)
        self._say(lost, at, cause, [self._name(worker) for worker in left])
        threads = engine.leave_out(lost, hang=hangs)
        if hangs:
            self._locks.lock(engine.store.gradients, self._name(0))
        self._planner.leave_out(lost)
        self._cache.leave_out(lost)
        if threads:
            text = f"{counted(len(threads), 'thread')} of a device that hangs left behind: {', '.join(threads)}"
            self._tell(Notice(text))

    def _say(self, lost: set[int], at: str, cause: str, left: Sequence[str]) -> None:
        for worker in sorted(lost):
            name = self._name(worker)
            xid = None if name == "cpu" else cuda.last_xid(int(name.removeprefix("cuda:")))
            said = f"{cause} ({xid})" if xid else cause
            event = DeviceLost(self._clock(), self._engine.lanes[worker], name, at, said, tuple(left))
            self._tell(event)
            note_lost_device(event.text)

    def _name(self, worker: int) -> str:
        return self._devices[self._engine.lanes[worker]]

    def _of_one_device(self, lost: set[int]) -> set[int]:
        """The lost workers, and others of the same GPUs."""
        names = {self._name(worker) for worker in lost} - {"cpu"}
        return lost | {worker for worker in range(self._engine.num_workers) if self._name(worker) in names}

    def _has_room(self) -> bool:
        needed = sum(gradient.nbytes for gradient in self._engine.store.gradients)
        return needed < host_memory().available_bytes

    def _end(self, lost: set[int], reason: str, at: str, cause: str) -> DeviceLostError:
        rest = [self._name(worker) for worker in range(self._engine.num_workers) if worker not in lost]
        names = ", ".join(sorted({self._name(worker) for worker in lost}))
        self._say(lost, at, cause, ())
        hint = "--resume continues from the newest checkpoint, after a restart of the machine perhaps; please report a "
        hint += "loss that comes again at the same step"
        if rest:
            hint = f"pipeline.devices=[{','.join(rest)}] with --resume leaves it out and continues from the newest "
            hint += "checkpoint; --restarts N does so by itself"
        error = DeviceLostError(
            f"a device was lost and the run cannot go on: {reason}", where=f"{names}, {at}", found=cause, hint=hint
        )
        error.rest, error.at = tuple(rest), at
        return error
