"""A dashboard that is painted while events come: a thread of its own, a few frames a second, never in the run's way.

Reporting an event only appends to a queue of limited length; when it is full, events are dropped and counted. The
time between two frames grows with what a frame costs, so that painting takes at most a hundredth of one core.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

from roundpipe_cli.dashboard.help import HELP_KEY, help_screen
from roundpipe_cli.dashboard.state import DashboardState, fold
from roundpipe_cli.dashboard.terminal import Terminal
from roundpipe_cli.dashboard.theme import Theme, theme_for
from roundpipe_cli.dashboard.views import MIN_HEIGHT, screen
from roundpipe_cli.events import Event, Notice

MAX_QUEUED = 2000
FRAME_S = 0.25
MAX_FRAME_S = 2.0
COST_SHARE = 0.01
"""Share of one core for painting."""
KEY_S = 0.1
"""Seconds within which a key takes effect."""
JOIN_S = 5.0

_COLOUR_SYSTEMS = {"standard": ColorSystem.STANDARD, "256": ColorSystem.EIGHT_BIT, "truecolor": ColorSystem.TRUECOLOR}


@dataclass(frozen=True)
class KeyBinding:
    """A key of the dashboard."""

    meaning: str
    act: Callable[[DashboardState], str]
    """Returns a message for the user, or nothing."""


def make_theme(console: Console) -> Theme:
    """The theme for what a console can show."""
    return theme_for(console.encoding, console.color_system is not None and not console.no_color)


LINES_BESIDE_WORKERS = 6
"""Header, figures, messages and legend of a frame with a line for each worker."""
MAX_LAST_LINES, LINES_BELOW = 24, 6
"""Height of the frame that stays, and lines of the terminal kept for an error or the prompt below it."""


def last_frame(state: DashboardState, console: Console, size: tuple[int, int]) -> list[Text]:
    """The screen that stays when a run is over, with room below it for an error or the prompt.

    Args:
        size: columns and lines of the terminal.
    """
    columns, lines = size
    last_s = max(state.seen_s, state.step_seen_s, state.sample.time_s if state.sample else 0.0)
    least = max(MIN_HEIGHT, len(state.workers) + LINES_BESIDE_WORKERS)  # more than the terminal has scroll up
    height = max(least, min(lines - LINES_BELOW, MAX_LAST_LINES))
    frame = screen(state, last_s, columns, height, make_theme(console))
    return [line for index, line in enumerate(frame) if line.plain.strip() or index == 0]


def ansi(line: Text, console: Console) -> str:
    """A line as the characters and escape sequences that show it on the console's terminal."""
    system = _COLOUR_SYSTEMS.get(console.color_system or "")
    parts = []
    for segment in line.render(console, end=""):
        style = segment.style
        if style is None:
            parts.append(segment.text)
        else:
            shown = style.without_color if console.no_color else style
            parts.append(shown.render(segment.text, color_system=system or ColorSystem.STANDARD))
    return "".join(parts)


class LiveDashboard:
    """Shows a run on a terminal from `start` to `stop`."""

    def __init__(
        self,
        terminal: Terminal,
        console: Console,
        clock: Callable[[], float],
        keys: Mapping[str, KeyBinding],
        state: DashboardState | None = None,
    ) -> None:
        """
        Args:
            terminal: is entered and left by the dashboard's thread.
            console: knows colours and encoding; nothing is printed with it.
            clock: the run's.
            keys: what keys do, from the dashboard's thread.
            state: what is known already.
        """
        self.state = state or DashboardState()
        self._terminal, self._console, self._clock, self._keys = terminal, console, clock, keys
        self._theme = make_theme(console)
        self._shown_keys = (*((key, entry.meaning) for key, entry in keys.items()), (HELP_KEY, "help"))
        self._has_help = False
        self._queue: deque[Event] = deque()
        self._num_dropped = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()  # who uses the terminal
        self._suspended = False
        self._previous_handler: Any = None
        self._thread = threading.Thread(target=self._run, name="dashboard")

    # -- from other threads ----------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Never waits; safe in a signal's handler."""
        if len(self._queue) >= MAX_QUEUED:
            self._num_dropped += 1
        else:
            self._queue.append(event)

    def begin_anew(self, state: DashboardState) -> None:
        """Drop the state, which is out of date."""
        self._queue.clear()
        self.state = state

    def start(self) -> None:
        """Take the terminal. Ctrl-Z gives it back until the run goes on, where this is called in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTSTP, self._suspend)
        self._thread.start()

    def stop(self) -> None:
        """Give the terminal back; it is left by the dashboard's own thread, which no signal interrupts."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        if self._previous_handler is not None:
            signal.signal(signal.SIGTSTP, self._previous_handler)
            self._previous_handler = None

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: leave the screen, stop as the shell expects, and go on when it says so."""
        self._suspended = True
        if self._lock.acquire(timeout=JOIN_S):
            try:
                self._terminal.leave()
            finally:
                self._lock.release()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        self._suspended = False

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(ValueError, OSError):  # a signal must reach the main thread
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP})
        try:
            while not self._stop.is_set():
                cost_s = self._frame()
                self._wait(min(MAX_FRAME_S, max(FRAME_S, cost_s / COST_SHARE)))
            self._frame()
        except OSError:  # the terminal is gone, but the run continues
            pass
        finally:
            with self._lock:
                self._terminal.close()

    def _frame(self) -> float:
        """Apply new events and paint. Returns the seconds of processor time that this took."""
        started_s = time.thread_time()
        self._frame_state()
        with self._lock:
            if self._suspended:
                return 0.0
            if not self._terminal.is_open:
                if not self._terminal.is_foreground():
                    return 0.0
                self._terminal.enter()
            for line in self._terminal.new_output():
                self.state = fold(self.state, Notice(line), self._clock())
            size = self._terminal.size()
            if self._has_help:
                lines = help_screen(self.state, *size, self._theme, self._shown_keys)
            else:
                lines = screen(self.state, self._clock(), *size, self._theme, self._shown_keys)
            self._terminal.paint([ansi(line, self._console) for line in lines], size)
        return time.thread_time() - started_s

    def _frame_state(self) -> None:
        for _ in range(len(self._queue)):
            self.state = fold(self.state, self._queue.popleft(), self._clock())
        self.state = replace(self.state, num_dropped=self._num_dropped)

    def _wait(self, seconds: float) -> None:
        """Until the next frame; keys, the end and a new size do not wait for it."""
        deadline_s = time.monotonic() + seconds
        size = self._terminal.size()
        while not self._stop.is_set() and time.monotonic() < deadline_s:
            pressed = self._terminal.read_keys(min(KEY_S, max(0.0, deadline_s - time.monotonic())))
            if pressed and not pressed.startswith("\x1b"):
                for key in pressed:
                    self._press(key)
                return
            if self._terminal.size() != size:
                return

    def _press(self, key: str) -> None:
        if key == HELP_KEY:
            self._has_help = not self._has_help
            return
        entry = self._keys.get(key.lower())
        text = entry.act(self.state) if entry is not None else ""
        if text:
            self.state = fold(self.state, Notice(text), self._clock())
