"""Finds work that should be short and does not end, and ends the run with all stacks shown.

    with watching(limit_s=600):              # in the main thread, once
        ...
        with at_work("writing a checkpoint"):   # in any thread, around each piece of work
            ...

Time in which the process itself was stopped (SIGSTOP, a laptop's lid) does not count: the watching thread counts its
own ticks. Steps of the engine have a watchdog of their own, which also knows worker, stage and microbatch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from roundpipe_cli.errors import NoProgressError

TICK_S = 0.25
_at_work: dict[int, list[str]] = {}
"""Thread -> names of its work, innermost last. Every piece of work has a new list, to be identified by."""


@contextlib.contextmanager
def at_work(what: str) -> Iterator[None]:
    """Note that this thread does `what`, which takes seconds, not minutes."""
    thread = threading.get_ident()
    before = _at_work.get(thread)
    _at_work[thread] = [*(before or ()), what]
    try:
        yield
    finally:
        if before is None:
            del _at_work[thread]
        else:
            _at_work[thread] = list(before)


_due: list[BaseException] = []
"""The error that `interrupt` raises."""
_before: list[Any] = []
"""Handlers of SIGUSR1 from before each open `interruptible`."""
_lock = threading.Lock()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """While the body runs, in the main thread, `interrupt` can end it; in another one nothing can. May be nested."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if _due:
            raise _due.pop()

    with _lock:
        _before.append(signal.signal(signal.SIGUSR1, handle))
    try:
        yield
    finally:
        with _lock:
            signal.signal(signal.SIGUSR1, _before.pop())
            if not _before:
                _due.clear()


def interrupt(error: BaseException) -> None:
    """Raise `error` in the main thread, as a signal's handler does: also while it waits for a lock. In any thread."""
    main = threading.main_thread().ident
    with _lock:
        if _before and main is not None:
            _due[:] = [error]
            signal.pthread_kill(main, signal.SIGUSR1)


@contextlib.contextmanager
def watching(limit_s: float) -> Iterator[None]:
    """While the body runs, one piece of work that lasts longer than `limit_s` ends it. 0: never.

    Raises:
        NoProgressError: in the main thread, see `interrupt`.
    """
    if limit_s <= 0:
        yield
        return
    stop = threading.Event()

    def watch() -> None:
        ticks: dict[int, tuple[list[str], int]] = {}
        while not stop.wait(TICK_S):
            ticks = {
                thread: (work, count + 1 if ticks_of is work else 1)
                for thread, work in list(_at_work.items())
                for ticks_of, count in [ticks.get(thread, (None, 0))]
            }
            overdue = [work for work, count in ticks.values() if count * TICK_S > limit_s]
            if overdue:
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                text = f"no progress for {limit_s:g} s (the stacks of all threads are above)"
                interrupt(NoProgressError(text, where=overdue[0][-1], hint="a longer time is set by watchdog_s="))
                return

    watcher = threading.Thread(target=watch, name="watchdog", daemon=True)
    with interruptible():
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()
