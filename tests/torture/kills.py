"""SIGKILL at random moments."""

from __future__ import annotations

import random
import shutil
import signal
from threading import Lock

from tests.torture.arena import Arena, Seen, assert_identical, died, go_on, inside_a_save, resume_words, saved, start

KILLS_PER_TRY = 3
SLOW_SAVES = {"ROUNDPIPE_FAULT": "ckpt_writer:slow=0.03"}
"""Saves take about as long as everything else together, so that many kills fall into one."""


def random_kills(arena: Arena, count: int, variants: tuple[str, ...] = ("lora", "full", "accumulate")) -> Seen:
    """Kill a run three times at random, from its start-up on, and let it go on; compare with an uninterrupted one."""
    for variant in variants:
        arena.reference(variant)
        arena.seconds(variant, SLOW_SAVES)
    lock, kills, in_saves = Lock(), 0, 0

    def attempt(index: int, draw: random.Random) -> None:
        nonlocal kills, in_saves
        variant = variants[index % len(variants)]
        work = arena.workspace(variant)
        done_share = 0.0
        for _ in range(KILLS_PER_TRY):
            whole_s = arena.seconds(variant, SLOW_SAVES)
            running = start(work, *resume_words(work), environment=SLOW_SAVES)
            running.process.join(draw.uniform(0.0, whole_s * (1.1 - done_share)))
            if not running.process.is_alive():
                running.finish().expect(0)
                break
            running.kill(signal.SIGKILL)
            died(running)
            with lock:
                kills += 1
                in_saves += inside_a_save(work)
            steps = [int(path.name.removeprefix("step-")) for path in saved(work)]
            done_share = 0.7 * max(steps, default=0) / 12
        go_on(work)
        assert_identical(work, arena.reference(variant))
        shutil.rmtree(work)

    failures = arena.each(count, attempt)
    return Seen(count, failures, f"{kills} kills, {100 * in_saves / max(kills, 1):.0f} % inside a save")
