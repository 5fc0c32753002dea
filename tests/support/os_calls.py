"""Replace a call of `os` so that `pathlib` makes the replaced one too: Python 3.10's keeps its own references."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any


def replace_os_call(name: str, function: Callable[..., Any], put: Callable[[Any, str, Any], None] = setattr) -> None:
    """`os.NAME = function`.

    Args:
        put: sets an attribute, as pytest's monkeypatch does.
    """
    replaced = getattr(os, name)
    put(os, name, function)
    accessor = getattr(pathlib, "_NormalAccessor", None)
    if accessor is not None and getattr(accessor, name, None) is replaced:  # its `open` is the built-in one
        put(accessor, name, staticmethod(function))
