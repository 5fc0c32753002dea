"""Words between the processes of a run, in lines of JSON: a connection from each to the first one, which passes all on.

here      a process calls; with the run's key
at        how many waits for others it has begun
failed    why it ends
lost      a device of its machine
left      it waits for nobody any more; where its line ends without, it died: said by whoever sees that
"""

from __future__ import annotations

import contextlib
import json
import secrets
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
        self._rank, self._take, self._key = rank, take, secrets.token_hex(16)
        self.open: dict[int, socket.socket] = {}
        """Rank -> its line."""

    def listen(self, listener: socket.socket) -> str:
        """Take calls at a socket that listens; returns the key for callers."""

        def take_calls() -> None:
            while True:
                self._keep(listener.accept()[0], None)

        threading.Thread(target=take_calls, name="lines", daemon=True).start()
        return self._key

    def call(self, line: socket.socket, key: str) -> None:
        """Keep a connection to the first process."""
        self.open[0] = line
        self._keep(line, 0)
        self.say("here", key)

    def say(self, kind: str, rest: Any = None) -> None:
        """A word to all that can be reached."""
        self._pass_on([kind, self._rank, rest])

    def _pass_on(self, word: list[Any], source: int | None = None) -> None:
        for rank, line in list(self.open.items()):
            if rank != source:
                with contextlib.suppress(OSError):
                    line.sendall(json.dumps(word).encode() + b"\n")

    def _keep(self, line: socket.socket, rank: int | None) -> None:
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            line.setsockopt(socket.IPPROTO_TCP, option, value)
        threading.Thread(target=self._hear, args=(line, rank), name="lines", daemon=True).start()

    def _hear(self, line: socket.socket, rank: int | None) -> None:
        has_left = False
        with contextlib.suppress(OSError, ValueError):
            for text in line.makefile("rb"):
                word = kind, sender, rest = json.loads(text)
                if rank is None:
                    if kind != "here" or rest != self._key:  # no process of this run
                        return
                    self.open[rank := sender] = line
                has_left |= kind == "left" and sender == rank
                self._pass_on(word, rank)
                self._take(*word)
        if rank is not None and not has_left:
            self._pass_on(["died", rank, None], rank)
            self._take("died", rank, None)
