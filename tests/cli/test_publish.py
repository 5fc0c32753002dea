"""The converter to GGUF is a program of others: killed, stopped or failing, it ends in one error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roundpipe_cli.choices import GGUF_NAME
from roundpipe_cli.cli import export
from roundpipe_cli.cli.export import check_upload, convert_to_gguf, push
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
    monkeypatch.setattr(export, "STALLED_S", 0.4)
    monkeypatch.setattr(export, "LOOK_S", 0.1)
    (tmp_path / "convert.py").write_text(code)
    with pytest.raises(RefusedError, match=words):
        convert_to_gguf(tmp_path / "convert.py", tmp_path)
    assert not (tmp_path / GGUF_NAME).exists()


def test_a_converter_that_works_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "LOOK_S", 0.05)
    (tmp_path / "convert.py").write_text("import sys; open(sys.argv[3], 'w').write('gguf')")
    assert convert_to_gguf(tmp_path / "convert.py", tmp_path).read_text() == "gguf"


@pytest.mark.parametrize("name", ["notes.txt", "deep/notes.txt", "deep"])
def test_nothing_outside_the_folder_is_uploaded(tmp_path: Path, name: str) -> None:
    """The hub's client reads through links; a converter or another program may have put one there."""
    private, folder = tmp_path / "private", tmp_path / "merged"
    private.mkdir()
    (private / "key").write_text("secret")
    (folder / name).parent.mkdir(parents=True)
    (folder / "model.safetensors").write_text("x")
    (folder / "same").symlink_to("model.safetensors")
    check_upload(folder)
    (folder / name).symlink_to(private / "key" if "." in name else private)
    with pytest.raises(RefusedError, match=r"(?s)not uploaded.*private"):
        push(folder, "me/model")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(RefusedError, match=r"(?s)not uploaded.*a named pipe"):
        push(folder, "me/model")
