"""The output of `finetune` and `bench --run`: plain lines, or a dashboard while the workers run."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from roundpipe_cli.cli.output import say, say_at_once
from roundpipe_cli.events import CheckpointSaved, Event, Notice, RunFinished, RunStarted, StepFinished, Tell, run_clock

if TYPE_CHECKING:
    from roundpipe_cli.dashboard.live import KeyBinding, LiveDashboard
    from roundpipe_cli.dashboard.state import DashboardState
    from roundpipe_cli.train.signals import StopSignals

MAX_NOTICES = 30
"""Told again as plain lines when the dashboard has gone."""


def is_terminal() -> bool:
    """Whether both outputs are a terminal that can be painted on, and ours to paint on now."""
    if os.environ.get("TERM", "") in ("", "dumb"):
        return False
    try:
        return os.isatty(1) and os.isatty(2) and os.tcgetpgrp(1) == os.getpgrp()
    except OSError:
        return False


class Display:
    """Told of events; as a context manager, so that the terminal is given back whatever happens."""

    def __init__(self, plain: Tell, *, dashboard: bool, keys: Mapping[str, KeyBinding] | None = None) -> None:
        """
        Args:
            plain: shows an event as a line, before and after the dashboard, or all the time.
            dashboard: show one while the workers run, if this is a terminal.
            keys: what keys do.
        """
        self._plain = plain
        self.is_dashboard = dashboard and is_terminal()
        self._keys = keys or {}
        self._live: LiveDashboard | None = None
        self._early: list[Event] = []
        self._late: list[Event] = []
        self._last: dict[type[Event], Event] = {}

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        live = self._live
        if live is None and self.is_dashboard and isinstance(event, RunStarted):
            live = self._open()
        if live is None:
            self._plain(event)
            if self.is_dashboard:
                self._early.append(event)
            return
        live.tell(event)
        if isinstance(event, Notice):
            self._late = [*self._late[1 - MAX_NOTICES :], event]
        elif isinstance(event, (CheckpointSaved, StepFinished, RunFinished)):
            self._last[type(event)] = event

    def say(self, text: str) -> None:
        """A line that is no event."""
        if self._live is not None:
            self._live.tell(Notice(text))
        else:
            say(text)

    def announce(self, text: str) -> None:
        """Say something inside a signal's handler."""
        if self._live is not None:
            self._live.tell(Notice(text))
        else:
            say_at_once(text)

    def close(self) -> None:
        """Give the terminal back and say as plain lines what should stay on it."""
        live, self._live = self._live, None
        if live is None:
            return
        self.is_dashboard = False
        live.stop()
        for event in (*self._late, *self._last.values()):
            self._plain(event)

    def _open(self) -> LiveDashboard | None:
        from rich.console import Console

        from roundpipe_cli.dashboard.live import LiveDashboard
        from roundpipe_cli.dashboard.terminal import Terminal

        live = LiveDashboard(Terminal(), Console(file=sys.stdout), run_clock(), self._keys)
        for event in self._early:
            live.tell(event)
        self._early.clear()
        self._live = live
        live.start()
        return live


def show_end(output_dir: Path) -> None:
    """Predicted against measured, and the page of a finished run."""
    from rich.console import Console

    from roundpipe_cli.dashboard.comparison import comparison, comparison_table
    from roundpipe_cli.dashboard.html import read_report, write_page
    from roundpipe_cli.errors import RoundpipeError

    page = output_dir / "report.html"
    finished = output_dir / "report.json"
    if page.exists() and finished.exists() and page.stat().st_mtime >= finished.stat().st_mtime:
        return  # the run was finished already
    report = read_report(output_dir)
    if comparison(report):
        table = io.StringIO()  # not through a terminal, which may be gone
        Console(file=table, width=80).print(comparison_table(report))
        say(table.getvalue().rstrip())
    try:
        write_page(output_dir, page)
    except RoundpipeError as error:  # the result itself is there
        say(f"note: no report.html: {error}")


def training_keys(signals: StopSignals) -> dict[str, KeyBinding]:
    """Pause after the step, save now, quit with a checkpoint: asked for as a signal would."""
    from roundpipe_cli.dashboard.live import KeyBinding

    def pause(state: DashboardState) -> str:
        signals.paused = not signals.paused
        if signals.paused:
            return "pausing after this step; p again goes on"
        return "" if state.paused else "not pausing"

    def save(state: DashboardState) -> str:
        signals.ask_to_save()
        return "saving now" if state.paused else "saving after this step"

    return {"p": KeyBinding("pause", pause), "s": KeyBinding("save", save), "q": quit_key(signals)}


def quit_key(signals: StopSignals | None = None) -> KeyBinding:
    """As Ctrl-C once; pressed again it does nothing."""
    from roundpipe_cli.dashboard.live import KeyBinding

    def leave(state: DashboardState) -> str:
        if signals is None or signals.requested is None:
            with contextlib.suppress(OSError):
                os.kill(os.getpid(), signal.SIGINT)
        return ""

    return KeyBinding("quit", leave)
