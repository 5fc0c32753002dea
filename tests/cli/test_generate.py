"""What `roundpipe generate` is asked: bad bytes and impossible temperatures are one error each."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from roundpipe_cli.cli.generate import check_temperature, converse, read_prompt
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.train.result.generate import Prompt, WholeAnswer


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 5e-324, float("nan"), float("inf")])
def test_a_temperature_at_which_no_token_can_be_drawn_is_refused(temperature: float) -> None:
    """Logits divided by it are infinite, and torch said that probabilities are below 0."""
    with pytest.raises(RefusedError, match="temperature"):
        check_temperature(temperature)
    for fine in (0.0, 0.01, 1.0, 100.0):
        check_temperature(fine)


def test_a_prompt_that_is_no_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt, data in (("a\udcff", b""), ("-", b"a\xff")):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        with pytest.raises(RefusedError, match="not valid UTF-8") as caught:
            read_prompt(prompt)
        assert "character 2" in str(caught.value)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("größe".encode())))
    assert read_prompt("-") == "größe" and read_prompt("größe") == "größe"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_conversation_has_commands(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`/help`, `/reset` and `/exit` were turns that the model answered. In a pipe any other line is one."""
    lines = b"/help\na\nb\n/reset\n/quit\n/etc/hosts is what?\n/exit\nc\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines), isatty=lambda: is_terminal))
    asked: list[tuple[str, int]] = []

    def show(prompt: Prompt) -> WholeAnswer:
        asked.append((prompt.text, len(prompt.earlier)))
        return WholeAnswer("yes", 1, True)

    converse(Prompt("", None, 10, 0.0), show, keeps_turns=True)
    unknown = [] if is_terminal else [("/quit", 0)]
    assert asked == [("a", 0), ("b", 1), *unknown, ("/etc/hosts is what?", len(unknown))]
    said = capsys.readouterr().err
    assert ("there is no /quit" in said) == is_terminal and said.count("/reset begin anew") == 1 + is_terminal
