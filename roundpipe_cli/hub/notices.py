"""Where notices of the hub go while a configuration or data set is asked for.

The program sets this once at its start; without it notices are dropped.
"""

from __future__ import annotations

from roundpipe_cli.events import Say

_listeners: list[Say] = []


def listen(say: Say) -> None:
    """Send notices to `say` from now on."""
    _listeners[:] = [say]


def notice(text: str) -> None:
    """Send a notice."""
    for say in _listeners:
        say(text)
