"""SIGKILL at random moments."""

from __future__ import annotations

import functools
import random
import shutil
import signal
from pathlib import Path

from tests.support.e2e import Outcome
from tests.torture.arena import (
    NUM_STEPS,
    Arena,
    Seen,
    assert_identical,
    at_a_moment,
    go_on,
    inside_a_save,
    resume_words,
    saved,
    start,
)

KILLS_PER_TRY = 3  # one where there is one try
SLOW_SAVES = {"ROUNDPIPE_FAULT": "ckpt_writer:slow=0.15"}  # many kills fall into a save
BRISK_SAVES = {"ROUNDPIPE_FAULT": "ckpt_writer:slow=0.03"}  # for few tries, of which no share is asked
MIN_IN_SAVES = 0.25
ENOUGH_KILLS = 30  # from which number of kills on that share is asked for


def random_kills(arena: Arena, count: int, variants: tuple[str, ...] = ("lora", "full", "accumulate")) -> Seen:
    each = KILLS_PER_TRY if count > 1 else 1
    kills = each * count
    slow = SLOW_SAVES if kills >= ENOUGH_KILLS else BRISK_SAVES
    whole_s = {variant: arena.seconds(variant, slow, count) for variant in variants[:count]}
    hits: list[bool] = []

    def attempt(index: int, draw: random.Random) -> None:
        variant = variants[index % len(variants)]
        work = arena.workspace(variant)
        for _ in range(each):
            last_step = max((int(path.name.removeprefix("step-")) for path in saved(work)), default=0)
            at_a_moment(
                whole_s[variant] * (1.0 - 0.7 * last_step / NUM_STEPS), draw, functools.partial(_kill, work, slow)
            )
            hits.append(inside_a_save(work))
        go_on(work)
        assert_identical(work, arena.reference(variant))
        shutil.rmtree(work)

    failures = arena.each(count, attempt)
    in_saves = sum(hits)
    if kills >= ENOUGH_KILLS and in_saves < MIN_IN_SAVES * kills:
        failures += (f"only {in_saves} of {kills} kills fell inside a save",)
    return Seen(count, failures, f"{kills} kills, {100 * in_saves / kills:.0f} % inside a save")


def _kill(work: Path, slow: dict[str, str], after_s: float) -> Outcome:
    """Let the run go on and kill it. One that ends before is undone."""
    out, before = work / "out", work / "out-before"
    if out.exists():
        shutil.copytree(out, before)
    running = start(work, *resume_words(work), environment=slow)
    running.process.join(after_s)
    if running.process.is_alive():
        running.kill(signal.SIGKILL)
    done = running.finish()
    if done.code == 0:
        shutil.rmtree(out)
        if before.exists():
            before.rename(out)
    else:
        assert done.code == -signal.SIGKILL, f"exit code {done.code}\n{done.err}"
        shutil.rmtree(before, ignore_errors=True)
    return done
