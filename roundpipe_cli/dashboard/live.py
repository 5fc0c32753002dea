"""A dashboard that is painted while events come: its thread, its terminal, its help.

Reporting an event only appends to a queue of limited length; when it is full, events are dropped and counted. The
time between two frames grows with what a frame costs, so that painting takes at most a hundredth of one core.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import termios
import textwrap
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import COLOR_SYSTEMS, Console
from rich.segment import Segment
from rich.text import Text

from roundpipe_cli.dashboard.state import DashboardState, fold
from roundpipe_cli.dashboard.theme import Theme, fit, theme_for
from roundpipe_cli.dashboard.views import MIN_HEIGHT, header, progress, screen
from roundpipe_cli.dashboard.waiting import CAUSES, longest_waiting
from roundpipe_cli.events import Event, Notice
from roundpipe_cli.units import counted

# The help of a dashboard: keys, the meaning of a lane, and why the worker with the longest wait waited.

HELP_KEY = "?"
_LANES = (
    "A lane is a worker; time runs to the right. F computes a stage forward, R computes it again from the tensors "
    "kept at its boundary, B computes its gradients. The stage that ends with the loss does F and B in one; its lane "
    "shows them in turn. A stage is a run of layers. No stage is assigned to a worker; each takes the next one in the "
    "queue and uploads its weights while it computes the stage before; u waits for the host to update them, ~ for the "
    "upload."
)


def help_screen(
    state: DashboardState, now_s: float, width: int, height: int, theme: Theme, keys: Sequence[tuple[str, str]]
) -> list[Text]:
    """Exactly `height` lines of `width` columns, as of `screen`, whose first two stay: the run goes on meanwhile."""
    found = longest_waiting(state)
    why = found.text() if found is not None else "no step is finished yet"
    lines = [header(state, now_s, width, theme), progress(state, now_s, width, theme)]
    lines += [Text(" why workers waited", style="bold"), *_indented(why, width)]
    causes = (f"{cause}: {meaning}" for cause, meaning in CAUSES.items())
    lines += [Text(" causes", style="bold"), *(line for text in causes for line in _indented(text, width))]
    meanings = "   ".join(f"{key} {meaning}" for key, meaning in keys)
    lines += [Text(" keys", style="bold"), *_indented(meanings, width)]
    lines += [Text(" lanes", style="bold"), *_indented(_LANES, width)]
    rest = len(lines) - (height - 1)
    back = f" {HELP_KEY} back" + (f"   {counted(rest, 'line')} more on a higher terminal" if rest > 0 else "")
    lines = [*lines, *[Text()] * height][: height - 1]
    return [fit(line, width, theme) for line in (*lines, Text(back, style=theme.faint))][:height]


def _indented(text: str, width: int) -> list[Text]:
    return [Text(f"   {line}") for line in textwrap.wrap(text, max(20, width - 4), break_on_hyphens=False)]


# The terminal while a dashboard has it: entered, painted line by line, and left as it was, whatever happens.
#
# Entered means: the alternate screen, no cursor, keys at once and without echo; Ctrl-C and Ctrl-Z stay signals. What
# the process or a library writes to stdout and stderr meanwhile is collected and shown when the terminal is restored. A
# small shell waits for the end of this process: if it dies (SIGKILL, out of memory), the shell restores the terminal.

ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
LEAVE = "\x1b[?25h\x1b[0m\x1b[?1049l"
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"
"""Around a frame: terminals that know it show the frame at once."""
MAX_ASIDE_BYTES = 64 * 1024
_GUARD = """
IFS= read -r word <&0 && [ "$word" = bye ] && exit 0
exec 2>/dev/null
printf '\\033[?25h\\033[0m\\033[?1049l' >&1
[ -n "$1" ] && stty "$1" <&1
tail -c 65536 "$2" >&1
rm -f "$2"
"""


class Terminal:
    """A terminal to paint on. Not safe for several threads at once; whoever owns it has a lock."""

    def __init__(self, output: int = 1, keys: int = 0) -> None:
        """
        Args:
            output: descriptor of the terminal that is painted on.
            keys: descriptor that keys come from; none come where it is no terminal.
        """
        self._tty = os.dup(output)
        os.set_inheritable(self._tty, False)
        self._keys = keys if os.isatty(keys) else None
        self._saved: list[Any] | None = None
        self._aside: Path | None = None
        self._aside_read = 0
        self._outside: dict[int, int] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self._lines: list[str] = []
        self._size = (0, 0)
        self.is_open = False

    def enter(self) -> None:
        """Take the terminal."""
        if self.is_open:
            return
        if self._keys is not None:
            with contextlib.suppress(termios.error):
                self._saved = termios.tcgetattr(self._keys)
        self._set_aside()
        self._start_guard()
        self.is_open = True
        self._size = (0, 0)
        if self._saved is not None and self._keys is not None:
            tty.setcbreak(self._keys, termios.TCSANOW)
        self._write(ENTER)

    def leave(self) -> None:
        """Restore the terminal, then show the collected output."""
        if not self.is_open:
            return
        self.is_open = False
        with contextlib.suppress(OSError):
            self._write(LEAVE)
        if self._saved is not None and self._keys is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._saved)
        self._dismiss_guard()
        self._bring_back()

    def close(self) -> None:
        """Leave, and close the descriptor."""
        self.leave()
        with contextlib.suppress(OSError):
            os.close(self._tty)

    def size(self) -> tuple[int, int]:
        """Columns and lines now."""
        try:
            columns, lines = os.get_terminal_size(self._tty)
        except OSError:
            return 80, 24
        return (columns, lines) if columns > 0 and lines > 0 else (80, 24)

    def paint(self, lines: Sequence[str], size: tuple[int, int]) -> None:
        """Show lines of escape sequences and text; only those that changed are written.

        Args:
            size: that they were made for.

        Raises:
            OSError: the terminal is gone.
        """
        if not self.is_open:
            return
        fresh = size != self._size or len(lines) != len(self._lines)
        parts = ["\x1b[2J"] if fresh else []
        for index, line in enumerate(lines):
            if fresh or line != self._lines[index]:
                parts.append(f"\x1b[{index + 1};1H{line}\x1b[0m")
        self._lines, self._size = list(lines), size
        if parts:
            self._write(BEGIN + "".join(parts) + END)

    def read_keys(self, timeout_s: float) -> str:
        """Keys pressed within the time; returns at once when there is one."""
        if self._keys is None or not self.is_open:
            time.sleep(timeout_s)
            return ""
        try:
            ready, _, _ = select.select([self._keys], [], [], timeout_s)
            return os.read(self._keys, 64).decode("utf-8", "ignore") if ready else ""
        except (OSError, ValueError):
            self._keys = None
            return ""

    def new_output(self) -> list[str]:
        """Whole lines that were written to stdout and stderr since the last call."""
        if self._aside is None:
            return []
        try:
            with self._aside.open("rb") as stream:
                stream.seek(self._aside_read)
                data = stream.read(MAX_ASIDE_BYTES)
        except OSError:
            return []
        whole, newline, _ = data.rpartition(b"\n")
        self._aside_read += len(whole) + len(newline)
        return [line for line in whole.decode("utf-8", "replace").split("\n") if line.strip()]

    def is_foreground(self) -> bool:
        """Whether this process may write: a job in the background is stopped by the system if it changes settings."""
        try:
            return os.tcgetpgrp(self._tty) == os.getpgrp()
        except OSError:
            return False

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(self._tty, data) :]

    # -- what others write meanwhile -------------------------------------------------------------------------------

    def _set_aside(self) -> None:
        _flush()
        descriptor, name = tempfile.mkstemp(prefix="roundpipe-output-")
        self._aside, self._aside_read = Path(name), 0
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                if os.isatty(stream):
                    self._outside[stream] = os.dup(stream)
                    os.dup2(descriptor, stream)
        os.close(descriptor)

    def _bring_back(self) -> None:
        _flush()
        for stream, saved in self._outside.items():
            os.dup2(saved, stream)
            os.close(saved)
        self._outside.clear()
        path, self._aside = self._aside, None
        if path is None:
            return
        with contextlib.suppress(OSError):
            data = path.read_bytes()[-MAX_ASIDE_BYTES:]
            path.unlink()
            while data:
                data = data[os.write(2, data) :]

    # -- in case we die --------------------------------------------------------------------------------------------

    def _start_guard(self) -> None:
        settings = ""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if self._saved is not None:
                asked = subprocess.run(["stty", "-g"], stdin=self._keys, capture_output=True, timeout=2)
                settings = asked.stdout.decode("ascii", "ignore").strip()
            self._guard = subprocess.Popen(
                ["sh", "-c", _GUARD, "roundpipe-guard", settings, str(self._aside)],
                stdin=subprocess.PIPE,
                stdout=self._tty,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not meant for it
            )

    def _dismiss_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is None or guard.stdin is None:
            return
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            guard.stdin.write(b"bye\n")
            guard.stdin.close()
            guard.wait(2)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


MAX_QUEUED = 2000
FRAME_S = 0.25
MAX_FRAME_S = 2.0
COST_SHARE = 0.01
"""Share of one core for painting."""
KEY_S = 0.1
"""Seconds within which a key takes effect."""
JOIN_S = 5.0

KeyBinding = tuple[str, Callable[[DashboardState], str]]
"""The meaning of a key of the dashboard, and what it does: that returns a message for the user, or nothing."""
LINES_BESIDE_WORKERS = 6
"""Header, figures, messages and legend of a frame with a line for each worker."""
MAX_LAST_LINES, LINES_BELOW = 24, 6
"""Height of the frame that stays, and lines of the terminal kept for an error or the prompt below it."""


def last_frame(state: DashboardState, console: Console, size: tuple[int, int]) -> list[Text]:
    """The screen that stays when a run is over, with room below it for an error or the prompt, on a terminal of `size`
    (columns, lines)."""
    columns, lines = size
    last_s = max(state.seen_s, state.step_seen_s, state.sample.time_s if state.sample else 0.0)
    least = max(MIN_HEIGHT, len(state.workers) + LINES_BESIDE_WORKERS)  # more than the terminal has scroll up
    height = max(least, min(lines - LINES_BELOW, MAX_LAST_LINES))
    frame = screen(state, last_s, columns, height, theme_for(console))
    return [line for index, line in enumerate(frame) if line.plain.strip() or index == 0]


def ansi(line: Text, console: Console) -> str:
    """A line as the characters and escape sequences that show it on the console's terminal."""
    system, segments = COLOR_SYSTEMS[console.color_system or "standard"], line.render(console, end="")
    if console.no_color:
        segments = Segment.remove_color(segments)
    return "".join(style.render(text, color_system=system) if style else text for text, style, _ in segments)


class LiveDashboard:
    """Shows a run on a terminal from `start` to `stop`."""

    def __init__(
        self,
        terminal: Terminal,
        console: Console,
        clock: Callable[[], float],
        keys: Mapping[str, KeyBinding],
        *,
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
        self._theme = theme_for(console)
        self._shown_keys = (*((key, meaning) for key, (meaning, _) in keys.items()), (HELP_KEY, "help"))
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
                lines = help_screen(self.state, self._clock(), *size, self._theme, self._shown_keys)
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
        _, act = self._keys.get(key.lower(), ("", lambda state: ""))
        if text := act(self.state):
            self.state = fold(self.state, Notice(text), self._clock())
