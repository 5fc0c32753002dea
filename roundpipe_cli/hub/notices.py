"""Notices of the hub while a question about a configuration or data set is answered: whom to tell.

Whoever starts the program says once where notices go; nobody listens otherwise.
"""

from __future__ import annotations

from roundpipe_cli.events import Say

_listeners: list[Say] = []


def listen(say: Say) -> None:
    """Notices go to `say` from now on."""
    _listeners[:] = [say]


def notice(text: str) -> None:
    """Tell whoever listens."""
    for say in _listeners:
        say(text)
