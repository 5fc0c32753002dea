"""Parts of a run that fail, run out of memory or hang, at every fault point."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from roundpipe_cli.train.checkpoint.reading import load_newest
from tests.support.e2e import Outcome
from tests.torture.arena import Arena, Seen, assert_identical, go_on, saved, spread, start

ENDS_WITHIN_S = 10.0
IN_A_STEP = ("prefetch", "upload", "compute", "download", "optimizer")
STEPS = {"first": 0, "middle": 5, "last": 11}
SAVES = {"first": 2, "middle": 6, "last": 12}
PASSAGES = {"tokenize": (1, 1, 1), "load": (1, 9, 18), "export": (1, 3, 5)}
CODES = {"FaultError": 1, "MemoryError": 5, "FaultExit": 1, "OSError": 1}
DEVICES = {1: "[cpu]", 2: "[cpu,cpu]"}


def fault_texts(action: str) -> Iterator[tuple[str, str]]:
    """(fault point, value of ROUNDPIPE_FAULT) for each point at the first, middle and last step or passage."""
    for point in IN_A_STEP:
        for step in STEPS.values():
            yield point, f"{point}:{action}:step={step}:nth=1"
    for step in SAVES.values():
        yield "ckpt_writer", f"ckpt_writer:{action}:step={step}:nth=1"
    for point, passages in PASSAGES.items():
        for nth in dict.fromkeys(passages):
            yield point, f"{point}:{action}:nth={nth}"


def failing_parts(arena: Arena, count: int) -> Seen:
    """Every fault point at its first, middle and last passage, with 1 and 2 workers, four kinds of exception."""
    cases = [
        (point, text, kind, workers)
        for kind in CODES
        for point, text in fault_texts(f"raise={kind}")
        for workers in DEVICES
        if kind in ("FaultError", "MemoryError") or workers == 2
    ]
    cases = spread(cases, count)
    arena.reference()

    def attempt(index: int, draw: random.Random) -> None:
        point, text, kind, workers = cases[index]
        work, done = _run(arena, text, workers)
        code = 5 if kind == "OSError" and point in ("ckpt_writer", "export") else CODES[kind]
        assert done.code == code, f"{text}: exit code {done.code}, expected {code}\n{done.err}"
        check_block(done, text, ENDS_WITHIN_S * arena.patience)
        if point in IN_A_STEP[:-1]:
            assert "worker " in done.err and "layer " in done.err and "step " in done.err, done.err
        if saved(work):
            load_newest(work / "out", warn=_fail)
        go_on(work)
        assert_identical(work, arena.reference())
        shutil.rmtree(work)

    return Seen(len(cases), arena.each(len(cases), attempt), f"{len(IN_A_STEP) + 1 + len(PASSAGES)} fault points")


def hanging_parts(arena: Arena, count: int) -> Seen:
    """A part that never comes back, at every fault point: the watchdog ends the run with all stacks shown."""
    cases = spread([(point, text, workers) for point, text in fault_texts("hang") for workers in DEVICES], count)
    arena.reference()

    def attempt(index: int, draw: random.Random) -> None:
        point, text, workers = cases[index]
        work, done = _run(arena, text, workers, "watchdog_s=1.5")
        assert done.code == 1, f"{text}: exit code {done.code}\n{done.err}"
        assert "no progress" in done.err, done.err
        place = "processes.py" if point == "tokenize" and "processes.py" in done.err else "faults.py"
        assert place in done.err, done.err  # where it hangs, or where the helper process is waited for that hangs
        check_block(done, text, ENDS_WITHIN_S * arena.patience)
        go_on(work)
        assert_identical(work, arena.reference())
        shutil.rmtree(work)

    return Seen(len(cases), arena.each(len(cases), attempt), "watchdog at 1.5 s")


def check_block(done: Outcome, text: str, within_s: float) -> None:
    """One error block, no traceback, in time."""
    blocks = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(blocks) == 1, f"{text}: {len(blocks)} error blocks\n{done.err}"
    assert "Traceback" not in done.out + done.err, f"{text}: {done.err}"
    assert done.seconds < within_s, f"{text}: ended after {done.seconds:.1f} s"


def _run(arena: Arena, fault: str, workers: int, *words: str) -> tuple[Path, Outcome]:
    work = arena.workspace()
    words = (f"pipeline.devices={DEVICES[workers]}", *words)
    return work, start(work, *words, environment={"ROUNDPIPE_FAULT": fault}, before=copy_weights).finish()


def copy_weights() -> None:
    """CPU workers copy weights and gradients, as GPUs do, so that every fault point is passed."""
    from roundpipe_cli.engine.backends.cpu import CpuBackend
    from roundpipe_cli.train.prepare import devices

    devices.CpuBackend = functools.partial(CpuBackend, copy=True)  # type: ignore[misc,assignment]


def _fail(text: str) -> None:
    raise AssertionError(text)
