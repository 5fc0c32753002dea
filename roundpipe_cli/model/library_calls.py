"""Calls of other libraries with untrusted files or figures: any error that they raise becomes one refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from roundpipe_cli.errors import RefusedError, RoundpipeError

RUST_PANIC = "PanicException"
"""Name of the error that Rust libraries raise; it is no Exception, and no library exports it."""
OUT_OF_MEMORY = "DefaultCPUAllocator"
"""Text in torch's RuntimeError when the host has no memory left."""


@contextmanager
def refusing(what: str, where: str, hint: str | None = None) -> Iterator[None]:
    """Turn any error of a library into a refusal with this text. Odd values raise what nobody can list: KeyError and
    ZeroDivisionError, AttributeError, torch's RuntimeError.

    Raises:
        RefusedError: as said.
        MemoryError: passed on, as are our own errors.
    """
    try:
        yield
    except (RoundpipeError, MemoryError):
        raise
    except Exception as error:
        if OUT_OF_MEMORY in str(error):
            raise
        raise _refusal(what, where, hint, error) from error
    except BaseException as error:
        if type(error).__name__ != RUST_PANIC:
            raise
        raise _refusal(what, where, hint, error) from error


def _refusal(what: str, where: str, hint: str | None, error: BaseException) -> RefusedError:
    text = next((line for line in str(error).splitlines() if line.strip()), "")[:300]
    return RefusedError(what, where=where, found=f"{type(error).__name__}: {text}", hint=hint)
