"""Runs work that an untrusted file decides (a template, a regular expression) in a child process with limits.

    template = run_limited(lambda: render(...), Limits("the chat template", where="chat_template"))

The child has no open files of ours, `processor_s` of processor time and `memory_bytes` beside what it began with:

    soft limit   SIGVTALRM, raises in Python code      hard limit   SIGPROF, ends the child (it was in C code)

A child that is stopped from outside is ended after `wall_s`. Children are forked, so that they need not load anything;
they end with their parent, whatever ends it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar, cast

from roundpipe_cli.errors import InternalError, RefusedError, RoundpipeError
from roundpipe_cli.units import format_bytes

PR_SET_PDEATHSIG = 1
WALL_S = 60.0
"""Wall time for work of at most `processor_s`; the machine may be busy."""

T = TypeVar("T")


class OutOfTime(BaseException):
    """Raised inside the work. Not an Exception, so that no handler in between catches it."""


@dataclass(frozen=True)
class Limits:
    """Limits of a piece of work, and its name."""

    what: str
    """For errors: `the chat template`."""
    where: str
    processor_s: float = 2.0
    memory_bytes: int = 2 * 1024**3
    hint: str | None = None
    wall_s: float = WALL_S
    """Longest wait for the child, which may be stopped from outside."""

    def refusal(self, problem: str, found: str) -> RefusedError:
        return RefusedError(f"{self.what} {problem}", where=self.where, found=found, hint=self.hint)

    def too_slow(self) -> RefusedError:
        return self.refusal("takes too long", f"more than {self.processor_s:g} s of processor time")


def run_limited(work: Callable[[], T], limits: Limits) -> T:
    """The result of `work`, which runs in a child; what it changes is lost.

    Raises:
        RefusedError: it went beyond its limits, or the child was killed.
        RoundpipeError: as `work` raised it; any other exception is an InternalError.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work, limits, os.getpid()), name="roundpipe-limited")
    with signals_held(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on forks beside threads: the child runs Python only
        process.start()
    theirs.close()
    ended = threading.Event()

    def end() -> None:
        ended.set()
        process.kill()

    overdue = threading.Timer(limits.wall_s, end)
    overdue.daemon = True
    overdue.start()  # a timer, since the child may be stopped while it sends: then the reply begins and never ends
    try:
        is_value, reply = ours.recv()
    except (EOFError, OSError):  # no reply, or the beginning of one
        process.join()
        if ended.is_set():
            raise limits.refusal("does not end", f"no result within {limits.wall_s:g} s") from None
        if process.exitcode == -signal.SIGPROF:
            raise limits.too_slow() from None
        raise limits.refusal("ended its process", f"exit code {process.exitcode}") from None
    finally:
        with signals_held():
            overdue.cancel()
            process.kill()
            process.join()
            overdue.join()
            ours.close()
    if not is_value:
        raise reply
    return cast("T", reply)


def _serve(connection: Connection, work: Callable[[], object], limits: Limits, parent_pid: int) -> None:
    leave_parent(connection, limits.memory_bytes)
    if os.getppid() != parent_pid:  # it was gone before the kernel was asked to end us with it
        return
    reply: object
    is_value = False
    try:
        with processor_limit(limits.processor_s):
            reply = work()
        is_value = True
    except RoundpipeError as error:
        reply = error
    except OutOfTime:
        reply = limits.too_slow()
    except MemoryError:
        reply = limits.refusal("takes too much memory", f"more than {format_bytes(limits.memory_bytes)}")
    except BaseException as error:  # nothing above would turn it into a message
        reply = InternalError(f"{limits.what} failed: {type(error).__name__}: {error}", where=limits.where)
    with suppress(ConnectionError):
        connection.send((is_value, reply))


def leave_parent(connection: Connection, memory_bytes: int) -> None:
    """Drop what a forked process should not have of its parent: signal handlers, open files, unlimited memory."""
    faulthandler.disable()  # the parent reports how the child ended
    for number in (signal.SIGINT, signal.SIGHUP):  # sent to the whole group of a terminal; the parent decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    keep = connection.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, max(keep + 1, min(os.sysconf("SC_OPEN_MAX"), 65536)))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process each; and threads do not survive a fork
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGVTALRM, _out_of_time)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _out_of_time(*_: object) -> None:
    raise OutOfTime


@contextmanager
def processor_limit(limit_s: float) -> Iterator[None]:
    """After `limit_s` of processor time OutOfTime is raised; after half as much again the process ends."""
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    signal.setitimer(signal.ITIMER_PROF, 1.5 * limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def signals_held() -> Iterator[None]:
    """Handlers run after the block, which is brief. Python would also run them in the callbacks around a fork, where
    what they raise is printed and lost."""
    if threading.current_thread() is not threading.main_thread():  # no handler runs here
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ours = [number for number, handler in before.items() if callable(handler)]
    for number in ours:
        signal.signal(number, lambda late, _: came.append(late))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
        for late in came:
            signal.raise_signal(late)
