"""Threads that issue work to GPUs take turns, a layer's pass each.

Every operator releases the GIL and takes it again. Where two threads issue at once, each of these is a switch from one
thread to the other, and both together issue less than half of what one does alone (scripts/issue_rate.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

STUCK_S = 0.05
"""A pass that takes longer to issue than this is waiting for its device, or is the first of its shape."""
MAX_STUCK = 32
"""So many stuck passes, with few others between them, end the turns for a while: other threads would wait too."""
FORGIVEN = 50
"""After so many passes in a row that were not stuck one that was is forgotten, such as the first of a shape."""
PAUSE_S, MAX_PAUSE_S = 10.0, 640.0
"""Seconds without turns: the first time, and at most. Each time takes twice as long as the one before."""

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
        """Number of passes that were stuck and are not forgotten."""
        self._stuck_since_s = math.inf
        """Start of the last one."""
        self._num_passes = 0
        """Passes since one was stuck or forgotten."""
        self._off_until_s, self._pause_s = -math.inf, PAUSE_S
        self.notice: str | None = None
        """For the user, said once."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Encloses a layer's pass: waits until no other thread issues a pass, unless that pass waits for its device."""
        lock = self._lock
        taken = self._take()
        try:
            yield
        finally:
            if taken:
                self._since_s = math.inf
                lock.release()

    def begin_anew(self) -> None:
        """A thread hangs, perhaps within its turn: nobody waits for it."""
        self._lock, self._since_s, self.num_stuck = threading.RLock(), math.inf, 0

    def are_on(self) -> bool:
        """Whether threads take turns now."""
        return time.perf_counter() >= self._off_until_s

    def _take(self) -> bool:
        if not self.are_on():
            return False
        asked_s = time.perf_counter()
        while not self._lock.acquire(timeout=self._stuck_s):
            now_s, since_s = time.perf_counter(), self._since_s
            if now_s - since_s > self._stuck_s:
                self._note_stuck(now_s, since_s)
                return False
            if now_s - asked_s > MOST_STUCK_TURNS * self._stuck_s:  # many others were faster
                return False
        self._since_s = time.perf_counter()
        self._num_passes += 1
        if self._num_passes >= FORGIVEN:
            self._num_passes, self.num_stuck = 0, max(0, self.num_stuck - 1)
        return True

    def _note_stuck(self, now_s: float, since_s: float) -> None:
        """Count the pass that began at `since_s`, once however many threads it holds up."""
        if since_s == self._stuck_since_s:
            return
        self._stuck_since_s, self._num_passes = since_s, 0
        self.num_stuck += 1
        if self.num_stuck < MAX_STUCK:
            return
        if now_s > self._off_until_s + self._pause_s:  # it went well for as long as the last pause
            self._pause_s = PAUSE_S
        self.num_stuck, self._off_until_s = 0, now_s + self._pause_s
        self.notice = (
            f"threads that issue work to the GPUs take no turns for {self._pause_s:.0f} s: {MAX_STUCK} layers' passes "
            f"took over {self._stuck_s * 1e3:.0f} ms to issue; a step may take longer meanwhile"
        )
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
