"""Host threads as actors: locks hand clocks on, and every thread that starts gets the simulation's dispatch mode.

Torch's autograd has a thread for each device: nodes and hooks of all backward passes run there, on the stream of the
thread that asked for one, which waits meanwhile and keeps its locks.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.simulated_cuda.clocks import Actor, Clock

Myself = Callable[[], Actor]  # the actor of the thread that calls


class TrackedLock:
    """A lock that gives its next owner the clock of the one before."""

    def __init__(self, inner: Any, myself: Myself) -> None:
        self._inner, self._myself = inner, myself
        self._clock: Clock = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken: bool = self._inner.acquire(blocking, timeout)
        if taken:
            self._myself().learn(self._clock)
        return taken

    def _hand_on(self) -> None:
        self._clock = dict(self._myself().clock)

    def release(self) -> None:
        self._hand_on()
        self._inner.release()

    def locked(self) -> bool:
        return bool(self._inner.locked())

    def _at_fork_reinit(self) -> None:
        """Called by the standard library in a forked process."""
        self._inner._at_fork_reinit()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class TrackedRLock(TrackedLock):
    """The same for a lock that its owner may take again; a condition uses what it has beside."""

    def _is_owned(self) -> bool:
        return bool(self._inner._is_owned())

    def _release_save(self) -> Any:
        self._hand_on()
        return self._inner._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._inner._acquire_restore(state)
        self._myself().learn(self._clock)


class ThreadHooks:
    """Patches of `threading` while a simulation lasts. Locks made meanwhile hand clocks on."""

    def __init__(self, myself: Myself, inside: Callable[[], Any]) -> None:
        self._myself, self._inside = myself, inside

    def patches(self) -> list[tuple[Any, str, Any]]:
        """(owner, name, value) of what is to be replaced."""
        myself, inside = self._myself, self._inside
        start, bootstrap, join_thread = (
            threading.Thread.start,
            threading.Thread._bootstrap_inner,  # type: ignore[attr-defined]
            threading.Thread.join,
        )

        def tracked_start(thread: Any) -> None:
            thread._simulated_clock = dict(myself().clock), dict(myself().waited_for)
            start(thread)

        def tracked_bootstrap(thread: Any) -> None:
            clock, waited_for = getattr(thread, "_simulated_clock", ({}, {}))
            myself().learn(clock)
            myself().waited_for = waited_for
            with inside():
                bootstrap(thread)
            thread._simulated_end = dict(myself().clock)

        def tracked_join(thread: Any, timeout: float | None = None) -> None:
            join_thread(thread, timeout)
            myself().learn(getattr(thread, "_simulated_end", {}))

        return [
            (threading, "Lock", lambda: TrackedLock(_thread.allocate_lock(), myself)),
            (threading, "RLock", lambda: TrackedRLock(_thread.RLock(), myself)),
            (threading.Thread, "start", tracked_start),
            (threading.Thread, "_bootstrap_inner", tracked_bootstrap),
            (threading.Thread, "join", tracked_join),
            (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
        ]


BACKWARD = "backward-cuda"  # begins the names of autograd's threads; the device's index follows


class BackwardThreads:
    """Autograd's threads, one for each device."""

    def __init__(self, num_devices: int) -> None:
        self._pools = [ThreadPoolExecutor(1, f"{BACKWARD}{index}") for index in range(num_devices)]

    def run(self, device: int, work: Callable[[], Any]) -> Any:
        """What `work` comes to in the device's thread; in place, where that is the thread that asks."""
        if threading.current_thread().name.startswith(f"{BACKWARD}{device}"):
            return work()
        return self._pools[device].submit(work).result()

    def end(self) -> None:
        for pool in self._pools:
            pool.shutdown()
