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
"""A pass that takes longer to issue than this is waiting for its device."""
MAX_STUCK = 8
"""After so many passes that waited for their device turns are given up: other threads would wait too."""

MOST_STUCK_TURNS = 20
"""Nobody waits for a turn longer than this number of waiting passes takes."""


class IssueTurns:
    """The turns of all GPUs of a process. They change no result: results do not depend on the order of issue."""

    def __init__(self, stuck_s: float = STUCK_S) -> None:
        self._lock = threading.RLock()
        self._stuck_s = stuck_s
        self._since_s = math.inf
        """Start of the turn by `time.perf_counter`; infinite between turns."""
        self.num_stuck = 0
        """Number of turns that waited for their device."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Encloses a layer's pass: waits until no other thread issues a pass, unless that pass waits for its device."""
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
