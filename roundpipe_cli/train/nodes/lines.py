"""Words between the processes of a run, in lines of JSON: a connection from each to the first one, which passes all on.

Kinds: `here` (a line's first word), `at` (how many waits it has begun), `failed` (why it ends), `lost` (a device of its
machine), `left` (it waits for nobody any more) and `died`: of one whose line ended without its having left.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""A machine without power or network is found dead after 25 s. That of a stopped process answers."""


class Lines:
    """The lines of one process: the first one's to each other, another one's to the first."""

    def __init__(self, rank: int, take: Callable[[str, int, Any], None]) -> None:
        """`take` gets each word of others: its kind, the rank of its process and the rest. In any thread."""
        self._rank, self._take = rank, take
        self.open: dict[int, socket.socket] = {}

    def listen(self, listener: socket.socket) -> None:
        """Take calls for ever."""
        while True:
            self.keep(listener.accept()[0], None)

    def keep(self, line: socket.socket, rank: int | None) -> None:
        """Hear a connection to the process of this rank; None: it will say which."""
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            line.setsockopt(socket.IPPROTO_TCP, option, value)
        threading.Thread(target=self._hear, args=(line, rank), name="lines", daemon=True).start()

    def say(self, kind: str, rest: Any = None) -> None:
        """A word to all that can be reached."""
        self._pass_on((kind, self._rank, rest), self._rank)

    def _pass_on(self, word: tuple[str, int, Any], source: int) -> None:
        for line in [line for rank, line in list(self.open.items()) if rank != source]:
            with contextlib.suppress(OSError):
                line.sendall(json.dumps(word).encode() + b"\n")

    def _hear(self, line: socket.socket, rank: int | None) -> None:
        has_left = False
        with contextlib.suppress(OSError, ValueError, TypeError):  # words of no process of this run
            for text in line.makefile("rb"):
                kind, sender, rest = json.loads(text)
                rank = sender if rank is None else rank
                self.open[rank] = line
                has_left |= kind == "left" and sender == rank
                self._pass_on((kind, sender, rest), rank)
                self._take(kind, sender, rest)
        if rank is not None and not has_left:
            self._pass_on(("died", rank, None), rank)
            self._take("died", rank, None)
