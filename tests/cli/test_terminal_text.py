"""What a user reads on a terminal of 80 columns, its colours and lines on a real one, and common mistakes with their
messages.

`python -m tests.cli.test_terminal_text` writes the golden file of the mistakes anew; read it aloud then. The file names
the commands that it answers: a line `$ roundpipe WORDS   [2]` adds one.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from roundpipe_cli.cli.app import main
from roundpipe_cli.cli.finetune import next_commands
from roundpipe_cli.cli.output import LEAST_WIDTH, UNCUT, terminal_width, wrapped
from roundpipe_cli.dashboard.live import ENTER, LEAVE
from tests.support.e2e import REPOSITORY, launch
from tests.support.model_hub import read_hub_settings_again

GOLDEN = Path(__file__).parents[1] / "golden" / "mistakes.txt"
GOOD = "model: model\ndatasets:\n  - {path: rows.jsonl}\nmax_seq_length: 128\n"
ROWS = '{"prompt": "a", "completion": "b"}\n'


def call(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `roundpipe WORDS`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    mask, handler = os.umask(0o077), signal.getsignal(signal.SIGINT)
    with (
        patch.dict(os.environ),  # `--offline` sets switches, which the server of forked runs would inherit
        patch.object(sys, "argv", ["roundpipe", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
    os.umask(mask)
    signal.signal(signal.SIGINT, handler)
    return code, out.getvalue(), err.getvalue()


def said(*words: str, code: int = 0) -> tuple[str, str]:
    """Standard output and errors of `roundpipe WORDS`, which ends with this code."""
    found, *texts = call(*words)
    assert found == code, texts
    assert "Traceback" not in texts[1], texts[1]
    return texts[0], texts[1]


# --- 80 columns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80])
def test_errors_are_cut_between_words_and_what_is_to_be_copied_is_not(width: int) -> None:
    """A terminal cut their lines within words, as they were printed whole for the sake of the commands in them."""
    text = [line for line in GOLDEN.read_text(encoding="utf-8").splitlines() if not line.startswith("$ ")]
    lines = list(wrapped(text, width))
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(text).split()), "no word is lost or parted"
    copied = [found for line in text for found in re.findall(r"`[^`]+`|hint: (roundpipe .*)", line)]
    assert len(copied) > 40 and all(any(one in line for line in lines) for one in copied if one)
    for line in lines:
        rest = UNCUT.sub(lambda found: found[0].replace(" ", "_"), line)
        assert len(line) <= width or len(rest.split()) <= 2 + rest.startswith(("error:", "  hint:")), line
    assert list(wrapped(["it took 12 ms of 7.25 s, 30 % of it"], 14)) == [
        "it took 12 ms",
        "  of 7.25 s,",
        "  30 % of it",
    ]


def test_a_run_ends_with_three_commands() -> None:
    lines = next_commands(Path("outputs/my run"), {"method": "lora"}).splitlines()
    assert lines == [
        "next:",
        "  roundpipe generate 'outputs/my run' \"your question\"",
        "  roundpipe export 'outputs/my run' --merge --to 'outputs/my run-merged'",
        "  xdg-open 'outputs/my run/report.html'",
    ]
    assert "--merge" not in next_commands(Path("out"), {"method": "full"})


# --- a pseudo-terminal ------------------------------------------------------------------------------------------------

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
    settings = termios.tcgetattr(follower)
    environment = {"TERM": "xterm-256color", **variables}
    child = launch(folder, *words, environment=environment, before=partial(take_terminal, os.ttyname(follower))).process
    written, seen, rest = b"", 0, [(before.encode(), typed.encode()) for before, typed in turns]
    last_s = time.monotonic()
    while time.monotonic() - last_s < 60:
        is_over = not child.is_alive()  # asked before what it wrote is read
        if not select.select([leader], [], [], 0.0 if is_over else 0.05)[0]:
            if is_over:
                break
            continue
        written, last_s = written + os.read(leader, 65536), time.monotonic()
        while rest and rest[0][0] in written[seen:]:
            before, typed = rest.pop(0)
            seen = written.index(before, seen) + len(before)
            os.write(leader, typed)
    child.kill()
    child.join()
    text, settings_after = written.decode(), termios.tcgetattr(follower)
    os.close(leader), os.close(follower)
    assert not rest and child.exitcode == code, (rest, child.exitcode, text)
    assert settings_after == settings and text.count(ENTER) == text.count(LEAVE), "the terminal is as before"
    return text.replace("\r\n", "\n")


def test_width_is_that_of_the_stream_that_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages were cut, or not, by what stdout is: `roundpipe plan > plan.txt` says them on a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
    leader, follower = pty.openpty()
    reader, writer = os.pipe()
    try:
        for columns, expected in ((97, 97), (12, LEAST_WIDTH)):
            fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            assert (terminal_width(follower), terminal_width(writer)) == (expected, None)
        monkeypatch.setenv("COLUMNS", "55")
        assert (terminal_width(follower), terminal_width(writer)) == (55, None)
    finally:
        for descriptor in (leader, follower, reader, writer):
            os.close(descriptor)


def take_terminal(name: str) -> None:
    """Have the terminal of this name, in whose foreground a dashboard wants to be, and no other's colours or width."""
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for stream in range(3):
        os.dup2(terminal, stream)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", buffering=1, closefd=False)
    os.environ.pop("COLUMNS", None)
    read_hub_settings_again()


@pytest.mark.parametrize("command", ["plan", "bench"])
def test_plan_and_bench_use_colour_on_a_terminal(command: str, tmp_path: Path) -> None:
    words = (command, "smollm2-135m", "--hardware", "2x3090")
    coloured = on_a_terminal(tmp_path, 100, *words)
    verdict = f"{GREEN}FITS\x1b[0m" if command == "plan" else "\x1b[32mroundpipe"
    assert verdict in coloured
    plain = on_a_terminal(tmp_path, 60, *words, NO_COLOR="1")
    assert "\x1b[32m" not in plain and GREEN not in plain and ("FITS: " in plain or command == "bench")


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
    """Story: rows took two lines each at 60 columns, and the terminal cut words of `recipes keys` at its edge."""
    shown = re.sub(r"\x1b\[[\d;]*m", "", on_a_terminal(tmp_path, columns, *words, NO_COLOR="1"))
    lines = [line for line in shown.splitlines() if not line.startswith(("reading", "notice", "  /", "an example"))]
    assert len(lines) >= 5 and max(map(len, lines)) <= columns, shown
    assert ("--json has them" in shown) == (words[0] == "bench" and columns < 80), "columns that are left out"
    if words[0] != "bench" and words[1] != "keys":
        assert not any(line.startswith("  ") for line in lines), "a row that goes on in a second line"


# --- mistakes ---------------------------------------------------------------------------------------------------------

RECIPES = json.loads((REPOSITORY / "tests/golden_data/bad_recipes.json").read_text(encoding="utf-8"))["mistakes"]
"""Name -> text; checked by `recipes validate`."""


def mistakes() -> Iterator[tuple[str, int, str]]:
    """(what was done, exit code, the message) in the working directory, which is written to."""
    for name, text in RECIPES.items():
        Path("a.yaml").write_text(text, encoding="utf-8")
        code, out, err = call("recipes", "validate", "a.yaml")
        yield f"recipe: {name}", code, err or out
    Path("rows.jsonl").write_text(ROWS * 8)
    Path("good.yaml").write_text(GOOD)
    shutil.copy(REPOSITORY / "recipes" / "example_costs.json", "small.json")
    Path("no-rows.yaml").write_text(GOOD.replace("rows", "row"))
    Path("no-model.yaml").write_text(GOOD.replace("model: model", "model: ./modell"))
    Path("no-path.yaml").write_text("base_model: model\ndatasets:\n  - {type: alpaca}\n")
    Path("forty.yaml").write_text(GOOD + "".join(f"nosuch_{index}: 1\n" for index in range(40)))
    Path("unreadable.yaml").unlink(missing_ok=True)
    Path("unreadable.yaml").symlink_to("/proc/self/mem")
    Path("model").mkdir(exist_ok=True)
    Path("model/config.json").write_text('{"model_type": "llama"}')
    Path("model/events.jsonl").write_text('{"event": "RunStarted"}\n')
    Path("model/model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    for line in re.findall(r"^\$ roundpipe (.*)   \[\d+\]$", GOLDEN.read_text(encoding="utf-8"), re.MULTILINE):
        code, out, err = call(*shlex.split(line))
        yield f"roundpipe {line}", code, err or out


def as_text(folder: Path) -> str:
    blocks = [f"$ {what}   [{code}]\n{message.rstrip()}\n" for what, code, message in mistakes()]
    root = str(Path(__file__).resolve().parents[2])
    return "\n".join(blocks).replace(str(folder), "HERE").replace(root, "ROOT")


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says what, where, what was found or expected, and what to do; no key twice in a line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    found = as_text(tmp_path)
    blocks = found.split("\n\n")
    assert len(blocks) >= 250
    for block in blocks:
        if "byte order mark" in block:
            assert "is a good recipe" in block
            continue
        assert "error: " in block and ("hint: " in block or "expected: " in block), block
        assert "Traceback" not in block and not re.search(r": (\w[\w.]*): \1 ", block), block
    assert found == GOLDEN.read_text(encoding="utf-8"), found


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as here:
        os.chdir(here)
        os.environ["COLUMNS"] = "80"
        GOLDEN.write_text(as_text(Path(here).resolve()), encoding="utf-8")
