"""Triton's interpreter for the tests of this folder, in a process whose other tests have triton as it is."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from roundpipe_cli import kernels

OURS = ("roundpipe_cli.kernels.grouped_triton", "roundpipe_cli.kernels.pointwise_triton")


def _is_tritons(name: str) -> bool:
    return name in OURS or (name.split(".")[0] == "triton" and not name.startswith("triton._C"))


def _take_out() -> dict[str, ModuleType]:
    """Modules that an import then makes anew, and not by way of the package that holds ours."""
    taken = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_tritons(name)}
    for name in OURS:
        vars(kernels).pop(name.rpartition(".")[2], None)
    return taken


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Kernels run in the interpreter, on tensors of the processor.

    Triton reads the variable while it is imported, and other libraries (bitsandbytes, torch) import it before we can
    set it; so its Python modules are imported again, and put back afterwards. The library below them stays.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    monkeypatch = pytest.MonkeyPatch()
    before = _take_out()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield
    monkeypatch.undo()
    _take_out()
    sys.modules.update(before)
