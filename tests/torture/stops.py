"""Signals: Ctrl-C, a closed terminal, SIGTERM; at random moments and in every phase."""

from __future__ import annotations

import random
import re
import shutil
import signal
from pathlib import Path
from threading import Lock

from roundpipe_cli.train.checkpoint import load_newest
from tests.e2e import Outcome
from tests.torture.arena import Arena, Seen, assert_identical, go_on, inside_a_save, resume_words, saved, start
from tests.torture.terminal import in_terminal

VARIANT = "accumulate"
SLOW = {"ROUNDPIPE_FAULT": "optimizer:slow=0.03,ckpt_writer:slow=0.01"}
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
STOPPED = re.compile(r"after step (\d+) of \d+, with a checkpoint")


def sigterm(arena: Arena, count: int) -> Seen:
    """SIGTERM at a random moment, with dropout and accumulation over 4 microbatches; then resume."""
    whole_s = arena.seconds(VARIANT, SLOW)
    reference = arena.reference(VARIANT)
    lock, stopped = Lock(), 0

    def attempt(index: int, draw: random.Random) -> None:
        nonlocal stopped
        work = arena.workspace(VARIANT)
        running = start(work, environment=SLOW)
        running.process.join(draw.uniform(0.05, whole_s))
        if running.process.is_alive():
            running.kill(signal.SIGTERM)
        done = running.finish()
        check_stop(work, done, signal.SIGTERM, done.out + done.err)
        with lock:
            stopped += done.code == 143
        go_on(work)
        assert_identical(work, reference)
        shutil.rmtree(work)

    failures = arena.each(count, attempt)
    return Seen(count, failures, f"{stopped} stopped, the others had finished")


def hangup(arena: Arena, count: int) -> Seen:
    """The terminal closes at a random moment, as when a connection breaks; then resume."""
    whole_s = arena.seconds(VARIANT, SLOW)
    reference = arena.reference(VARIANT)

    def attempt(index: int, draw: random.Random) -> None:
        work = arena.workspace(VARIANT)
        with in_terminal(work, SLOW) as (running, terminal):
            running.process.join(draw.uniform(0.15, whole_s))
            terminal.close()
            done = running.finish()
        assert done.code in (0, 129, -signal.SIGHUP), done
        assert not inside_a_save(work), "a half-written checkpoint was left behind"
        if saved(work):
            load_newest(work / "out", warn=_no_damage)
        go_on(work)
        assert_identical(work, reference)
        shutil.rmtree(work)

    return Seen(count, arena.each(count, attempt))


def ctrl_c(arena: Arena, count: int, twice: bool = False) -> Seen:
    """Ctrl-C at a terminal at a random moment, `twice` a second one 0.2 s later; then resume."""
    whole_s = arena.seconds(VARIANT, SLOW)
    reference = arena.reference(VARIANT)
    lock, at_once = Lock(), 0

    def attempt(index: int, draw: random.Random) -> None:
        nonlocal at_once
        work = arena.workspace(VARIANT)
        slow = {"ROUNDPIPE_FAULT": "optimizer:slow=0.5"} if twice else SLOW
        with in_terminal(work, slow) as (running, terminal):
            running.process.join(draw.uniform(0.15, 3 * whole_s if twice else whole_s))
            if running.process.is_alive():
                terminal.press_ctrl_c()
            if twice:
                running.process.join(0.2)
                if running.process.is_alive():
                    terminal.press_ctrl_c()
            done = running.finish()
            text = terminal.text
        check_stop(work, done, signal.SIGINT, text)
        with lock:
            at_once += "second SIGINT" in text
        go_on(work)
        assert_identical(work, reference)
        shutil.rmtree(work)

    failures = arena.each(count, attempt)
    return Seen(count, failures, f"{at_once} stopped at once" if twice else "")


def ctrl_c_twice(arena: Arena, count: int) -> Seen:
    return ctrl_c(arena, count, twice=True)


def check_stop(work: Path, done: Outcome, number: signal.Signals, text: str) -> None:
    """The exit code is that of the signal, and what it says about a checkpoint is true."""
    assert "Traceback" not in text, text
    if done.code == -number:  # before the program had a handler, or after it had put it back
        assert not saved(work) or (work / "out" / "report.json").exists(), text
    elif done.code == 0:
        assert (work / "out" / "report.json").exists(), text
    else:
        assert done.code == EXIT_CODES[number], f"exit code {done.code}\n{text}"
        if stopped := STOPPED.search(text):
            assert load_newest(work / "out").step == int(stopped.group(1)), text
        else:
            assert "no checkpoint was written" in text or "stopped at once" in text or "stopped by SIGINT" in text, text
        if "no checkpoint was written" in text:
            assert not saved(work), text
    assert not inside_a_save(work), "a half-written checkpoint was left behind"
    if saved(work):
        load_newest(work / "out", warn=_no_damage)


def _no_damage(text: str) -> None:
    raise AssertionError(text)


PHASES = {
    "loading": ("weights ...", {"ROUNDPIPE_FAULT": "load:slow=0.02"}),
    "tokenising": ("tokenising", {"ROUNDPIPE_FAULT": "tokenize:slow=0.3"}),
    "first step": ("starting the workers", {"ROUNDPIPE_FAULT": "compute:slow=0.02"}),
    "update": (" 1/12  loss", {"ROUNDPIPE_FAULT": "optimizer:slow=0.3"}),
    "save": (".tmp-step", {"ROUNDPIPE_FAULT": "ckpt_writer:slow=0.1"}),
    "prune": ("step-00000006", {"ROUNDPIPE_FAULT": "ckpt_writer:slow=0.1:step=6"}),
    "export": ("writing the result", {"ROUNDPIPE_FAULT": "export:slow=0.1"}),
}
"""Phase: what tells that it has begun (printed words, or a name in the output directory), and what makes it last."""


def every_phase(arena: Arena, count: int) -> Seen:
    """Each signal in each phase, at a random moment of it; then resume."""
    reference = arena.reference(VARIANT)
    cases = [(phase, number) for phase in PHASES for number in EXIT_CODES]

    def attempt(index: int, draw: random.Random) -> None:
        phase, number = cases[index % len(cases)]
        sign, environment = PHASES[phase]
        work = arena.workspace(VARIANT)
        running = start(work, *resume_words(work), environment=environment)
        out = work / "out"
        running.wait_until(
            lambda: sign in running.out + running.err or (out.is_dir() and any(sign in p.name for p in out.iterdir()))
        )
        running.process.join(draw.uniform(0.0, 0.1))
        if running.process.is_alive():
            running.kill(number)
        done = running.finish()
        check_stop(work, done, number, done.out + done.err)
        if phase in ("loading", "tokenising"):
            assert done.code == EXIT_CODES[number] and not out.exists(), (phase, done)
        go_on(work)
        assert_identical(work, reference)
        shutil.rmtree(work)

    return Seen(count, arena.each(count, attempt), f"{len(PHASES)} phases x {len(EXIT_CODES)} signals")
