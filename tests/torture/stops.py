"""Signals: Ctrl-C, a closed terminal, SIGTERM; at random moments and in every phase."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.e2e import Outcome
from tests.torture.arena import (
    Arena,
    Seen,
    assert_identical,
    at_a_moment,
    check_newest,
    go_on,
    inside_a_save,
    saved,
    start,
)
from tests.torture.terminal import in_terminal

SLOW = {"ROUNDPIPE_FAULT": "optimizer:slow=0.03,ckpt_writer:slow=0.01"}
SLOW_STEPS = {"ROUNDPIPE_FAULT": "optimizer:slow=0.25"}
FIRST_S = 0.05  # Before, a run is Python that starts, and has no handlers yet
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
STOPPED = re.compile(r"after step (\d+) of \d+, with a checkpoint")


def hangup(arena: Arena, count: int) -> Seen:
    def stop(work: Path, after_s: float) -> Outcome:
        with in_terminal(work, SLOW) as (running, terminal):
            running.process.join(after_s)
            terminal.close()
            return running.finish()

    return _stopped_at_random(arena, count, stop, signal.SIGHUP)


def ctrl_c(arena: Arena, count: int, again_s: tuple[float, ...] = (), environment: Mapping[str, str] = SLOW) -> Seen:
    """Ctrl-C at a terminal at a random moment, and again after so many seconds; then resume, but for one try of two."""

    def stop(work: Path, after_s: float) -> Outcome:
        with in_terminal(work, environment) as (running, terminal):
            for wait_s in (after_s, *again_s):
                running.process.join(wait_s)
                if running.process.is_alive():
                    terminal.press_ctrl_c()
            return dataclasses.replace(running.finish(), err=terminal.text)

    return _stopped_at_random(arena, count, stop, signal.SIGINT, environment, resumes=count > 1 or not again_s)


ctrl_c_twice = functools.partial(ctrl_c, again_s=(0.2,), environment=SLOW_STEPS)  # before the step can have ended


def _stopped_at_random(
    arena: Arena,
    count: int,
    stop: Callable[[Path, float], Outcome],
    number: signal.Signals,
    environment: Mapping[str, str] = SLOW,
    *,
    resumes: bool = True,
) -> Seen:
    """Stop a run at a random moment of it, check what it says and leaves behind, let it go on."""
    whole_s = arena.seconds("lora", environment, count)
    reference = arena.reference()
    ends: list[Outcome] = []

    def attempt(index: int, draw: random.Random) -> None:
        work = arena.workspace()

        def once(after_s: float) -> Outcome:
            shutil.rmtree(work / "out", ignore_errors=True)
            return stop(work, after_s)

        done = at_a_moment(whole_s, draw, once, FIRST_S)
        check_stop(work, done, number)
        ends.append(done)
        if resumes:
            go_on(work)
            assert_identical(work, reference)
        shutil.rmtree(work)

    failures = arena.each(count, attempt)
    codes = Counter(done.code for done in ends).most_common()
    at_once = sum("second SIGINT" in done.err for done in ends)
    note = ", ".join(f"{many} ended with {code}" for code, many in codes)
    return Seen(count, failures, note + (f", {at_once} at once" if at_once else ""))


def check_stop(work: Path, done: Outcome, number: signal.Signals) -> None:
    """The exit code is that of the signal, and what it says about a checkpoint is true."""
    text = done.out + done.err
    assert "Traceback" not in text, text
    if done.code == -number:  # before the program had a handler, or after it had put it back
        ended = (work / "out" / "report.json").exists() or STOPPED.search(text) or "stopped at once" in text
        assert not saved(work) or ended, text
    elif done.code == 0:
        assert (work / "out" / "report.json").exists(), text
    else:
        assert done.code == EXIT_CODES[number], f"exit code {done.code}\n{text}"
        if number == signal.SIGHUP:
            pass  # nobody left to tell
        elif stopped := STOPPED.search(text):
            assert check_newest(work) == int(stopped.group(1)), text
        else:
            said = "no new checkpoint was written" in text or "stopped at once" in text or "stopped by SIGINT" in text
            assert said, f"exit code {done.code}, and nothing said why\n{text}"
        if "no new checkpoint was written" in text:
            assert not saved(work), text
    at_once = "stopped at once" in text  # then the next start removes what a save has begun
    assert at_once or not inside_a_save(work), "a half-written checkpoint was left behind"
    if saved(work):
        check_newest(work)


PHASES = {
    "loading": ("weights ...", {"ROUNDPIPE_FAULT": "load:slow=0.1"}),
    "tokenising": ("tokenising", {"ROUNDPIPE_FAULT": "tokenize:slow=2"}),
    "first step": ("starting the workers", {"ROUNDPIPE_FAULT": "compute:slow=0.02"}),
    "update": (" 1/8  epoch", {"ROUNDPIPE_FAULT": "optimizer:slow=0.3"}),
    "save": (".tmp-step", {"ROUNDPIPE_FAULT": "ckpt_writer:slow=0.1"}),
    "prune": ("step-00000006", {"ROUNDPIPE_FAULT": "ckpt_writer:slow=0.1:step=6"}),
    "export": ("writing the result", {"ROUNDPIPE_FAULT": "export:slow=0.1"}),
}
"""Phase: what tells that it has begun (printed words, or a name in the output directory), and what makes it last."""


def every_phase(arena: Arena, count: int) -> Seen:
    """Each signal in each phase, at a random moment of it, SIGTERM where a step has four microbatches; then resume."""
    numbers = list(EXIT_CODES)
    cases = [(phase, numbers[(i + shift) % 3]) for shift in range(3) for i, phase in enumerate(PHASES)]
    if count < len(PHASES):
        cases = cases[len(PHASES) - count : len(PHASES)]

    def attempt(index: int, draw: random.Random) -> None:
        phase, number = cases[index % len(cases)]
        sign, environment = PHASES[phase]
        variant = "accumulate" if number == signal.SIGTERM else "lora"
        work = arena.workspace(variant)
        running = start(work, environment=environment)
        out = work / "out"
        running.wait_until(
            lambda: sign in running.out + running.err or (out.is_dir() and any(sign in p.name for p in out.iterdir()))
        )
        running.process.join(draw.uniform(0.0, 0.1))
        if running.process.is_alive():
            running.kill(number)
        done = running.finish()
        check_stop(work, done, number)
        if phase in ("loading", "tokenising"):
            assert done.code == EXIT_CODES[number] and not out.exists(), (phase, done)
        go_on(work)
        assert_identical(work, arena.reference(variant))
        shutil.rmtree(work)

    return Seen(count, arena.each(count, attempt), f"{len(PHASES)} phases x {len(EXIT_CODES)} signals")
