"""State that all threads of a step share: a lock, an abort, and the time of the last progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class AbortedError(Exception):
    """Another thread failed and its error will be shown: leave without a message."""


class Progress:
    """Wakes waiting threads, spreads an abort and reports progress to the watchdog, all under one lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.condition = threading.Condition(self.lock)
        self._conditions = [self.condition]
        self.aborted = False
        self.last_s = time.monotonic()

    def new_condition(self) -> threading.Condition:
        """A condition for one thread on the common lock, so that its events wake no other thread."""
        condition = threading.Condition(self.lock)
        with self.lock:
            self._conditions.append(condition)
        return condition

    def abort(self) -> None:
        with self.lock:
            self.aborted = True
            for condition in self._conditions:
                condition.notify_all()

    def moved(self) -> None:
        """Say that something has happened."""
        with self.lock:
            self.last_s = time.monotonic()
            self.condition.notify_all()

    def wait_for(self, ready: Callable[[], bool], condition: threading.Condition | None = None) -> None:
        """Block until `ready()` is true, which is called with the lock held.

        Args:
            condition: one of `new_condition`'s; None: the one that `moved` notifies.

        Raises:
            AbortedError: another thread of the step failed.
        """
        condition = condition or self.condition
        with condition:
            condition.wait_for(lambda: self.aborted or ready())
            if self.aborted:
                raise AbortedError
