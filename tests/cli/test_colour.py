"""Colours and lines on a real terminal: what a command writes to a pseudo-terminal of a given width."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from roundpipe_cli.cli.colour import CHECKS, VERDICTS, with_colours
from tests.support.e2e import REPOSITORY, child_environment

GREEN = "\x1b[1;32m"


def on_a_terminal(folder: Path, columns: int, *words: str, **variables: str) -> str:
    """What `roundpipe WORDS` writes to a terminal of so many columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**child_environment(), "TERM": "xterm-256color", **variables}
    for name in {"NO_COLOR", "COLUMNS"} - set(variables):
        environment.pop(name, None)
    command = [sys.executable, "-m", "roundpipe_cli", *words]
    child = subprocess.Popen(command, cwd=folder, env=environment, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    written = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:  # nobody has the other end any more
            break
        if not data:
            break
        written += data
    os.close(leader)
    assert child.wait(60) == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


def test_words_are_coloured_where_they_stand() -> None:
    assert with_colours("FITS: a/FITSY", VERDICTS) == f"{GREEN}FITS\x1b[0m: a/FITSY"
    assert with_colours("good   the good one", CHECKS) == f"{GREEN}good \x1b[0m  the good one"


@pytest.mark.parametrize("command", ["plan", "bench"])
def test_plan_and_bench_use_colour_on_a_terminal(command: str, tmp_path: Path) -> None:
    """`plan` had none, `bench` bold words only."""
    words = (command, str(REPOSITORY / "recipes" / "qwen3-8b.yaml"), "--hardware", "2x3090")
    coloured = on_a_terminal(tmp_path, 100, *words)
    verdict = f"{GREEN}FITS\x1b[0m" if command == "plan" else "\x1b[32mroundpipe"
    assert verdict in coloured
    plain = on_a_terminal(tmp_path, 100, *words, NO_COLOR="1")
    assert "\x1b[32m" not in plain and GREEN not in plain and ("FITS: " in plain or command == "bench")


def test_notes_are_cut_between_words_on_a_narrow_terminal(tmp_path: Path) -> None:
    """A terminal of 60 columns showed `every s` and, in the next line, `chedule`."""
    words = ("bench", str(REPOSITORY / "recipes" / "qwen3-8b.yaml"), "--hardware", "2x3090")
    shown = on_a_terminal(tmp_path, 60, *words, NO_COLOR="1").splitlines()
    note = next(index for index, line in enumerate(shown) if line.startswith("note: the interpreter's"))
    assert len(shown[note]) <= 60 and shown[note + 1].startswith("  ") and "`plan` counts them" in shown[note + 1]
