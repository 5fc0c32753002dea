"""The converter to GGUF is a program of others: killed, stopped or failing, it ends in one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundpipe_cli.cli import publish
from roundpipe_cli.cli.publish import GGUF_NAME, convert_to_gguf
from roundpipe_cli.errors import RefusedError


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "did nothing for"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9"),
        ("import time; time.sleep(60)", "did nothing for"),
        ("raise SystemExit('no such architecture')", "no such architecture"),
    ],
)
def test_a_converter_that_does_not_end_well_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    """One that was stopped was waited for without an end."""
    monkeypatch.setattr(publish, "STALLED_S", 0.4)
    monkeypatch.setattr(publish, "LOOK_S", 0.1)
    (tmp_path / "convert.py").write_text(code)
    with pytest.raises(RefusedError, match=words):
        convert_to_gguf(tmp_path / "convert.py", tmp_path)
    assert not (tmp_path / GGUF_NAME).exists()


def test_a_converter_that_works_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "LOOK_S", 0.05)
    (tmp_path / "convert.py").write_text("import sys; open(sys.argv[3], 'w').write('gguf')")
    assert convert_to_gguf(tmp_path / "convert.py", tmp_path).read_text() == "gguf"
