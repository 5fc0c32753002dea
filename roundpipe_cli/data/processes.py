"""Child processes that render and tokenise: they use several cores, and no chat template runs in the main process.

A template is an untrusted program. It runs in jinja2's sandbox, in a child without open files,
with `MAX_RENDER_S` of processor time for a conversation and `MAX_MEMORY_BYTES` on top of what the child began with.

Children are forked, so that they need not load anything; they end with their parent, whatever ends it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, cast

from roundpipe_cli.data.formats import RowFormat
from roundpipe_cli.data.row_chunks import ChunkResult, RowEncoder
from roundpipe_cli.data.rows import RawRow
from roundpipe_cli.data.settings import DataSettings
from roundpipe_cli.data.templates import find_template
from roundpipe_cli.data.turns import TurnEnds
from roundpipe_cli.errors import InternalError, RefusedError, ResourceError, RoundpipeError
from roundpipe_cli.limited import Limits, OutOfTime, leave_parent, processor_limit, signals_held
from roundpipe_cli.units import format_bytes
from roundpipe_cli.watchdog import at_work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_RENDER_S = 2.0
"""Processor time for one conversation, all its renderings together."""
MAX_MEMORY_BYTES = 2 * 1024**3
"""Address space that a child may take."""
MAX_WORKERS = 16
CHUNKS_AHEAD = 4
"""Chunks for each child that are given out before the oldest is done: bounds memory, and hides that chunks differ."""

Chunk = tuple[RowFormat | None, list[RawRow], bool]
"""Format, rows, and whether they are only counted: the arguments of `RowEncoder.encode`."""


@dataclass
class _Child:
    process: BaseProcess
    connection: Connection
    place: str = "datasets"
    """File and rows of its current chunk."""


class EncoderPool:
    """Child processes with a `RowEncoder` each. Use it inside `with`; the first child starts when it is needed."""

    def __init__(
        self, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, num_workers: int | None = None
    ) -> None:
        """
        Args:
            num_workers: children at most; None: as many as this process has cores.

        Raises:
            RefusedError: as of `find_template`.
        """
        self._settings = settings
        self._tokenizer = tokenizer
        given = (settings.chat_template, settings.folder, settings.chat_template_kwargs)
        template = find_template(tokenizer, *given)
        self.templates = (template, template and find_template(tokenizer, *given, with_tools=True))
        """For rows without tools, and with them."""
        self._max_children = num_workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self._children: list[_Child] = []

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(self, *_: object) -> None:
        with signals_held():
            for child in self._children:
                child.process.kill()
            for child in self._children:
                child.process.join()
                child.connection.close()
            self._children.clear()

    def ends(self) -> TurnEnds | None:
        """How the chat template in force ends turns; None without one.

        Raises:
            RefusedError: it is not valid, or too slow, or too large.
        """
        child = self._children[0] if self._children else self._start()
        self._send(child, None)
        return cast("TurnEnds | None", _value(self._reply(child)))

    def encode(self, chunks: Iterable[Chunk], name: str = "datasets") -> Iterator[ChunkResult]:
        """The result of each chunk, in their order; a child that is free gets the next one.

            given out    0 1 2 3 4 5 6 7        at most `CHUNKS_AHEAD` for each child, counted from the first
            results      . 1 2 3 . 5            one that is not yet yielded: 0, here. Errors wait for their turn, too.

        Args:
            name: of the file or dataset, for errors.

        Raises:
            RefusedError: the chat template went beyond its limits.
            ResourceError: a child was killed, probably for want of memory.
            InternalError: a child failed.
        """
        left, is_read, num_given, num_yielded = iter(chunks), False, 0, 0
        free, working, replies = [*self._children], dict[Connection, tuple[int, _Child]](), dict[int, object]()
        while True:
            while num_given - num_yielded < CHUNKS_AHEAD * self._max_children and not is_read:
                if not free and len(self._children) == self._max_children:
                    break
                chunk = next(left, None)
                if chunk is None:
                    is_read = True
                    break
                child = free.pop() if free else self._start()
                child.place = _place(name, chunk[1])
                self._send(child, (*chunk, child.place))
                working[child.connection] = num_given, child
                num_given += 1
            if num_yielded == num_given:
                return
            with at_work("tokenising rows"):  # the watchdog ends a run whose children are stuck
                ready = wait([*working], 0 if num_yielded in replies else None) if working else []
            for connection in ready:
                index, child = working.pop(cast("Connection", connection))
                replies[index] = reply = self._reply(child)
                free.append(child)
                is_read = is_read or isinstance(reply, RoundpipeError)  # nothing behind it is asked for
            if not ready:
                yield cast("ChunkResult", _value(replies.pop(num_yielded)))
                num_yielded += 1

    def _send(self, child: _Child, request: object) -> None:
        with at_work("handing rows to a tokenising process"), suppress(BrokenPipeError):  # it died, see `_reply`
            child.connection.send(request)

    def _reply(self, child: _Child) -> object:
        """The child's result, or its error, or the one that says how it died."""
        try:
            with at_work("tokenising rows"):
                return child.connection.recv()
        except (EOFError, OSError):  # no reply, or the beginning of one
            child.process.join()
            return _died(child.process.exitcode, child.place)

    def _start(self) -> _Child:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        given = (theirs, self._settings, self._tokenizer, self.templates)
        process = context.Process(
            target=_serve, args=given, kwargs={"parent_pid": os.getpid()}, name="roundpipe-tokenise"
        )
        child = _Child(process, ours)
        with signals_held():  # Python would wait for ever at its end for a child that is not in the list
            process.start()
            self._children.append(child)
        theirs.close()
        return child


def _value(reply: object) -> object:
    if isinstance(reply, RoundpipeError):
        raise reply
    return reply


def _slow_template() -> RefusedError:
    hint = "chat_template: path/to/template.jinja"
    return Limits("the chat template", "chat_template", MAX_RENDER_S, hint=hint).too_slow()


def _place(name: str, rows: Sequence[RawRow]) -> str:
    if len(rows) < 2:
        return f"{name}: row {rows[0].number}" if rows else name
    return f"{name}: rows {rows[0].number} to {rows[-1].number}"


def _died(exit_code: int | None, place: str) -> RoundpipeError:
    number = -(exit_code or 0)
    if number == signal.SIGPROF:
        return _slow_template()
    if number <= 0:
        return InternalError(f"a tokenising process left with exit code {exit_code}", where=place)
    name = signal.Signals(number).name if number in {item.value for item in signal.Signals} else f"signal {number}"
    return ResourceError(
        f"a tokenising process was ended by {name}",
        where=place,
        found="the system ends processes this way when memory runs out"
        if number == signal.SIGKILL
        else "this can happen where memory runs out",
        hint="close other programs, or look for rows of many megabytes",
    )


# --- in the child ---------------------------------------------------------------------------------------------------


def _serve(
    connection: Connection,
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    templates: Sequence[str | None],
    *,
    parent_pid: int,
) -> None:
    """Answer requests until the parent closes the connection or is gone."""
    leave_parent(connection, MAX_MEMORY_BYTES)
    if os.getppid() != parent_pid:  # it was gone before the kernel was asked to end us with it
        return
    encoder: RowEncoder | None = None
    with suppress(EOFError, ConnectionError):
        while True:
            request = connection.recv()
            reply: object
            try:
                encoder = encoder or RowEncoder(settings, tokenizer, templates, lambda: processor_limit(MAX_RENDER_S))
                reply = encoder.ends() if request is None else encoder.encode(*request[:2], count_only=request[2])
            except RoundpipeError as error:
                reply = error
            except OutOfTime:
                reply = _slow_template()
            except MemoryError:
                reply = ResourceError(
                    "a tokenising process is out of memory",
                    where=request[3] if request else "chat_template",
                    found=f"more than {format_bytes(MAX_MEMORY_BYTES)} for these rows",
                    hint="look for rows of many megabytes",
                )
            except BaseException as error:  # nothing above would turn it into a message
                place, rows = traceback.extract_tb(error.__traceback__)[-1], request[3] if request else "datasets"
                text = f"tokenising failed: {type(error).__name__}: {error}"
                reply = InternalError(text, where=rows, found=f"at {place.filename}:{place.lineno}")
            connection.send(reply)
