"""The dashboard on a real terminal: one of tmux, whose screen is captured, with the program run as a user runs it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from roundpipe_cli.cli.display import Display
from roundpipe_cli.dashboard.live import LEAVE, MAX_QUEUED, LiveDashboard, Terminal
from roundpipe_cli.errors import StoppedError
from roundpipe_cli.events import Notice, RunStarted
from tests.cli.test_terminal_text import on_a_terminal
from tests.support.e2e import REPOSITORY, STAGES, launch, make_workspace, metrics

MAX_WAIT_S = 200.0
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


class Screen:
    """A terminal with a shell.

    The prompt has the number of the next command, so that an old prompt is never taken for a new one: on a busy machine
    a shell shows what was typed after some time, and the test typed into the program that it took for finished.
    """

    def __init__(self, folder: Path, columns: int = 80, lines: int = 24) -> None:
        self._socket = f"roundpipe-{os.getpid()}-{time.monotonic_ns()}"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
        environment.pop("TMUX", None)
        self._run(
            *("-f", os.devnull, "new-session", "-d", "-x", str(columns), "-y", str(lines), "bash --norc --noprofile"),
            cwd=folder,
            environment=environment,
        )
        self._run("set-option", "-g", "status", "off")
        self._num_typed = 0
        self.type(r"PS1='ready \#> '; stty -a | md5sum > before; clear")
        self.wait_for(self.prompt)

    def _run(self, *words: str, cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
        command = ["tmux", "-L", self._socket, *words]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, timeout=20, check=True)
        return done.stdout.decode()

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)
        self._run("send-keys", "Enter")
        self._num_typed += 1

    @property
    def prompt(self) -> str:
        return f"ready {self._num_typed + 1}>"

    def key(self, name: str) -> None:
        self._run("send-keys", name)

    def resize(self, columns: int, lines: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(lines))

    @property
    def text(self) -> str:
        return self._run("capture-pane", "-p")

    def is_alternate(self) -> bool:
        return self._run("display-message", "-p", "#{alternate_on} #{cursor_flag}").split() == ["1", "0"]

    def wait(self, condition: Callable[[str], bool]) -> str:
        deadline_s = time.monotonic() + MAX_WAIT_S
        while not condition(text := self.text):
            assert time.monotonic() < deadline_s, f"waited in vain:\n{text}"
            time.sleep(0.1)
        return text

    def wait_for(self, *words: str) -> str:
        return self.wait(lambda text: all(word in text for word in words))

    def expect_clean(self, code: int) -> str:
        """The shell is back: main screen, cursor, terminal settings as before, and the exit code."""
        if code == 137:  # the shell may have written its prompt before the terminal was put back: Enter has it again
            self.wait(lambda _: not self.is_alternate())
            self.key("Enter")
        text = self.wait(lambda text: text.rstrip().endswith(self.prompt))
        assert self._run("display-message", "-p", "#{alternate_on} #{cursor_flag}").split() == ["0", "1"]
        self.type('echo "code=$?" $(stty -a | md5sum | cmp - before && echo same)')
        self.wait_for(f"code={code} same")
        return text

    def close(self) -> None:
        self._run("kill-server")


@pytest.fixture
def screen(tmp_path: Path, model: Path) -> Iterator[Screen]:
    screen = Screen(make_workspace(tmp_path / "w", model, num_train_epochs=3, save_steps=1000, **STAGES))
    yield screen
    screen.close()


FINETUNE = f"{sys.executable} -m roundpipe_cli finetune recipe.yaml"
SLOW = "ROUNDPIPE_FAULT=compute:slow=0.2"


def fills(text: str, lines: int) -> bool:
    """Whether a dashboard, and nothing else, is on the screen from its first to its last line."""
    rows = text.split("\n")
    return rows[0].startswith(" roundpipe ") and rows[lines - 1].startswith(" p ") and text.count("roundpipe ") == 1


@needs_tmux
def test_a_run_on_a_terminal(screen: Screen, tmp_path: Path) -> None:
    screen.type(f"{SLOW} {FINETUNE}")
    screen.wait_for("/9", "worker 0 · cpu", "worker 1 · cpu", "tokens/s", "p pause", "● training")
    assert screen.is_alternate()
    screen.key("p")
    screen.wait_for("● paused", "paused after step", "p resume")
    for columns, lines in ((120, 40), (200, 60), (60, 15), (80, 24)):
        screen.resize(columns, lines)
        screen.wait(lambda text, lines=lines: fills(text, lines))  # type: ignore[misc]
    screen.key("C-z")
    screen.wait_for("Stopped", screen.prompt)
    assert not screen.is_alternate()
    screen.type("fg")
    screen.wait_for("● paused", "p resume")
    rows = len(metrics(tmp_path / "w" / "out"))
    screen.key("s")
    screen.wait_for("checkpoint step-")
    assert len(metrics(tmp_path / "w" / "out")) == rows
    screen.key("p")
    screen.wait_for("● training", "continuing")
    screen.key("C-c")
    ends = "stopping after this step", "stopped by SIGINT after step"  # a busy machine draws no frame before the end
    if ends[1] not in screen.wait(lambda text: any(end in text for end in ends)):
        screen.key("C-c")
    text = screen.expect_clean(130)
    assert "Traceback" not in text
    assert "stopped at once by a second SIGINT" in text or ends[1] in text, "it was over before"
    assert "● stopped" in text and "worker 0 · cpu" in text, "the last frame stays"


def test_a_run_that_is_left_by_its_key_and_ends_another_time(tmp_path: Path, model: Path) -> None:
    work = make_workspace(tmp_path / "w", model, num_train_epochs=3, save_steps=1000, **STAGES)
    words = (work, 80, "finetune", "recipe.yaml")
    shown = on_a_terminal(*words, turns=[("● training", "q")], code=130, ROUNDPIPE_FAULT="compute:slow=0.2")
    text = shown.rpartition(LEAVE)[2]
    assert "stopped after step" in text and "SIGINT" not in shown and "--resume continues" in text
    assert "● stopped" in text and "worker 0" in text
    text = on_a_terminal(*words, "--resume").rpartition(LEAVE)[2]
    assert "done: " in text and "predicted" in text and "step 9/9" in text and "● finished" in text
    assert "roundpipe generate out" in text and "roundpipe export out --merge" in text and "out/report.html" in text
    assert (work / "out" / "report.html").is_file()
    shown = on_a_terminal(work, 80, "watch", "out", turns=[("● finished", "q")])
    assert "● finished" in shown.rpartition(LEAVE)[2], "the last frame stays"


def test_watching_a_run_leaves_its_newest_screen(tmp_path: Path, model: Path) -> None:
    work = make_workspace(tmp_path / "w", model, max_steps=3, **STAGES)
    running = launch(work, "finetune", "recipe.yaml", environment={"ROUNDPIPE_FAULT": "compute:slow=0.1"})
    while running.process.is_alive() and not (work / "out" / "metrics.jsonl").exists():
        time.sleep(0.05)
    text = on_a_terminal(work, 80, "watch", "out").rpartition(LEAVE)[2]
    running.finish().expect(0)
    assert "● finished" in text and "step 3/3" in text


SHOWN = """import os, time; from pathlib import Path; from rich.console import Console
from roundpipe_cli.dashboard.live import LiveDashboard, Terminal
LiveDashboard(Terminal(), Console(), time.time, {}).start()
Path("shown.tmp").write_text(str(os.getpid())); os.rename("shown.tmp", "shown"); time.sleep(999)
"""
"""A dashboard without a run."""


@needs_tmux
def test_a_kill_leaves_the_terminal_clean(screen: Screen, tmp_path: Path) -> None:
    """A small shell that waited for our end puts the terminal back."""
    work = tmp_path / "w"
    (work / "shown.py").write_text(SHOWN)
    screen.type(f"{sys.executable} shown.py")
    screen.wait(lambda _: (work / "shown").exists() and screen.is_alternate())
    os.kill(int((work / "shown").read_text()), signal.SIGKILL)
    screen.expect_clean(137)


@needs_tmux
@pytest.mark.sweep
def test_a_worker_that_fails_leaves_the_terminal_clean(screen: Screen) -> None:
    screen.type(f"ROUNDPIPE_FAULT=compute:slow=0.2,compute:raise:step=3 {FINETUNE}")
    screen.wait_for("p pause")
    assert "a worker failed" in screen.expect_clean(1)


# --- without a terminal -----------------------------------------------------------------------------------------------
def test_events_are_dropped_and_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    live = LiveDashboard(Terminal(), Console(), time.time, {})
    started_s = time.monotonic()
    for number in range(10 * MAX_QUEUED):
        live.tell(Notice(str(number)))
    assert time.monotonic() - started_s < 10
    live._frame_state()
    assert live.state.num_dropped == 9 * MAX_QUEUED
    live._terminal.close()


def test_a_line_of_output_that_comes_in_pieces_is_shown_whole(tmp_path: Path) -> None:
    terminal = Terminal()
    terminal._aside = tmp_path / "output"
    for text, lines in (("one\ntw", ["one"]), ("o", []), ("\n\nthree\n", ["two", "three"])):
        with terminal._aside.open("a") as file:
            file.write(text)
        assert terminal.new_output() == lines
    terminal.close()


def test_a_terminal_that_is_gone_ends_the_dashboard_only() -> None:
    import pty

    leader, follower = pty.openpty()
    terminal = Terminal(follower, follower)
    live = LiveDashboard(terminal, Console(force_terminal=True), time.time, {})
    terminal.is_foreground = lambda: True  # type: ignore[method-assign]  # not our controlling terminal
    live.start()
    assert os.read(leader, 1000)
    os.close(leader)
    os.close(follower)
    live.tell(Notice("into the void"))
    live._thread.join(10)
    assert not live._thread.is_alive()
    live.stop()
    assert signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL


@pytest.mark.parametrize("is_shown", [True, False])
def test_who_leaves_a_display_has_the_exit_code_of_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_shown: bool
) -> None:
    """Story: a second Ctrl-C on the way out left the terminal to be restored after the shell's prompt."""
    stop, handler = LiveDashboard.stop, signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(LiveDashboard, "stop", lambda live: (signal.raise_signal(signal.SIGINT), stop(live)))
    monkeypatch.setattr("roundpipe_cli.cli.display.is_terminal", lambda: True)
    expected = StoppedError if is_shown else KeyboardInterrupt
    with pytest.raises(expected) as left, Display(lambda event: None, dashboard=True) as display:
        if is_shown:
            display(RunStarted(0.0, "model", "lora", ("cpu",), 10, 0))
        raise KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is handler
    if is_shown:
        assert isinstance(left.value, StoppedError) and left.value.exit_code == 130
