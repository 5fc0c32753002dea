"""The processes of a run on several machines: what they send each other (gloo), and how they wait for each other.

They meet in a store, at which the first of them (or torchrun) listens. Over lines (`lines`) the end of one ends all
waits of the others. No wait is in the main thread: that hears signals meanwhile. A thread, the ticker, says for whom
the run waits; it ends one that was asked to stop and waits in vain, and one that goes on beside another's end.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from concurrent.futures import TimeoutError as NoAnswerError
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from roundpipe_cli.errors import NodeLostError, Problem, RefusedError, RoundpipeError, StoppedError, redact_values
from roundpipe_cli.events import Say
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.checkpoint.reading import Checkpoint
from roundpipe_cli.train.nodes.agreement import recipe_facts, require_same
from roundpipe_cli.train.nodes.lines import Lines
from roundpipe_cli.watchdog import interrupt, interruptible

TICK_S, LOOK_S = 0.25, 0.05
SAY_AFTER_S, STOP_AFTER_S = 5.0, 3.0
"""Waits that last longer are said, if none until now took half as long; from then on a stop that was asked for waits as
long as the second."""
TELL_S, HEAR_S = 10.0, 2.0
"""How long a machine that ends waits for the others to come, and one that another's end reaches for its own words."""
GONE = "its connection ended without a goodbye"
SIGNALLED = 128
"""Exit codes of stopped runs are above it, by the signal's number."""
LONGEST_WAIT = timedelta(days=1)
"""Longest wait for the others where `watchdog_s` is 0."""
Answer = TypeVar("Answer")
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)}
stores: Any = dist
"""torch.distributed, whose types leave out the stores."""


class Nodes:
    """The processes of a run, as a context manager: an error that leaves it ends the others too.

    A single process sends nothing and gets its own values back.
    """

    def __init__(self, rank: int = 0, count: int = 1, say: Say = lambda text: None) -> None:
        """`say` gets lines for the user about the other processes, in any thread."""
        self.rank, self.count, self.say = rank, count, say
        self._timeout = LONGEST_WAIT
        self.may_resume: Callable[[], bool] | None = None
        """Whether there is a checkpoint; None: another machine knows."""
        self._requested: Callable[[], signal.Signals | None] = lambda: None
        self._needs_nobody = False
        self._waits: dict[int, tuple[str, float]] = {}
        """Thread -> what for, and since when."""
        self._at: dict[int, int] = {}
        """Rank -> waits that it has begun."""
        self._num_waits, self._num_compared, self._longest_s = 0, 0, 0.0
        self._obstacle = "no answer"
        self.lines = Lines(rank, self._take)
        self._failure: RoundpipeError | None = None
        self._dead: int | None = None
        self._over: Future[Any] = Future()
        """Done when this process, or another one, leaves or fails: every wait ends."""
        self._first_left = threading.Event()
        self.lost: list[tuple[int, Any]] = []
        """Ranks, and their words about devices."""
        self._left = threading.Event()
        self._handler = contextlib.ExitStack()
        self._store = self._weights = self._state = None  # type: Any

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def __enter__(self) -> Nodes:
        if self.count > 1:
            self._handler.enter_context(interruptible())
            threading.Thread(target=self._tick, name="machines", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.count == 1:
            return
        is_refusal = isinstance(error, RoundpipeError) and not isinstance(error, (StoppedError, NodeLostError))
        if is_refusal and self._store is None:
            self.say(f"telling the other machines why this one ends; it waits {TELL_S:g} s for them")
            with contextlib.suppress(RuntimeError, OSError, RefusedError, KeyError, ValueError, NoAnswerError):
                in_thread(self._reach, "waits").result(TELL_S)
        self.leave(error)
        self.lines.say("left")
        if dist.is_initialized():
            dist.destroy_process_group()
        self._handler.close()

    def meet(self, recipe: Recipe) -> None:
        """Find the other processes, before anything that is named below.

        Raises:
            NodeLostError: one does not come.
            RefusedError: see `check_same`, or the port is taken.
        """
        self._timeout = timedelta(seconds=recipe.watchdog_s) if recipe.watchdog_s else LONGEST_WAIT
        self._run(self._connect, "to begin")
        self.check_same(lambda: {"WORLD_SIZE": self.count, **recipe_facts(recipe)})
        store, place = stores.PrefixStore("gloo", self._store), {"rank": self.rank, "world_size": self.count}
        self._run(lambda: stores.init_process_group("gloo", store=store, timeout=self._timeout, **place), "to connect")

    def check_same(self, make_facts: Callable[[], Mapping[str, Any]]) -> None:
        """Raise a RecipeError for machines that train different things; called on all, in the same order."""
        if self.count == 1:
            return
        facts = redact_values(make_facts())
        self._num_compared += 1
        topic = f"facts/{self._num_compared}"
        seen: dict[int, Mapping[str, Any]] = {}

        def gather() -> None:
            self._store.set(f"{topic}/{self.rank}", json.dumps(facts))
            while len(seen) < self.count and not self._left.is_set():
                for rank in set(range(self.count)) - set(seen):
                    if self._store.check([f"{topic}/{rank}"]):
                        seen[rank] = json.loads(self._store.get(f"{topic}/{rank}"))
                require_same(seen, self.count)
                time.sleep(LOOK_S if len(seen) < self.count else 0)

        self._run(gather, "to compare what is trained")

    def heed(self, requested: Callable[[], signal.Signals | None]) -> None:
        """Training begins: a signal that is only noted ends a wait that lasts much longer than any until now."""
        self._requested, self._longest_s = requested, 0.0

    def _run(self, work: Callable[[], Answer], what: str) -> Answer:
        """The answer of `work`, which waits for other machines. In any thread.

        Raises:
            NodeLostError: one of them ended or does not answer.
            RoundpipeError: why another one ended, in its words.
        """
        thread, since = threading.get_ident(), time.monotonic()
        self._waits[thread] = (what, since)
        self._num_waits += 1
        try:
            answer, limit_s = in_thread(work, "waits"), self._timeout.total_seconds()
            wait([answer, self._over], limit_s, FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise RuntimeError(GONE if self._over.done() else f"{self._obstacle} for {limit_s:g} s")
        except (RuntimeError, OSError) as error:  # torch raises the first for a lost peer and a timeout
            wait([self._over], HEAR_S if self.lines.open else 0)
            raise self._why(what, str(error)) from error
        finally:
            del self._waits[thread]
            self._longest_s = max(self._longest_s, time.monotonic() - since)

    def _why(self, what: str, found: str) -> RoundpipeError:
        """The error that ends a wait: another process' own, or that it died or is not reached."""
        if self._failure is not None:
            return self._failure
        resume = ", with --resume if there is a checkpoint" if self.may_resume is None else ""
        resume = " with --resume" if self.may_resume and self.may_resume() else resume
        return NodeLostError(
            f"another process of this run ended or cannot be reached: {self._whom()} ({what})",
            where=f"machine {self.rank + 1} of {self.count}",
            found=found.strip().partition("\n")[0][:200],
            hint=f"its own output says why; start all of them again{resume}",
        )

    def fail(self, error: RoundpipeError | None) -> None:
        """End every wait with this error; the main thread raises it soon. In any thread."""
        with contextlib.suppress(InvalidStateError):
            self._failure = self._failure or error
            self._over.set_result(None)

    def finish(self) -> None:
        """All steps are done. The first process needs nobody from here on; the others wait until it leaves, so that all
        begin again where it dies before its result is written."""
        self._needs_nobody, self._timeout = self.is_first, LONGEST_WAIT
        if not self.is_first:
            self._run(self._first_left.wait, "the result")
            if self._failure is not None:  # told just before the first left
                raise self._failure

    def leave(self, error: BaseException | None = None) -> None:
        """Wait for no other machine from here on; they hear of `error`, if there is one that they do not know."""
        if self.count == 1 or self._left.is_set():
            return
        self._left.set()
        self.fail(None)
        error = getattr(error, "stopped", error)
        if error is None or (self._dead is not None and isinstance(error, NodeLostError)):
            return
        problems = (
            error.problems if isinstance(error, RoundpipeError) else [Problem(f"{type(error).__name__}: {error}")]
        )
        code = getattr(error, "exit_code", 1)
        self.lines.say("failed", {"code": code, "problems": redact_values([*map(asdict, problems)])})

    # -- values and tensors -------------------------------------------------------------------------------------------

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums over all processes, in float64, with equal bits on each."""
        return [float(value) for value in self._reduced(values, torch.float64, dist.ReduceOp.SUM)]

    def most(self, values: Sequence[int]) -> list[int]:
        """The maximum of each value over all processes."""
        return [int(value) for value in self._reduced(values, torch.int64, dist.ReduceOp.MAX)]

    def _reduced(self, values: Sequence[float], dtype: torch.dtype, operation: Any) -> list[float]:
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=dtype)
        self._run(lambda: dist.all_reduce(tensor, operation), "a step's border")
        return list(tensor.tolist())

    def add_up(self, tensor: torch.Tensor, owner: int | None = None) -> None:
        """Replace a host tensor by its sum over all processes, with the same bits on each; with `owner`, the only
        process that wants it, anything is left in it elsewhere."""
        work: Callable[[torch.Tensor], Any] = dist.all_reduce if owner is None else partial(dist.reduce, dst=owner)
        self._run(partial(work, tensor), "summing gradients")

    def open_links(self) -> None:
        """Make `share`, `send_to_first` and `receive_like` possible; on all processes."""
        self._weights, self._state = (dist.new_group(timeout=self._timeout) for _ in range(2))

    def share(self, tensor: torch.Tensor, owner: int) -> None:
        """Replace a contiguous host tensor by its owner's. May run beside calls of other methods."""
        content = tensor.view(torch.uint8)
        self._run(lambda: dist.broadcast(content, owner, group=self._weights), "sending new weights round")

    def send_to_first(self, tensor: torch.Tensor) -> None:
        """Send a contiguous host tensor to the first process, which calls `receive_like`."""
        content = tensor.reshape(-1).view(torch.uint8)
        if content.numel():
            self._run(lambda: dist.send(content, 0, group=self._state), "collecting a checkpoint")

    def receive_like(self, tensor: torch.Tensor, sender: int) -> torch.Tensor:
        """The tensor that `sender` sends, of the shape and type of `tensor`."""
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        content = received.view(-1).view(torch.uint8)
        if content.numel():
            self._run(lambda: dist.recv(content, sender, group=self._state), "collecting a checkpoint")
        return received

    def from_first(self, document: Any) -> Any:
        """The first process' JSON document, on all."""
        if self.count == 1:
            return document
        content = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self._run(lambda: dist.broadcast(size, 0), "the first process' word")
        if not self.is_first:
            content = torch.empty(int(size), dtype=torch.uint8)
        self._run(lambda: dist.broadcast(content, 0), "the first process' word")
        return json.loads(bytes(content.numpy()))

    def share_checkpoint(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """The first process' checkpoint, on all; the others need not see its files."""
        if self.count == 1:
            return checkpoint
        head: Any = None
        if checkpoint is not None:
            kinds = {
                group: {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
                for group, tensors in checkpoint.tensors.items()
            }
            head = [str(checkpoint.folder), checkpoint.step, checkpoint.meta, kinds]
        if (head := self.from_first(head)) is None:
            return None
        if checkpoint is None:
            folder, step, meta, kinds_of = head
            received = {
                group: {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in kinds.items()}
                for group, kinds in kinds_of.items()
            }
            checkpoint = Checkpoint(Path(folder), step, meta, received)
        for tensor in itertools.chain.from_iterable(group.values() for group in checkpoint.tensors.values()):
            self._run(partial(dist.broadcast, tensor, 0), "the checkpoint")
        return checkpoint

    # -- the store -----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        host, port = _address()
        own_host, is_host = host, self.rank == 0 and not _launcher_listens()
        listener = self._listen_at(host, port) if is_host else None
        while listener is None:  # torch would not say that nobody is there
            try:
                with socket.create_connection((host, port), timeout=1.0) as probe:
                    own_host = host if probe.getsockname()[0] == probe.getpeername()[0] else probe.getsockname()[0]
                break
            except OSError as error:
                self._obstacle = f"{host}:{port}: {error.strerror or error}"
                if self._left.wait(TICK_S):
                    raise RuntimeError(self._obstacle) from error
        if listener is not None and listener.getsockname()[0] == "0.0.0.0":
            host = "127.0.0.1"  # this machine may not have the address that the others know it by
        descriptor = None if listener is None else listener.detach()
        is_server, options = descriptor is not None, {"wait_for_workers": False, "master_listen_fd": descriptor}
        store = stores.TCPStore(host, port, None, is_server, self._timeout, **options)
        attempt = f"roundpipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        number = store.add(f"{attempt}/{self.rank}", 1)  # one torchrun may start several runs, one after the other
        if number > 1 and not _launcher_listens():
            what = "two processes of the run say that they are the same machine"
            raise RefusedError(what, where="RANK", found=str(self.rank), expected="another on each machine")
        self._store = store = stores.PrefixStore(f"{attempt}/{number}", store)
        if self.is_first:
            own = self._listen_at(own_host, 0)
            in_thread(partial(self.lines.listen, own), "lines")
            store.set("line", json.dumps([own_host, own.getsockname()[1]]))
            return
        while not store.check(["line"]) and not self._left.wait(LOOK_S):
            pass
        self.lines.open[0] = line = socket.create_connection(tuple(json.loads(store.get("line"))), TELL_S)
        self.lines.keep(line, 0)
        self.lines.say("here")

    def _reach(self) -> None:
        """Meet the others only to tell them why this process ends."""
        self._connect()
        while self.is_first and len(self.lines.open) < self.count - 1:
            time.sleep(LOOK_S)

    def _listen_at(self, host: str, port: int) -> socket.socket:
        """Listens at the given address alone, if this machine has it and others can reach it."""
        where, family = "", socket.AF_INET
        with contextlib.suppress(OSError):
            family, _, _, _, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # Many machines give their own name an address that only they themselves reach.
            where = "" if str(address).startswith("127.") and host not in ("localhost", address) else host
        try:
            try:
                listener = socket.create_server((where, port), family=family)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
                where, listener = "", socket.create_server(("", port))
        except OSError as error:
            raise RefusedError(
                "the port for the other machines cannot be used",
                where="MASTER_PORT",
                found=f"{host}:{port}: {os.strerror(error.errno or 0)}",
                expected="a port that no other program listens at",
                hint="name another one on every machine",
            ) from error
        if not str(listener.getsockname()[0]).startswith("127."):
            text = f"the run listens for other machines at {where or 'all addresses'}, port {port}"
            self.say(f"note: {text}: trusted network only")
        return listener

    def _take(self, kind: str, rank: int, rest: Any) -> None:
        """Take a word of another process, or that it died."""
        if kind == "at":
            self._at[rank] = rest
        elif kind == "lost":
            self.lost.append((rank, rest))
        elif kind == "left" and rank == 0:
            self._first_left.set()
        elif kind in ("failed", "died") and not self._over.done():
            self._dead = rank if kind == "died" else None
            self.fail(self._read_failure(rank, rest) if rest else None)

    def _read_failure(self, rank: int, told: Mapping[str, Any]) -> RoundpipeError:
        """Why another machine ended: its error, with its place."""
        problems = [Problem(**problem) for problem in told["problems"]]
        what, code = problems[0].what, int(told["code"])
        error = StoppedError(what, exit_code=code) if code > SIGNALLED else RoundpipeError(what)
        error.exit_code = code
        place = f"machine {rank + 1} of {self.count}"
        error.problems = tuple(replace(one, where=": ".join(filter(None, (place, one.where)))) for one in problems)
        return error

    # -- threads -------------------------------------------------------------------------------------------------

    def _whom(self) -> str:
        others = [rank for rank in range(self.count) if rank != self.rank] if self.lines.open or self.is_first else [0]
        behind = [rank for rank in others if self._at.get(rank, 0) < self._num_waits]
        ranks = [self._dead] if self._dead is not None else behind or others
        word = "machine" if len(ranks) == 1 else "machines"
        place = "" if dist.is_initialized() else f" at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return f"{word} {', '.join(str(rank + 1) for rank in ranks)} of {self.count}{place}"

    def _tick(self) -> None:
        said, asked_s = 0.0, None
        while not self._left.wait(TICK_S) and not self._needs_nobody:
            self.lines.say("at", self._num_waits)
            if self._over.done():
                if not self._left.wait(HEAR_S):  # this machine may be about to end for the same reason
                    interrupt(self._why("this one was at work", GONE))
                return
            now, patience_s = time.monotonic(), max(SAY_AFTER_S, 2 * self._longest_s)
            asked = self._requested()
            asked_s = now if asked and asked_s is None else asked_s
            for what, since in list(self._waits.values()):
                if now - since > patience_s and since > said:
                    said = since
                    self.say(f"waiting for {self._whom()} ({what})")
                if now - since > patience_s and asked and asked_s is not None and now - asked_s > STOP_AFTER_S:
                    text = f"stopped by {asked.name} while waiting for {self._whom()} ({what})"
                    interrupt(StoppedError(f"{text}; the last checkpoint is as it was", exit_code=SIGNALLED + asked))
                    return


def in_thread(work: Callable[[], Answer], name: str) -> Future[Answer]:
    """The answer of `work`, or its error, which a daemon thread carries out."""
    answer: Future[Answer] = Future()

    def carry_out() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # passed on as a value
            answer.set_exception(error)

    threading.Thread(target=carry_out, name=name, daemon=True).start()
    return answer


def _launcher_listens() -> bool:
    """Whether torchrun listens at MASTER_ADDR, and not the first process. Its store outlives a restart of the run."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"].strip(), int(os.environ["MASTER_PORT"])


def has_begun(output_dir: str, *, now: bool = False) -> bool:
    """Whether a run that torchrun starts again wrote into this folder before; where torchrun cannot know, it did.
    With `now`, it does from now on."""
    if not _launcher_listens():
        return True
    with contextlib.suppress(RuntimeError, KeyError, ValueError, NoAnswerError):
        limit, options = timedelta(seconds=TELL_S), {"wait_for_workers": False}
        store = in_thread(lambda: stores.TCPStore(*_address(), None, False, limit, **options), "waits").result(TELL_S)
        return int(store.add(f"roundpipe/begun/{output_dir}", int(now))) > 0
    return False
