"""Questions to the hub: time limits, waiting, and this program's words for its refusals and the library's messages.

A hub that takes the connection and answers late is slow, not absent: the program waits and says so. A hub that
takes no connection within `CONNECT_S` is not reachable, and the caller uses the cache.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from roundpipe_cli.errors import RefusedError

if TYPE_CHECKING:
    from roundpipe_cli.events import Say  # its classes take a tenth of the time of `--help` to make

T = TypeVar("T")
CONNECT_S = 5.0
READ_S = 60.0
"""Longest silence of a hub that took the connection; `HF_HUB_DOWNLOAD_TIMEOUT` sets another one for files."""
TIMEOUT: Any = (CONNECT_S, READ_S, READ_S, READ_S)
"""To connect, read, write, and to wait for a connection: in the order of httpx."""
SLOW_S = 4.0
"""Seconds after which the user is told what the program waits for."""
MAX_TRIES = 5
MAX_WAIT_S = 310.0
"""Longest wait that a rate limit may ask for; the hub's windows are five minutes."""
BUSY = (408, 429, 500, 502, 503, 504)
"""Answers that may differ later."""
_NO_CONNECTION = {"ConnectError", "ConnectTimeout", "ProxyError", "UnsupportedProtocol", "InvalidURL"}
_NO_ANSWER = {"TimeoutException", "NetworkError", "RemoteProtocolError"}
"""Names of exceptions: huggingface_hub uses httpx or httpx2, by its release."""


@dataclass(frozen=True)
class Repository:
    """A model or data set of the hub."""

    name: str
    kind: Literal["model", "dataset"] = "model"

    @property
    def where(self) -> str:
        """The recipe's key, for errors."""
        return "model" if self.kind == "model" else f"datasets: {self.name}"


_NOT_OF_A_HUB = {"FileMetadataError", "JSONDecodeError", "TooManyRedirects", "AttributeError", "KeyError", "TypeError"}
"""Names of exceptions of the library that could not read an answer."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def no_hub(repository: Repository, found: str) -> RefusedError:
    """The refusal of an answer that no hub gives."""
    return RefusedError(
        "what answers in the hub's place is no hub",
        where=repository.where,
        found=found,
        expected="the answers of a hub",
        hint="check HF_ENDPOINT and the proxy",
    )


def check_name(repository: Repository, what: str, name: object) -> str:
    """A name that the hub sent, from which a path in the cache is made.

    Raises:
        RefusedError: it could lead elsewhere.
    """
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
        raise no_hub(repository, f"{what} {str(name)[:100]!r}")
    return name


class UnreachableError(Exception):
    """The hub gave no answer, or was not to be asked; the text says why."""


def is_offline() -> bool:
    """Whether the environment forbids connections to the hub."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def hub_answers() -> bool:
    """Whether the hub's host takes a connection; nothing is sent."""
    import socket
    from urllib.request import getproxies  # with the libraries of HTTP: nobody else needs them

    if getproxies():  # the proxy resolves names
        return True
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = 80 if url.scheme == "http" else 443
    try:
        with socket.create_connection((url.hostname or "", url.port or port), timeout=CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


def ask_hub(repository: Repository, question: Callable[[], T], tell: Say, *, is_transfer: bool = False) -> T:
    """The answer of the hub; asked again where it is busy or silent.

    Args:
        question: one call of huggingface_hub, with `TIMEOUT`.
        tell: is told why it takes long.
        is_transfer: the answer is a file, whose coming is reported elsewhere.

    Raises:
        RefusedError: not there, not for this account, or too many questions.
        UnreachableError: no connection, or no answer.
        OSError: another one, of this machine's disk for instance.
    """
    for attempt in range(1, MAX_TRIES + 1):
        timer = threading.Timer(SLOW_S, _tell_slow, [repository, tell])
        timer.daemon = True
        if not is_transfer:
            timer.start()
        try:
            return question()
        except Exception as error:  # the client raises many kinds, those of its HTTP library among them
            wait_s = _next_try_s(_cause(error), attempt, is_transfer=is_transfer)
            if wait_s is None:
                translated = _translated(repository, _cause(error), attempt)
                if translated is error:
                    raise
                raise translated from error
            status = status_of(_cause(error))
            reason = f"it answers {status}" if status is not None else _short(_cause(error))
        finally:
            timer.cancel()
        tell(f"the hub is busy ({reason}): asking again in {wait_s:.0f} s")
        time.sleep(wait_s)
    raise AssertionError


_slow_told_s = float("-inf")


def _tell_slow(repository: Repository, tell: Say) -> None:
    """Report a wait, not too often: several files may wait at a time."""
    global _slow_told_s
    if time.monotonic() - _slow_told_s >= READ_S / 2:
        _slow_told_s = time.monotonic()
        tell(f"the hub is slow: waiting for its answers about {repository.name}, at most {READ_S:.0f} s each")


def _cause(error: BaseException) -> BaseException:
    """The cause that the client hides: it calls every failure of a request a file that is not in the cache."""
    while type(error).__name__ in ("LocalEntryNotFoundError", "RevisionResolutionError"):
        inner = error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def status_of(error: BaseException) -> int | None:
    """The status of the hub's answer, where the error is one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _next_try_s(error: BaseException, attempt: int, *, is_transfer: bool) -> float | None:
    """Seconds until the question is asked again; None where that would not help."""
    names = _names(error)
    if names & _NO_CONNECTION:
        return None
    if "TimeoutException" in names:
        return 1.0 if attempt < 2 and not is_transfer else None  # each took READ_S, and of a file several
    if names & _NO_ANSWER:
        return 1.0 if attempt < MAX_TRIES else None
    if status_of(error) not in BUSY or attempt == MAX_TRIES:
        return None
    asked_s = _asked_wait_s(error)
    if asked_s is None:
        return float(2 ** (attempt - 1))
    return asked_s if asked_s <= MAX_WAIT_S else None


def _asked_wait_s(error: BaseException) -> float | None:
    headers = getattr(getattr(error, "response", None), "headers", {})
    try:
        return max(float(headers["Retry-After"]), 0.0)
    except (KeyError, TypeError, ValueError):
        return None  # a date, or nothing


def _translated(repository: Repository, error: BaseException, attempts: int) -> BaseException:
    """The error for the reader; errors of the disk, and our own, stay as they are."""
    names, status = _names(error), status_of(error)
    if "OfflineModeIsEnabled" in names:
        return UnreachableError("offline")
    if names & (_NO_CONNECTION | _NO_ANSWER):
        return UnreachableError(_short(error))
    if status is not None:
        return _refusal(repository, names, status, error, attempts=attempts)
    if names & _NOT_OF_A_HUB:
        return no_hub(repository, _short(error))
    if "HFValidationError" in names:
        return RefusedError("not a hub id", where=repository.where, found=repository.name, expected=_short(error))
    return error


def _refusal(
    repository: Repository, names: set[str], status: int, error: BaseException, *, attempts: int
) -> RefusedError | UnreachableError:
    name, kind = repository.name, repository.kind
    what, found, expected, hint = f"the hub refuses this {kind}", f"{repository.name} ({status})", "", ""
    if "GatedRepoError" in names or status == 403:
        if "GatedRepoError" in names:
            what = f"the {kind} is gated, and this account has no access to it"
        expected, hint = "access", "accept its terms on its page on the hub, then `hf auth login` with that account"
    elif "RevisionNotFoundError" in names:
        what, found, expected = f"the {kind} has no such revision", name, "a branch, tag or commit of it"
        hint = "leave the revision out for the default branch"
    elif "EntryNotFoundError" in names:
        what, found, expected = f"the {kind} has no such file", f"{name}: {_short(error)}", "a file of its listing"
    elif "RepositoryNotFoundError" in names or status in (401, 404):
        what, expected = f"the hub has no {kind} of this name, or it is private", f"a {kind} that this account can read"
        hint = "check the spelling; for a private one `hf auth login`, or HF_TOKEN="
    elif status == 429:
        asked_s = _asked_wait_s(error)
        what, tries = "the hub limits how often it is asked", "try" if attempts == 1 else "tries"
        found += f" after {attempts} {tries}"
        found += f", asked to wait {asked_s:.0f} s" if asked_s is not None and asked_s > MAX_WAIT_S else ""
        hint = "wait a few minutes and run it again, or `hf auth login`: accounts may ask more often"
    elif status >= 500 or status == 408:
        return UnreachableError(f"the hub answers {status}, {attempts} times")
    else:
        found += f": {_short(error)}"
    return RefusedError(what, where=repository.where, found=found, expected=expected or None, hint=hint or None)


def _short(error: BaseException) -> str:
    """`ConnectTimeout: timed out`, within a line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines and lines[0] else type(error).__name__


@contextlib.contextmanager
def other_settings(module: Any, **values: object) -> Iterator[None]:
    """While the body runs, these settings of a library, which reads the environment only once, have other values."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


_listeners: list[Say] = []


def listen(say: Say) -> None:
    """Send notices of the hub to `say` from now on; the program does so once at its start."""
    _listeners[:] = [say]


def notice(text: str) -> None:
    """Send a notice while a configuration or data set is asked for; dropped where nobody listens."""
    for say in _listeners:
        say(text)


_SIGNED = re.compile(r"\?\S+")
"""Parts of an address that hold keys."""


@contextlib.contextmanager
def library_messages(tell: Say) -> Iterator[None]:
    """While the body runs, huggingface_hub draws no bars, and its warnings become notices, each once."""
    import logging  # with the library: `--help` needs neither

    from huggingface_hub import utils

    library: Any = utils  # its types do not name what it exports
    told: set[str] = set()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines = [line.strip() for line in record.getMessage().splitlines() if line.strip()]
            text = _SIGNED.sub("", f"the hub's client: {' '.join(lines)}")[:300]
            if text not in told:
                told.add(text)
                tell(text)

    logger = logging.getLogger("huggingface_hub")
    before, had_bars = logger.handlers[:], not library.are_progress_bars_disabled()
    logger.handlers[:] = [Handler(logging.WARNING)]
    if had_bars:
        library.disable_progress_bars()
    try:
        yield
    finally:
        logger.handlers[:] = before
        if had_bars:
            library.enable_progress_bars()
