"""Threads that issue work to GPUs take turns, a layer's pass each.

Every operator gives the interpreter away and takes it back. Where two threads issue at once, each of these is a switch
from one thread to the other, and both together issue less than half of what one does alone (scripts/issue_rate.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

STUCK_S = 0.05
"""A pass that is issued for longer waits for its device."""
MAX_STUCK = 8
"""Passes that wait for their device, after which nobody takes turns any more: the others would wait with it."""

MOST_STUCK_TURNS = 20
"""Nobody waits for a turn for longer than so many stuck ones would take."""


class IssueTurns:
    """One for all GPUs of a process. Says nothing about results, which do not depend on who issues when."""

    def __init__(self, stuck_s: float = STUCK_S) -> None:
        self._lock = threading.RLock()
        self._stuck_s = stuck_s
        self._since_s = math.inf
        """When the turn began, of `time.perf_counter`; infinite between turns."""
        self.num_stuck = 0
        """Turns during which the device was waited for."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Encloses a layer's pass: waits until no other thread issues one, unless that one waits for its device."""
        taken = self._take()
        try:
            yield
        finally:
            if taken:
                self._since_s = math.inf
                self._lock.release()

    def _take(self) -> bool:
        if self.num_stuck >= MAX_STUCK:
            return False
        asked_s = time.perf_counter()
        while not self._lock.acquire(timeout=self._stuck_s):
            now_s = time.perf_counter()
            if now_s - self._since_s > self._stuck_s:
                self.num_stuck += 1
                return False
            if now_s - asked_s > MOST_STUCK_TURNS * self._stuck_s:  # many others were faster
                return False
        self._since_s = time.perf_counter()
        return True
