"""The terminal while a dashboard has it: entered, painted line by line, and left as it was, whatever happens.

Entered means: the alternate screen, no cursor, keys at once and without echo; Ctrl-C and Ctrl-Z stay signals. What the
process or a library writes to stdout and stderr meanwhile is collected and shown when the terminal is restored. A
small shell waits for the end of this process: if it dies (SIGKILL, out of memory), the shell restores the terminal.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

    def __init__(self, output: int = 1, keys: int | None = 0) -> None:
        """
        Args:
            output: descriptor of the terminal that is painted on.
            keys: descriptor that keys come from; None or no terminal: none come.
        """
        self._tty = os.dup(output)
        os.set_inheritable(self._tty, False)
        self._keys = keys if keys is not None and os.isatty(keys) else None
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
