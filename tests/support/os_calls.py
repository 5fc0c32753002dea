"""Calls of `os` that are replaced, mounted file systems, and what the system says of this process."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def replace_os_call(name: str, function: Callable[..., Any], put: Callable[[Any, str, Any], None] = setattr) -> None:
    """`os.NAME = function`, for `pathlib` too: Python 3.10's keeps its own references."""
    replaced = getattr(os, name)
    put(os, name, function)
    accessor = getattr(pathlib, "_NormalAccessor", None)
    if accessor is not None and getattr(accessor, name, None) is replaced:  # its `open` is the built-in one
        put(accessor, name, staticmethod(function))


@contextlib.contextmanager
def mounted(folder: pathlib.Path, options: str) -> Iterator[None]:
    """A file system in memory for the time of a test; skips, visibly, where this user may not mount."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def status_bytes(key: str) -> int:
    """A line of this process's status."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key + ":"))
