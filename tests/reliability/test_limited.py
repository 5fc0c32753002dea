"""Work of somebody else's making runs in a child with limits; whatever becomes of the child is one error."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from roundpipe_cli import limited
from roundpipe_cli.errors import InternalError, RefusedError, RoundpipeError
from roundpipe_cli.limited import Limits, run_limited
from roundpipe_cli.train.prepare import base_files
from roundpipe_cli.train.prepare.base_files import trained_ends
from roundpipe_cli.train.result import ollama
from roundpipe_cli.train.result.generate import _render
from roundpipe_cli.train.result.ollama import find_turns
from tests.data.test_data_dataset import CHATML, byte_tokenizer

LIMITS = Limits("the work", "here", processor_s=0.2, memory_bytes=256 * 1024**2)


def loop() -> None:
    while True:
        pass


def end(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(30)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (loop, "takes too long"),
        (lambda: 9 ** (9**9), "takes too long"),
        (lambda: re.match(r"(a+)+$", "a" * 60 + "b"), "takes too long"),
        (lambda: "x" * 10**10, "too much memory"),
        (lambda: end(signal.SIGKILL), "exit code -9"),
        (lambda: end(signal.SIGSEGV), "exit code -11"),
        (lambda: end(signal.SIGSTOP), "does not end"),
        (lambda: os._exit(3), "exit code 3"),
    ],
)
def test_work_beyond_its_limits_is_one_error(work: Callable[[], object], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        run_limited(work, replace(LIMITS, wall_s=1.0 if words == "does not end" else 30.0))
    assert not [child for child in multiprocessing.active_children() if child.name == "roundpipe-limited"]


def test_a_child_that_is_stopped_while_it_answers_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the first byte of an answer was waited for with a limit, and the rest of it for ever."""
    read = Connection.recv

    def stop_then_read(connection: Connection) -> object:
        time.sleep(0.3)  # the pipe is full by then
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGSTOP)
        return read(connection)

    monkeypatch.setattr(Connection, "recv", stop_then_read)
    with pytest.raises(RefusedError, match="does not end"):
        run_limited(lambda: b"x" * 8 * 1024**2, replace(LIMITS, wall_s=1.0))


def test_values_and_errors_come_back() -> None:
    assert run_limited(lambda: {"a": (1, "b")}, LIMITS) == {"a": (1, "b")}
    with pytest.raises(RoundpipeError, match="hello"):
        run_limited(lambda: (_ for _ in ()).throw(RefusedError("hello")), LIMITS)
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        run_limited(lambda: 1 / 0, LIMITS)


SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_result_with_a_slow_template_answers_and_exports_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """generate, export and the end of a run rendered a template in their own process, for ever."""
    for room in (base_files, ollama):
        monkeypatch.setattr(room, "TEMPLATE_LIMITS", LIMITS)
    tokenizer = byte_tokenizer(template=CHATML)
    assert len(trained_ends(tokenizer)) >= 1 and find_turns(tokenizer) is not None
    tokenizer.chat_template = SLOW
    assert trained_ends(tokenizer) == [tokenizer.eos_token_id] and find_turns(tokenizer) is None
    with pytest.raises(RefusedError, match="takes too long"):
        run_limited(lambda: _render(tokenizer, [{"role": "user", "content": "x"}]), LIMITS)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(RefusedError, match="refuses this conversation"):
        run_limited(lambda: _render(tokenizer, [{"role": "user", "content": "x"}]), LIMITS)


def test_no_template_is_rendered_outside_a_child() -> None:
    """Every caller of a renderer is known to run in a child."""
    package = Path(limited.__file__).parent
    names = re.compile(r"\.apply_chat_template\(|environment\.from_string\(|ChatTemplate\(")
    callers = {str(path.relative_to(package)) for path in package.rglob("*.py") if names.search(path.read_text())}
    assert callers == {
        *("data/chat.py", "data/row_chunks.py"),
        *("train/prepare/base_files.py", "train/result/generate.py", "train/result/ollama.py"),
    }
