"""Triton's interpreter for the tests of this folder, in a process whose other tests have triton as it is."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest

OURS = "roundpipe_cli.kernels.grouped_triton"


def _drop(names: list[str]) -> None:
    for name in names:
        del sys.modules[name]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Kernels run in the interpreter, on tensors of the processor.

    Triton reads the variable while it is imported, and other libraries (bitsandbytes, torch) import it before we can
    set it; so its Python modules are imported again, and put back afterwards. The library below them stays.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    monkeypatch = pytest.MonkeyPatch()
    is_triton = lambda name: (name.split(".")[0] == "triton" and not name.startswith("triton._C")) or name == OURS  # noqa: E731
    before = {name: module for name, module in sys.modules.items() if is_triton(name)}
    _drop(list(before))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield
    monkeypatch.undo()
    _drop([name for name in sys.modules if is_triton(name)])
    sys.modules.update(before)
