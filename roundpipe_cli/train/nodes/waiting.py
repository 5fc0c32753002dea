"""Waiting for the other machines of a run: who is there, why one of them ended, and for whom this one waits.

They meet in a store, at which the first of them (or torchrun) listens. What waits for another machine never runs in the
main thread, which hears signals meanwhile. Two threads watch until the machine leaves:

    ticker     says for whom the run waits; ends one that was asked to stop and waits in vain
    listener   reads in the store why another machine ended, and which of them are behind
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from roundpipe_cli.errors import NodeLostError, Problem, RefusedError, RoundpipeError, StoppedError
from roundpipe_cli.events import Say
from roundpipe_cli.train.nodes.agreement import require_same
from roundpipe_cli.watchdog import interrupt, interruptible

TICK_S, LOOK_S = 0.25, 0.05
SAY_AFTER_S = 5.0
"""Waits that last longer are said, if none until now took half as long; a stop that was asked for waits as long."""
TELL_S, HEAR_S = 10.0, 2.0
"""How long a machine that ends waits for the others to come, and for those that came to hear why."""
SIGNALLED = 128
"""Exit codes of stopped runs are above it, by the signal's number."""
LONGEST_WAIT = timedelta(days=1)
"""Longest wait for the others where `watchdog_s` is 0."""
Answer = TypeVar("Answer")
stores: Any = dist
"""torch.distributed, whose types leave out the stores."""


class Waiting:
    """One machine's waits for the others, inside `with`; an error that leaves the block ends the others too."""

    def __init__(self, rank: int, count: int, say: Say) -> None:
        """
        Args:
            rank: of this machine.
            count: of machines.
            say: gets lines for the user; in any thread.
        """
        self.rank, self.count, self.say = rank, count, say
        self.timeout = LONGEST_WAIT
        self.may_resume: Callable[[], bool] | None = None
        """Whether there is a checkpoint; None: another machine knows."""
        self.store: Any = None
        self._requested: Callable[[], signal.Signals | None] = lambda: None
        self._is_host = self._has_met = False
        self._behind = [0] if rank else [*range(1, count)]
        """Ranks that are waited for."""
        self._waits: dict[int, tuple[str, float]] = {}
        """Thread -> what for, and since when."""
        self._num_waits = self._num_compared = 0
        self._longest_s = 0.0
        self._obstacle = "no answer"
        self._failure: RoundpipeError | None = None
        self._left = threading.Event()
        self._handler = contextlib.ExitStack()

    def __enter__(self) -> Waiting:
        if self.count > 1:
            self._handler.enter_context(interruptible())
            threading.Thread(target=self._tick, name="machines", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.count == 1:
            return
        is_refusal = isinstance(error, RoundpipeError) and not isinstance(error, StoppedError)
        if is_refusal and self.store is None:
            self.say(f"telling the other machines why this one ends; it waits {TELL_S:g} s for them")
            with contextlib.suppress(RuntimeError, RefusedError, KeyError, ValueError):
                self.store = _beside(self._connect, TELL_S)
        self.leave(error)
        if error is not None and self._is_host and self.store is not None:
            with contextlib.suppress(RuntimeError):
                _beside(self._until_heard, TELL_S if is_refusal and not self._has_met else HEAR_S)
        self._handler.close()

    def meet(self, facts: Mapping[str, Any], limit_s: float) -> None:
        """Find the other machines.

        Args:
            facts: see `compare`.
            limit_s: of this and of every later wait; 0 is a day.

        Raises:
            NodeLostError: one does not come.
            RefusedError: see `compare`, or the port is taken.
        """
        self.timeout = timedelta(seconds=limit_s) if limit_s else LONGEST_WAIT

        def find() -> None:
            self.store = self._connect()
            if self.store.add(f"taken/{self.rank}", 1) > 1:
                what = "two processes of the run say that they are the same machine"
                raise RefusedError(what, where="RANK", found=str(self.rank), expected="another on each machine")
            self.store.set(f"at/{self.rank}", "0")

        self.run(find, "to begin")
        self.compare(facts)
        self._has_met = True
        threading.Thread(target=self._listen, name="machines-news", daemon=True).start()

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Refuse facts that are not the same on all machines; called on all, in the same order.

        Raises:
            RecipeError: see `require_same`.
        """
        self._num_compared += 1
        topic = f"facts/{self._num_compared}"
        seen: dict[int, Mapping[str, Any]] = {}

        def gather() -> None:
            self.store.set(f"{topic}/{self.rank}", json.dumps(facts))
            while len(seen) < self.count and not self._left.is_set():
                for rank in set(range(self.count)) - set(seen):
                    if self.store.check([f"{topic}/{rank}"]):
                        seen[rank] = json.loads(self.store.get(f"{topic}/{rank}"))
                require_same(seen, self.count)
                if self.store.check(["failed"]):
                    raise self._read_failure()
                self._behind = sorted(set(range(self.count)) - set(seen))
                time.sleep(LOOK_S if self._behind else 0)

        self.run(gather, "to compare what is trained")

    def heed(self, requested: Callable[[], signal.Signals | None]) -> None:
        """Training begins: a signal that is only noted ends a wait that lasts much longer than any until now."""
        self._requested, self._longest_s = requested, 0.0

    def run(self, work: Callable[[], Answer], what: str) -> Answer:
        """The answer of `work`, which waits for other machines. In any thread.

        Raises:
            NodeLostError: one of them ended or does not answer.
            RoundpipeError: why another one ended, in its words.
        """
        thread, since = threading.get_ident(), time.monotonic()
        self._waits[thread] = (what, since)
        self._num_waits += 1
        try:
            if threading.current_thread() is threading.main_thread():
                return _beside(work, self.timeout.total_seconds(), lambda: self._obstacle)
            return work()
        except RuntimeError as error:  # torch raises this for a lost peer, a timeout and a refused connection
            deadline_s = time.monotonic() + HEAR_S
            while self._has_met and self._failure is None and time.monotonic() < deadline_s and not self._left.is_set():
                time.sleep(LOOK_S)
            if self._failure is not None:
                raise self._failure from None
            resume = " with --resume" if self.may_resume and self.may_resume() else ""
            resume = resume or (", with --resume if there is a checkpoint" if self.may_resume is None else "")
            raise NodeLostError(
                f"another process of this run ended or cannot be reached: {self._whom()} ({what})",
                where=f"machine {self.rank + 1} of {self.count}",
                found=str(error).strip().partition("\n")[0][:200],
                hint=f"its own output says why; start all of them again{resume}",
            ) from error
        finally:
            del self._waits[thread]
            self._longest_s = max(self._longest_s, time.monotonic() - since)

    def leave(self, error: BaseException | None = None) -> None:
        """Wait for no other machine from here on; they hear of `error`, if there is one."""
        if self.count == 1 or self._left.is_set():
            return
        self._left.set()
        error = getattr(error, "stopped", error)
        if self.store is None or error is None:
            return
        problems = (
            error.problems if isinstance(error, RoundpipeError) else [Problem(f"{type(error).__name__}: {error}")]
        )
        code = getattr(error, "exit_code", 1)
        told = json.dumps({"rank": self.rank, "code": code, "problems": [asdict(problem) for problem in problems]})

        def tell() -> None:
            self.store.compare_set("failed", "", told)
            self._note_heard()

        with contextlib.suppress(RuntimeError):
            _beside(tell, HEAR_S)

    # -- the store -----------------------------------------------------------------------------------------------

    def _connect(self) -> Any:
        """The store of this attempt of the run."""
        host, port = os.environ["MASTER_ADDR"].strip(), int(os.environ["MASTER_PORT"])
        self._is_host = self.rank == 0 and not has_launcher_store()
        listener = self._listen_at(host, port) if self._is_host else None
        while listener is None:  # torch would not say that nobody is there
            try:
                socket.create_connection((host, port), timeout=1.0).close()
                break
            except OSError as error:
                self._obstacle = f"{host}:{port}: {error.strerror or error}"
                if self._left.wait(TICK_S):
                    raise RuntimeError(self._obstacle) from error
        descriptor = None if listener is None else listener.detach()
        store = _open_store(host, port, self.timeout, descriptor)
        return stores.PrefixStore(f"roundpipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def _listen_at(self, host: str, port: int) -> socket.socket:
        """Listens at the given address alone, if this machine has it."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family)
            where = host
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RefusedError(
                    "the port for the other machines is taken",
                    where="MASTER_PORT",
                    found=f"{host}:{port}: {error.strerror}",
                    expected="a port that no other program listens at",
                    hint="name another one on every machine",
                ) from error
            listener, where = socket.create_server(("", port)), "all addresses"
        if not str(listener.getsockname()[0]).startswith("127."):
            self.say(f"note: the run listens for other machines at {where}, port {port}: trusted network only")
        return listener

    def _note_heard(self) -> None:
        self.store.set(f"heard/{self.rank}", "1")

    def _until_heard(self) -> None:
        """Wait until every other machine knows why this one ends."""
        while not all(self.store.check([f"heard/{rank}"]) for rank in range(self.count)):
            time.sleep(LOOK_S)

    def _read_failure(self) -> RoundpipeError:
        """Why another machine ended: its error, with its place."""
        told = json.loads(self.store.get("failed"))
        self._note_heard()
        problems = [Problem(**problem) for problem in told["problems"]]
        what, code = problems[0].what, int(told["code"])
        error = StoppedError(what, exit_code=code) if code > SIGNALLED else RoundpipeError(what)
        error.exit_code = code
        place = f"machine {told['rank'] + 1} of {self.count}"
        error.problems = tuple(
            Problem(one.what, f"{place}: {one.where}" if one.where else place, one.found, one.expected, one.hint)
            for one in problems
        )
        return error

    # -- threads -------------------------------------------------------------------------------------------------

    def _whom(self) -> str:
        ranks = self._behind or [rank for rank in range(self.count) if rank != self.rank]
        word = "machine" if len(ranks) == 1 else "machines"
        place = "" if self._has_met else f" at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return f"{word} {', '.join(str(rank + 1) for rank in ranks)} of {self.count}{place}"

    def _tick(self) -> None:
        said, asked_s = 0.0, None
        while not self._left.wait(TICK_S):
            if self._failure is not None:
                if not self._left.wait(HEAR_S):  # this machine may be about to end for the same reason
                    interrupt(self._failure)
                return
            now, patience_s = time.monotonic(), max(SAY_AFTER_S, 2 * self._longest_s)
            asked = self._requested()
            asked_s = now if asked and asked_s is None else asked_s
            for what, since in list(self._waits.values()):
                if now - since > patience_s and since > said:
                    said = since
                    self.say(f"waiting for {self._whom()} ({what})")
                if now - since > patience_s and asked and asked_s is not None and now - asked_s > SAY_AFTER_S:
                    text = f"stopped by {asked.name} while waiting for {self._whom()} ({what})"
                    interrupt(StoppedError(f"{text}; the last checkpoint is as it was", exit_code=SIGNALLED + asked))
                    return

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: whoever waits gets an error without us
            while not self._left.wait(TICK_S):
                self.store.set(f"at/{self.rank}", str(self._num_waits))
                if self.store.check(["failed"]):
                    self._failure = self._read_failure()
                    return
                at = [int(self.store.get(f"at/{rank}")) for rank in range(self.count)]
                self._behind = [rank for rank in range(self.count) if at[rank] < at[self.rank]]


def _beside(work: Callable[[], Answer], limit_s: float, obstacle: Callable[[], str] = lambda: "no answer") -> Answer:
    """The answer of `work`, which a thread carries out; while it is waited for, signals are heard.

    Raises:
        RuntimeError: it takes longer than `limit_s`.
    """
    answers: queue.Queue[tuple[Answer | None, BaseException | None]] = queue.Queue()

    def carry_out() -> None:
        try:
            answers.put((work(), None))
        except BaseException as error:  # passed on as a value
            answers.put((None, error))

    threading.Thread(target=carry_out, name="waits", daemon=True).start()
    try:
        answer, error = answers.get(timeout=limit_s)
    except queue.Empty:
        raise RuntimeError(f"{obstacle()} for {limit_s:g} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


# The store of torchrun outlives a restart of the run.

BEGUN_KEY = "roundpipe/begun"


def has_launcher_store() -> bool:
    """Whether torchrun listens at MASTER_ADDR, and not the first process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store(host: str, port: int, timeout: timedelta, listener: int | None = None) -> Any:
    is_server = listener is not None
    return stores.TCPStore(host, port, None, is_server, timeout, wait_for_workers=False, master_listen_fd=listener)


def _launcher_store() -> Any:
    host, port = os.environ["MASTER_ADDR"].strip(), int(os.environ["MASTER_PORT"])
    return _beside(lambda: _open_store(host, port, timedelta(seconds=TELL_S)), TELL_S)


def note_begun(output_dir: str) -> None:
    """Note for a restart that the run writes into this folder."""
    if has_launcher_store():
        _launcher_store().set(BEGUN_KEY, output_dir)


def began_before(output_dir: str) -> bool:
    """Whether a run that torchrun started again wrote into this folder before; without its store that is assumed."""
    if not has_launcher_store():
        return True
    store = _launcher_store()
    return bool(store.check([BEGUN_KEY]) and store.get(BEGUN_KEY).decode() == output_dir)
