"""Display of a run or a download: a dashboard on a terminal while the workers run, else plain lines."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from roundpipe_cli.cli.output import has_codes, say, say_at_once
from roundpipe_cli.dashboard.live import KeyBinding, LiveDashboard, Terminal, last_frame
from roundpipe_cli.dashboard.replay import RunFiles
from roundpipe_cli.dashboard.state import DashboardState
from roundpipe_cli.errors import StoppedError
from roundpipe_cli.events import Event, Notice, RunFinished, RunStarted, RunStopped, Say, Tell, run_clock

if TYPE_CHECKING:
    from roundpipe_cli.train.signals import StopSignals


MAX_NOTICES = 30
"""Told again as plain lines when the dashboard has gone."""


def is_terminal() -> bool:
    """Whether both outputs are a terminal that this program may paint on now."""
    try:
        return has_codes() and os.isatty(1) and os.isatty(2) and os.tcgetpgrp(1) == os.getpgrp()
    except OSError:
        return False


class Display:
    """Shows events; a context manager, so that the terminal is always restored."""

    def __init__(
        self,
        plain: Tell,
        *,
        dashboard: bool,
        keys: Mapping[str, KeyBinding] | None = None,
        output_dir: Path | None = None,
    ) -> None:
        """
        Args:
            plain: shows an event as a line, before and after the dashboard, or all the time.
            dashboard: show one while the workers run, if this is a terminal.
            keys: what keys do; None: q does as Ctrl-C.
            output_dir: of the run, whose files know the steps before a resume.
        """
        self._plain, self._output_dir = plain, output_dir
        self.is_dashboard = dashboard and is_terminal()
        self._keys = keys if keys is not None else {"q": ("quit", lambda state: _interrupt())}
        self._live: LiveDashboard | None = None
        self._early: list[Event] = []
        self._late: list[Notice] = []
        self._finished: RunFinished | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_left = kind is KeyboardInterrupt and self._live is not None  # that of a run says why it stopped
        if error is not None and self._live is not None:
            lines = ["stopped"] if isinstance(error, KeyboardInterrupt) else str(error).splitlines()
            self._live.tell(RunStopped(lines[0] if lines else type(error).__name__))
        self.close()
        if is_left:  # by q or Ctrl-C: no matter which signal
            raise StoppedError("stopped", exit_code=130) from None

    def __call__(self, event: Event) -> None:
        live = self._live
        if live is None and self.is_dashboard and isinstance(event, RunStarted):
            live = self._open(event.first_step)
        if live is None:
            self._plain(event)
            if self.is_dashboard:
                self._early.append(event)
            return
        live.tell(event)
        if isinstance(event, Notice):
            self._late = [*self._late[1 - MAX_NOTICES :], event]
        elif isinstance(event, RunFinished):
            self._finished = event

    def say(self, text: str, plain: Say = say) -> None:
        """A line that is no event."""
        if self._live is not None:
            self._live.tell(Notice(text))
        else:
            plain(text)

    def announce(self, text: str) -> None:
        """Say something inside a signal's handler."""
        self.say(text, say_at_once)

    def close(self) -> None:
        """Restore the terminal, with the last frame on it, and print what the frame had no room for."""
        live, self._live = self._live, None
        if live is None:
            return
        self.is_dashboard = False
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more would leave the terminal half restored
        try:
            live.stop()
            console = Console(file=sys.stdout)
            frame = last_frame(live.state, console, shutil.get_terminal_size())
            shown = "\n".join(line.plain for line in frame)
            for event in [late for late in self._late if late.text not in shown]:
                self._plain(event)
            with contextlib.suppress(OSError):
                for line in frame:
                    console.print(line, crop=True, no_wrap=True)
            if self._finished is not None:
                self._plain(self._finished)
        finally:
            signal.signal(signal.SIGINT, handler)

    def _open(self, first_step: int) -> LiveDashboard | None:
        known = RunFiles(self._output_dir).before(first_step) if first_step and self._output_dir is not None else None
        self._live = live = LiveDashboard(Terminal(), Console(file=sys.stdout), run_clock(), self._keys, state=known)
        for event in self._early:
            live.tell(event)
        live.start()
        return live


def _interrupt() -> str:
    """Do as Ctrl-C does, without a message for the screen."""
    os.kill(os.getpid(), signal.SIGINT)
    return ""


def training_keys(signals: StopSignals) -> dict[str, KeyBinding]:
    """The keys: pause after the step, save now, quit with a checkpoint."""

    def pause(state: DashboardState) -> str:
        signals.paused = not signals.paused
        if signals.paused:
            return "pausing after this step; p again resumes"
        return "" if state.paused else "not pausing"

    def save(state: DashboardState) -> str:
        signals.ask_to_save()
        return "saving now" if state.paused else "saving after this step"

    def leave(state: DashboardState) -> str:
        """Quit as the first Ctrl-C does; pressed again it does nothing."""
        if signals.requested is not None:
            return ""
        signals.asked_by_key = True
        return _interrupt()

    return {"p": ("pause", pause), "s": ("save", save), "q": ("quit", leave)}
