"""Colours and lines on a real terminal: what a command writes to a pseudo-terminal of a given width."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path

import pytest

from roundpipe_cli.cli.output import CHECKS, VERDICTS, with_colours
from tests.support.e2e import REPOSITORY, child_environment, command_line

GREEN = "\x1b[1;32m"


def on_a_terminal(
    folder: Path, columns: int, *words: str, turns: Sequence[tuple[str, str]] = (), code: int = 0, **variables: str
) -> str:
    """What `roundpipe WORDS` writes to a terminal of so many columns.

    Args:
        turns: (words to wait for, what is then typed), one after the other.
        code: exit code.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**child_environment(), "TERM": "xterm-256color", **variables}
    for name in {"NO_COLOR", "COLUMNS"} - set(variables):
        environment.pop(name, None)
    child = subprocess.Popen(
        command_line(*words),
        cwd=folder,
        env=environment,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # a dashboard wants to be in the foreground
    )
    os.close(follower)
    written, seen, rest = b"", 0, [(before.encode(), typed.encode()) for before, typed in turns]
    with contextlib.suppress(OSError):  # nobody has the other end any more
        while select.select([leader], [], [], 60)[0] and (data := os.read(leader, 65536)):
            written += data
            while rest and rest[0][0] in written[seen:]:
                before, typed = rest.pop(0)
                seen = written.index(before, seen) + len(before)
                os.write(leader, typed)
    assert not rest and child.wait(60) == code, (rest, written.decode())
    os.close(leader)
    return written.decode().replace("\r\n", "\n")


def test_words_are_coloured_where_they_stand() -> None:
    assert with_colours("FITS: a/FITSY", VERDICTS) == f"{GREEN}FITS\x1b[0m: a/FITSY"
    assert with_colours("good   the good one", CHECKS) == f"{GREEN}good \x1b[0m  the good one"


@pytest.mark.parametrize("command", ["plan", "bench"])
def test_plan_and_bench_use_colour_on_a_terminal(command: str, tmp_path: Path) -> None:
    """`plan` had none, `bench` bold words only."""
    words = (command, str(REPOSITORY / "recipes" / "qwen3-8b.yaml"), "--hardware", "1x3090")
    coloured = on_a_terminal(tmp_path, 100, *words)
    verdict = f"{GREEN}FITS\x1b[0m" if command == "plan" else "\x1b[32mroundpipe"
    assert verdict in coloured
    plain = on_a_terminal(tmp_path, 100, *words, NO_COLOR="1")
    assert "\x1b[32m" not in plain and GREEN not in plain and ("FITS: " in plain or command == "bench")


def test_notes_are_cut_between_words_on_a_narrow_terminal(tmp_path: Path) -> None:
    """A terminal of 60 columns showed `every s` and, in the next line, `chedule`."""
    words = ("bench", str(REPOSITORY / "recipes" / "qwen3-8b.yaml"), "--hardware", "2x3090")
    shown = on_a_terminal(tmp_path, 60, *words, NO_COLOR="1").splitlines()
    note = next(index for index, line in enumerate(shown) if line.startswith("note: Python takes"))
    assert len(shown[note]) <= 60 and shown[note + 1].startswith("  ") and shown[note + 1].endswith("is faster")


@pytest.mark.parametrize(
    "words",
    [
        ("recipes", "ls"),
        ("recipes", "keys", "lora"),
        ("plan", "--compare", "qwen3-8b", "hardware=1x4090,1x3090", "lora.r=8,16"),
        ("bench", "--costs", str(REPOSITORY / "recipes" / "example_costs.json"), "--workers=4", "--microbatches=8"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
@pytest.mark.parametrize("columns", [60, pytest.param(80, marks=pytest.mark.sweep)])
def test_tables_fit_a_narrow_terminal(words: tuple[str, ...], columns: int, tmp_path: Path) -> None:
    """Rows of `recipes ls` and `plan --compare` took two lines each at 60 columns, and the terminal cut words of
    `recipes keys` at its edge."""
    shown = re.sub(r"\x1b\[[\d;]*m", "", on_a_terminal(tmp_path, columns, *words, NO_COLOR="1"))
    lines = [line for line in shown.splitlines() if not line.startswith(("reading", "notice", "  /", "an example"))]
    assert len(lines) >= 5 and max(map(len, lines)) <= columns, shown
    if words[0] != "bench" and words[1] != "keys":
        assert not any(line.startswith("  ") for line in lines), "a row that goes on in a second line"


def test_a_demo_begins_with_figures(tmp_path: Path) -> None:
    """For as long as the first step took, 10 s, every figure was `-` and the room for them empty."""
    words = ("watch", "--demo", "2x4090", "quickstart", "gradient_accumulation_steps=4")
    shown = on_a_terminal(tmp_path, 80, *words, turns=[("help", "q")])
    assert "step 1/" in shown and "step 0/" not in shown and "waiting for the first step" not in shown
