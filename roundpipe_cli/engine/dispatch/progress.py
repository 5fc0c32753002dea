"""Shared by all threads of a step: a lock, an abort, and when something last moved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class AbortedError(Exception):
    """Another thread failed: leave quietly, its error is the one to show."""


class Progress:
    """Wakes waiters, spreads an abort, tells the watchdog that something moved. One lock for all of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.condition = threading.Condition(self.lock)
        self._conditions = [self.condition]
        self.aborted = False
        self.last_s = time.monotonic()

    def new_condition(self) -> threading.Condition:
        """A condition of one thread's own on the common lock, so that what concerns it wakes nobody else."""
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

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Block until `ready()`, which is called with the lock held.

        Raises:
            AbortedError: another thread of the step failed.
        """
        with self.condition:
            while not ready():
                if self.aborted:
                    raise AbortedError
                self.condition.wait()
            if self.aborted:
                raise AbortedError
