"""A terminal of one's own for a run: Ctrl-C comes from its keyboard, and it can be closed."""

from __future__ import annotations

import contextlib
import functools
import os
import pty
import select
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.e2e import Running
from tests.torture.arena import resume_words, start

QUIET_S = 0.25  # a terminal that showed nothing new for so long has shown everything


class Terminal:
    """The far end of a pseudo terminal."""

    def __init__(self) -> None:
        self._master, self._slave = pty.openpty()
        self.name = os.ttyname(self._slave)
        self._shown = bytearray()
        self._open = True
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """What was shown so far; the kernel hands bytes on later than the process that wrote them ends."""
        seen = -1
        while seen != len(self._shown):
            seen = len(self._shown)
            time.sleep(QUIET_S)
        with self._lock:
            return self._shown.decode(errors="replace")

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def close(self) -> None:
        """Hang up: the kernel sends SIGHUP to the session."""
        if self._open:
            self._open = False
            self._reader.join()
            os.close(self._slave)
            os.close(self._master)

    def _read(self) -> None:
        while self._open:
            if select.select([self._master], [], [], 0.02)[0]:
                with self._lock, contextlib.suppress(OSError):
                    self._shown += os.read(self._master, 65536)


@contextlib.contextmanager
def in_terminal(work: Path, environment: Mapping[str, str] | None = None) -> Iterator[tuple[Running, Terminal]]:
    """`roundpipe finetune recipe.yaml --no-dashboard` with a terminal, resuming where there is a checkpoint."""
    terminal = Terminal()
    taken = work / ".terminal-taken"
    taken.unlink(missing_ok=True)
    before = functools.partial(_take, terminal.name, str(taken))
    running = start(work, "--no-dashboard", *resume_words(work), environment=environment, before=before)
    try:
        running.wait_until(taken.exists)  # it can only be closed to a process that has it
        yield running, terminal
    finally:
        if running.process.is_alive():
            running.process.join(30)
        if running.process.is_alive():
            running.kill()
        terminal.close()


def _take(name: str, taken: str) -> None:
    """In the new process: a session of its own, with this terminal for all streams; then `taken` is made."""
    os.setsid()
    descriptor = os.open(name, os.O_RDWR)  # the first terminal that a session leader opens is its own
    for stream in (0, 1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    Path(taken).touch()
