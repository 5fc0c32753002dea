"""Large tensors are read and written in parts: in this folder's tests tiny ones are too."""

from __future__ import annotations

import pytest

from roundpipe_cli import files
from roundpipe_cli.kernels import unpack_codes
from roundpipe_cli.model.files import untrusted
from roundpipe_cli.model.stored import gguf, tensors


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_codes, "AT_ONCE", 200)
    monkeypatch.setattr(gguf, "ROWS_AT_ONCE", 50)
    monkeypatch.setattr(tensors, "FINITE_CHECK_ELEMENTS", 1000)
    monkeypatch.setattr(files, "_CHUNK_BYTES", 1 << 16)  # real files are read too
    monkeypatch.setattr(untrusted, "COMPARED_BYTES", 1000)
