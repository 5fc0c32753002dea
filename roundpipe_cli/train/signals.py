"""Requests of a user to a run: its options, and at a step border stop, pause, save."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from roundpipe_cli.errors import StoppedError
from roundpipe_cli.events import Say, Tell
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.schedule.actions import Schedule

if TYPE_CHECKING:
    from roundpipe_cli.model.head import TokenLoss

AGAIN_S = 0.01
"""Time after which a stop that Python ignored is tried again."""
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


class _StopNow(KeyboardInterrupt):
    """Interrupts running code. Not an `Exception`, since libraries swallow those, for instance while importing."""

    def __init__(self, stopped: StoppedError) -> None:
        super().__init__(str(stopped))
        self.stopped = stopped


class StopSignals:
    """While active, a signal leaves the `with` block at once as `StoppedError`; after `guard()` it is only noted.

    A SIGHUP that the program was started to ignore (`nohup`) stays ignored. Where a signal ended the block, more of
    them do nothing from there on, so that it can be said what was stopped; whoever has said it sets them free.
    """

    def __init__(self, what_is_left: str = " before the first finished step: no new checkpoint was written") -> None:
        """`what_is_left`: end of the sentence on a signal that leaves the block at once."""
        self._what_is_left = what_is_left
        self.announce: Say | None = None
        """Called in the handler of a noted signal, so it must not use buffers."""
        self.answer = "stopping after this step, with a checkpoint", "a checkpoint"
        """Effect of a noted signal, and what is missing if a second one stops at once."""
        self.asked_by_key = False
        """The signal stands for a key of the dashboard, so no message names it."""
        self.requested: signal.Signals | None = None
        """The signal that asked for a stop, if any."""
        self._stop: _StopNow | None = None
        """Raised by the handler, and due to leave the block."""
        self._guarded = False
        self._ended = False
        self._save = False
        self.paused = False
        """The user wants no further step to begin; may be set from any thread."""
        self._previous: dict[signal.Signals, Any] = {}
        self._tell_ignored = sys.unraisablehook
        """Python's way to tell of an error that it drops."""

    def __enter__(self) -> StopSignals:
        for number in EXIT_CODES:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        sys.unraisablehook = self._on_ignored
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended = True
        sys.unraisablehook = self._tell_ignored
        if isinstance(error, StoppedError):
            return
        stop = None if error is None else self._stop  # compiled code that meets a stop may make another error of it
        if stop is not None:
            raise stop.stopped from (None if error is stop else error)
        self.set_free()

    def set_free(self) -> None:
        """Let signals do what they did before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def guard(self) -> None:
        """Let a first signal wait for the step border from now on."""
        self._guarded = True

    def ask_to_save(self) -> None:
        """A checkpoint at the next step border; from any thread."""
        self._save = True

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since this was last called."""
        asked, self._save = self._save, False
        return asked

    def _on_ignored(self, ignored: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised in a weak reference's callback or in `__del__`: stop a moment later instead."""
        stop = ignored.exc_value
        if not isinstance(stop, _StopNow):
            self._tell_ignored(ignored)
            return

        def stop_now(number: int, frame: FrameType | None) -> None:
            if not self._ended:
                raise stop

        signal.signal(signal.SIGALRM, stop_now)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ended:
            return
        received = signal.Signals(number)
        if not self._guarded:
            self._guarded = True  # the same signal, sent to a whole group, must not interrupt the way out
            self.requested = received
            text = f"stopped by {received.name}{self._what_is_left}"
        elif self.requested is None:
            self.requested = received
            if self.announce is not None:
                again = f"; Ctrl-C stops at once, without {self.answer[1]}" if received == signal.SIGINT else ""
                name = "" if self.asked_by_key else f"{received.name}: "
                self.announce(f"{name}{self.answer[0]}{again}")
            return
        elif received == signal.SIGINT:
            text = "stopped at once by a second SIGINT; the last checkpoint is as it was"
        else:
            return
        self._stop = _StopNow(StoppedError(text, exit_code=EXIT_CODES[received]))
        raise self._stop


# Settings of a run beside its recipe: how it starts, and where it reports.

Planned = Callable[[Recipe, Sequence[Schedule], bool], Sequence[Mapping[str, float]]]
Refused = Callable[[Sequence[int]], str | None]


@dataclass(frozen=True)
class Start:
    """How a run begins."""

    resume: bool = False
    """Continue from the newest valid checkpoint."""
    offline: bool = False
    """Use local files only."""
    allow_changed: Sequence[str] = ()
    """Recipe keys that may differ from the checkpoint's."""
    allow_other_base: bool = False
    """The adapter of `lora.start_from` may have been trained on another base model."""
    lost_at: str = ""
    """Where a device was lost for which this run was started again."""
    loss: TokenLoss | None = None
    """A program's own training loss; None: cross entropy."""


@dataclass(frozen=True)
class Reporting:
    """Reports of a run while it lasts, and files beside its result."""

    tell: Tell
    """Called with each event."""
    live: bool = False
    """Report several times a second what the workers do."""
    trace: bool = False
    """Write what the workers did in the last steps to trace.json."""
    planned: Planned | None = None
    """Says for the report what was predicted of each schedule, besides its times: of the recipe as the run resolved it
    (its rows as long as the longest until now), the schedules, and whether all weights stay on the devices."""
    refused: Refused | None = None
    """Says why the run would not fit on the devices of these of its workers alone."""
